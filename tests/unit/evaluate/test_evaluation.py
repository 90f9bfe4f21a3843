import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from rlctl.data.schema import Message, Row, write_rows
from rlctl.errors import UsageError
from rlctl.evaluate import request as request_module
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.request import EvaluateRequest
from rlctl.evaluate.scores import pass_at_k
from rlctl.tiny import game
from rlctl.tiny.embedded import DATA_SOURCE, write_parquet
from tests.unit.evaluate.runs import QUICK, make_run


@pytest.fixture
def run_dir(tmp_path, task):
    return make_run(tmp_path / "run", task)


def quiet(doing, done, total):
    del doing, done, total


def samples_of(out):
    return pq.read_table(out / "samples.parquet").to_pylist()


def found_by(request, **changes):
    """The evaluation, and its samples as they were written."""
    out, found = evaluate(replace(request, **changes), quiet)
    return found, samples_of(out)


def test_results_are_those_of_the_stored_samples(run_dir, task, tmp_path):
    told = []
    reward = tmp_path / "reward.py"
    reward.write_text("def even(response):\n    return float(len(response) % 2 == 0)\n")
    request = EvaluateRequest(str(run_dir), n=4, ks=[1, 4], reward=f"{reward}:even")
    out, _ = evaluate(request, lambda *p: told.append(p))
    assert out.parent == run_dir / "evaluations"
    assert {file.name for file in out.iterdir()} == {
        "results.json",
        "samples.parquet",
        "samples.html",
        "code.json",  # the user's own reward, signed
    }
    results = json.loads((out / "results.json").read_text())
    samples = samples_of(out)
    assert len(samples) == 150 * 4
    assert told[0] == ("sampling", 0, 600)
    assert ("sampling", 600, 600) in told
    assert told[-1] == ("grading", 600, 600)

    by_question = {}
    for row in samples:
        assert row["reward"] == float(len(row["response"]) % 2 == 0)
        by_question.setdefault(row["question_index"], []).append(row["reward"])
    [score] = results["scores"]
    assert score["avg"]["value"] == pytest.approx(sum(row["reward"] for row in samples) / 600)
    passed = [pass_at_k(4, int(sum(rewards)), 4) for rewards in by_question.values()]
    assert score["pass@4"]["value"] == pytest.approx(sum(passed) / 150)
    assert 0 < score["avg"]["value"] < 1
    assert score["maj@4"] is None  # functions read no answers
    truncated = sum(row["truncated"] for row in samples) / 600
    assert score["truncated_fraction"]["value"] == pytest.approx(truncated)
    assert score["mean_length"]["value"] == pytest.approx(sum(row["num_tokens"] for row in samples) / 600)
    assert results["reward"]["name"] == f"{reward}:even"
    assert results["model"]["step"] == 8
    assert results["sampling"]["max_response_length"] == 6  # the run's own
    prompts = [row["prompt"][0]["content"] for row in pq.read_table(task.val_file).to_pylist()]
    assert [samples[4 * i]["prompt"] for i in range(150)] == prompts


def test_samples_differ_within_a_question_and_by_seed_and_not_by_batch_size_or_limit(
    run_dir, tmp_path, monkeypatch
):
    request = EvaluateRequest(str(run_dir), n=4, limit=70)

    def responses(name, **changes):
        monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "caches" / name))  # nothing is stored
        return [row["response"] for row in found_by(request, out=tmp_path / name, **changes)[1]]

    first = responses("a")
    assert len(set(first[:4])) > 1
    assert responses("b", batch_size=10) == first
    assert responses("c", limit=20) == first[: 20 * 4]
    assert responses("d", seed=2) != first


def test_no_two_questions_share_their_random_numbers(run_dir, tmp_path):
    data = tmp_path / "data.parquet"
    write_parquet([("12+34=", "640")] * 130, "test", data)
    _, samples = found_by(EvaluateRequest(str(run_dir), [str(data)]))
    answers = {tuple(row["response"] for row in samples[8 * i : 8 * i + 8]) for i in range(130)}
    assert len(answers) > 120  # equal numbers would give equal answers to equal questions


def test_what_the_grader_fails_on_is_stored_and_left_out(run_dir, tmp_path):
    data = tmp_path / "data.parquet"
    asked = (Message("user", "12+34="),)
    write_rows(data, "test", [Row("some/maths", asked, "???"), Row(DATA_SOURCE, asked, "640")])
    found, samples = found_by(EvaluateRequest(str(run_dir), [str(data)], n=2))
    by_source = {score.data_source: score for score in found.scores}
    assert by_source["some/maths"].figures["avg"] is None
    assert by_source["overall"].num_grader_errors == 2
    assert by_source[DATA_SOURCE].figures["avg"] is not None
    assert by_source["overall"].figures["avg"] is None  # half of it: more than reward.max_error_fraction
    assert "not a mathematical expression" in found.grader_errors[0]
    assert [row["reward"] for row in samples][:2] == [None, None]


