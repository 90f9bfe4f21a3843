"""Each framework's rule, as rlctl writes it, does to the same 1,000 responses what the framework does.

verl 0.9.1 itself computes its rows where it can be imported; the others' rules are the slow ones of
`tests/reference/peers.py`. The table of `docs/evidence/conformance.md` is what comes out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.what_if.settings import Setting, frameworks
from tests.properties.padded_batches import Corrected, corrected, factor_and_metrics
from tests.reference import peers, verl_helper

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "conformance.md"
SETTINGS = {setting.name: setting for setting in frameworks()}
RESPONSES = peers.thousand()
LENGTHS = torch.tensor([len(response) for response in RESPONSES])
MASK = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]


def padded(rows: list[list[float]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


LOG_RATIO = padded(RESPONSES)
ROLLOUT = torch.full_like(LOG_RATIO, -1.0)
ADVANTAGES = torch.tensor(peers.ADVANTAGES)[:, None].expand_as(LOG_RATIO)


def ours(setting: Setting) -> tuple[torch.Tensor, torch.Tensor, Corrected]:
    """(weights, kept, all of it); without a weight, 1 where kept."""
    found = corrected(ROLLOUT + LOG_RATIO, ROLLOUT, MASK, setting.rules, advantages=ADVANTAGES)
    return found.weights, found.keep_mask, found


def row_of(setting: Setting) -> str:
    """One row of the table: what is kept of the 1,000, and the weights that reach the loss."""
    rules = setting.rules
    weights, keep, found = ours(setting)
    factor, metrics = factor_and_metrics(found, rules)
    assert factor == 1.0
    used = keep & (weights > 0.0)
    tokens = used.sum().item() / MASK.sum().item()
    # Without a weight, those that reach the loss are 1 and 0.
    mean = metrics.get("rollout_corr/rollout_is_mean", tokens)
    ess = metrics.get("rollout_corr/rollout_is_eff_sample_size", tokens)
    largest = metrics.get("rollout_corr/rollout_is_max", 1.0)
    spec = setting.spec
    written = f"{spec.rollout_is or 'null'}"
    if spec.rollout_is:
        bound = spec.rollout_is_bound or ("mask" if "_" in spec.rollout_is_threshold else "truncate")
        written += f", {bound} {spec.rollout_is_threshold}"
    criterion = f"{spec.rollout_rs} {spec.rollout_rs_threshold}" if spec.rollout_rs else "–"
    cells = (setting.name, written, criterion, spec.dialect, f"{used.any(-1).sum()}", f"{tokens:.1%}")
    return f"| {' | '.join(cells)} | {mean:.3f} | {ess:.3f} | {largest:.2f} |"


@pytest.mark.parametrize("name", peers.RULES)
def test_equals_the_slow_rule(name: str) -> None:
    weights, kept, _ = ours(SETTINGS[name])
    rows = [
        peers.RULES[name](response, advantage)
        for response, advantage in zip(RESPONSES, peers.ADVANTAGES, strict=True)
    ]
    expected_kept = padded([[float(x) for x in passed] for _, passed in rows]).bool() & MASK
    assert torch.equal(kept, expected_kept)
    expected = padded([weight for weight, _ in rows])
    torch.testing.assert_close(
        torch.where(kept, weights, 0.0), torch.where(kept, expected, 0.0), rtol=2e-5, atol=1e-7
    )


def test_every_framework_rule_is_compared() -> None:
    assert {name for name in SETTINGS if not name.startswith("verl")} == set(peers.RULES)


@pytest.mark.verl
@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("verl")])
def test_equals_verl(name: str) -> None:
    helper = verl_helper.load()
    if helper is None:
        pytest.skip(verl_helper.why_not())
    spec = SETTINGS[name].spec
    proto, their_mask, _ = helper.compute_rollout_correction_and_rejection_mask(
        (ROLLOUT + LOG_RATIO).double(),
        ROLLOUT.double(),
        MASK.double(),
        rollout_is=spec.rollout_is,
        rollout_is_threshold=spec.rollout_is_threshold,
        rollout_rs=spec.rollout_rs,
        rollout_rs_threshold=spec.rollout_rs_threshold,
        rollout_is_batch_normalize=False,
    )
    weights, kept, _ = ours(SETTINGS[name])
    assert torch.equal(kept, their_mask.bool())
    if spec.rollout_is is not None:
        expected = torch.where(kept, proto.batch["rollout_is_weights"], 0.0).float()
        torch.testing.assert_close(torch.where(kept, weights, 0.0), expected, rtol=1e-5, atol=1e-7)


def test_the_table_of_the_docs_is_what_comes_out() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in map(row_of, SETTINGS.values()) if row not in text]
    assert not missing, "put these rows into docs/evidence/conformance.md:\n" + "\n".join(missing)
