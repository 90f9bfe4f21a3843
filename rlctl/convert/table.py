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
    """How one key is translated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    to: str = ""  # the spec key that takes its value; empty where only formulas read it, or nothing does
    default: Any = None  # the framework's own default; None where it has none or computes it
    #: value → value here, both as text where they are words; a value that is not listed has no counterpart.
    #: None: any value, unchanged
    values: dict[str, Any] | None = None
    #: in what its meaning differs; a mapping states it per value, `*` for all others
    differs: str | dict[str, str] = ""
    unsupported: str = ""  # why nothing here corresponds to it
    neutral: list[Any] = []  # with these values an unsupported key changes nothing
    #: not among the options of the version in `title`: an older one's, or of a library beneath it
    outside: bool = False

    def difference(self, value: Any) -> str:
        """In what the meaning of this value differs; empty: it does not."""
        if isinstance(self.differs, str):
            return self.differs
        return self.differs.get(word(value), self.differs.get("*", ""))


class KeyTable(BaseModel):
    """One framework."""

    model_config = ConfigDict(extra="forbid")

    name: str  # as on the command line
    title: str  # name and version that the keys are those of
    style: Style  # how its options are written in a command: `a.b=c` or `--a.b c`
    commands: list[str]  # regular expressions of the launch command
    launcher: list[str] = []  # options of the launcher before it that are read, as `num_processes`
    classes: dict[str, str] = {}  # Python classes whose arguments are its keys → prefix of these keys
    marks: list[str]  # starts of keys that only it has
    aliases: dict[str, str] = {}  # other spelling of a key → the key
    constants: dict[str, Any] = {}  # spec keys that any run of this framework has
    keys: dict[str, KeyRule]  # key → rule; a text is short for `to`
    unsupported: dict[str, str] = {}  # key, or its start where it ends in a dot or a dash → why
    #: spec key → expression over `{keys}`; a list of them: the first that can be evaluated
    formulas: dict[str, str] = {}
    #: key → expression over `{spec keys}`, where the reverse of `keys` does not do
    export: dict[str, str] = {}
    export_unsupported: dict[str, str] = {}  # spec key → why no key of the framework corresponds
    note: str = ""  # added to every import

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
        open_ended = (start for start in self.unsupported if start.endswith((".", "-", "_")))
        starts = [start for start in open_ended if key.startswith(start)]
        starts += [key] if key in self.unsupported else []
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


def word(value: Any) -> str:
    """A value as tables write it: `true`, `null`, `0.5`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def placeholders(formula: str) -> list[str]:
    """The keys that a formula reads."""
    return _PLACEHOLDER.findall(formula)


class Open:
    """A value that is not known: a formula may pass it on, but not compute with it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _refuse(self, *others: object) -> Any:
        raise TypeError("not known")

    __eq__ = __bool__ = __str__ = _refuse
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
