"""Parts by name: the built-in ones, installed ones, and functions of the user's files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlctl.errors import SpecError, UsageError
from rlctl.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, Registry
from rlctl.spec.load import LoadedSpec, dump_spec, load_spec

LOSS = "algorithm.rollout_correction.loss_type"
PARAMS = "algorithm.rollout_correction.loss_params"

MINE = '''
import torch
from pydantic import BaseModel, Field

from rlctl.algos.losses import TokenLoss
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


class Soft(BaseModel, extra="forbid"):
    beta: float = Field(default=1.0, gt=0)


@POLICY_LOSSES.register(label="Mine", needs={"old_log_probs"}, params=Soft)
def with_params(rule, log_probs, old_log_probs, advantages, loss_mask, weights):
    return TokenLoss(torch.where(loss_mask, -rule.params.beta * advantages * log_probs, 0.0))


def plain(rule, log_probs, old_log_probs, advantages, loss_mask, weights):
    """A loss without decoration."""
    return TokenLoss(torch.where(loss_mask, -advantages * log_probs, 0.0))


NOT_A_FUNCTION = 3
'''


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


@pytest.mark.parametrize("registry", [POLICY_LOSSES, ADVANTAGE_ESTIMATORS, KL_ESTIMATORS])
def test_every_part_says_what_it_is(registry: Registry) -> None:
    assert len(registry) >= 5
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
    from rlctl.spec.resolve import loss_rule

    name = f"{mine}:with_params"
    spec = spec_with(f"{LOSS}={name}", f"{PARAMS}.beta=0.5").spec
    rule = loss_rule(spec)
    assert rule.params.beta == 0.5
    assert rule.has_ratio
    assert loss_rule(spec_with(f"{LOSS}={name}").spec).params.beta == 1.0
    assert POLICY_LOSSES.part(name).label == "Mine"
    assert name not in set(POLICY_LOSSES)  # a file of one user is nobody else's part


def test_an_undecorated_function_is_a_part_without_a_ratio(mine: str) -> None:
    from rlctl.spec.resolve import loss_rule

    spec = spec_with(f"{LOSS}={mine}:plain").spec
    assert not loss_rule(spec).has_ratio
    assert POLICY_LOSSES.part(f"{mine}:plain").label == "A loss without decoration"


def test_the_spec_with_parameters_is_written_and_read_back(mine: str, tmp_path: Path) -> None:
    loaded = spec_with(f"{LOSS}={mine}:with_params", f"{PARAMS}.beta=0.25")
    file = tmp_path / "spec.yaml"
    file.write_text(dump_spec(loaded.spec))
    assert load_spec([], [file], []).spec == loaded.spec
    assert loaded.origins[PARAMS].layer == "command line"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{LOSS}=ppoclip"], LOSS, "did you mean `ppo_clip`"),
        ([f"{LOSS}=missing.py:f"], LOSS, "no such file"),
        ([f"{LOSS}=mine.py:absent"], LOSS, "no such function"),
        ([f"{LOSS}=mine.py:NOT_A_FUNCTION"], LOSS, "is not a function"),
        ([f"{LOSS}=mine.py:with_params", f"{PARAMS}.beta=-1"], f"{PARAMS}.beta", "greater than 0"),
        ([f"{LOSS}=mine.py:with_params", f"{PARAMS}.gamma=1"], f"{PARAMS}.gamma", "are beta"),
        ([f"{LOSS}=mine.py:plain", f"{PARAMS}.beta=1"], f"{PARAMS}.beta", "has no parameters of its own"),
        ([f"{PARAMS}.beta=1"], f"{PARAMS}.beta", "has no parameters of its own"),
        (["algorithm.adv_estimator=rlo"], "algorithm.adv_estimator", "did you mean `rloo`"),
        (["algorithm.kl_penalty=unbiased"], "algorithm.kl_penalty", "use k1, k2 or k3"),
        (["actor.kl_loss_type=k9"], "actor.kl_loss_type", "`k"),
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
        registry.register("one")(len)
    with pytest.raises(UsageError, match="no toy `two`"):
        registry.part("two")


def test_an_installed_package_adds_a_part(tmp_path: Path) -> None:
    """A package on the path whose metadata names an entry point, in a process of its own."""
    (tmp_path / "their_losses.py").write_text(
        "from rlctl.registry import POLICY_LOSSES\n\n\n"
        '@POLICY_LOSSES.register("theirs", label="Theirs", needs={"old_log_probs"})\n'
        "def loss(*arguments):\n    raise NotImplementedError\n"
    )
    info = tmp_path / "their_losses-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-losses\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlctl.policy_losses]\ntheirs = their_losses:loss\nbroken = their_losses:absent\n"
    )
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from rlctl.errors import UsageError
        from rlctl.registry import POLICY_LOSSES
        from rlctl.spec.load import load_spec
        assert "theirs" in set(POLICY_LOSSES)
        spec = load_spec([], [], ["{LOSS}=theirs", "algorithm.rollout_correction.rollout_is=null"]).spec
        assert spec.algorithm.rollout_correction.loss_type == "theirs"
        assert POLICY_LOSSES.part("theirs").label == "Theirs"
        assert POLICY_LOSSES.part("theirs").needs == {{"old_log_probs"}}
        try:
            POLICY_LOSSES.part("broken")
        except UsageError as error:
            assert "their-losses" in (error.fix or ""), error
        else:
            raise AssertionError("the broken entry point was accepted")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
