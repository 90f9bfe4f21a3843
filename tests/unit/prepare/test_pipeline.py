"""From inputs to a prepared directory: complete, the same every time, or not there."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import arrow_schema
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import Recipe
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.reward import maths
from tests.unit.prepare.helpers import GSM8K_LIKE, gsm8k_rows, write_jsonl

REAL_GSM8K = Path(
    os.environ.get("RLCTL_GSM8K", Path(__file__).parents[3].parent / "shared/data/gsm8k/train.jsonl")
)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def all_rows(directory):
    return load_rows([str(file) for file in sorted(directory.glob("*.parquet"))])


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(copies=50))


@pytest.fixture
def request_(source, tmp_path):
    return PrepareRequest(sources=(str(source),), out=tmp_path / "out")


def test_gsm8k_like(request_):
    summary = prepare(request_)
    assert summary.recipe == "gsm8k"
    assert not summary.unchanged
    rows = all_rows(request_.out)
    assert len(rows) == summary.counts["input"] == summary.counts["train"] + summary.counts["test"] == 300
    assert Counter(row.ground_truth for row in rows) == dict.fromkeys(
        ["7", "11500", "-3", "2.5", "0", "11"], 50
    )
    assert {row.data_source for row in rows} == {"openai/gsm8k"}
    assert sorted(row.index for row in rows) == list(range(300))
    assert all("####" in row.prompt[-1].content for row in rows)
    assert pq.read_schema(request_.out / "train.parquet").equals(arrow_schema())
    splits = pq.read_table(request_.out / "test.parquet")["extra_info"].combine_chunks().field("split")
    assert set(splits.to_pylist()) == {"test"}
    for question, answer in GSM8K_LIKE:
        truth = answer.rpartition("#### ")[2].replace(",", "")
        assert maths.grade(answer, truth) == 1.0, question


@pytest.mark.skipif(not REAL_GSM8K.exists(), reason="the GSM8K file is not here (RLCTL_GSM8K names it)")
def test_the_real_gsm8k(tmp_path):
    lines = REAL_GSM8K.read_text(encoding="utf-8").splitlines()
    out = tmp_path / "gsm8k"
    summary = prepare(PrepareRequest(sources=(str(REAL_GSM8K),), out=out))
    assert summary.counts["input"] == len(lines)
    assert summary.counts["quarantined"] == 0
    assert 0.04 < summary.counts["test"] / len(lines) < 0.06
    rows = all_rows(out)
    assert len(rows) == len(lines)
    for row in rows[::25]:
        solution = json.loads(lines[row.index])["answer"]
        assert maths.grade(solution, row.ground_truth) == 1.0
        assert maths.grade(f"#### {row.ground_truth}", row.ground_truth) == 1.0
        assert maths.grade("", row.ground_truth) == 0.0
    other = tmp_path / "again"
    prepare(PrepareRequest(sources=(str(REAL_GSM8K),), out=other))
    assert contents(other) == contents(out)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_generic_with_column_mapping(tmp_path, suffix):
    rows = [{"problem": f"what is {i}+1?", "solution": str(i + 1), "more": "x"} for i in range(40)]
    source = tmp_path / f"sums.{suffix}"
    if suffix == "jsonl":
        write_jsonl(source, rows)
    elif suffix == "json":
        source.write_text(json.dumps(rows))
    elif suffix == "csv":
        source.write_text("problem,solution,more\n" + "".join(",".join(r.values()) + "\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    request = PrepareRequest(
        sources=(str(source),),
        out=tmp_path / "out",
        recipe=Recipe("auto", "problem", "solution", system_prompt="Be brief.", instruction="Box it."),
        val_size=10,
    )
    summary = prepare(request)
    assert summary.recipe == "generic"
    assert (summary.counts["train"], summary.counts["test"]) == (30, 10)
    row = next(row for row in all_rows(request.out) if row.index == 7)
    assert [(m.role, m.content) for m in row.prompt] == [
        ("system", "Be brief."),
        ("user", "what is 7+1?\nBox it."),
    ]
    assert (row.ground_truth, row.data_source) == ("8", "sums")


def test_nested_columns_and_chat_prompts(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    rows = [
        {"prompt": [*chat, {"role": "user", "content": f"{i}"}], "reward": {"truth": i}} for i in range(9)
    ]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    prepare(
        PrepareRequest((str(source),), tmp_path / "out", Recipe(answer_key="reward.truth"), val_fraction=0)
    )
    assert not (tmp_path / "out/test.parquet").exists()
    assert [row.ground_truth for row in all_rows(tmp_path / "out")] == [str(i) for i in range(9)]
    assert len(all_rows(tmp_path / "out")[0].prompt) == 3


def test_the_split_follows_the_question_not_the_place(tmp_path):
    rows = gsm8k_rows(copies=50)
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [*rows[::-1][:200], *rows[:20]])  # reordered, cut, duplicated
    for name in "ab":
        source = str(tmp_path / f"{name}.jsonl")
        # another instruction must not move a row either
        prepare(
            PrepareRequest(
                (source,), tmp_path / name, Recipe(instruction=name), val_fraction=0.2, duplicates="keep"
            )
        )

    def side(name, split):
        return {row.prompt[0].content[:-2] for row in load_rows([str(tmp_path / name / f"{split}.parquet")])}

    assert side("b", "test") <= side("a", "test")
    assert side("b", "train") <= side("a", "train")
    assert not side("b", "test") & side("b", "train")


def test_seed_changes_the_split(request_, tmp_path):
    prepare(request_)
    prepare(replace(request_, seed=2, out=tmp_path / "other"))
    assert contents(request_.out)["test.parquet"] != contents(tmp_path / "other")["test.parquet"]


def test_again_is_byte_identical_and_leaves_alone(request_, tmp_path):
    prepare(request_)
    before = contents(request_.out)
    stamp = (request_.out / "train.parquet").stat().st_mtime_ns
    assert prepare(request_).unchanged
    assert (request_.out / "train.parquet").stat().st_mtime_ns == stamp
    prepare(replace(request_, out=tmp_path / "elsewhere"))
    assert contents(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("name", ["sums", "sums-v1.5"])
def test_a_datasets_rows_have_its_name(tmp_path, name):
    table = pa.table({"prompt": [f"{i} + 1?" for i in range(9)], "answer": list(range(1, 10))})
    sources = []
    for each in (name, f"{name}-moved"):
        (tmp_path / each).mkdir()
        with pa.ipc.new_stream(tmp_path / each / "data-00000-of-00001.arrow", table.schema) as writer:
            writer.write_table(table)
        (tmp_path / each / "state.json").write_text("{}")
        assert set(check(CheckRequest((str(tmp_path / each),))).files[0].data_sources) == {each}
        request = PrepareRequest((str(tmp_path / each),), tmp_path / "out")
        prepare(replace(request, overwrite=True))
        sources.append({row.data_source for row in all_rows(tmp_path / "out")})
    assert sources == [{name}, {f"{name}-moved"}]


def test_other_work_needs_overwrite(request_):
    prepare(request_)
    other = replace(request_, seed=2)
    with pytest.raises(UsageError, match="not empty") as caught:
        prepare(other)
    assert "--overwrite" in caught.value.fix
    assert not prepare(replace(other, overwrite=True)).unchanged
    assert prepare(other).unchanged


def test_a_damaged_output_is_not_taken_for_done(request_):
    prepare(request_)
    damaged = request_.out / "train.parquet"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    with pytest.raises(UsageError, match="not empty"):
        prepare(request_)
    prepare(replace(request_, overwrite=True))
    assert damaged.read_bytes() == good


def test_overwrite_never_removes_what_it_did_not_write(request_):
    request_.out.mkdir()
    (request_.out / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"did not write \(thesis.txt\)"):
        prepare(replace(request_, overwrite=True))
    assert (request_.out / "thesis.txt").read_text() == "years of work"


BAD = [
    ({"question": "q"}, "no column 'answer' (it has question)"),
    ({"answer": "#### 1"}, "no column 'question'"),
    ({"question": None, "answer": "#### 1"}, "the prompt is null"),
    ({"question": "", "answer": "#### 1"}, "the user message of the prompt is empty"),
    ({"question": 5, "answer": "#### 1"}, "the prompt is of type int"),
    ({"question": "q", "answer": {"a": 1}}, "column 'answer' has the fields a: name one of them"),
    ({"question": "q", "answer": float("nan")}, "column 'answer' is nan"),
    ({"question": "q", "answer": [["1"], "2"]}, "an element of column 'answer' is of type list"),
    ({"question": "q", "answer": "no mark"}, "the answer has no '####'"),
    ({"question": "q", "answer": "#### seven"}, "not a number: 'seven'"),
    ({"question": "q", "answer": "#### NaN"}, "not a number: 'NaN'"),
    ({"question": [], "answer": "#### 1"}, "the prompt has no messages"),
    ({"question": [{"role": "user"}], "answer": "#### 1"}, "content is null"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_row_is_refused_with_file_and_row(tmp_path, bad, reason):
    source = write_jsonl(tmp_path / "in.jsonl", [*gsm8k_rows(), bad])
    with pytest.raises(UsageError) as caught:
        prepare(PrepareRequest((str(source),), tmp_path / "out"))
    assert caught.value.exit_code == 2
    assert f"{source}:7: " in str(caught.value)
    assert reason in str(caught.value)
    assert "1 of 7 rows" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_half_a_surrogate_pair_and_bytes_that_are_not_utf8(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\\ud800", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    table = tmp_path / "in.csv"
    table.write_bytes(b"prompt,answer\nfine,1\n\xff,2\n")
    with pytest.raises(UsageError) as caught:
        prepare(PrepareRequest((str(source), str(table)), tmp_path / "out"))
    assert "3 of 4 rows" in str(caught.value)
    assert f"{source}:1: not valid UTF-8 text at character 0" in str(caught.value)
    assert f"{source}:2: not valid UTF-8 at byte" in str(caught.value)
    assert f"{table}:3: not valid UTF-8" in str(caught.value)


def test_only_the_first_few_are_shown(tmp_path):
    rows = [*gsm8k_rows(), *[{"question": "q", "answer": str(i)} for i in range(20)]]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    with pytest.raises(UsageError, match=r"20 of 26 rows(.|\n)*and 15 more"):
        prepare(PrepareRequest((str(source),), tmp_path / "out"))


def test_quarantine_keeps_the_raw_text_and_counts(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=5))
    with source.open("ab") as file:
        file.write(b'{"question": "q", "answer": \xff\n{"question": "q", "answer": "none"}\n')
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", bad_rows="quarantine"))
    assert summary.counts["input"] == 32
    assert summary.counts["quarantined"] == 2
    entries = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["file"]) for entry in entries] == [(31, str(source)), (32, str(source))]
    assert entries[0]["raw"] == '{"question": "q", "answer": \\xff'
    assert entries[1]["reason"] == "the answer has no '####'"
    assert json.loads((tmp_path / "out/manifest.json").read_text())["counts"] == summary.counts


def test_nothing_usable_says_which_columns_were_looked_for(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"stem": "q", "key": "1"}])
    with pytest.raises(UsageError, match="1 of 1 rows") as caught:
        prepare(PrepareRequest((str(source),), tmp_path / "out", bad_rows="quarantine"))
    assert "--prompt-key" in caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [{"val_fraction": 1.0}, {"val_fraction": float("nan")}, {"val_size": 300}]
)
def test_a_split_that_leaves_nothing_is_refused(request_, changes):
    with pytest.raises(UsageError):
        prepare(replace(request_, **changes))
    assert not request_.out.exists()


def test_every_phase_ends_where_it_said(request_):
    told: dict[str, tuple[int, int | None]] = {}
    prepare(request_, Progress(lambda done, total, phase: told.update({phase: (done, total)})))
    assert told["reading"][0] == Path(request_.sources[0]).stat().st_size
    assert {"reading", "duplicates", "writing train", "writing test"} <= set(told)
    assert all(done == (total or 0) for done, total in told.values())


def run_in_child(source, out, before=""):
    code = (
        f"{before}\nfrom pathlib import Path\nfrom rlctl.prepare.pipeline import prepare\n"
        f"from rlctl.prepare.request import PrepareRequest\n"
        f"prepare(PrepareRequest(({str(source)!r},), Path({str(out)!r}), check_graders=False))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_killed_midway_leaves_no_half_output(tmp_path, source, moment):
    out = tmp_path / "out"
    stop = {
        "writing": "rlctl.prepare.transform.Staging.add",  # nothing but a partial directory
        "replacing": "pathlib.Path.rename",  # complete, but not yet in its place
    }[moment]
    owner, name = stop.rsplit(".", 1)
    module, holder = owner.rsplit(".", 1)
    before = (
        f"import time\nfrom {module} import {holder}\n"
        f"def stop(*_):\n    print('here', file=__import__('sys').stderr, flush=True)\n    time.sleep(60)\n"
        f"{holder}.{name} = stop"
    )
    child = run_in_child(source, out, before)
    assert child.stderr.readline() == "here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stderr.close()
    assert not out.exists()
    assert [entry.name for entry in tmp_path.iterdir() if entry != source] == [f".out.partial-{child.pid}"]
    prepare(PrepareRequest((str(source),), out))
    assert len(all_rows(out)) == 300
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "train.jsonl"]


def test_killed_while_replacing_brings_the_old_one_back(tmp_path, request_):
    prepare(request_)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    request_.out.rename(tmp_path / f".out.old-{child.pid}")  # the moment between the two renames
    with pytest.raises(UsageError, match="not empty"):
        prepare(replace(request_, seed=2))
    assert prepare(request_).unchanged


def test_a_full_disk_leaves_nothing(tmp_path, source):
    out = tmp_path / "out"
    child = run_in_child(
        source, out, "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    )
    _, stderr = child.communicate(timeout=60)
    assert EnvironmentFailure.__name__ in stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    """Ten times the rows must not take ten times the memory."""
    peaks = []
    for copies in (1_500, 10_000):
        source = write_jsonl(tmp_path / f"{copies}.jsonl", gsm8k_rows(copies))
        code = (
            "import resource, sys\nfrom pathlib import Path\n"
            "from rlctl.prepare.pipeline import prepare\nfrom rlctl.prepare.request import PrepareRequest\n"
            f"prepare(PrepareRequest(({str(source)!r},), Path({str(tmp_path / f'out{copies}')!r}),"
            " check_graders=False))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(float(run.stdout))
    assert peaks[1] < peaks[0] + 60, f"{peaks} MiB"
