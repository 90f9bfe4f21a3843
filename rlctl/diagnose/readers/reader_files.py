"""Readers: what a framework calls its metrics, and how it prints its rows, one TOML file per framework.

The built-in files are in `frameworks/`; `Readers.with_files` adds those of users, which have the same form:

- `marks`: patterns of names that only this framework uses, at the beginning of a name;
- `names`, `patterns` (of whole names): the canonical metric, and its definition there if it is another; the
  metric `step` marks the name of the step;
- `rows`: forms of the lines that it prints (see `RowForm`);
- `other_quantities`: names that are not read under some values of a setting, because they are others then;
- `facts` that are true of all its runs, `implied_facts` that follow from a name, and `config`, where the
  configuration states the others (see `rlctl.diagnose.facts`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from rlctl.diagnose.facts import setting_keys
from rlctl.diagnose.readers.collect import STEP_KEYS
from rlctl.diagnose.table import Facts, Framework
from rlctl.errors import UsageError, in_words
from rlctl.metric_names import ELSEWHERE, METRICS, describe, key_pattern
from rlctl.run_spec.keys import closest

_MARK_WEIGHT = 20
_DIRECTORY = Path(__file__).parent / "frameworks"
#: Built-in files; the first framework of those that match a log equally well is used.
_BUILT_IN = (
    *("verl", "rlctl", "trl", "openrlhf", "slime", "prime_rl", "nemo_rl", "trl_async", "trl_ppo"),
    *("ms_swift", "llama_factory", "skyrl", "areal", "torchforge", "roll", "oat", "open_instruct", "tinker"),
)
#: What `names` lead to besides canonical metrics: the step.
STEP = "step"
UNKNOWN = "unknown"
#: Forms of figures that are in the line itself, see `RowForm`.
IN_LINE = frozenset({"dictionary", "dashes", "bars", "pairs"})


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """The canonical metric of a name in a log."""

    key: str  # the canonical metric; in patterns `\\1` is the first group
    meaning: str = ""  # definition of the figure where it differs from rlctl's, one clause
    scale: float = 1.0  # factor on the values
    #: `sum`: the canonical metric is the sum of the names with this key that differ only in their last part
    #: (not of those of several agents); otherwise it is the first one logged
    aggregate: Literal["", "sum"] = ""
    #: `update`: the figure is a sum over the batch's updates, and is divided by their number if it is known;
    #: `batch`: the figure counts batches instead of updates, and is multiplied by it
    per: Literal["", "update", "batch"] = ""


def _known(named: NamedMetric) -> NamedMetric:
    """Checks that the metric exists, except for groups of a pattern in it."""
    if named.key != STEP and not _GROUP.search(named.key) and not describe(named.key):
        near = closest(named.key, [*METRICS, *ELSEWHERE])
        hint = f": did you mean {near}?" if near else "; docs/reference/metrics.md lists them"
        raise ValueError(f"no metric `{named.key}`{hint}")
    return named


_GROUP = re.compile(r"\\(\d+)")
#: In a file, a text is short for its key.
KnownMetric = Annotated[
    NamedMetric,
    BeforeValidator(lambda value: {"key": value} if isinstance(value, str) else value),
    AfterValidator(_known),
]


class RowForm(BaseModel):
    """One form of a line that is a row, or that states the step of the list below it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    contains: str = ""  # a text in every such line, to pass over others quickly
    #: pattern that is searched in a line; its groups are `step` (a row in a line may do without, and is
    #: counted), `body` where the figures are in the line, `clock` where the framework counts several things
    line: re.Pattern[str]
    #: form of the figures in `body`: `dictionary` (as Python or JSON prints one), `dashes` (`a:1 - b:2`),
    #: `bars` (`a: 1 | b 2`), `pairs` (`a=1, b: 2`); or of the lines below: `bullets` (`• a: 1`), `table`
    #: (cells between bars), `list` (`a: 1`)
    figures: Literal["dictionary", "dashes", "bars", "pairs", "bullets", "table", "list"]
    at_least: int = Field(1, ge=0)  # fewer known names are no row; 0: one name with `/` is enough
    clocks: dict[str, str] = {}  # value of the group `clock` → name of its step; `*`: any other value

    @model_validator(mode="after")
    def _has_groups(self) -> RowForm:
        needed = {"body"} if self.figures in IN_LINE else {"step"}
        missing = needed - self.line.groupindex.keys()
        if missing:
            raise ValueError(f"`line` has no group (?P<{sorted(missing)[0]}>…)")
        if self.clocks and not ("clock" in self.line.groupindex and "*" in self.clocks):
            raise ValueError("`clocks` needs a group (?P<clock>…) in `line`, and a name for `*`")
        unknown = [name for name in self.clocks.values() if name not in STEP_KEYS]
        if unknown:
            raise ValueError(f"`clocks`: no step is named {unknown[0]}")
        return self


