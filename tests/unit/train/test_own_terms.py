"""Terms of the loss from users' files, and columns of a batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlctl.batch import TokenLists
from rlctl.capabilities.sections import sections
from rlctl.errors import RunFailure, UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train.capability import capabilities_of
from rlctl.train.update import update
from tests.models import tiny_model
from tests.unit.train.updates import BYPASS, REINFORCE, Case, PlainEngine, alone, settings_of

TERM = """
from rlctl.parts import LOSS_TERMS

@LOSS_TERMS.register({arguments})
def half(tokens):
    {returned}
"""


def spec_with(path: Path, returned: str, arguments: str = ""):
    file = path / "mine.py"
    file.write_text(TERM.format(arguments=arguments, returned=returned))
    return load_spec([], [], [f"actor.terms=[{file}:half]"]).spec


def gradient_with(terms: list[str]) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradient of one update of the tiny model, in micro-batches, with further terms; its metrics."""
    case = Case(BYPASS | REINFORCE | {"rollout_is": "sequence"})
    engine = PlainEngine(tiny_model())
    settings = settings_of(case.correction, micro_sequences=5, terms=terms)
    outcome = update(case.batch(tiny_model()), engine, alone(), settings, lambda _: 0.0, 0)
    return list(engine.gradient.values()), outcome.metrics


def test_a_term_adds_its_gradient_once_however_the_batch_is_cut(tmp_path: Path) -> None:
    """The gradient of the sum is the sum of the gradients; the mean of a constant metric is the constant."""
    file = tmp_path / "mine.py"
    returned = "return 0.5 * tokens.log_probs.square(), {'three': tokens.log_probs.detach() * 0 + 3}"
    file.write_text(TERM.format(arguments="metrics={'three': 'a constant'}", returned=returned))
    plain, _ = gradient_with([])
    once, metrics = gradient_with([f"{file}:half"])
    other = tmp_path / "other.py"
    other.write_text(TERM.format(arguments="", returned="return tokens.log_probs.square()"))
    twice, _ = gradient_with([f"{other}:half"])
    differs = False
    for a, b, c in zip(plain, once, twice, strict=True):
        torch.testing.assert_close(c - a, 2.0 * (b - a), rtol=1e-3, atol=1e-6)
        differs |= bool((b - a).abs().max() > 1e-4)
    assert differs
    assert metrics["actor/terms/half/three"] == pytest.approx(3.0)
    assert metrics["actor/terms/half"] > 0


@pytest.mark.parametrize(
    ("arguments", "returned", "words"),
    [
        ("", "return 1.0", "returned float, not a tensor"),
        ("", "return tokens.log_probs[:1]", "returned a tensor of shape"),
        ("", "return tokens.log_probs.detach()", "has no gradient"),
        ("metrics={'a': 'b'}", "return tokens.log_probs", r"returned the metrics \[\]"),
        ("", "return tokens.log_probs, {'b': tokens.log_probs}", r"returned the metrics \['b'\]"),
        ("", "return tokens.column('nothing')", "no column `nothing`"),
    ],
)
def test_wrong_terms_end_the_run(tmp_path: Path, arguments: str, returned: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TERM.format(arguments=arguments, returned=returned))
    with pytest.raises((RunFailure, LookupError), match=words):
        gradient_with([f"{file}:half"])


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("short", "lambda batch: batch.turns[:1]", "column short"),
        ("number", "lambda batch: 3", "not a tensor"),
    ],
)
def test_wrong_columns_end_the_run(tmp_path: Path, name: str, function: str, words: str) -> None:
    spec = spec_with(tmp_path, "return tokens.log_probs", f"columns={{'{name}': {function}}}")
    [capability] = [each for each in capabilities_of(spec) if each.name == "own_terms"]
    batch = Case(BYPASS | REINFORCE).batch(tiny_model())
    with pytest.raises(RunFailure, match=words):
        capability.scored(SimpleNamespace(), batch, batch)


def test_a_column_cannot_take_the_name_of_another(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "return tokens.log_probs", "columns={'versions': len}")
    with pytest.raises(UsageError, match="a column `versions` exists already"):
        capabilities_of(spec)


def test_undeclared_columns_and_wrong_sizes_are_refused() -> None:
    batch = Case(BYPASS | REINFORCE).batch(tiny_model())
    with pytest.raises(ValueError, match="`unheard` is not declared"):
        batch.with_columns(unheard=batch.turns)
    with pytest.raises(ValueError, match="`age` has 1 entries instead of"):
        batch.with_columns(age=batch.turns[:1])
    lists = TokenLists(torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="`kept` has 1 entries"):
        batch.with_columns(kept=lists)
    with pytest.raises(LookupError, match="no column `values`"):
        batch.column("values")


def test_capabilities_are_off_by_default() -> None:
    """All but the account of dropped episodes, and the test of the sampler's log-probs."""
    spec = load_spec([], [], []).spec
    always_on = ["dropped_episodes", "sampler_test"]
    assert [name for name, section in sections().items() if section.is_on(spec)] == always_on
    assert [capability.name for capability in capabilities_of(spec)] == always_on
    assert len(sections()) >= 6
