"""Responses outlive the process that sampled them."""

import os
import signal
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from rlctl.evaluate import local_model as local_model_module
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.local_model import files_hash
from rlctl.evaluate.request import EvaluateRequest
from rlctl.evaluate.store import ResponseStore
from rlctl.tiny.embedded import write_parquet
from tests.processes import Job


@pytest.fixture
def request_of(task, tmp_path):
    def make(name, **changes):
        own = {"n": 4, "limit": 40, "batch_size": 32, "max_response_length": 6, "out": tmp_path / name}
        return EvaluateRequest(str(task.model_dir), [str(task.val_file)], **(own | changes))

    return make


@pytest.fixture
def sampled(monkeypatch):
    """How many responses every call of the engine samples."""
    counts = []
    ask = local_model_module.sample_responses

    def counting(*arguments, **options):
        for batch in ask(*arguments, **options):
            counts.append(len(batch))
            yield batch

    monkeypatch.setattr(local_model_module, "sample_responses", counting)
    return counts


def quiet(doing, done, total):
    del doing, done, total


def figures(request):
    out, found = evaluate(request, quiet)
    return found.scores, pq.read_table(out / "samples.parquet").to_pylist()


def evaluate_and_die(request, batches):
    add = ResponseStore.add

    def dying(self, responses):
        nonlocal batches
        if batches == 0:  # within a transaction
            self._rows.execute("INSERT INTO responses (prompt) VALUES ('half')")
            os.kill(os.getpid(), signal.SIGKILL)
        batches -= 1
        add(self, responses)

    ResponseStore.add = dying
    evaluate(request, quiet)
    return 0


@pytest.mark.parametrize("batches", [0, 2])
def test_killed_and_run_again(request_of, tmp_path, monkeypatch, sampled, batches):
    whole = figures(request_of("whole"))
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "other"))
    job = Job(evaluate_and_die, request_of("killed"), batches, log=tmp_path / "log.txt")
    assert job.wait() == -signal.SIGKILL, job.output
    assert not (tmp_path / "killed").exists()
    sampled.clear()
    told = []
    out, found = evaluate(request_of("killed"), lambda *state: told.append(state))
    assert sum(sampled) == 160 - 32 * batches
    assert found.num_stored == 32 * batches
    assert told[0] == ("sampling", 32 * batches, 160)
    assert (found.scores, pq.read_table(out / "samples.parquet").to_pylist()) == whole


def test_a_larger_n_samples_only_the_difference_and_the_same_as_at_once(
    request_of, tmp_path, monkeypatch, sampled
):
    figures(request_of("four"))
    sampled.clear()
    grown = figures(request_of("eight", n=8))
    assert sum(sampled) == 160
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "other"))
    assert figures(request_of("at once", n=8)) == grown


def test_no_model_is_loaded_when_all_is_stored(request_of, monkeypatch):
    first = figures(request_of("first"))

    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(local_model_module, "load_policy", refuse)
    assert figures(request_of("second")) == first
    assert figures(request_of("fewer", n=2, limit=10))[1] == [
        row for row in first[1] if row["sample_index"] < 2 and row["question_index"] < 10
    ]
    for changes in ({"seed": 2}, {"temperature": 0.5}, {"top_p": 0.9}, {"max_response_length": 5}):
        with pytest.raises(AssertionError, match="the model was loaded"):
            evaluate(request_of("other", **changes), quiet)


def test_fresh_samples_all_of_it_again_and_leaves_other_seeds_alone(request_of, sampled):
    other = figures(request_of("other", seed=2))
    first = figures(request_of("first"))
    sampled.clear()
    again = figures(request_of("again", fresh=True))
    assert sum(sampled) == 160
    assert again == first
    sampled.clear()
    assert figures(request_of("other again", seed=2)) == other
    assert sampled == []


def test_repeats_of_a_prompt_are_questions_of_their_own(request_of, tmp_path, sampled):
    data = tmp_path / "data.parquet"
    write_parquet([("12+34=", "640")] * 30, "test", data)
    request = replace(request_of("first", n=8), data=[str(data)])
    _, rows = figures(request)
    assert sum(sampled) == 240
    by_question = {}
    for row in rows:
        by_question.setdefault(row["question_index"], []).append(row["response"])
    assert len({tuple(responses) for responses in by_question.values()}) > 25
    assert figures(replace(request, out=tmp_path / "second"))[1] == rows
    assert sum(sampled) == 240


def test_a_second_evaluation_at_once_uses_the_same_store(request_of):
    found = []

    def meanwhile(doing, done, total):
        if doing == "sampling" and 0 < done < total and not found:
            found.append(None)
            found[0] = figures(request_of("inner"))

    evaluate(request_of("outer"), meanwhile)
    assert figures(request_of("after")) == found[0]


def test_the_hash_is_of_what_the_files_hold(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    first = files_hash(tmp_path / "a", {})
    (tmp_path / "b" / "README.md").write_text("says nothing")
    assert files_hash(tmp_path / "b", {}) == first
    for name in ("generation_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "b" / name).write_text(name)
        assert files_hash(tmp_path / "b", {}) != first
    known = {"config.json": "x", "model.safetensors": "y"}
    assert files_hash(tmp_path / "a", known) != first
