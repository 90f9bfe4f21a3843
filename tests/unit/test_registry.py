"""Parts by name: the built-in ones, installed ones, and functions of the user's files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import rlctl
from rlctl.algos.correction import Correction, correct, correction_metrics
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.segments import Units, to_host
from rlctl.errors import RunFailure, SpecError, UsageError
from rlctl.registry import (
    ADVANTAGE_ESTIMATORS,
    CORRECTION_WEIGHTS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    Registry,
)
from rlctl.run_spec.explain import bands
from rlctl.run_spec.load import LoadedSpec, dump_spec, load_spec
from rlctl.run_spec.resolve import correction_rules
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.start import with_absolute_paths
from rlctl.user_code import files_of, load_function

LOSS = "algorithm.rollout_correction.loss_type"
PARAMS = "algorithm.rollout_correction.loss_params"
RC = "algorithm.rollout_correction."
SQUARED = [f"{RC}rollout_is=mine.py:squared"]
GAP = [f"{RC}rollout_rs=mine.py:largest_gap", f"{RC}rollout_rs_threshold=0.3"]

MINE = '''
import torch
from pydantic import BaseModel, Field

from rlctl.algos.losses import TokenLoss
from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA


class Soft(BaseModel, extra="forbid"):
    beta: float = Field(default=1.0, gt=0)


@POLICY_LOSSES.register(label="Mine", needs={"old_log_probs"}, params=Soft)
def with_params(rule, inputs):
    return TokenLoss(-rule.params.beta * inputs.advantages * inputs.log_probs)


def plain(rule, inputs):
    """A loss without decoration."""
    return TokenLoss(-inputs.advantages * inputs.log_probs)


def of_six(rule, log_probs, old_log_probs, advantages, loss_mask, weights):
    return None


NOT_A_FUNCTION = 3


class Floor(BaseModel, extra="forbid"):
    floor: float = Field(default=0.0, ge=0)


@CORRECTION_WEIGHTS.register(label="Squared", formula="ρ_t²", params=Floor)
def squared(log_ratio, params):
    return (2.0 * log_ratio.token).clamp(min=params.floor - 20.0)


@REJECTION_CRITERIA.register(
    label="Largest gap", formula="max |log ρ_t|", unit="sequence", thresholds=["0.3"]
)
def largest_gap(log_ratio, params):
    return log_ratio.unit.max(log_ratio.token.abs())


def undecorated(log_ratio, params):
    """Any gap."""
    return log_ratio.token.abs()


def sequence(log_ratio, params):
    return log_ratio.token.abs()


@ADVANTAGE_ESTIMATORS.register(needs={"group_ids", "baseline_scores"})
def greedy_groups(inputs):
    return None


async def awaited(rule, inputs):
    return None


@REJECTION_CRITERIA.register(unit="sequence")
def wrong_shape(log_ratio, params):
    return log_ratio.token
'''


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries that a test makes are gone after it."""
    monkeypatch.setattr(Registry, "all", list(Registry.all))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py"


def spec_with(*overrides: str) -> LoadedSpec:
    return load_spec([], [], ["algorithm.rollout_correction.rollout_is=null", *overrides])


def problem(*overrides: str) -> tuple[str, str, str]:
    """(key, what, fix) of the one problem."""
    with pytest.raises(SpecError) as caught:
        spec_with(*overrides)
    (found,) = [each for each in caught.value.problems if each.severity == "error"]
    return found.key, found.what, found.fix or ""


@pytest.mark.parametrize(
    "registry",
    [POLICY_LOSSES, ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, CORRECTION_WEIGHTS, REJECTION_CRITERIA],
)
def test_every_part_says_what_it_is(registry: Registry) -> None:
    assert len(registry) >= 3
    for part in registry.parts():
        assert all([part.label, part.formula, part.source]), part.name
        assert (part.function.__doc__ or "").strip(), part.name