class OtherQuantity(BaseModel):
    """Names that are left out under some values of a setting, because they are other quantities then."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str  # of the names
    setting: str
    values: list[Any]


class Reader(BaseModel):
    """One reader: the content of its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    framework: Framework
    extends: str = ""  # a built-in file; what this file states is added, or replaces it
    prefix: str = ""  # optional beginning of every name
    uses_rlctl_names: bool = False  # rlctl's own names are known, too
    marks: list[re.Pattern[str]] = []
    names: dict[str, KnownMetric] = {}
    patterns: dict[re.Pattern[str], KnownMetric] = {}
    rows: list[RowForm] = []
    facts: Facts = Facts()
    implied_facts: dict[re.Pattern[str], Facts] = {}
    other_quantities: list[OtherQuantity] = []
    config: dict[str, Any] = {}

    __hash__, __eq__ = object.__hash__, object.__eq__

    @field_validator("config")
    @classmethod
    def _states_facts(cls, config: dict[str, Any]) -> dict[str, Any]:
        try:
            setting_keys(config)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a fact has another form than those of the built-in files: {error}") from None
        return config

    @field_validator("patterns")
    @classmethod
    def _has_groups(cls, patterns: dict[re.Pattern[str], NamedMetric]) -> dict[re.Pattern[str], NamedMetric]:
        for pattern, named in patterns.items():
            if any(int(group) > pattern.groups for group in _GROUP.findall(named.key)):
                raise ValueError(f"{pattern.pattern} has fewer groups than {named.key}")
        return patterns

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - the readers live as long as the program
    def translate(self, name: str) -> NamedMetric | None:
        """The canonical metric of the name; None if unknown."""
        short = name.removeprefix(self.prefix)
        for one in (name, short):
            if one in self.names:
                return self.names[one]
        for pattern, named in self.patterns.items():
            match = pattern.fullmatch(short)
            if match:
                return replace(named, key=match.expand(named.key))
        return NamedMetric(name) if self.uses_rlctl_names and describe(name) else None

    def is_marked(self, name: str) -> bool:
        """Whether only this framework uses the name."""
        return any(mark.match(name.removeprefix(self.prefix)) for mark in self.marks)


def _load(path: Path) -> Reader:
    """Reads one file.

    Raises:
        UsageError: it cannot be read, or is not of this form.
    """
    reader: Reader = _checked(Reader, _content(path), path)
    return reader


def _checked(kind: Any, content: Any, path: Path) -> Any:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(in_words(first), where=f"{path}: {key}" if key else str(path), fix=_HELP) from None


_HELP = "the form of a reader's file is described in docs/reference/diagnose-inputs.md"


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", where=str(path), fix=_HELP) from error


def _content(path: Path) -> dict[str, Any]:
    """Content of a file, merged over that of the built-in one that it `extends`."""
    own = _toml(path)
    parent = str(own.get("extends") or "").replace("-", "_")
    if not parent:
        return own
    if parent not in _BUILT_IN:
        fix = f"one of {', '.join(_BUILT_IN)}"
        raise UsageError(f"no built-in reader `{parent}`", where=f"{path}: extends", fix=fix)
    content = _content(_DIRECTORY / f"{parent}.toml")
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            content[key] |= value
        else:
            content[key] = content.get(key, []) + value if isinstance(value, list) else value
    return content


