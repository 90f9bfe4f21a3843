"""Tables that map a framework's keys to spec keys: `frameworks/<name>.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rlctl.convert.expressions import evaluate
from rlctl.convert.python_parts import FORMULAS
from rlctl.errors import UsageError
from rlctl.run_spec.keys import open_leaves

_DIRECTORY = Path(__file__).parent / "frameworks"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")

Style = Literal["hydra", "flags"]


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """One key that a file sets."""

    key: str  # the framework's dotted key
    value: Any  # bool, number, text, None, list, mapping or `Unresolved`
    where: str  # line, with the file name if it is not the given file


class KeyRule(BaseModel):
    """Translation rule of one key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: spec key that gets the value, unless a formula computes it; empty if only formulas read the key, or it
    #: is not translated
    to: str = ""
    default: Any = None  # the framework's default; None if it has none or computes it
    #: the framework's value → spec value; an unlisted value has no equivalent, `*` accepts all others
    #: unchanged. None: any value, unchanged
    values: dict[str, Any] | None = None
    #: how its meaning differs; a mapping states it per value, `*` for all others
    differs: str | dict[str, str] = ""
    when: str = ""  # expression over `{keys}`: whether `differs` holds
    note: str | dict[str, str] = ""  # a remark on a value that loses nothing
    unsupported: str = ""  # why no spec key corresponds to it
    neutral: list[Any] = []  # values for which an unsupported key has no effect
    #: not an option of the version in `title`, but of an older version or of a library of the framework
    outside: bool = False

    def difference(self, value: Any, values: dict[str, Any] | None = None) -> str:
        """How the meaning of this value differs; empty if it does not. `values`: those of all keys."""
        if self.when and values is not None and not compute(self.when, values):
            return ""
        return _of_value(self.differs, value)

    def remark(self, value: Any) -> str:
        """The remark on this value."""
        return _of_value(self.note, value)


def _of_value(texts: str | dict[str, str], value: Any) -> str:
    return texts if isinstance(texts, str) else texts.get(word(value), texts.get("*", ""))


class Variant(BaseModel):
    """A class of the framework whose keys differ from those of its main class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str  # what a launch command names it, see `KeyTable.commands`
    defaults: dict[str, Any] = {}  # key → default, where it differs


class KeyTable(BaseModel):
    """Table of one framework."""

    model_config = ConfigDict(extra="forbid")

    name: str  # name on the command line
    title: str  # name and version of the framework that the keys belong to
    style: Style  # syntax of its options in a command: `a.b=c` or `--a.b c`
    option: str = ""  # beginning of an option in advice
    commands: list[
        str
    ] = []  # none: no import; regular expressions of the launch command; the group `variant` names the class
    launcher: list[str] = []  # options of the preceding launcher that are read, for example `num_processes`
    variants: dict[str, Variant] = {}  # `_class` → its differences
    classes: dict[str, str] = {}  # Python classes that take its keys as arguments → prefix of these keys
    positional: dict[str, list[str]] = {}  # class → names of the arguments that it takes by position
    packages: list[str] = []  # packages of Python whose names the table knows
    parts: list[str] = []  # keys whose value is a list of functions, classes or models
    marks: list[str] = []  # key prefixes that identify the framework
    aliases: dict[str, str] = {}  # other spelling of a key → the key
    #: spec key without which the spec would train something else → what is missing
    required: dict[str, str] = {}
    constants: dict[str, Any] = {}  # spec keys that every run of this framework has
    keys: dict[str, KeyRule] = {}  # key → rule; a string is short for `to`
    #: spec key, or name of a fix in `rlctl.diagnose.fixes` → the framework's key or settings; for a spec key
    #: only where `keys` have none with the same meaning
    fixes: dict[str, str] = {}
    unsupported: dict[str, str] = {}  # key, or prefix that ends in a dot, dash or underscore → why
    formulas: dict[str, str] = {}  # spec key → expression over `{keys}`
    note: str = ""  # note added to every import

    @property
    def is_framework(self) -> bool:
        """Whether its keys are those of a framework."""
        return self.name != "words"

    def defaults(self, variant: object) -> dict[str, Any]:
        """The default of every key that has one, in this class."""
        found = {key: rule.default for key, rule in self.keys.items() if rule.default is not None}
        return found | (self.variants[str(variant)].defaults if str(variant) in self.variants else {})

    def fix(self, name: str, value: str | None = None) -> str:
        """The framework's key of a spec key, with a value if one is given, or its settings of a named fix.

        Empty if it has none, or none for this value.
        """
        known = {} if name in self.fixes else self.keys
        rules = {self.fixes.get(name, ""): KeyRule()} | {
            self.option + key: rule
            for key, rule in known.items()
            if rule.to == name and not (rule.unsupported or rule.outside or rule.differs)
        }
        for key, rule in rules.items():
            if not key or value is None:
                continue
            values = rule.values or {"*": "*"}
            theirs = [one for one, ours in values.items() if ours != "*" and word(ours) == value]
            if theirs or "*" in values:
                return f"{key}{' ' if key[0] == '-' else '='}{theirs[0] if theirs else value}"
        return "" if value is not None else next(filter(None, rules), "")

    def canonical(self, key: str) -> str:
        """The table's spelling of a key: resolves aliases and exchanged dashes and underscores."""
        for alias, whole in self.aliases.items():  # of a mapping: its entries
            if key.startswith(f"{alias}."):
                return whole + key.removeprefix(alias)
        spellings = [key, key.replace("-", "_"), key.replace("_", "-")]
        return next(
            (
                self.aliases.get(spelling, spelling)
                for spelling in spellings
                if spelling in self.aliases or spelling in self.keys
            ),
            key,
        )

    def rule(self, key: str) -> KeyRule | None:
        """The rule of a key, of the mapping that contains it, or of its longest prefix in `unsupported`.

        None: unknown.
        """
        if key in self.keys:
            return self.keys[key]
        for start, rule in self.keys.items():
            if rule.to in open_leaves() and key.startswith(f"{start}."):
                return rule.model_copy(update={"to": rule.to + key.removeprefix(start)})
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