def test_a_model_with_data_needs_no_run_and_greedy_is_the_same_every_time(task, tmp_path):
    request = EvaluateRequest(
        str(task.model_dir), [str(task.val_file)], n=1, temperature=0.0, max_response_length=6, limit=20
    )
    first, again = (
        found_by(request, out=tmp_path / name, seed=seed)[1] for name, seed in (("a", 1), ("b", 2))
    )
    assert first == again


def test_embedded_run_without_validation_files_uses_the_embedded_ones(tmp_path, task, monkeypatch):
    seeds = []
    monkeypatch.setattr(game, "ensure_embedded", lambda seed, **_: seeds.append(seed) or task)
    run = make_run(tmp_path / "run", task, "data.val_files=[]", "trainer.seed=7")
    assert request_module.find_target(str(run), []).data_files == [str(task.val_file)]
    assert seeds == [7]


def test_a_limit_is_for_each_data_source(task, tmp_path):
    files = []
    for name, sources in (("one", "aab"), ("two", "cacca")):
        files.append(str(tmp_path / f"{name}.parquet"))
        rows = [Row(source, (Message("user", f"{name}{i}="),), str(i)) for i, source in enumerate(sources)]
        write_rows(tmp_path / f"{name}.parquet", "test", rows)
    request = EvaluateRequest(str(task.model_dir), files, limit=2)
    kept = [row.prompt_text for row in request_module.check_request(request).questions.rows]
    assert kept == ["one0=", "one1=", "one2=", "two0=", "two2="]
    assert len(request_module.check_request(replace(request, limit=None)).questions.rows) == 8


def test_results_go_through_no_link_that_a_run_holds(run_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "evaluations").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    request = EvaluateRequest(str(run_dir), limit=1)
    with pytest.raises(UsageError, match=f"is a link to {tmp_path / 'elsewhere'}") as refused:
        request_module.check_request(request)
    assert "--out" in refused.value.fix
    assert request_module.check_request(replace(request, out=tmp_path / "out"))


def test_a_damaged_checkpoint_is_passed_over_and_left_alone(run_dir):
    weights = run_dir / "checkpoints" / "step_000008" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (run_dir / "checkpoints" / ".partial-000012").mkdir()  # a run in the middle of saving
    found = request_module.find_target(str(run_dir), [])
    assert found.step == 4
    assert "step_000008" in found.notes[0]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        ".partial-000012",
        "step_000004",
        "step_000008",
    ]


def test_a_failing_evaluation_leaves_nothing(run_dir, tmp_path):
    def fail(doing, done, total):
        if doing == "grading":
            raise KeyboardInterrupt

    out = tmp_path / "places" / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(EvaluateRequest(str(run_dir), n=2, limit=70, batch_size=8, out=out), fail)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ks": [9]}, "pass@9 cannot be estimated from 8"),
        ({"ks": [0]}, "pass@0"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": float("inf")}, "temperature of inf"),
        ({"temperature": 1e-300}, "temperature of 1e-300"),
        ({"max_response_length": QUICK.max_position_embeddings}, "no tokens for a prompt"),
        ({"model_or_run": "no/such"}, "does not exist"),
        ({"reward": "nonesuch"}, "no such reward"),
        ({"reward": "nowhere.py:f"}, "no such file"),
        ({"data": ["nowhere.parquet"]}, "no such file"),
    ],
)
def test_what_cannot_work_is_refused(run_dir, changes, words):
    with pytest.raises(UsageError, match=words):
        evaluate(replace(EvaluateRequest(str(run_dir)), **changes), quiet)
    assert not (run_dir / "evaluations").exists()


def test_overlong_prompts_are_counted(run_dir, tmp_path):
    data = tmp_path / "data.parquet"
    write_parquet([("12+34=", "640"), ("12+34=12+34=", "640")], "test", data)
    found, _ = found_by(EvaluateRequest(str(run_dir), [str(data)], n=1))
    assert found.about["data"]["num_overlong_prompts"] == 1
    assert found.scores[0].num_questions == 1


def test_a_model_is_evaluated_in_an_environment_that_is_named(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where evaluations of a model without a run go
    file, section = tmp_path / "games.py", tmp_path / "section.yaml"
    game = "class {}:\n    def reset(self): pass\n    def get_reward(self): return {}\n"
    file.write_text(game.format("One", 0.25) + game.format("Other", 0.75))
    request = EvaluateRequest(str(task.model_dir), [str(task.val_file)], n=2, limit=3, max_response_length=4)
    found, samples = found_by(request, environment=f"{file}:One")
    assert [row["environment_reward"] for row in samples] == 6 * [0.25]
    assert found.about["sampling"]["environment"]["name"] == f"{file}:One"
    section.write_text(f"environment: {{name: '{file}:Other', max_turns: 2}}\n")
    found, samples = found_by(request, environment=str(section))
    assert [row["environment_reward"] for row in samples] == 6 * [0.75]
    assert found.about["sampling"]["environment"]["max_turns"] == 2
    for wrong in ("nowhere", f"{file}:Missing"):
        with pytest.raises(UsageError, match="environment"):
            evaluate(replace(request, environment=wrong), quiet)
