import json
import shutil
from dataclasses import replace

import pytest

from rlctl.errors import SpecError, UsageError
from rlctl.evaluate import local_model as local_model_module
from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.evaluate.evaluation import changes, evaluate, regrade
from rlctl.evaluate.request import EvaluateRequest, chosen_reward
from rlctl.evaluate.samples import read_samples
from rlctl.evaluate.scores import summarise
from rlctl.run_spec.rollout import RewardSpec
from rlctl.track.redaction import MASK


def quiet(doing, done, total):
    del doing, done, total


@pytest.fixture
def evaluated(task, tmp_path):
    """An evaluation with some right answers, by a function that likes every other length."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def even(response):\n    return float(len(response) % 2 == 0)\n"
        "def split(response, extra_info, messages):\n"
        "    return float(extra_info['split'] == 'test' and messages[-1]['role'] == 'user')\n"
        "def broken(response):\n    raise ValueError('no')\n"
    )
    request = EvaluateRequest(
        str(task.model_dir),
        [str(task.val_file)],
        n=4,
        limit=12,
        max_response_length=6,
        reward=f"{reward}:even",
        out=tmp_path / "evaluation",
    )
    return evaluate(request, quiet)[0], reward


def test_grades_change_and_nothing_else(evaluated, tmp_path, monkeypatch):
    directory, reward = evaluated
    monkeypatch.setattr(local_model_module, "load_reader", None)
    before = read_samples(directory / "samples.parquet")
    num_even = sum(sample.reward for sample in before)
    assert 0 < num_even < 48
    out, found = regrade(directory, quiet, reward=f"{reward}:split", out=tmp_path / "again")
    after = read_samples(out / "samples.parquet")
    assert [sample.response for sample in after] == [sample.response for sample in before]
    assert {sample.reward for sample in after} == {1.0}
    assert found.regraded["num_changed"] == found.regraded["now_right"] == 48 - num_even
    results = json.loads((out / "results.json").read_text())
    assert results["regraded"]["directory"] == str(directory)
    assert results["regraded"]["reward"]["name"].endswith(":even")
    assert results["reward"]["name"].endswith(":split")
    assert results["sampling"]["n"] == 4
    assert results["scores"][0]["avg"]["value"] == 1.0


def test_its_own_reward_by_default_gives_the_same(evaluated):
    directory, _ = evaluated
    out, found = regrade(directory, quiet)
    assert out.parent == directory.parent
    assert found.regraded["num_changed"] == 0
    assert read_samples(out / "samples.parquet") == read_samples(directory / "samples.parquet")
    again, _ = regrade(out, quiet)
    assert again != out


def test_the_parameters_of_a_grader_are_not_given_to_another(tmp_path):
    name = f"{tmp_path}/mine.py:scaled"
    (tmp_path / "mine.py").touch()
    own = RewardSpec(name=name, params={"scale": 2.0})
    assert chosen_reward(own, "maths") == RewardSpec(name="maths")
    assert chosen_reward(own, name) == chosen_reward(own, None) == own
    masked = RewardSpec(name=name, params={"judge_key": MASK})
    assert chosen_reward(masked, "maths") == RewardSpec(name="maths")
    with pytest.raises(UsageError, match="a parameter of the run's reward is masked"):
        chosen_reward(masked, None)


def test_a_yaml_file_gives_a_reward_of_several_terms_and_parameters(evaluated, tmp_path, monkeypatch):
    directory, _ = evaluated
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(
        "from pydantic import BaseModel\n"
        "from rlctl.registry import GRADERS\n"
        "class Params(BaseModel):\n    scale: float\n"
        "@GRADERS.register(params=Params)\n"
        "def length(response, params):\n    return params.scale * len(response)\n"
    )
    spec = tmp_path / "reward.yaml"
    spec.write_text(
        "reward:\n"
        "  overlong: {buffer_length: 2}\n"
        "  terms:\n"
        "  - {name: 'reward.py:even', weight: 2.0}\n"
        "  - {name: 'scaled.py:length', params: {scale: 0.25}}\n"
    )
    _, found = regrade(directory, quiet, reward=str(spec), out=tmp_path / "again")
    for sample in read_samples(tmp_path / "again" / "samples.parquet"):
        length = len(sample.response)
        assert sample.reward == 2.0 * (length % 2 == 0) + 0.25 * length
    assert found.reward.overlong.buffer_length == 0
    monkeypatch.chdir("/")
    again, _ = regrade(tmp_path / "again", quiet)
    assert read_samples(again / "samples.parquet") == read_samples(tmp_path / "again" / "samples.parquet")
    spec.write_text("reward: {nam: maths}\n")
    with pytest.raises(SpecError, match="name"):
        regrade(directory, quiet, reward=str(spec), out=tmp_path / "wrong")


def test_a_reward_that_fails_is_counted(evaluated):
    directory, reward = evaluated
    _, found = regrade(directory, quiet, reward=f"{reward}:broken")
    assert found.regraded["now_failed"] == 48
    assert found.scores[0].figures["avg"] is None
    assert "ValueError: no" in found.grader_errors[0]


def test_votes_appear_with_a_grader_that_reads_answers(evaluated):
    directory, _ = evaluated
    _, found = regrade(directory, quiet, reward="exact")
    assert found.scores[0].figures["maj@4"] is not None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward": "nonesuch"}, "no such reward"),
        ({"ks": [5]}, "pass@5 cannot"),
        ({"directory": "nowhere"}, "no such directory"),
        ({"out": "evaluation"}, "not empty"),
    ],
)
def test_mistakes_are_refused(evaluated, tmp_path, changed, words):
    directory, _ = evaluated
    paths = {name: tmp_path / value for name, value in changed.items() if name in {"directory", "out"}}
    with pytest.raises(UsageError, match=words):
        regrade(**({"directory": directory} | changed | paths), progress=quiet)


def test_changes_are_told_apart(make_samples):
    before = make_samples("s", [[1.0, 0.0, None, 1.0, 0.5, 0.0]])
    after = make_samples("s", [[0.0, 1.0, 1.0, None, 0.7, 0.0]])
    assert changes(before, after) == {
        "num_changed": 5,
        "now_right": 1,
        "now_wrong": 1,
        "now_failed": 1,
        "no_longer_failed": 1,
    }


@pytest.fixture
def stored(tmp_path, make_samples):
    """Writes an evaluation of these responses to one question each, all with the ground truth 7."""

    def make(responses):
        samples = [
            replace(sample, response=response, ground_truth="7")
            for sample, response in zip(
                make_samples("openai/gsm8k", [[None]] * len(responses)), responses, strict=True
            )
        ]
        about = {
            "model": {"path": "model", "run_dir": None, "step": None, "template_sha256": None},
            "data": {"files": ["x.parquet"], "num_overlong_prompts": 0},
            "sampling": {"n": 1, "seed": 1, "greedy": True, "temperature": 1.0, "top_p": 1.0}
            | {"max_response_length": 9},
        }
        evaluation = Evaluation(about, RewardSpec(), summarise(samples, [1], 1), [], 1.0, (0.0, 1.0))
        write_evaluation(tmp_path / "stored", evaluation, samples)
        return tmp_path / "stored"

    return make


def test_monstrous_responses_are_wrong(stored):
    """Excluded, they would leave 2 right ones of 3."""
    directory = stored(["\\boxed{7}"] * 2 + ["\\boxed{8}"] + ["\\boxed{9^{9^{9}}}"] * 5)
    _, found = regrade(directory, quiet)
    [score] = found.scores
    assert score.figures["avg"].value == 0.25
    assert score.num_grader_errors == 0


CRASHES = """
import os
def grade(response, ground_truth):
    if "crash" in response:
        os.abort()
    if "raise" in response:
        raise ValueError("the grader's own fault")
    return float(response == ground_truth)
"""


def test_responses_that_crash_a_grader_are_wrong_and_a_broken_grader_leaves_no_score(stored, tmp_path):
    (tmp_path / "grader.py").write_text(CRASHES)
    directory = stored(["7"] * 3 + ["8"] + ["crash"] * 4)
    out, found = regrade(directory, quiet, reward=f"{tmp_path}/grader.py:grade", out=tmp_path / "crashed")
    assert found.scores[0].figures["avg"].value == 3 / 8
    assert json.loads((out / "results.json").read_text())["timeouts"] == {"crash": 4}
    assert "4 responses made their grading fail" in (out / "samples.html").read_text()

    directory = stored_again(directory, stored, ["7"] * 3 + ["8"] + ["raise"] * 4)
    out, found = regrade(directory, quiet, reward=f"{tmp_path}/grader.py:grade", out=tmp_path / "raised")
    [document] = json.loads((out / "results.json").read_text())["scores"]
    assert (document["avg"], document["pass@1"]) == (None, None)
    assert "too many grader errors" in (out / "samples.html").read_text()


def stored_again(directory, stored, responses):
    shutil.rmtree(directory)
    return stored(responses)
