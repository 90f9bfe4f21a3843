from dataclasses import replace

import pytest

from rlctl.errors import UsageError
from rlctl.evaluate.samples import read_samples, write_samples
from rlctl.tiny.embedded import write_parquet


def test_what_is_written_is_read(tmp_path, make_samples):
    samples = make_samples("a", [[1.0, None], [0.25, 0.0]], [["7", None], [None, "8"]])
    samples[1] = replace(
        samples[1],
        extra_info={"split": "test", "deep": [{"x": 1.5, "y": None}]},
        messages=[{"role": "system", "content": "ü\u2028"}, {"role": "user", "content": ""}],
        response="\x00 </script> \U0001f600",
    )
    path = tmp_path / "samples.parquet"
    write_samples(path, samples)
    found = read_samples(path)
    assert [replace(each, messages=tuple(each.messages)) for each in found] == [
        replace(each, messages=tuple(each.messages)) for each in samples
    ]


def test_lone_surrogates_become_question_marks(tmp_path, make_samples):
    [sample] = make_samples("a", [[1.0]])
    write_samples(tmp_path / "s.parquet", [replace(sample, response="a\ud800b", answer="\udfff")])
    [found] = read_samples(tmp_path / "s.parquet")
    assert (found.response, found.answer) == ("a?b", "?")


def test_other_files_are_refused(tmp_path):
    data = tmp_path / "data.parquet"
    write_parquet([("1+1=", "2")], "test", data)
    with pytest.raises(UsageError, match="not an evaluation's samples: question_index"):
        read_samples(data)
    (tmp_path / "text").write_text("text")
    with pytest.raises(UsageError, match="cannot be read"):
        read_samples(tmp_path / "text")
    with pytest.raises(UsageError, match="cannot be read"):
        read_samples(tmp_path / "nowhere")
