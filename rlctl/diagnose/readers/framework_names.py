"""Metric names of the frameworks: maps the names in a log to canonical columns.

Each `frameworks/*.toml` describes one framework:

- `marks`: patterns of names that only it uses, at the beginning of a name;
- `names`, `patterns` (of whole names): the canonical metric, and its definition there if it is another;
- `other_quantities`: names that are not read under some values of a setting, because they are others then;
- `facts` that are true of all its runs, `implied_facts` that follow from a name, and `config`, where the
  configuration states the others (see `rlctl.diagnose.facts`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.facts import Config, configured_facts, setting_keys
from rlctl.diagnose.readers.collect import Collected, LogReading
from rlctl.diagnose.table import Facts, Framework, MetricOrigin, Table
from rlctl.metric_names import describe, key_pattern

_MARK_WEIGHT = 20


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """The canonical metric of a name in a log."""

    key: str  # the canonical metric; in patterns `\\1` is the first group
    meaning: str = ""  # definition of the figure where it differs from rlctl's, one clause
    scale: float = 1.0  # factor on the values
    #: `sum`: the canonical metric is the sum of the names with this key that differ only in their last part
    #: (not of those of several agents); otherwise it is the first one logged
    aggregate: str = ""
    #: `update`: the figure is a sum over the batch's updates, and is divided by their number if it is known;
    #: `batch`: the figure counts batches instead of updates, and is multiplied by it
    per: str = ""


@dataclass(frozen=True, eq=False)
class FrameworkNames:
    """One file of `frameworks/`."""

    framework: Framework
    marks: re.Pattern[str]
    names: Mapping[str, NamedMetric]
    patterns: tuple[tuple[re.Pattern[str], NamedMetric], ...]
    prefix: str
    uses_rlctl_names: bool
    facts: Facts
    implied_facts: tuple[tuple[re.Pattern[str], Facts], ...]
    other_quantities: tuple[Mapping[str, Any], ...]  # `pattern` of the name, under `values` of a `setting`
    config: Mapping[str, Any]

    def translate(self, name: str) -> NamedMetric | None:
        """The canonical metric of the name; None if unknown."""
        return _translate(self, name)

    def is_marked(self, name: str) -> bool:
        """Whether only this framework uses the name."""
        return self.marks.match(name.removeprefix(self.prefix)) is not None


@lru_cache(maxsize=1 << 16)
def _translate(framework: FrameworkNames, name: str) -> NamedMetric | None:
    short = name.removeprefix(framework.prefix)
    if short in framework.names:
        return framework.names[short]
    for pattern, named in framework.patterns:
        if match := pattern.fullmatch(short):
            return replace(named, key=match.expand(named.key))
    return NamedMetric(name) if framework.uses_rlctl_names and describe(name) else None


def _load(name: str) -> FrameworkNames:
    content = _content(name)
    implied = (dict(one) for one in content.get("implied_facts", ()))
    return FrameworkNames(
        content["framework"],
        re.compile("|".join(content["marks"]) or "(?!)"),
        {key: _named(value) for key, value in content["names"].items()},
        tuple((re.compile(key), _named(value)) for key, value in content.get("patterns", {}).items()),
        content.get("prefix", ""),
        content.get("uses_rlctl_names", False),
        Facts(**content.get("facts", {})),
        tuple((re.compile(one.pop("pattern")), Facts(**one)) for one in implied),
        tuple(content.get("other_quantities", ())),
        content.get("config", {}),
    )


def _content(name: str) -> dict[str, Any]:
    """Content of a framework's file, merged over that of the framework that it `extends`."""
    path = Path(__file__).parent / "frameworks" / f"{name}.toml"
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    if "extends" not in own:
        return own
    content = _content(own.pop("extends"))
    for key, value in own.items():
        if isinstance(value, dict):
            content[key] = content.get(key, {}) | value
        else:
            content[key] = content.get(key, []) + value if isinstance(value, list) else value
    return content


def _named(value: Any) -> NamedMetric:
    return NamedMetric(value) if isinstance(value, str) else NamedMetric(**value)


#: All frameworks; the first of those that match a log equally well is used.
FRAMEWORKS: tuple[FrameworkNames, ...] = tuple(
    _load(name)
    for name in (
        *("verl", "rlctl", "trl", "openrlhf", "slime", "prime_rl", "nemo_rl", "trl_async", "trl_ppo"),
        *("ms_swift", "llama_factory", "skyrl", "areal"),
    )
)
RLCTL = FRAMEWORKS[1]
_UNKNOWN = _load("unknown")


class MetricFilter:
    """Canonical metrics to keep; `<…>` in a key stands for any text."""

    def __init__(self, keys: Collection[str]) -> None:
        self._exact = frozenset(key for key in keys if "<" not in key)
        self._patterns = [key_pattern(key) for key in keys if "<" in key]
        self._names: dict[str, bool] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._exact or any(pattern.fullmatch(key) for pattern in self._patterns)

    def by_any_name(self, name: str) -> bool:
        """Whether any framework uses this name for a wanted metric."""
        if name not in self._names:
            found = [framework.translate(name) for framework in (*FRAMEWORKS, _UNKNOWN)]
            self._names[name] = any(named is not None and named.key in self for named in found)
        return self._names[name]


