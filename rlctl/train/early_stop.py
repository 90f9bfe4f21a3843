"""Early stopping: a logged metric has not improved for a while. Reads only the log, which a resume has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlctl.metric_names import validation_score

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import EarlyStopSpec


def early_stop_reason(history: Iterable[Mapping[str, float]], spec: EarlyStopSpec) -> str:
    """Why the run ends after the last step of its log; empty if it goes on.

    A value is an improvement if it is better than the best so far by more than `min_delta`. A step that does
    not log the metric does not count, and a run never ends after one.
    """
    if spec.patience is None:
        return ""
    best = last = math.nan
    best_step = 0
    waited = 0
    is_logged = False
    for metrics in history:
        value = validation_score(metrics) if spec.metric is None else metrics.get(spec.metric)
        is_logged = value is not None and math.isfinite(value)
        if value is None or not is_logged:
            continue
        last = value
        gain = value - best if spec.goal == "max" else best - value
        if math.isnan(best) or gain > spec.min_delta:
            best = value
            best_step = int(metrics["step"])
            waited = 0
        else:
            waited += 1
    if not is_logged or waited < spec.patience:
        return ""
    name = spec.metric or "the mean validation reward"
    than = f" by more than {spec.min_delta:g}" if spec.min_delta else ""
    return (
        f"{name} has not improved{than} in {waited} values: {last:.4g} now, {best:.4g} at step {best_step}, "
        "the best"
    )