def test_names_and_formulas_need_no_torch() -> None:
    code = """
        import sys
        from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
        assert POLICY_LOSSES.part("gspo").formula and len(ADVANTAGE_ESTIMATORS.parts()) > 5
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_decorated_function_brings_its_parameters_and_needs(mine: str) -> None:
    from rlctl.run_spec.resolve import loss_rule

    name = f"{mine}:with_params"
    spec = spec_with(f"{LOSS}={name}", f"{PARAMS}.beta=0.5").spec
    rule = loss_rule(spec)
    assert rule.params.beta == 0.5
    assert rule.has_ratio
    assert loss_rule(spec_with(f"{LOSS}={name}").spec).params.beta == 1.0
    assert POLICY_LOSSES.part(name).label == "Mine"
    assert name not in set(POLICY_LOSSES)  # a user's file is not registered globally


def test_an_undecorated_function_is_a_part_without_a_ratio(mine: str) -> None:
    from rlctl.run_spec.resolve import loss_rule

    spec = spec_with(f"{LOSS}={mine}:plain").spec
    assert not loss_rule(spec).has_ratio
    assert POLICY_LOSSES.part(f"{mine}:plain").label == "A loss without decoration"


def test_the_spec_with_parameters_is_written_and_read_back(mine: str, tmp_path: Path) -> None:
    loaded = spec_with(f"{LOSS}={mine}:with_params", f"{PARAMS}.beta=0.25")
    file = tmp_path / "spec.yaml"
    file.write_text(dump_spec(loaded.spec))
    assert load_spec([], [file], []).spec == loaded.spec
    assert loaded.origins[PARAMS].layer == "command line"


def corrected(*overrides: str) -> tuple[Correction, CorrectionRules]:
    """Of two responses with log-ratios 0.1, 0.5 and 0.1, 0.2."""
    rules = correction_rules(spec_with(*overrides).spec.algorithm.rollout_correction)
    log_ratio, units = torch.tensor([0.1, 0.5, 0.1, 0.2]), Units.of_responses(torch.tensor([2, 2]))
    return correct(log_ratio - 3.0, torch.full((4,), -3.0), units, rules), rules


def test_a_weight_of_ones_own_is_bounded_like_the_others(mine: str) -> None:
    found, rules = corrected(*SQUARED, f"{RC}rollout_is_threshold=2.0")
    expected = torch.tensor([0.2, 1.0, 0.2, 0.4]).exp().clamp(max=2.0)
    torch.testing.assert_close(found.weights, expected)
    assert rules.weight.params.floor == 0.0
    band = bands(spec_with(*SQUARED).spec)[0]
    assert (band.interval, band.bounds) == ("0.5 ≤ w ≤ 2", "w = ρ_t²: Squared")


def test_a_criterion_of_ones_own_rejects_and_is_measured(mine: str) -> None:
    found, rules = corrected(*GAP)
    assert found.keep.tolist() == [False, False, True, True]
    metrics = correction_metrics(to_host(found.sums), rules)
    prefix = "rollout_corr/rollout_rs_largest_gap_"
    assert metrics[f"{prefix}max"] == pytest.approx(0.5)
    assert metrics[f"{prefix}fraction_high"] == metrics[f"{prefix}seq_masked_fraction"] == 0.5
    band = bands(spec_with(*GAP).spec)[-1]
    assert (band.interval, band.outside) == ("max |log ρ_t| ≤ 0.3", "the whole response is rejected")


def test_a_function_without_decoration_rejects_tokens(mine: str) -> None:
    found, _ = corrected(f"{RC}rollout_rs=mine.py:undecorated", f"{RC}rollout_rs_threshold=0.3")
    assert found.keep.tolist() == [True, False, True, True]


def test_a_criterion_of_another_shape_than_it_says_is_refused(mine: str) -> None:
    with pytest.raises(RunFailure, match=r"wrong_shape.*unit='sequence'.*shape \(4,\).*\(2,\)"):
        corrected(f"{RC}rollout_rs=mine.py:wrong_shape", f"{RC}rollout_rs_threshold=0.3")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{LOSS}=ppoclip"], LOSS, "did you mean `ppo_clip`"),
        ([f"{LOSS}=missing.py:f"], LOSS, "no such file"),
        ([f"{LOSS}=mine.py:of_six"], LOSS, "def of_six(rule, inputs)"),
        ([f"{LOSS}=mine.py:absent"], LOSS, "no such function"),
        ([f"{LOSS}=mine.py:NOT_A_FUNCTION"], LOSS, "is not a function"),
        ([f"{LOSS}=mine.py:with_params", f"{PARAMS}.beta=-1"], f"{PARAMS}.beta", "greater than 0"),
        ([f"{LOSS}=mine.py:with_params", f"{PARAMS}.gamma=1"], f"{PARAMS}.gamma", "are beta"),
        ([f"{LOSS}=mine.py:plain", f"{PARAMS}.beta=1"], f"{PARAMS}.beta", "takes no parameters"),
        ([f"{PARAMS}.beta=1"], f"{PARAMS}.beta", "takes no parameters"),
        (["algorithm.adv_estimator=rlo"], "algorithm.adv_estimator", "did you mean `rloo`"),
        (["algorithm.kl_penalty=unbiased"], "algorithm.kl_penalty", "use k1"),
        (["actor.kl_loss_type=k9"], "actor.kl_loss_type", "`k"),
        ([f"{RC}rollout_is=tokn"], f"{RC}rollout_is", "did you mean `token`"),
        ([f"{RC}rollout_is=mine.py:absent"], f"{RC}rollout_is", "no such function"),
        (
            [f"{RC}rollout_is=token", f"{RC}rollout_is_params.x=1"],
            f"{RC}rollout_is_params.x",
            "no parameters",
        ),
        ([*SQUARED, f"{RC}rollout_is_params.floor=-1"], f"{RC}rollout_is_params.floor", "greater than"),
        (
            [f"{RC}rollout_rs=mine.py:absent", f"{RC}rollout_rs_threshold=1"],
            f"{RC}rollout_rs",
            "no such func",
        ),
        ([f"{RC}rollout_rs=mine.py:largest_gap"], f"{RC}rollout_rs_threshold", "missing"),
        ([*GAP, f"{RC}rollout_rs_threshold=-1"], f"{RC}rollout_rs_threshold", "for example 0.3"),
        ([*GAP, f"{RC}rollout_rs_params.x=1"], f"{RC}rollout_rs_params.x", "no criterion"),
        ([f"{RC}rollout_rs_params.x=1"], f"{RC}rollout_rs_params.x", "no criterion"),
        ([f"{RC}rollout_is_params.x=1"], f"{RC}rollout_is_params.x", "no weight"),
        (
            [f"{RC}rollout_rs=mine.py:sequence,sequence", f"{RC}rollout_rs_threshold=0.5,0.5_2.0"],
            f"{RC}rollout_rs",
            "under the name sequence",
        ),
        (
            ["algorithm.adv_estimator=mine.py:greedy_groups", "algorithm.filter_groups.enable=true"],
            "algorithm.filter_groups.enable",
            "a greedy response to every prompt",
        ),
        ([f"{LOSS}=mine.py:awaited"], LOSS, "cannot be an async function"),
    ],
)
def test_what_does_not_fit_is_refused(mine: str, overrides: list[str], key: str, words: str) -> None:
    found = problem(*overrides)
    assert found[0] == key
    assert words in found[1] + found[2]


def test_a_file_that_cannot_be_imported_names_its_line(mine: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('on purpose')\n")
    key, what, _ = problem(f"{LOSS}=broken.py:f")
    assert key == LOSS
    assert "broken.py:2" in what
    assert "on purpose" in what


def test_one_name_is_one_part() -> None:
    registry = Registry("toy", key="toy", module="math")
    registry.register("one")(len)
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("one")(max)
    with pytest.raises(UsageError, match="no toy `two`"):
        registry.part("two")


def test_the_name_of_a_built_in_part_is_taken_before_it_is_loaded() -> None:
    code = """
        from rlctl.registry import ADVANTAGE_ESTIMATORS
        try:
            @ADVANTAGE_ESTIMATORS.register()
            def grpo(inputs): ...
        except ValueError as error:
            assert "grpo is registered twice" in str(error), error
        else:
            raise AssertionError("the name was accepted")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_file_with_several_parts_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("state = []\ndef gap(log_ratio, params): return state\nweight = gap\n")
    functions = [
        registry.part(f"{tmp_path}/two.py:{name}").function
        for registry, name in ((CORRECTION_WEIGHTS, "weight"), (REJECTION_CRITERIA, "gap"))
    ]
    assert functions[0](None, None) is functions[1](None, None)


