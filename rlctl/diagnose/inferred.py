"""Settings that a log does not state, inferred from its figures; each is marked as inferred."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.table import RunLog, Table

#: Relative deviation up to which loss / KL counts as constant.
SAME_RATIO = 0.05
#: Maximum number of decimals in a rounded log (verl's older console has 3), and number of newest values per
#: metric that are checked.
DECIMALS, _LAST = 4, 100
#: Minimum number and minimum share of rows with exactly the largest length, for it to be the limit.
AT_LIMIT_ROWS, AT_LIMIT_SHARE = 3, 0.05
#: Minimum length of a limit, in tokens; the second applies where all rows have the same length, because short
#: answers may all have one length without a limit.
SHORTEST_LIMIT, LONG_ANSWER = 16.0, th.LONG_RESPONSE


def with_inferred(run: RunLog) -> RunLog:
    """Returns the run with facts inferred from its figures, where they were unknown."""
    found = {"kl_coef": _kl_coefficient(run.table), "max_response_length": _length_limit(run.table)}
    how = {"kl_coef": "inferred: loss / KL is constant", "max_response_length": "inferred: lengths end there"}
    new = {fact: v for fact, v in found.items() if v is not None and getattr(run.facts, fact) is None}
    origins = {**run.fact_origins, **{fact: how[fact] for fact in new}}
    return replace(run, facts=replace(run.facts, **new), fact_origins=origins)  # type: ignore[arg-type]


def is_rounded(table: Table) -> bool:
    """Whether the whole log is printed with few decimals: a 0 may then be a small number."""
    values = np.concatenate([np.empty(0), *(table.series(key).values[-_LAST:] for key in table.columns)])
    scaled = np.unique(values[values % 1.0 != 0.0]) * 10**DECIMALS
    return len(scaled) >= th.MIN_STEPS and bool((np.abs(scaled - np.round(scaled)) < 1e-6).all())


def _kl_coefficient(table: Table) -> float | None:
    """Loss / KL if it is constant: on-policy, the rest of a loss with group-centred advantages is zero."""
    _, (loss, kl) = table.aligned("actor/pg_loss", "actor/kl_loss")
    large = (kl > 0.0) & (kl >= np.median(kl)) if len(kl) else np.empty(0, dtype=bool)
    if large.sum() < th.MIN_STEPS:
        return None
    ratio = loss[large] / kl[large]
    middle = float(np.median(ratio))
    if middle <= 0.0 or float(np.median(np.abs(ratio - middle))) > SAME_RATIO * middle:
        return None
    return float(f"{middle:.2g}")


def _length_limit(table: Table) -> int | None:
    """The length limit, if many rows have exactly the same largest length."""
    mean, longest = (table.series(f"response_length/{which}").values for which in ("mean", "max"))
    _, (means, maxima) = table.aligned("response_length/mean", "response_length/max")
    if (all_at_once := means[(means == maxima) & (means > LONG_ANSWER)]).size:
        return int(all_at_once.max())  # all responses of a row are as long as its longest
    for values in (longest, mean):
        if len(values) and _ends_sharply(values):
            return int(values.max())
    return None


def _ends_sharply(values: NDArray[np.float64]) -> bool:
    top = float(values.max())
    count = int((values == top).sum())
    is_long = top >= (LONG_ANSWER if count == len(values) else SHORTEST_LIMIT)
    return top.is_integer() and is_long and count >= max(AT_LIMIT_ROWS, AT_LIMIT_SHARE * len(values))
