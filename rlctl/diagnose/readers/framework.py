"""What a framework calls its metrics, and what they mean there; recognising it by the names in its log."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from rlctl.diagnose.table import Facts, Framework
from rlctl.metric_names import describe

#: A configuration: nested, or flat with dotted keys.
Config = Mapping[str, Any]

NOTHING_KNOWN = Facts()

_MARK_WEIGHT = 20


@dataclass(frozen=True, slots=True)
class Named:
    """What a name in a log stands for.

    Attributes:
        key: the canonical metric; in patterns `\\1` is the first group.
        meaning: where the figure differs from rlctl's definition, one sentence.
        scale: what a value is multiplied with.
        adds: the canonical metric is the sum of all names that say so.
        over_updates: the figure is a sum over the batch's updates; it is divided by their number where known.
    """

    key: str
    meaning: str = ""
    scale: float = 1.0
    adds: bool = False
    over_updates: bool = False


@dataclass(frozen=True)
class Dialect:
    """One framework's way of logging.

    Attributes:
        framework: its name.
        marks: matches names that only this framework uses.
        names: what it calls its metrics. Of several names for one metric the first that was logged counts.
        patterns: the same for names with a varying part.
        prefix: what loggers may put in front of every name.
        uses_ours: whether names equal to rlctl's mean the same.
        always: what is true of every one of its runs.
        told_by: (names, what is true of a run that logs any of them).
        facts: what a configuration says.
    """

    framework: Framework
    marks: re.Pattern[str]
    names: Mapping[str, Named]
    patterns: tuple[tuple[re.Pattern[str], Named], ...] = ()
    prefix: str = ""
    uses_ours: bool = False
    always: Facts = NOTHING_KNOWN
    told_by: tuple[tuple[re.Pattern[str], Facts], ...] = ()
    facts: Callable[[Config], Facts] = field(default=lambda config: NOTHING_KNOWN)

    def translate(self, name: str) -> Named | None:
        """What the name stands for; None for one that is not known."""
        return _translate(self, name)

    def told(self, names: Collection[str]) -> Iterator[Facts]:
        """What the presence of names says."""
        for pattern, facts in self.told_by:
            if any(pattern.match(name.removeprefix(self.prefix)) for name in names):
                yield facts

    def is_marked(self, name: str) -> bool:
        """Whether only this framework uses the name."""
        return self.marks.match(name.removeprefix(self.prefix)) is not None

    def __hash__(self) -> int:
        return hash(self.framework)


@lru_cache(maxsize=1 << 16)
def _translate(dialect: Dialect, name: str) -> Named | None:
    short = name.removeprefix(dialect.prefix)
    if short in dialect.names:
        return dialect.names[short]
    for pattern, named in dialect.patterns:
        if match := pattern.fullmatch(short):
            return replace(named, key=match.expand(named.key))
    return Named(name) if dialect.uses_ours and describe(name) else None


def recognise(dialects: Iterable[Dialect], names: Collection[str], hint: Framework | None) -> Dialect | None:
    """The dialect that explains most of the names; `hint`, told by the format, decides between equals.

    None if no dialect knows any of them.
    """

    def score(dialect: Dialect) -> int:
        known = sum(dialect.translate(name) is not None for name in names)
        marks = sum(map(dialect.is_marked, names))
        return known and 2 * (known + _MARK_WEIGHT * marks) + (dialect.framework == hint)

    best = max(dialects, key=score)
    return best if score(best) else None


def known_facts(*sources: Facts) -> Facts:
    """The sources put together; what an earlier one knows, a later one cannot change."""
    values = {f.name: [getattr(source, f.name) for source in sources] for f in fields(Facts)}
    return Facts(**{key: next((v for v in found if v is not None), None) for key, found in values.items()})


class Lookup:
    """Typed values of somebody else's configuration; None for what is missing or of another type."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def get(self, key: str) -> Any:
        """The value at a dotted key."""
        if key in self._config:
            return self._config[key]
        here: Any = self._config
        for part in key.split("."):
            if not isinstance(here, Mapping) or part not in here:
                return None
            here = here[part]
        return here

    def has(self, key: str) -> bool:
        """Whether there is a section or value at the dotted key."""
        return self.get(key) is not None

    def number(self, key: str) -> float | None:
        """A number, or a text that says one."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None

    def whole(self, key: str) -> int | None:
        """A whole number."""
        number = self.number(key)
        return int(number) if number is not None and number.is_integer() else None

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.get(key)
        return value if isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        """A text."""
        value = self.get(key)
        return value if isinstance(value, str) else None


def product(*numbers: int | None) -> int | None:
    """The product; None if a factor is unknown."""
    result = 1
    for number in numbers:
        if number is None:
            return None
        result *= number
    return result


def dtype_name(text: str | None) -> str | None:
    """`bfloat16` and `torch.bfloat16` → `bf16`; None for what is none of the three."""
    short = (text or "").removeprefix("torch.").lower()
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}.get(
        short, short if short in {"bf16", "fp16", "fp32"} else None
    )