@dataclass(frozen=True, eq=False)
class Readers:
    """The readers that a log is compared with."""

    #: the first of those that match a log equally well is used
    frameworks: tuple[Reader, ...]
    unknown: Reader  # plain names, and forms that any script may print

    def with_files(self, files: Sequence[Path] = (), maps: Sequence[Path] = ()) -> Readers:
        """Adds readers' files in front, and files of `"name in the log" = "metric"` pairs to every reader.

        Raises:
            UsageError: a file cannot be read, or has another form.
        """
        readers = tuple(map(_load, files)) + self.frameworks
        own: dict[str, NamedMetric] = {}
        for path in maps:
            own |= _checked(dict[str, KnownMetric], _toml(path), path)
        if not own:
            return Readers(readers, self.unknown)
        mapped = [
            one.model_copy(update={"names": own | {**one.names, **own}}) for one in (*readers, self.unknown)
        ]
        return Readers(tuple(mapped[:-1]), mapped[-1])

    @cached_property
    def step_keys(self) -> tuple[str, ...]:
        """Names of the step; the first one that a row has is used."""
        each = (
            (name, named) for one in (*self.frameworks, self.unknown) for name, named in one.names.items()
        )
        return tuple(dict.fromkeys((*(name for name, named in each if named.key == STEP), *STEP_KEYS)))

    @cached_property
    def forms(self) -> tuple[tuple[Framework, RowForm], ...]:
        """Every form of a printed row."""
        return tuple((one.framework, row) for one in (*self.frameworks, self.unknown) for row in one.rows)

    @cached_property
    def setting_names(self) -> frozenset[str]:
        """Every configuration key on which a fact, or the meaning of a name, of any framework depends."""
        others = (
            quantity.setting for framework in self.frameworks for quantity in framework.other_quantities
        )
        return frozenset(others).union(*(setting_keys(framework.config) for framework in self.frameworks))

    def named(self, framework: Framework) -> Reader:
        """The first reader of a framework."""
        return next(one for one in self.frameworks if one.framework == framework)

    def of(self, names: Collection[str], hint: Framework | None) -> Reader | None:
        """The framework that best matches the names; `hint`, from the log's format, decides ties.

        `unknown` if only generic names are known, and None if no name is known.
        """

        def score(framework: Reader) -> int:
            known = sum(framework.translate(name) is not None for name in names)
            marks = sum(map(framework.is_marked, names))
            return known and 2 * (known + _MARK_WEIGHT * marks) + (framework.framework == hint)

        best = max(self.frameworks, key=score)
        if not score(self.unknown):
            return best if score(best) else None
        # A few generic names alone, such as `loss` and `reward`, do not identify a framework.
        marked = best.framework == hint or any(map(best.is_marked, names)) or best.uses_rlctl_names
        return best if score(best) and marked else self.unknown


BUILT_IN = Readers(
    tuple(_load(_DIRECTORY / f"{name}.toml") for name in _BUILT_IN), _load(_DIRECTORY / "unknown.toml")
)


class MetricFilter:
    """Canonical metrics to keep; `<…>` in a key stands for any text."""

    def __init__(self, keys: Collection[str], readers: Readers = BUILT_IN) -> None:
        self.readers = readers
        self._exact = frozenset(key for key in keys if "<" not in key)
        self._patterns = [key_pattern(key) for key in keys if "<" in key]
        self._names: dict[str, bool] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._exact or any(pattern.fullmatch(key) for pattern in self._patterns)

    def by_any_name(self, name: str) -> bool:
        """Whether any framework uses this name for a wanted metric."""
        if name not in self._names:
            each = (*self.readers.frameworks, self.readers.unknown)
            found = [framework.translate(name) for framework in each]
            self._names[name] = any(named is not None and named.key in self for named in found)
        return self._names[name]
