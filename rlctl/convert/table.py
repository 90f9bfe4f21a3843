"""Tables that map a framework's keys to spec keys: `frameworks/<name>.toml`.

Also the evaluation of their formulas, and of expressions in Python files and shell scripts, without
executing code.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rlctl.errors import UsageError
from rlctl.spec.keys import open_leaves

_DIRECTORY = Path(__file__).parent / "frameworks"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.\[\]-]*)\}")

Style = Literal["hydra", "flags"]


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
    marks: list[str] = []  # key prefixes that identify the framework
    aliases: dict[str, str] = {}  # other spelling of a key → the key
    constants: dict[str, Any] = {}  # spec keys that every run of this framework has
    keys: dict[str, KeyRule] = {}  # key → rule; a string is short for `to`
    #: spec key, or name of a fix in `rlctl.diagnose.fixes` → the framework's key or settings; for a spec key
    #: only where `keys` have none with the same meaning
    fixes: dict[str, str] = {}
    unsupported: dict[str, str] = {}  # key, or prefix that ends in a dot, dash or underscore → why
    formulas: dict[str, str] = {}  # spec key → expression over `{keys}`
    note: str = ""  # note added to every import

    def defaults(self, variant: object) -> dict[str, Any]:
        """The default of every key that has one, in this class."""
        found = {key: rule.default for key, rule in self.keys.items() if rule.default is not None}
        return found | (self.variants[str(variant)].defaults if str(variant) in self.variants else {})

    def fix(self, name: str, value: str | None = None) -> str:
        """The framework's key of a spec key, with a value if one is given, or its settings of a named fix.

        Empty if it has none, or none for this value.
        """
        known = {} if name in self.fixes else self.keys
        found = {self.fixes.get(name, ""): KeyRule()} | {
            self.option + key: rule
            for key, rule in known.items()
            if rule.to == name and not (rule.unsupported or rule.outside or rule.differs)
        }
        for key, rule in found.items():
            if not key or value is None:
                continue
            values = rule.values or {"*": "*"}
            theirs = [one for one, ours in values.items() if ours != "*" and word(ours) == value]
            if theirs or "*" in values:
                return f"{key}{' ' if key[0] == '-' else '='}{theirs[0] if theirs else value}"
        return "" if value is not None else next(filter(None, found), "")

    def canonical(self, key: str) -> str:
        """The table's spelling of a key: resolves aliases and exchanged dashes and underscores."""
        spellings = [key, key.replace("-", "_"), key.replace("_", "-")]
        return next(
            (self.aliases.get(one, one) for one in spellings if one in self.aliases or one in self.keys), key
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


def word(value: Any) -> str:
    """A value as it is written in tables: `true`, `null`, `0.5`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def placeholders(formula: str) -> list[str]:
    """The keys that a formula reads, each once."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(formula)))


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
    keys = placeholders(formula)
    names = {f"_{number}": values.get(key) for number, key in enumerate(keys)}
    return evaluate(_PLACEHOLDER.sub(lambda found: f"_{keys.index(found[1])}", formula), names)


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


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "str": str,
    "len": len,
    "round": round,
    "ceil": math.ceil,
    "only": lambda values, allowed: [value for value in _listed(values) if value in allowed],
    "drops": lambda values, allowed: any(value not in allowed for value in _listed(values)),
    "is_parquet": lambda name: str(name).endswith(".parquet"),
}


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


#: The most often that an expression may repeat a text or list.
_MAX_REPEATS = 10_000


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Evaluates an expression over `names`: literals, arithmetic, comparisons, `a if b else c`, `min` ….

    Raises:
        ValueError: it cannot be evaluated: unsupported syntax, an unknown name, a division by zero.
    """
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, TypeError, ArithmeticError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"cannot be evaluated: {text}") from error


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: PLR0911, PLR0912
    """Evaluates a node of a syntax tree.

    Raises:
        ValueError: as for `evaluate`. Wrong operands raise Python's exceptions.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = value_of(node.left, names), value_of(node.right, names)
            if isinstance(node.op, ast.Mult) and not _is_small(left, right):
                raise ValueError("a sequence repeated too often")
            return _OPERATORS[type(node.op)](left, right)
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value_of(node.operand, names))
        case ast.BoolOp():
            wanted = isinstance(node.op, ast.Or)
            value: Any = None
            for part in node.values:
                value = value_of(part, names)
                if bool(value) is wanted:
                    break
            return value
        case ast.Compare():
            sides = [value_of(side, names) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(_OPERATORS[type(op)](a, b) for op, a, b in pairs)
        case ast.IfExp():
            return value_of(node.body if value_of(node.test, names) else node.orelse, names)
        case ast.List() | ast.Tuple():
            return [value_of(item, names) for item in node.elts]
        case ast.Dict() if None not in node.keys:
            keys = [value_of(key, names) for key in node.keys if key is not None]
            return dict(zip(keys, [value_of(value, names) for value in node.values], strict=True))
        case ast.Subscript():
            return value_of(node.value, names)[value_of(node.slice, names)]
        case ast.JoinedStr():
            return "".join(str(value_of(part, names)) for part in node.values)
        case ast.FormattedValue() if node.format_spec is None and node.conversion == -1:
            return value_of(node.value, names)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and not node.keywords:
            return _FUNCTIONS[name](*[value_of(argument, names) for argument in node.args])
    raise ValueError(f"cannot be evaluated: {ast.unparse(node)}")


def _is_small(left: Any, right: Any) -> bool:
    counts = [
        b for a, b in ((left, right), (right, left)) if isinstance(a, str | list) and isinstance(b, int)
    ]
    return all(count <= _MAX_REPEATS for count in counts)
