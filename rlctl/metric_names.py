"""Every metric that a run may log: key, unit, definition, and its names in other frameworks.

Tracking writes these keys, diagnosis reads them, and `docs/reference/metrics.md` is generated from them. They
are listed in `metrics.toml`. This module imports no torch.

Equal names of different quantities (for example, five different KLs) are handled by the readers of
`rlctl.diagnose`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

#: Name of the length penalty among the reward terms, as in `reward/overlong/mean`.
OVERLONG = "overlong"


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number."""

    name: str  # the key; `<…>` stands for a variable part, such as a criterion's name
    unit: str  # `1` for a pure number, `fraction` for a share in [0, 1], `nats`, `tokens`, `s`, `GiB` …
    definition: str  # what is computed, over what
    peers: Mapping[str, str]  # framework → its name for the same quantity


def _metric(name: str, unit: str, definition: str, **peers: str) -> Metric:
    named = {framework: name if theirs == "same" else theirs for framework, theirs in peers.items()}
    return Metric(name, unit, definition, named)


#: Section title → its metrics, in the order `docs/reference/metrics.md` shows them.
SECTIONS: dict[str, tuple[Metric, ...]] = {
    title: tuple(_metric(name, **about) for name, about in section.items())
    for title, section in tomllib.loads(
        Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    ).items()
}
#: Metrics of other frameworks' logs that rlctl does not log itself.
ELSEWHERE: Mapping[str, Metric] = {
    metric.name: metric for metric in SECTIONS.pop("Metrics of other frameworks")
}
#: Every metric by name; a metric with a variable part is listed under its pattern.
METRICS: Mapping[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}


@cache
def key_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles `a/<x>_mean` to a regex with the variable part as group `x` (which may contain slashes).

    A name that is no identifier, or that was used before, gets no group: each part stands for any text.
    """
    parts = re.split(r"<([^<>]*)>", pattern)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.escape(part)
        else:
            has_group = part.isidentifier() and f"(?P<{part}>.+)" not in parts[:i]
            parts[i] = f"(?P<{part}>.+)" if has_group else ".+"
    return re.compile("".join(parts))


_PATTERNS = tuple((key_pattern(name), metric) for name, metric in METRICS.items() if "<" in name)


def describe(key: str) -> Metric | None:
    """Returns the metric of a logged key, with the variable part filled in; None for an unknown key.

    Example: `describe("rollout_corr/rollout_rs_token_k1_mean")` returns the entry of
    `rollout_corr/rollout_rs_<criterion>_mean`, with the given key as its name.
    """
    if "<" in key:
        return None
    if key in METRICS or key in ELSEWHERE:
        return METRICS.get(key) or ELSEWHERE[key]
    for matcher, metric in _PATTERNS:
        match = matcher.fullmatch(key)
        if match:
            peers = {framework: _filled(name, match) for framework, name in metric.peers.items()}
            return replace(metric, name=key, peers=peers)
    return None


def _filled(pattern: str, match: re.Match[str]) -> str:
    """Fills the variable parts of the matched key into another framework's pattern."""
    return re.sub(r"<(\w+)>", lambda part: match[part[1]], pattern)


def validation_rewards(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Data source → mean reward of its validation prompts, of those metrics that are such rewards."""
    matches = (
        (re.fullmatch("val/(.+)/reward_mean", key, re.DOTALL), value) for key, value in metrics.items()
    )
    return {match[1]: float(value) for match, value in matches if match}


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """Mean reward of a validation, averaged over data sources; None without validation."""
    rewards = validation_rewards(metrics).values()
    return sum(rewards) / len(rewards) if rewards else None


def best_validation(history: Iterable[Mapping[str, float]]) -> tuple[int, float] | None:
    """Step and score of the best validation of trained weights; the earliest if several are equal.

    The one before training is not among them: its weights are in no checkpoint.
    """
    trained = (metrics for metrics in history if metrics["step"] > 0)
    scored = [(int(m["step"]), score) for m in trained if (score := validation_score(m)) is not None]
    return max(scored, key=lambda pair: pair[1], default=None)