def test_a_decorated_function_that_takes_other_arguments_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="a correction weight is called with 2 arguments"):
        CORRECTION_WEIGHTS.register("of_one")(lambda log_ratio: log_ratio)
    assert "of_one" not in list(CORRECTION_WEIGHTS)


def test_a_notebook_cell_can_be_run_again() -> None:
    """It defines the function, and registers it, a second time."""
    registry = Registry("toy", key="toy", module="math")
    for label in ("before", "after"):
        exec(f"@registry.register(label='{label}')\ndef cell(): pass", {"registry": registry})
    assert registry.part("cell").label == "after"


WEIGHT = """
from rlctl.registry import CORRECTION_WEIGHTS

@CORRECTION_WEIGHTS.register(unit="{unit}")
def weight(log_ratio, params):
    return {value}
"""


def test_a_relative_path_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_probs, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    for shift in (0.5, 0.1):
        directory = tmp_path / str(shift)
        directory.mkdir()
        monkeypatch.chdir(directory)
        Path("mine.py").write_text(WEIGHT.format(unit="token", value=f"log_ratio.token - {shift}"))
        for name in ("mine.py:weight", f"{directory}/mine.py:weight"):
            options = {"rollout_is": name, "rollout_is_batch_normalize": False}
            weights = rlctl.correct(log_probs, log_probs, mask, **options).weights
            assert weights[0, 0].item() == pytest.approx(math.exp(-shift))


