"""One framework's keys and what they mean here: `frameworks/<name>.toml`."""

from __future__ import annotations

import re
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rlctl.convert.expression import evaluate
from rlctl.errors import UsageError

_DIRECTORY = Path(__file__).parent / "frameworks"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")

Style = Literal["hydra", "flags"]


class KeyRule(BaseModel):
    """What becomes of one key.

    Attributes:
        to: the spec key that takes its value; empty where only formulas read it, or nothing does.
        default: the framework's own default; None where it has none or computes it.
        values: value → value here, both as text where they are words; a value that is not listed has no
            counterpart. None: any value, unchanged.
        differs: in what its meaning differs; a mapping says it per value, `*` for all others.
        unsupported: why nothing here corresponds to it.
        neutral: with these values an unsupported key changes nothing.
        outside: not among the options of the version in `title`: an older one's, or of a library beneath it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    to: str = ""
    default: Any = None
    values: dict[str, Any] | None = None
    differs: str | dict[str, str] = ""
    unsupported: str = ""
    neutral: list[Any] = []
    outside: bool = False

    def difference(self, value: Any) -> str:
        """In what the meaning of this value differs; empty: it does not."""
        if isinstance(self.differs, str):
            return self.differs
        return self.differs.get(word(value), self.differs.get("*", ""))


class KeyTable(BaseModel):
    """One framework.

    Attributes:
        name: as on the command line.
        title: name and version that the keys are those of.
        style: how its options are written in a command: `a.b=c` or `--a.b c`.
        commands: regular expressions of the launch command.
        launcher: options of the launcher before it that are read, as `num_processes`.
        classes: Python classes whose arguments are its keys → prefix of these keys.
        marks: starts of keys that only it has.
        aliases: other spelling of a key → the key.
        constants: spec keys that any run of this framework has.
        keys: key → rule; a text is short for `to`.
        unsupported: key, or its start where it ends in a dot or a dash → why.
        formulas: spec key → expression over `{keys}`; a list of them: the first that can be evaluated.
        export: key → expression over `{spec keys}`, where the reverse of `keys` does not do.
        export_unsupported: spec key → why no key of the framework corresponds.
        note: said of every import.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    title: str
    style: Style
    commands: list[str]
    launcher: list[str] = []
    classes: dict[str, str] = {}
    marks: list[str]
    aliases: dict[str, str] = {}
    constants: dict[str, Any] = {}
    keys: dict[str, KeyRule]
    unsupported: dict[str, str] = {}
    formulas: dict[str, str] = {}
    export: dict[str, str] = {}
    export_unsupported: dict[str, str] = {}
    note: str = ""

    def canonical(self, key: str) -> str:
        """The key as the table writes it: aliases, and dashes for underscores or the reverse."""
        spellings = [key, key.replace("-", "_"), key.replace("_", "-")]
        return next(
            (self.aliases.get(one, one) for one in spellings if one in self.aliases or one in self.keys), key
        )

    def rule(self, key: str) -> KeyRule | None:
        """The rule of a key, or of the longest start of it that is not supported; None: unknown."""
        if key in self.keys:
            return self.keys[key]
        starts = [start for start in self.unsupported if key == start or _starts(key, start)]
        if not starts:
            return None
        return KeyRule(unsupported=self.unsupported[max(starts, key=len)], neutral=[None, "{}", "[]"])

    @cached_property
    def read_by(self) -> dict[str, list[str]]:
        """Key → spec keys that are computed from it."""
        found: dict[str, list[str]] = {}
        for target, formula in self.formulas.items():
            for key in placeholders(formula):
                found.setdefault(key, []).append(target)
        return found


def _starts(key: str, start: str) -> bool:
    return start.endswith((".", "-", "_")) and key.startswith(start)


def word(value: Any) -> str:
    """A value as tables write it: `true`, `null`, `0.5`."""
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else "null"
        if value is None
        else str(value)
    )


def placeholders(formula: str) -> list[str]:
    """The keys that a formula reads."""
    return _PLACEHOLDER.findall(formula)


class Open:
    """A value that is not known: a formula may hand it on, but not compute with it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        raise TypeError("not known")

    def __bool__(self) -> bool:
        raise TypeError("not known")

    def __str__(self) -> str:
        raise TypeError("not known")

    __hash__ = None  # type: ignore[assignment]


def compute(formula: str, values: dict[str, Any]) -> Any:
    """The value of a formula; a key without a value is None.

    Raises:
        ValueError: it cannot be computed from these values.
    """
    keys = list(dict.fromkeys(placeholders(formula)))
    names = {f"_{number}": values.get(key) for number, key in enumerate(keys)}
    return evaluate(_PLACEHOLDER.sub(lambda found: f"_{keys.index(found[1])}", formula), names)


def names() -> list[str]:
    """Every framework."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


@cache
def table(name: str) -> KeyTable:
    """The table of a framework.

    Raises:
        UsageError: there is none.
    """
    path = _DIRECTORY / f"{name}.toml"
    if name not in names():
        raise UsageError(f"no framework `{name}`", fix=f"one of {', '.join(names())}")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    keys = {key: {"to": rule} if isinstance(rule, str) else rule for key, rule in content["keys"].items()}
    return KeyTable.model_validate(content | {"name": name, "keys": keys})