@lru_cache(maxsize=1)
def setting_names() -> frozenset[str]:
    """Every configuration key on which a fact, or the meaning of a name, of any framework depends."""
    others = (one["setting"] for framework in FRAMEWORKS for one in framework.other_quantities)
    return frozenset(others).union(*(setting_keys(one.config) for one in FRAMEWORKS))


def framework_of(names: Collection[str], hint: Framework | None) -> FrameworkNames | None:
    """Returns the framework that best matches the names; `hint`, from the log's format, decides ties.

    Returns `_UNKNOWN` if only generic names are known, and None if no name is known.
    """

    def score(framework: FrameworkNames) -> int:
        known = sum(framework.translate(name) is not None for name in names)
        marks = sum(map(framework.is_marked, names))
        return known and 2 * (known + _MARK_WEIGHT * marks) + (framework.framework == hint)

    found = max(FRAMEWORKS, key=score)
    if not score(_UNKNOWN):
        return found if score(found) else None
    # A few generic names alone, such as `loss` and `reward`, do not identify a framework.
    marked = found.framework == hint or any(map(found.is_marked, names)) or found.uses_rlctl_names
    return found if score(found) and marked else _UNKNOWN


def canonical_table(
    collected: Collected,
    framework: FrameworkNames,
    wanted: MetricFilter,
    reading: LogReading,
    known: Facts | None,
) -> tuple[Table, dict[str, MetricOrigin], Facts, dict[str, str]]:
    """Canonical columns of the wanted metrics and their origins, facts of the run and their origins.

    Columns are taken out of `collected`. `known`: the facts from the run's spec, if there is one.
    """
    name_of, table = framework.framework, framework.config
    configured = configured_facts(name_of, table, reading.config)
    stated = configured_facts(name_of, table, reading.stated, is_complete=False)
    sources = [
        (configured, "the configuration in the log, or next to it"),
        (stated, "a setting in the log"),
        (Facts(updates_per_batch=collected.updates_per_rollout), "the log's counts of updates and rollouts"),
        *(
            (facts, f"the name {name} in the log")
            for pattern, facts in framework.implied_facts
            for name in sorted(collected.names)
            if pattern.match(name.removeprefix(framework.prefix))
        ),
        (framework.facts, f"fixed in {name_of}"),
    ]
    facts, fact_origins = _first_known([(known, "the run's spec")] if known else sources)
    updates = facts.updates_per_batch or 1
    scales = {"update": 1 / updates, "batch": updates}
    settings = Config(reading.stated | reading.config)
    others = {
        one["pattern"]: f"{one['setting']}={value}"
        for one in framework.other_quantities
        if (value := settings.get(one["setting"])) in one["values"]
    }
    columns: dict[str, NDArray[np.float64]] = {}
    nonfinite: dict[str, NDArray[np.int64]] = {}
    origins: dict[str, MetricOrigin] = {}
    for name, named in _in_order(collected.names, framework):
        before = origins.get(named.key)
        is_sibling = before and before.name.rpartition("/")[0] == name.rpartition("/")[0]
        if named.key not in wanted or (before and not (is_sibling and named.aggregate == "sum")):
            continue
        if why := next((why for pattern, why in others.items() if re.fullmatch(pattern, name)), ""):
            reading.notes.append(f"{name} is left out: with {why} it is another quantity")
            continue
        column = collected.columns.pop(name, None)
        bad = collected.nonfinite.get(name, collected.steps[:0])
        if column is None or (not len(bad) and np.isnan(column).all()):
            continue
        column *= named.scale * scales.get(named.per, 1)
        if before:  # sum the two where at least one was logged
            both = np.array([columns[named.key], column])
            column = np.where(np.isnan(both).all(axis=0), np.nan, np.nansum(both, axis=0))
        columns[named.key] = column
        if len(bad):
            nonfinite[named.key] = bad
        origins.setdefault(named.key, MetricOrigin(name, named.meaning))
    return Table(collected.steps, columns, nonfinite), origins, facts, fact_origins


def _first_known(sources: Sequence[tuple[Facts, str]]) -> tuple[Facts, dict[str, str]]:
    """Every fact from the first source that states it, and the origin of that source."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, origin in reversed(sources):
        known = {fact: value for fact, value in asdict(source).items() if value is not None}
        values |= known
        origins |= dict.fromkeys(known, origin)
    return Facts(**values), origins


def _in_order(names: Collection[str], framework: FrameworkNames) -> list[tuple[str, NamedMetric]]:
    """The known names, in the order of the framework's file."""
    places = {name: place for place, name in enumerate(framework.names)}
    known = [(name, named) for name in sorted(names) if (named := framework.translate(name)) is not None]
    return sorted(known, key=lambda one: places.get(one[0].removeprefix(framework.prefix), len(places)))