def test_an_edit_of_the_same_size_in_the_same_second_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's bytecode files are compared by size and second only."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1, 2):
        file.write_text(f"def part():\n    return {value}\n")
        os.utime(file, (0, 0))
        part = load_function(f"{file}:part", key="key")
        assert part() == value
        del sys.modules[part.__module__]  # as in a new process


@pytest.mark.parametrize(
    ("name", "rest"), [("weight", "raise RuntimeError"), ("wieght", "")], ids=["broken", "misspelled"]
)
def test_a_file_whose_import_failed_is_imported_again(tmp_path: Path, name: str, rest: str) -> None:
    """Its parts before the error are registered already."""
    file, key = tmp_path / "mine.py", f"{RC}rollout_is"
    file.write_text(WEIGHT.format(unit="token", value="None") + rest)
    for _ in range(2):
        with pytest.raises(SpecError, match=r"importing it failed|no such function"):
            rlctl.load_spec("rloo-seq-is", {key: f"{file}:{name}"})
    file.write_text(WEIGHT.format(unit="sequence", value="None"))
    rlctl.load_spec("rloo-seq-is", {key: f"{file}:weight"})
    assert CORRECTION_WEIGHTS.part(f"{file}:weight").unit == "sequence"


def test_a_decorator_that_gives_another_name_counts(tmp_path: Path) -> None:
    """Without `needs`, a ratio loss would be weighted by the correction too."""
    file = tmp_path / "named.py"
    file.write_text(
        "from rlctl.registry import GRADERS, POLICY_LOSSES\n\n\n"
        '@POLICY_LOSSES.register("soft-ppo", needs={"old_log_probs"}, label="Soft")\n'
        "def soft_ppo(rule, inputs):\n    return None\n\n\n"
        "@GRADERS.register()\ndef same(response, ground_truth):\n    return 1.0\n"
    )
    part = POLICY_LOSSES.part(f"{file}:soft_ppo")
    assert (part.needs, part.label) == ({"old_log_probs"}, "Soft")
    with pytest.raises(UsageError, match="same is registered as a grader, not as a policy loss"):
        POLICY_LOSSES.part(f"{file}:same")


@pytest.mark.parametrize("decorator", ["", "@POLICY_LOSSES.register()\n"])
def test_a_part_without_words_is_called_by_its_function(decorator: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"from rlctl.registry import POLICY_LOSSES\n\n\n{decorator}def bare(rule, inputs): ...\n"
    )
    assert POLICY_LOSSES.part(f"{tmp_path}/mine.py:bare").label == "bare"


def test_a_plain_function_can_be_parts_of_two_kinds(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("def mine(*arguments):\n    return None\n")
    for registry in (POLICY_LOSSES, CORRECTION_WEIGHTS):
        assert registry.part(f"{file}:mine").unit == "token"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"unit": "seq"}, "unit='seq': write 'token' or 'turn' or 'sequence' or 'episode'"),
        ({"params": dict}, "params=<class 'dict'>: give a subclass"),
        ({"name": len}, "with parentheses"),
        ({"needs": "rewards"}, r"needs=\['rewards'\]"),
        ({"needs": [3]}, r"needs=\[3\]: give a list of texts"),
        ({"thresholds": ["abc"]}, r"thresholds=\['abc'\]: write positive numbers"),
        ({"thresholds": ["0"]}, r"thresholds=\['0'\]: write positive numbers"),
        ({"thresholds": [0.5]}, r"thresholds=\[0.5\]: give a list of texts"),
        ({"thresholds": "2.0"}, "thresholds='2.0': give a list of texts"),
        ({"options": "actor.tau_pos"}, "options='actor.tau_pos': give a list of texts"),
        ({"options": ["tau_pos"]}, r"options=\['tau_pos'\]: write keys of the spec"),
        ({"label": 3}, "label=3: give a text"),
        ({"unbiased": "yes"}, "unbiased='yes': give True or False"),
        ({"clip": "ppo"}, "clip='ppo': give a ClipBand"),
        ({"batch_statistics": 1}, "batch_statistics=1: give a function"),
        ({"of_batch": len}, "of_batch is called batch_statistics now"),
        ({"needs_advantage": True}, "needs_advantage is called vanishes_without_advantage now"),
        ({"known_responses": "36"}, "known_responses='36': give a function"),
        ({"data_sources": "mybench("}, "is no regular expression"),
        ({"lable": "Mine"}, "unexpected keyword argument 'lable'"),
    ],
)
def test_wrong_arguments_of_the_decorator_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        CORRECTION_WEIGHTS.register(**arguments)