def explained(
    table: KeyTable, name: str, *, by_prefix: bool = False
) -> list[tuple[str, list[str], list[str]]]:
    """Keys of a table with this name, or whose last parts it is: key, spec keys, and what is said about them.

    With `by_prefix`, a key of which the table knows the beginning only. The spec key with the same meaning
    comes first, then those that formulas compute from the key.
    """
    wanted = name.lstrip("-+~").replace(" ", "_").lower()
    spellings = {wanted, wanted.replace("_", "-"), wanted.replace("_", " ")}
    known = {**dict.fromkeys(table.keys), **dict.fromkeys(table.unsupported), **table.aliases}
    ends = tuple(f".{spelling}" for spelling in spellings)
    keys = [to or key for key, to in known.items() if f".{key.lower()}".endswith(ends)]
    if by_prefix:
        is_key = " " not in name and any(mark in name for mark in "._-")
        keys = [table.canonical(name)] if is_key else []
    entries = []
    for key in dict.fromkeys(keys):
        rule = table.rule(key)
        if rule is None:
            continue
        same = [target for target, theirs in table.fixes.items() if theirs == table.option + key]
        targets = [*same, *([rule.to] if rule.to else []), *table.read_by.get(key, [])]
        texts = [rule.unsupported] if rule.unsupported else []
        for kind in (rule.differs, rule.note):
            if isinstance(kind, str):
                texts += [kind] if kind else []
            else:
                texts += [f"{value}: {text}" for value, text in kind.items() if text]
        entries.append((key, list(dict.fromkeys(targets)), texts))
    return entries


def word(value: Any) -> str:
    """A value as it is written in tables: `true`, `null`, `0.5`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def placeholders(formula: str) -> list[str]:
    """The keys that a formula reads, each once."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(formula)))


def compute(formula: str, values: dict[str, Any]) -> Any:
    """Evaluates a formula; a key without a value is None.

    Raises:
        ValueError: the formula cannot be computed from these values.
        NoCounterpart: nor can it by its meaning, with the reason.
    """
    keys = placeholders(formula)
    names = {f"_{number}": values.get(key) for number, key in enumerate(keys)}
    text = _PLACEHOLDER.sub(lambda match: f"_{keys.index(match[1])}", formula)
    return evaluate(text, names, FORMULAS)


@cache
def tables() -> dict[str, KeyTable]:
    """The tables of all frameworks, by name."""
    return {path.stem: _load(path) for path in sorted(_DIRECTORY.glob("*.toml"))}


def names() -> list[str]:
    """Names of the frameworks whose configurations can be imported."""
    return [name for name, one in tables().items() if one.commands]


def table(name: str) -> KeyTable:
    """The table of a framework whose configurations can be imported.

    Raises:
        UsageError: there is no such framework.
    """
    if name not in names():
        raise UsageError(f"no framework `{name}`", fix=f"one of {', '.join(names())}")
    return tables()[name]


def _load(path: Path) -> KeyTable:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    rules = content.get("keys", {}).items()
    keys = {key: {"to": rule} if isinstance(rule, str) else rule for key, rule in rules}
    reasons = content.get("unsupported", {}).items()  # why → a key, or a list of keys
    unsupported = {
        key: why for why, those in reasons for key in ([those] if isinstance(those, str) else those)
    }
    for term, expression in content.pop("terms", {}).items():
        for target, formula in content["formulas"].items():
            content["formulas"][target] = formula.replace(f"<{term}>", f"({expression})")
    return KeyTable.model_validate(content | {"name": path.stem, "keys": keys, "unsupported": unsupported})
