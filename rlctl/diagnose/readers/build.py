"""From names of a log to canonical columns: which framework wrote it, what its names mean."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose.readers.collect import Collected
from rlctl.diagnose.readers.framework import Dialect, Named, known_facts, recognise
from rlctl.diagnose.readers.frameworks import nemo_rl, openrlhf, plain, prime_rl, rlctl, slime, trl, verl
from rlctl.diagnose.readers.reading import Reading
from rlctl.diagnose.table import Facts, Framework, Origin, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Where two explain a log equally well the first one wins.
DIALECTS: tuple[Dialect, ...] = (
    *(module.DIALECT for module in (verl, rlctl, trl, openrlhf, slime, prime_rl, nemo_rl)),
    trl.ASYNC,
)
OURS = rlctl.DIALECT


class Wanted:
    """Canonical metrics to keep; `<…>` in a key stands for any text."""

    def __init__(self, keys: Collection[str]) -> None:
        self._exact = frozenset(key for key in keys if "<" not in key)
        patterns = ("".join(_literal(key)) for key in keys if "<" in key)
        self._patterns = tuple(re.compile(pattern) for pattern in patterns)
        self._names: dict[str, bool] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._exact or any(pattern.fullmatch(key) for pattern in self._patterns)

    def by_any_name(self, name: str) -> bool:
        """Whether some framework calls a wanted metric so."""
        if name not in self._names:
            found = [dialect.translate(name) for dialect in (*DIALECTS, plain.DIALECT)]
            self._names[name] = any(named is not None and named.key in self for named in found)
        return self._names[name]


def _literal(key: str) -> list[str]:
    return [".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", key)]


@dataclass(frozen=True, slots=True)
class Built:
    """A log under canonical names; the parts of a `RunLog` that its content tells."""

    table: Table
    framework: Framework
    origins: Mapping[str, Origin]
    facts: Facts


def dialect_of(names: Collection[str], hint: Framework | None) -> Dialect | None:
    """Who wrote a log with these names; `plain` if only generic names are known, None if none is."""
    found = recognise(DIALECTS, names, hint)
    generic = recognise((plain.DIALECT,), names, None)
    if found is None or generic is None:
        return found or generic
    # A few generic names alone, such as `loss` and `reward`, are nobody's in particular.
    marked = found.framework == hint or any(found.is_marked(name) for name in names)
    return found if marked or found.uses_ours else generic


def build(
    collected: Collected, dialect: Dialect, wanted: Wanted, reading: Reading, told: Facts | None
) -> Built:
    """Canonical columns of the wanted metrics.

    Args:
        collected: the log by its own names; its columns are used up.
        dialect: who wrote it.
        wanted: what to keep.
        reading: for the configuration the log carried.
        told: what the run's spec says, if there is one.
    """
    counted = Facts(updates_per_batch=collected.updates_per_rollout)
    by_names = dialect.told(collected.names)
    facts = told or known_facts(dialect.facts(reading.config), counted, *by_names, dialect.always)
    steps = collected.steps
    columns: dict[str, NDArray[np.float64]] = {}
    nonfinite: dict[str, NDArray[np.int64]] = {}
    origins: dict[str, Origin] = {}
    names = set(collected.names)
    for name, named in _in_order(collected.names, dialect):
        names.add(named.key)
        if named.key not in wanted or (named.key in columns and not named.adds):
            continue
        column = collected.columns.pop(name, None)
        bad = collected.nonfinite.get(name, steps[:0])
        if column is None or (not len(bad) and np.isnan(column).all()):
            continue
        column *= named.scale / ((facts.updates_per_batch or 1) if named.over_updates else 1)
        earlier = columns.get(named.key)
        columns[named.key] = column if earlier is None else _sum(earlier, column)
        if len(bad):
            nonfinite[named.key] = bad
        origins.setdefault(named.key, Origin(name, named.meaning))
    return Built(Table(steps, columns, nonfinite, frozenset(names)), dialect.framework, origins, facts)


def _in_order(names: Collection[str], dialect: Dialect) -> list[tuple[str, Named]]:
    """Known names, those that the dialect lists earlier first."""
    places = {name: place for place, name in enumerate(dialect.names)}
    known = [(name, named) for name in sorted(names) if (named := dialect.translate(name)) is not None]
    return sorted(known, key=lambda one: places.get(one[0].removeprefix(dialect.prefix), len(places)))


def _sum(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b where either was logged."""
    both = np.nan_to_num(a) + np.nan_to_num(b)
    return np.where(np.isnan(a) & np.isnan(b), np.nan, both)
