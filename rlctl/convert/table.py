"""Tables that map a framework's keys to spec keys: `frameworks/<name>.toml`."""

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
    """Translation rule of one key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    to: str = ""  # spec key that gets the value; empty if only formulas read the key, or it is not translated
    default: Any = None  # the framework's default; None if it has none or computes it
    #: the framework's value → spec value; an unlisted value has no equivalent, `*` accepts all others
    #: unchanged. None: any value, unchanged
    values: dict[str, Any] | None = None
    #: how its meaning differs; a mapping states it per value, `*` for all others
    differs: str | dict[str, str] = ""
    unsupported: str = ""  # why no spec key corresponds to it
    neutral: list[Any] = []  # values for which an unsupported key has no effect
    #: not an option of the version in `title`, but of an older version or of a library of the framework
    outside: bool = False

    def difference(self, value: Any) -> str:
        """How the meaning of this value differs; empty if it does not."""
        if isinstance(self.differs, str):
            return self.differs
        return self.differs.get(word(value), self.differs.get("*", ""))


class KeyTable(BaseModel):
    """Table of one framework."""

    model_config = ConfigDict(extra="forbid")

    name: str  # name on the command line
    title: str  # name and version of the framework that the keys belong to
    style: Style  # syntax of its options in a command: `a.b=c` or `--a.b c`
    commands: list[str]  # regular expressions of the launch command
    launcher: list[str] = []  # options of the preceding launcher that are read, for example `num_processes`
    classes: dict[str, str] = {}  # Python classes that take its keys as arguments → prefix of these keys
    marks: list[str]  # key prefixes that identify the framework
    aliases: dict[str, str] = {}  # other spelling of a key → the key
    constants: dict[str, Any] = {}  # spec keys that every run of this framework has
    keys: dict[str, KeyRule]  # key → rule; a string is short for `to`
    unsupported: dict[str, str] = {}  # key, or prefix that ends in a dot, dash or underscore → why
    formulas: dict[str, str] = {}  # spec key → expression over `{keys}`
    #: key → expression over `{spec keys}`, where reversing `keys` is not enough
    export: dict[str, str] = {}
    export_unsupported: dict[str, str] = {}  # spec key → why no key of the framework corresponds
    note: str = ""  # note added to every import

    def canonical(self, key: str) -> str:
        """The table's spelling of a key: resolves aliases and exchanged dashes and underscores."""
        spellings = [key, key.replace("-", "_"), key.replace("_", "-")]
        return next(
            (self.aliases.get(one, one) for one in spellings if one in self.aliases or one in self.keys), key
        )

    def rule(self, key: str) -> KeyRule | None:
        """The rule of a key, or of its longest prefix in `unsupported`; None: unknown."""
        if key in self.keys:
            return self.keys[key]
        open_ended = (start for start in self.unsupported if start.endswith((".", "-", "_")))
        starts = [start for start in open_ended if key.startswith(start)]
        starts += [key] if key in self.unsupported else []
        if not starts:
            return None
        return KeyRule(unsupported=self.unsupported[max(starts, key=len)], neutral=[None, "{}", "[]"])

    @cached_property
    def read_by(self) -> dict[str, list[str]]:
        """Spec keys that are computed from each key."""
        found: dict[str, list[str]] = {}
        for target, formula in self.formulas.items():
            for key in placeholders(formula):
                found.setdefault(key, []).append(target)
        return found


def word(value: Any) -> str:
    """A value as it is written in tables: `true`, `null`, `0.5`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def placeholders(formula: str) -> list[str]:
    """The keys that a formula reads."""
    return _PLACEHOLDER.findall(formula)


class Open:
    """An unknown value: a formula can return it unchanged, but not compute with it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _refuse(self, *others: object) -> Any:
        raise TypeError("not known")

    __eq__ = __bool__ = __str__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def compute(formula: str, values: dict[str, Any]) -> Any:
    """Evaluates a formula; a key without a value is None.

    Raises:
        ValueError: the formula cannot be computed from these values.
    """
    keys = list(dict.fromkeys(placeholders(formula)))
    names = {f"_{number}": values.get(key) for number, key in enumerate(keys)}
    return evaluate(_PLACEHOLDER.sub(lambda found: f"_{keys.index(found[1])}", formula), names)


def names() -> list[str]:
    """Names of all frameworks."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.toml"))


@cache
def table(name: str) -> KeyTable:
    """Loads the table of a framework.

    Raises:
        UsageError: there is no such framework.
    """
    path = _DIRECTORY / f"{name}.toml"
    if name not in names():
        raise UsageError(f"no framework `{name}`", fix=f"one of {', '.join(names())}")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    keys = {key: {"to": rule} if isinstance(rule, str) else rule for key, rule in content["keys"].items()}
    return KeyTable.model_validate(content | {"name": name, "keys": keys})
