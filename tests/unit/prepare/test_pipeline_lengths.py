"""Prompts measured with a model's tokenizer on their way through the pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.data.read import load_rows
from rlctl.errors import UsageError
from rlctl.prepare import sources
from rlctl.prepare.lengths import PromptLengths
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import Recipe
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import write_jsonl
from tests.unit.prepare.small_models import save_model

LIMIT = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def request_(tmp_path, model):
    rows = [{"prompt": " ".join(f"{i}x{j}" for j in range(i + 1)), "answer": "1"} for i in range(40)]
    return PrepareRequest(
        (str(write_jsonl(tmp_path / "in.jsonl", rows)),),
        tmp_path / "out",
        model=model,
        max_prompt_length=LIMIT,
        check_graders=False,
        val_fraction=0,
        recipe=Recipe(instruction="Go."),
    )


def prompts(request):
    return {row.index: row.prompt[-1].content for row in load_rows([str(request.out / "train.parquet")])}


def test_kept_but_counted(request_):
    summary = prepare(request_)
    lengths = summary.report["lengths"]
    assert summary.counts["train"] == 40
    assert lengths["overlong"] > 20
    assert lengths["max"] > LIMIT
    every = [11 + 2 * i for i in range(40)]  # i + 1 words, i spaces, 10 tokens of template and instruction
    assert [lengths[name] for name in ("min", "p50", "p99", "max")] == [11, every[19], every[39], every[39]]
    assert "overlong" in [finding["code"] for finding in summary.report["findings"]]


def test_dropped(request_):
    overlong = prepare(request_).report["lengths"]["overlong"]
    dropped = prepare(replace(request_, overlong="drop", overwrite=True))
    assert dropped.counts["overlong_dropped"] == overlong
    assert dropped.counts["train"] == 40 - overlong
    assert dropped.report["lengths"]["max"] <= LIMIT
    assert list(prompts(request_)) == list(range(40 - overlong))


def test_lengths_are_those_of_the_rows_that_are_written(request_, model):
    source = Path(request_.sources[0])
    longest = {"prompt": source.read_text().splitlines()[-1].split('"')[3].replace(" ", "  "), "answer": "1"}
    write_jsonl(source.with_name("more.jsonl"), [longest])
    request = replace(request_, sources=(str(source), str(source.with_name("more.jsonl"))))
    report = prepare(replace(request, duplicates="drop")).report
    written = load_rows([str(request.out / "train.parquet")])
    measured = [one.num_tokens for one in PromptLengths(model).measure(written)]
    assert (len(measured), max(measured)) == (40, report["lengths"]["max"])


@pytest.mark.slow  # each process imports a tokenizer library
def test_processes_measure_the_same(request_, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    dropped = replace(request_, overlong="drop")
    prepare(replace(dropped, workers=1))
    prepare(replace(dropped, workers=2, out=tmp_path / "two"))
    for name in ("train.parquet", "manifest.json"):
        assert (request_.out / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_another_limit_is_another_output(request_):
    prepare(request_)
    with pytest.raises(UsageError, match="not empty"):
        prepare(replace(request_, max_prompt_length=LIMIT + 1))


def test_dropping_needs_a_maximum(request_):
    with pytest.raises(UsageError, match="no maximum length"):
        prepare(replace(request_, max_prompt_length=None, overlong="drop"))


@pytest.mark.parametrize("options", [{"max_prompt_length": 5}, {"overlong": "drop"}])
def test_measuring_needs_a_model(request_, options):
    with pytest.raises(UsageError, match="none is named"):
        prepare(replace(request_, model=None, **{"max_prompt_length": None} | options))
