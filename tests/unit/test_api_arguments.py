"""Wrong arguments of the Python API get an error that names the argument, before anything starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import rlctl
from rlctl import api
from rlctl.errors import SpecError, UsageError
from rlctl.evaluate.request import EvaluateRequest
from rlctl.run_spec.algorithm import RolloutCorrectionSpec

A, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


async def waiting(step: int, metrics: object) -> None:
    """A callback that nothing awaits."""


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "values as a list": (lambda: rlctl.load_spec("rloo-seq-is", ["actor.lr=1"]), "values is a list"),
    "a spec that is a name": (lambda: rlctl.train("rloo-seq-is"), "spec is a str"),
    "a callback that is a number": (
        lambda: rlctl.train(rlctl.load_spec("rloo-seq-is"), callbacks=[3]),
        "a callback is a int",
    ),
    "one response as text": (lambda: rlctl.grade("exact", "12", "12"), "responses: must be a list"),
    "no response": (lambda: rlctl.grade("exact", [None], ["1"]), "responses.0: must be a text"),
    "a grader of runs": (lambda: rlctl.grade("model", ["a"], ["b"]), "this grader needs settings of a run"),
    "no responses": (lambda: rlctl.grade("exact", None, ["1"]), "responses: must be a list"),
    "too few rows": (lambda: rlctl.grade("exact", ["a"], ["b"], rows=[{}, {}]), "2 rows"),
    "an unknown field": (
        lambda: rlctl.grade("exact", ["a"], ["b"], rows=[{"prmpt": "a"}]),
        "unexpected keyword argument 'prmpt'",
    ),
    "rows as texts": (lambda: rlctl.grade("exact", ["a"], ["b"], rows=["a"]), "rows.0: "),
    "log-probs of numpy": (lambda: rlctl.correct(A.numpy(), A, MASK), "log_probs: is a ndarray"),
    "an unknown option": (lambda: rlctl.evaluate("m", foo=1), "evaluate has no option foo"),
    "no name": (lambda: rlctl.load_spec(3), "3 is no name"),
    "a grader that is a function": (lambda: rlctl.grade(len, ["1"], ["1"]), "grader: must be a text"),
    "no time": (
        lambda: rlctl.grade("exact", ["1"], ["1"], deadline_s=0),
        "deadline_s: must be greater than 0",
    ),
    "a deadline as text": (
        lambda: rlctl.grade("exact", ["1"], ["1"], deadline_s="5"),
        "deadline_s: must be a number",
    ),
    "advantages as a list": (lambda: rlctl.correct(A, A, MASK, advantages=[1, 2]), "advantages: is a list"),
    "a number of responses as text": (
        lambda: rlctl.evaluate("m", "gsm8k", n="x"),
        "n: must be an integer",
    ),
    "a temperature as text": (
        lambda: rlctl.evaluate("m", "gsm8k", temperature="x"),
        "temperature: must be a number",
    ),
    "no sequence of callbacks": (
        lambda: rlctl.train(rlctl.load_spec("rloo-seq-is"), callbacks=None),
        "callbacks: is a NoneType",
    ),
    "a callback of one argument": (
        lambda: rlctl.train(rlctl.load_spec("rloo-seq-is"), callbacks=lambda metrics: None),
        "called with (step, metrics): too many positional arguments",
    ),
    "an async callback": (
        lambda: rlctl.train(rlctl.load_spec("rloo-seq-is"), callbacks=waiting),
        "cannot be an async function",
    ),
    "a run to resume that is a number": (
        lambda: rlctl.train(rlctl.load_spec("rloo-seq-is"), resume=3),
        "resume: is a int",
    ),
    "no run": (lambda: rlctl.open_run(None), "path: is a NoneType"),
    "no log": (lambda: rlctl.diagnose(None), "log: is a NoneType"),
    "one k": (lambda: rlctl.evaluate("m", "gsm8k", ks=2), "ks: must be"),
    "a reward that is a function": (lambda: rlctl.evaluate("m", "gsm8k", reward=len), "reward: must be"),
    "a flag that is text": (lambda: rlctl.evaluate("m", "gsm8k", fresh="perhaps"), "fresh: must be"),
    "parameters as a list": (
        lambda: rlctl.grade("exact", ["1"], ["1"], params=["x"]),
        "params: must be a mapping",
    ),
    "a parameter of NumPy": (
        lambda: rlctl.grade("exact", ["1"], ["1"], params={"x": np.float32(1)}),
        "params.x: ",
    ),
    "no end": (
        lambda: rlctl.grade("exact", ["1"], ["1"], deadline_s=math.inf),
        "deadline_s: must be a finite number",
    ),
    "no response per question": (
        lambda: rlctl.evaluate("m", "gsm8k", n=0),
        "n: 0 is not a positive integer",
    ),
    "a k above n": (lambda: rlctl.evaluate("m", "gsm8k", n=2, ks=[4]), "ks: pass@4 cannot be estimated"),
    "no model": (lambda: rlctl.evaluate(None), "model_or_run: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_argument_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, words = WRONG[name]
    with pytest.raises(UsageError) as error:
        call()
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def test_log_probs_have_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"must be \(B, T\), not of shape \(3,\)"):
        rlctl.correct(A[0], A[0], MASK[0])


def test_one_file_and_one_rule_need_no_list(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("actor:\n  lr: 1.0e-05\n")
    assert rlctl.load_spec("rloo-seq-is", files=tmp_path / "spec.yaml").actor.lr == 1e-5


def test_a_rule_without_the_argument_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rule():\n    return None\n")
    (tmp_path / "log.csv").write_text("step,actor/entropy\n1,0.5\n")
    with pytest.raises(UsageError, match="a diagnosis rule is called with 1 argument") as error:
        rlctl.diagnose(tmp_path / "log.csv", rules=f"{tmp_path}/mine.py:rule")
    assert error.value.fix == "def rule(run)"


def test_a_rule_that_returns_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def too_low(run): return 'low'\n")
    (tmp_path / "log.csv").write_text("step,actor/entropy\n" + "".join(f"{i},0.5\n" for i in range(1, 30)))
    with pytest.raises(UsageError, match="the rule too_low returned str"):
        rlctl.diagnose(tmp_path / "log.csv", rules=f"{tmp_path}/mine.py:too_low")


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "log.csv").write_text("step,actor/entropy\n1,0.5\n")
    assert rlctl.diagnose("~/log.csv").status == "insufficient data"


def test_a_rule_without_the_decorator_may_read_any_metric(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlctl.diagnose.rule import Detection\n\n"
        "def slow(run):\n"
        "    count = len(run.table.series('perf/time_per_step'))\n"
        "    return Detection('info', f'{count} slow steps', ())\n"
    )
    rows = "".join(f"{i},0.5,60\n" for i in range(1, 30))
    (tmp_path / "log.csv").write_text("step,actor/entropy,perf/time_per_step\n" + rows)
    found = rlctl.diagnose(tmp_path / "log.csv", rules=f"{tmp_path}/mine.py:slow").findings
    assert "29 slow steps" in [finding.what for finding in found]


def test_a_copied_spec_is_checked() -> None:
    spec = rlctl.load_spec("rloo-seq-is")
    alone = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"n": 1})})
    with pytest.raises(SpecError, match=r"rollout\.n"):
        rlctl.train(alone)


def test_a_value_given_twice_is_named() -> None:
    with pytest.raises(SpecError, match=r"actor\.lr.*given twice"):
        rlctl.load_spec("rloo-seq-is", {"actor.lr": 1e-6, "actor": {"lr": 2e-6}})


def test_errors_name_arguments_not_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as wrong:
        rlctl.train(rlctl.load_spec("rloo-seq-is"), resume=tmp_path / "nothing")
    assert wrong.value.fix == "run without resume to start one"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError) as wrong:
        rlctl.diagnose(tmp_path, rules=f"{tmp_path}/nothing.py:rule")
    assert wrong.value.where == "rules"


def test_columns_of_a_table_can_be_graded() -> None:
    """As `open_run(…).rollouts()` gives them."""
    texts = np.array(["1", "2"], dtype=object)
    assert rlctl.grade("exact", texts, iter(["1", "3"])) == [1.0, 0.0]


def test_a_grader_gets_the_other_fields_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(response, prompt, data_source, extra_info, messages):\n"
        "    return len(prompt + data_source) + extra_info['n'] + len(messages)\n"
        "def trl(completions, n, completion_ids):\n"
        "    return [a + len(b) for a, b in zip(n, completion_ids)]\n"
    )
    row = {
        "prompt": "ab",
        "data_source": "c",
        "extra_info": {"n": 10},
        "messages": [{"role": "user", "content": "a"}],
        "response_ids": [1, 2, 3],
    }
    rows = [row, row | {"extra_info": {"n": 20}}]
    assert rlctl.grade(f"{tmp_path}/mine.py:f", ["x", "y"], ["", ""], rows=iter(rows)) == [14.0, 24.0]
    assert rlctl.grade(f"{tmp_path}/mine.py:trl", ["x", "y"], ["", ""], rows=rows) == [13.0, 23.0]


@pytest.mark.processes
def test_programs_are_graded() -> None:
    """Also by `auto`; they are not run by graders of text."""
    programs = ["def f(x): return x", "def f(x): return 2", "while True: pass"]
    tests = ["assert f(1) == 1"] * 3
    assert rlctl.grade("code", programs, tests, params={"memory_mb": 256}, deadline_s=0.5) == [1.0, 0.0, 0.0]
    rows = [{"data_source": "mbpp"}, {"data_source": "gsm8k"}]
    assert rlctl.grade("auto", [programs[0], "\\boxed{3}"], [tests[0], "3"], rows=rows, deadline_s=5.0) == [
        1.0,
        1.0,
    ]
    with pytest.raises(rlctl.RlctlError, match=r"code.timeout: unknown parameter"):
        rlctl.grade("code", programs, tests, params={"timeout": 1})


def test_a_grader_gets_its_parameters(tmp_path: Path) -> None:
    source = (
        "from pydantic import BaseModel\nfrom rlctl.registry import GRADERS\n\n\n"
        "class Scale(BaseModel, extra='forbid'):\n    scale: float = 1.0\n\n\n"
        "@GRADERS.register(params=Scale)\n"
        "def scaled(response: str, params: Scale) -> float:\n    return len(response) * params.scale\n"
    )
    (tmp_path / "mine.py").write_text(source)
    name = f"{tmp_path}/mine.py:scaled"
    assert rlctl.grade(name, ["abc", ""], ["", ""], params={"scale": 2.0}) == [6.0, 0.0]
    with pytest.raises(UsageError, match="scal"):
        rlctl.grade(name, ["abc"], [""], params={"scal": 2.0})
    with pytest.raises(UsageError, match="takes no parameters"):
        rlctl.grade("exact", ["abc"], ["abc"], params={"scale": 2.0})


def test_options_are_typed_key_by_key() -> None:
    """What an editor completes is what the functions read, and nothing that `correct` refuses."""
    fields = {field.name for field in dataclasses.fields(EvaluateRequest)} - {"model_or_run", "data"}
    assert set(api.EvaluateOptions.__annotations__) == fields
    refused = {"bypass_mode", "loss_type", "loss_params", "loss_denominator", "score_centering"}
    refused.add("max_nonfinite_fraction")
    assert set(api.CorrectOptions.__annotations__) == set(RolloutCorrectionSpec.model_fields) - refused


def test_keys_of_the_loss_are_refused_unless_they_have_their_default() -> None:
    everything = RolloutCorrectionSpec(rollout_is="token").model_dump()
    assert rlctl.correct(A, A, MASK, **everything).weights.shape == A.shape
    with pytest.raises(UsageError, match="loss_type: has no effect on weights and rejection"):
        rlctl.correct(A, A, MASK, **everything | {"loss_type": "gspo"})


def test_values_keep_their_type_and_may_nest(tmp_path: Path) -> None:
    """A text that looks like a number or a word of YAML stays text; a path is accepted."""
    trainer = {"experiment_name": "true", "total_training_steps": 300}
    values = {
        "trainer": trainer,
        "trainer.run_dir": tmp_path,
        "rollout.n": np.int64(5),
        "engine.deepspeed": {"wall_clock_breakdown": True},
    }
    terms = [{"name": "exact", "weight": np.float32(0.5)}, {"name": "maths"}]
    values |= {"model.path": "org/name", "data.train_files": [tmp_path / "a", "b"], "reward.terms": terms}
    spec = rlctl.load_spec("rloo-seq-is", values)
    assert (spec.data.train_files, spec.reward.terms[0].weight) == ([str(tmp_path / "a"), "b"], 0.5)
    assert (spec.trainer.experiment_name, spec.trainer.total_training_steps) == ("true", 300)
    assert (spec.trainer.run_dir, spec.engine.deepspeed) == (str(tmp_path), {"wall_clock_breakdown": True})
    assert rlctl.load_spec("rloo-seq-is", {"actor.lr": "1e-6"}).actor.lr == 1e-6
    with pytest.raises(UsageError, match=r"values: actor\.lr: .* got 'x'"):
        rlctl.load_spec("rloo-seq-is", {"actor": {"lr": "x"}})