def test_a_failed_import_of_the_parts_is_reported_again() -> None:
    registry = Registry("toy", key="toy", module="no_such_module_of_parts")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            registry.part("one")


def test_parameters_that_no_spec_can_set_are_refused() -> None:
    with pytest.raises(ValueError, match="a KL estimator has no parameters in a spec"):
        KL_ESTIMATORS.register("unused", params=BaseModel)
    assert "unused" not in list(KL_ESTIMATORS)


def test_the_schema_offers_no_kl_estimator_that_a_reward_cannot_use() -> None:
    schema = RunSpec.model_json_schema()["$defs"]
    in_reward, in_loss = (
        schema[section]["properties"][key]["anyOf"][0]["enum"]
        for section, key in (("AlgorithmSpec", "kl_penalty"), ("ActorSpec", "kl_loss_type"))
    )
    assert set(in_loss) - set(in_reward) == {"unbiased", "sequence"}


def test_files_joined_with_commas_are_absolute_in_the_spec_of_a_run(mine: str) -> None:
    rules = [f"{RC}rollout_rs={mine}:largest_gap, token_k1,{mine}:undecorated"]
    text = "data.chat_template_kwargs.note=see b.py:f, or c.py:g"
    spec = with_absolute_paths(spec_with(*rules, f"{RC}rollout_rs_threshold=0.5,0.5_2.0,0.5", text).spec)
    assert spec.data.chat_template_kwargs == {"note": "see b.py:f, or c.py:g"}
    file = Path(mine).resolve()
    assert spec.algorithm.rollout_correction.rollout_rs == f"{file}:largest_gap,token_k1,{file}:undecorated"


def test_files_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    """Pickle, and dataclasses with annotations as text, find a module by its name."""
    source = "from dataclasses import dataclass\n\n@dataclass\nclass {0}:\n    x: int\n"
    found = {}
    for name in ("First", "Second"):
        file = tmp_path / name / "mine.py"
        file.parent.mkdir()
        file.write_text(source.format(name))
        found[name] = load_function(f"{file}:{name}", key="key")
    for name, kind in found.items():
        assert getattr(sys.modules[kind.__module__], name) is kind


def test_the_files_of_names_that_are_joined_or_contain_a_comma(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "lr=1,n=8" / "two.py"
    two.parent.mkdir()
    for file in (one, two):
        file.write_text("def part(log_ratio, params): ...\n")
    assert files_of(f"seq_max_k2,{one}:part", f"{two}:part", "reinforce", None) == sorted([one, two])


def test_the_spec_of_a_run_is_read_without_its_parts(mine: str, tmp_path: Path) -> None:
    """A run stays readable after a user's file moved or a package was uninstalled."""
    run = tmp_path / "run"
    run.mkdir()
    spec = with_absolute_paths(spec_with(f"{LOSS}={mine}:with_params", f"{PARAMS}.beta=2").spec)
    (run / "spec.yaml").write_text(dump_spec(spec).replace("mine.py", "gone.py"))
    recorded = rlctl.open_run(run).spec.algorithm.rollout_correction
    assert recorded.loss_type == f"{tmp_path}/gone.py:with_params"
    assert recorded.loss_params == {"beta": 2}
    (run / "spec.yaml").write_text("actor:\n  lr: [1]\n  lrr: 2\n")
    with pytest.raises(UsageError, match=r"actor\.lrr"):
        rlctl.open_run(run).spec  # noqa: B018
