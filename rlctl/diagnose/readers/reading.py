"""State of reading one log, and the canonical table of what was read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.facts import Config, configured_facts
from rlctl.diagnose.readers.collect import Collected, Collector
from rlctl.diagnose.readers.reader_files import MetricFilter, NamedMetric, Reader, Readers
from rlctl.diagnose.table import Facts, Framework, LoggedException, LoggedWarning, MetricOrigin, Table


@dataclass(slots=True)
class LogReading:
    """State of reading one log, which the readers fill."""

    collector: Collector  # collects the rows
    readers: Readers  # the frameworks whose rows and settings are looked for
    limit: int | None = None  # rows after which a reader may stop, for a preview; None reads everything
    hint: Framework | None = None  # the framework, where the format shows it
    config: dict[str, Any] = field(default_factory=dict)  # the run's configuration, where the log has one
    stated: dict[str, Any] = field(default_factory=dict)  # single settings that the log states
    exception: LoggedException | None = None  # the error that ends the log
    warnings: list[LoggedWarning] = field(default_factory=list)  # of a disk that is nearly full
    notes: list[str] = field(default_factory=list)  # problems that were tolerated

    @property
    def is_full(self) -> bool:
        """Whether a preview has read enough rows."""
        return self.limit is not None and self.collector.num_rows >= self.limit


def canonical_table(
    collected: Collected,
    framework: Reader,
    wanted: MetricFilter,
    reading: LogReading,
    known: Facts | None,
) -> tuple[Table, dict[str, MetricOrigin], Facts, dict[str, str]]:
    """Canonical columns of the wanted metrics and their origins, facts of the run and their origins.

    Columns are taken out of `collected`. `known`: the facts from the run's spec, if there is one.
    """
    name_of = framework.framework
    table = framework.config
    configured = configured_facts(name_of, table, reading.config)
    stated = configured_facts(name_of, table, reading.stated, is_complete=False)
    sources = [
        (configured, "the configuration in the log, or next to it"),
        (stated, "a setting in the log"),
        (Facts(updates_per_batch=collected.updates_per_rollout), "the log's counts of updates and rollouts"),
        *(
            (facts, f"the name {name} in the log")
            for pattern, facts in framework.implied_facts.items()
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
        quantity.pattern: f"{quantity.setting}={value}"
        for quantity in framework.other_quantities
        if (value := settings.get(quantity.setting)) in quantity.values
    }
    columns: dict[str, NDArray[np.float64]] = {}
    nonfinite: dict[str, NDArray[np.int64]] = {}
    origins: dict[str, MetricOrigin] = {}
    for name, named in _in_order(collected.names, framework):
        before = origins.get(named.key)
        is_sibling = before and before.name.rpartition("/")[0] == name.rpartition("/")[0]
        if named.key not in wanted or (before and not (is_sibling and named.aggregate == "sum")):
            continue
        why = next((why for pattern, why in others.items() if re.fullmatch(pattern, name)), "")
        if why:
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


def _in_order(names: Collection[str], framework: Reader) -> list[tuple[str, NamedMetric]]:
    """The known names, in the order of the framework's file."""
    places = {name: index for index, name in enumerate(framework.names)}
    known = [(name, named) for name in sorted(names) if (named := framework.translate(name)) is not None]
    return sorted(known, key=lambda one: places.get(one[0].removeprefix(framework.prefix), len(places)))
