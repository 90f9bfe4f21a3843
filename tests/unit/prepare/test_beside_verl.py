"""Prepared files and files of verl's preprocessing scripts in one list of `data.train_files`."""

import itertools
import mmap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import BatchWriter, Message, Row, arrow_schema, batch_of
from rlctl.prepare import output
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl

#: Field orders of verl's scripts: GSM8K's, MATH's, and the alphabetical order of older pyarrow (DAPO-Math).
VERL_ROWS = {
    "gsm8k": {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1? Answer after ####"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "answer": "#### 2", "question": "1+1?"},
    },
    "math": {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": "1+1? Box it."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    },
    "alphabetical": {
        "data_source": "math_dapo",
        "prompt": [{"content": "1+1?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": 7},
    },
}
OURS = {
    "gsm8k": gsm8k_rows(copies=5),
    "math": [
        {"problem": f"{i}+1?", "solution": f"\\boxed{{{i + 1}}}", "level": "Level 1", "type": "Algebra"}
        for i in range(30)
    ],
}


def datasets():
    """Imported by tests that use it: that takes seconds."""
    return pytest.importorskip("datasets")


def load(path, cache):
    """As verl's `RLHFDataset` does."""
    return datasets().load_dataset("parquet", data_files=str(path), cache_dir=str(cache))["train"]


@pytest.fixture
def ours(tmp_path):
    def build(name):
        source = write_jsonl(tmp_path / f"{name}.jsonl", OURS[name])
        prepare(PrepareRequest((str(source),), tmp_path / name))
        return tmp_path / name / "train.parquet"

    return build


@pytest.mark.parametrize(("mine", "theirs"), itertools.product(OURS, VERL_ROWS))
def test_concatenate_with_verls_own(tmp_path, ours, mine, theirs):
    path = tmp_path / "theirs.parquet"
    datasets().Dataset.from_list([VERL_ROWS[theirs]]).to_parquet(path)
    prepared = ours(mine)
    parts = [load(file, tmp_path / "cache") for file in (prepared, path)]
    for order in (parts, parts[::-1]):
        rows = list(datasets().concatenate_datasets(order))
        last = rows[-1] if order is parts else rows[0]
        assert last["prompt"] == VERL_ROWS[theirs]["prompt"]
        assert last["reward_model"] == VERL_ROWS[theirs]["reward_model"]
        assert {k: v for k, v in last["extra_info"].items() if v is not None} == VERL_ROWS[theirs][
            "extra_info"
        ]
    mixed = list(datasets().concatenate_datasets(parts))[:-1]
    for row, expected in zip(mixed, load_rows([str(prepared)]), strict=True):
        assert row["prompt"] == [{"role": m.role, "content": m.content} for m in expected.prompt]
        assert row["reward_model"]["ground_truth"] == expected.ground_truth
        assert row["extra_info"]["index"] == expected.index


def test_the_features_are_those_of_verls_gsm8k_script(tmp_path, ours):
    """Older versions of `datasets` align columns only, not the fields inside: then nothing may be extra."""
    path = tmp_path / "theirs.parquet"
    datasets().Dataset.from_list([VERL_ROWS["gsm8k"]]).to_parquet(path)
    written, wanted = (load(file, tmp_path / "cache").features for file in (ours("gsm8k"), path))
    assert written == wanted
    assert list(written["extra_info"]) == list(wanted["extra_info"])


def test_fields_without_a_column_are_kept_where_a_row_has_some(ours):
    assert load_rows([str(ours("math"))])[0].extra["level"] == "Level 1"
    assert "other" in pq.read_schema(ours("math")).field("extra_info").type.names


def test_large_blocks_are_written_in_pieces_that_32_bit_offsets_reach(tmp_path, monkeypatch):
    monkeypatch.setattr("rlctl.data.schema.ROW_GROUP_BYTES", 2000)
    monkeypatch.setattr(output, "SHARD_BYTES", 8000)
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=20))
    request = PrepareRequest((str(source),), tmp_path / "out", val_fraction=0, workers=1)
    summary = prepare(request)
    files = [request.out / name for name in summary.outputs["train"]]
    assert len(files) > 3
    for file in files:
        metadata = pq.read_metadata(file)
        groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
        assert sum(group.total_byte_size for group in groups) < 8000
        assert len(groups) > 1
    assert [row.index for row in load_rows(list(map(str, files)))] == list(range(120))


def test_a_slice_that_begins_beyond_two_gigabytes_is_written(tmp_path):
    beyond = (1 << 31) + 5
    content = mmap.mmap(-1, beyond + 10)  # its pages are not touched, so it takes no memory
    content[beyond:] = b"abcdefghij"
    batch = batch_of([Row("s", (Message("user", "?" * 5),), "1", index=i) for i in range(2)], "train")
    offsets = pa.py_buffer(np.array([beyond, beyond + 5, beyond + 10], dtype=np.int64))
    texts = pa.Array.from_buffers(pa.large_string(), 2, [None, offsets, pa.py_buffer(content)])
    kind, turn = batch.schema.field("prompt").type, batch.column("prompt").values
    turns = pa.StructArray.from_arrays(
        [turn.field("role"), texts, turn.field("other")], fields=list(kind.value_type)
    )
    prompts = pa.ListArray.from_arrays(batch.column("prompt").offsets, turns, type=kind)
    path = tmp_path / "a.parquet"
    with BatchWriter(path, arrow_schema()) as writer:
        writer.add(batch.set_column(1, batch.schema.field("prompt"), prompts))
    assert [row.prompt[0].content for row in load_rows([str(path)])] == ["abcde", "fghij"]
