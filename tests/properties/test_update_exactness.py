"""Which settings give the gradient of the expected reward: `update` on DeepSpeed, every batch enumerated.

RLOO baselines, groups of two. A setting is

- exact, if the mean gradient over mini-batches is the expected reward's times a known constant, however
  small the mini-batch;
- consistent, if only ever larger mini-batches tend to that;
- biased, if they tend to something else.

The table of `docs/explanation/rollout-correction.md` is what comes out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.algos.rules import RejectRule, WeightRule
from rlctl.registry import POLICY_LOSSES
from tests.processes import on_ranks
from tests.properties.enumerated_updates import (
    AGGREGATIONS,
    HORIZON,
    RESPONSES,
    ROUNDING,
    SIXTEENTHS,
    UNBOUNDED,
    Found,
    Setting,
    enumerate_updates,
)
from tests.sweeps import asked_for, swept

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "rollout-correction.md"
STABLE = POLICY_LOSSES.stable()
LOSSES = [part.name for part in POLICY_LOSSES.parts()]
#: Losses whose gradient is not that of the expected reward even where π_θ = π_old.
CHANGED = [part.name for part in POLICY_LOSSES.parts() if not part.unbiased]
MEAN_LENGTH = sum(count * len(response) for response, count in SIXTEENTHS.items()) / 16
BAND = RejectRule("sequence", "ratio", "sum", 0.5, 2.0, "sequence")


def both(weight: WeightRule, *reject: RejectRule, after: bool = False) -> list[Setting]:
    """Bypass mode, and the first update of decoupled mode."""
    return [Setting("reinforce", old, weight, reject, after) for old in ("rollout", "current")]


def unbounded(level: str | None, *, normalize: bool = False) -> WeightRule:
    return WeightRule(level, "truncate", upper=1e9, normalize=normalize)


#: Row of the table → its settings.
ROWS = {
    "bypass, `reinforce`": [Setting("reinforce", "rollout")],
    "bypass, a loss with a ratio": [Setting(loss, "rollout") for loss in STABLE if loss != "reinforce"],
    "decoupled, first update of a batch, any loss except `clip_cov`": [
        Setting(loss, "current") for loss in LOSSES if loss not in CHANGED
    ],
    "decoupled, first update of a batch, `clip_cov`": [Setting(loss, "current") for loss in CHANGED],
    "decoupled, later updates of a batch, any loss": [Setting(loss, "earlier") for loss in STABLE],
    "`rollout_is_batch_normalize: true`": both(unbounded("sequence", normalize=True)),
    "a bound that changes weights": [
        setting
        for bound in ("clip", "truncate", "mask")
        for setting in both(WeightRule("sequence", bound, 0.5, 2.0))
    ],
    "`rollout_is: token`": both(unbounded("token")),
    "`rollout_is: geometric`": both(unbounded("geometric")),
    "`rollout_is: null`": both(unbounded(None)),
    "a criterion that rejects": [*both(UNBOUNDED, BAND), *both(UNBOUNDED, BAND, after=True)],
}
#: Aggregation → the constant that an unbiased gradient is multiplied by.
SCALES = {
    "token-mean": 1.0 / MEAN_LENGTH,
    "seq-mean-token-sum": 1.0,
    "seq-mean-token-mean": 1.0,
    "seq-mean-token-sum-norm": 1.0 / HORIZON,
}


CASES = [(row, mode) for row in ROWS for mode in AGGREGATIONS]
#: Every row with one aggregation: rows take turns, so that there are exact, consistent and biased ones. The
#: row of the docs' advice, `reinforce` in bypass mode, has all.
SAMPLE = [
    (row, mode)
    for place, row in enumerate(ROWS)
    for turn, mode in enumerate(AGGREGATIONS)
    if place == 0 or turn == place % len(AGGREGATIONS)
]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Setting, str], Found]:
    asked = asked_for(request, "row", "mode")
    cases = [(setting, mode) for row, mode in CASES if (row, mode) in asked for setting in ROWS[row]]
    where = tmp_path_factory.mktemp("enumerated")
    (result,) = on_ranks(1, enumerate_updates, list(dict.fromkeys(cases)), where=where)
    return result  # type: ignore[return-value]


def word(found: Found) -> str:
    if found.small is None:
        return "biased"
    return "exact" if found.small.error < ROUNDING else "consistent"


def test_the_responses_are_all_there_are() -> None:
    assert sum(SIXTEENTHS.values()) == 16
    assert len(RESPONSES) == 1 + 2 * 3


def table_of_the_docs() -> dict[str, list[str]]:
    """Row → its words, by aggregation."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"| | {' | '.join(f'`{mode}`' for mode in AGGREGATIONS)} |") + 2
    cells = [line.strip("| ").split(" | ") for line in lines[first : first + len(ROWS)]]
    return {row: words for row, *words in cells}


@pytest.mark.parametrize(("row", "mode"), swept(CASES, SAMPLE))
def test_an_unbiased_gradient_has_a_known_scale_and_a_biased_one_is_far_off(found, row, mode) -> None:
    words = {word(found[setting, mode]) for setting in ROWS[row]}
    assert table_of_the_docs()[row][AGGREGATIONS.index(mode)] == "/".join(sorted(words))
    for setting in ROWS[row]:
        deviation = found[setting, mode]
        if deviation.small is None:
            assert deviation.large.error > 100 * ROUNDING
        else:
            assert deviation.large.scale == pytest.approx(SCALES[mode], rel=1e-4)
        if word(deviation) == "exact":
            assert deviation.small.scale == pytest.approx(SCALES[mode], rel=1e-4)


def test_the_table_of_the_docs_has_every_row() -> None:
    assert table_of_the_docs().keys() == ROWS.keys()
