"""Sources of a spec: YAML files and `key=value` arguments, read into leaves; the shipped presets.

YAML is read from the nodes that PyYAML composes, because plain values have no line numbers. The reader
accepts a strict subset of YAML: one UTF-8 document with mappings, lists and scalars of YAML 1.2. Duplicate
keys, tabs, anchors and tags are refused; `yes` and `1_2` are text.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml

import rlctl
from rlctl.errors import EnvironmentFailure, Problem

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = {"", "~", "null", "Null", "NULL"}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


Layer = Literal["default", "hardware", "inferred", "embedded", "preset", "file", "command line", "values"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value."""

    layer: Layer  # the layer that set it
    #: preset name, file path, or the reason for a value that nobody wrote (`hardware`, `inferred`)
    name: str | None = None
    line: int | None = None  # 1-based line in that file

    def __str__(self) -> str:
        """As the dry run prints it, e.g. `preset rloo-seq-is:7`."""
        if self.layer == "embedded":
            return "embedded model"
        location = f"{self.name}:{self.line}" if self.line else (self.name or "")
        shown = {"preset": f"preset {location}", "inferred": f"inferred: {location}"}
        return (shown | dict.fromkeys(("file", "hardware"), location)).get(self.layer, self.layer)


COMMAND_LINE = Origin("command line")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value as written in its source."""

    value: Any  # bool, int, float, str, None, or a list or mapping of these
    #: source text of a plain scalar, so that `2.10` keeps its digits in a text field; else None
    text: str | None
    origin: Origin  # its source


@dataclass(frozen=True, slots=True)
class SpecSource:
    """The values of one source by their dotted keys, and all errors."""

    origin: Origin
    leaves: dict[str, Leaf] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def at(self, line: int | None) -> Origin:
        """The origin of a line."""
        return replace(self.origin, line=line)

    def refuse(self, line: int | None, what: str, fix: str | None = None) -> SpecSource:
        """Adds an error."""
        self.problems.append(
            Problem(
                severity="error",
                key="",
                what=what,
                fix=fix,
                where=str(self.at(line)),
            )
        )
        return self


#: Longer integers are read as text: no key needs them, and Python does not convert more than 4,300 digits.
_MAX_DIGITS = 1000


def parse_scalar(text: str) -> bool | int | float | str | None:
    """Read a plain scalar by the rules of YAML 1.2: `yes`, `on`, `0.5_2` and `1_2` are text."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= _MAX_DIGITS else text
    if _FLOAT.fullmatch(text):
        number = float(text)
        is_zero = not re.search("[1-9]", text.lower().partition("e")[0])
        return number if number or is_zero else text  # 1e-400 is not 0
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def read_yaml_file(path: Path, known: Container[str], origin: Origin | None = None) -> SpecSource:
    """Read a spec file; a key in `known` is a leaf even if its value is a mapping.

    A file that cannot be opened is returned as a problem, so that it is reported together with all others.
    """
    source = SpecSource(origin or Origin("file", str(path)))
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return source.refuse(None, f"cannot be read: {error.strerror}")
    return read_yaml(raw, known, source)


def read_yaml(raw: bytes, known: Container[str], source: SpecSource) -> SpecSource:
    """Read the bytes of one YAML document into the leaves of `source`, which is returned."""
    fault = _fault_of_bytes(raw)
    if fault:
        return source.refuse(*fault)
    try:
        root = _composed(raw.decode())
    except yaml.YAMLError as error:
        return source.refuse(*_fault_of_yaml(error, raw))
    if isinstance(root, yaml.MappingNode):
        _flatten(root, "", known, source, {})
    elif root is not None:
        source.refuse(_line(root), "the file must hold `key: value` pairs at its top level")
    return source


def read_value(text: str, origin: Origin = COMMAND_LINE, *, takes_mapping: bool = False) -> Leaf:
    """Read the right-hand side of `key=value`; `[a, b]`, `{}` and quotes as in YAML.

    Raises:
        ValueError: the text is not a single scalar, a list, `{}` or, with `takes_mapping`, a mapping; the
            message says why.
    """
    text = text.strip()
    if not text.startswith(("[", "{", '"', "'")):
        return Leaf(parse_scalar(text), text, origin)
    try:
        node = _composed(text)
    except yaml.YAMLError as error:
        raise ValueError(_fault_of_yaml(error, text.encode())[1]) from error
    if node is None or (isinstance(node, yaml.MappingNode) and node.value and not takes_mapping):
        raise ValueError("a value is a scalar or a list; give mappings key by key, a.b=value")
    source = SpecSource(origin)
    value = _plain(node, source)
    if source.problems:
        raise ValueError(source.problems[0].what)
    return Leaf(value, None, origin)


@lru_cache(maxsize=32)  # one process reads a preset many times: for each suggestion that it tries, say
def _composed(text: str) -> yaml.Node | None:
    """The root node of a document, which nobody changes; raises `yaml.YAMLError`."""
    root: yaml.Node | None = yaml.compose(text, Loader=_StrictLoader)
    return root


class _StrictLoader(yaml.BaseLoader):
    """Composes nodes only (no constructors run); refuses anchors, aliases, tags and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal("anchors (&) and aliases (*) are not supported; write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"the tag {event.tag} is not supported; write the plain value", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(f"nested more than {MAX_DEPTH} levels deep", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refusal(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast("yaml.Mark", event.start_mark))


def _flatten(
    mapping: yaml.MappingNode, prefix: str, known: Container[str], source: SpecSource, lines: dict[str, int]
) -> None:
    """Collect the leaves under `mapping`; `lines` maps every key read so far to its line."""
    for key_node, value_node in mapping.value:
        line = _line(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            source.refuse(line, "a key must be plain text")
            continue
        key = f"{prefix}{key_node.value}"
        if key in lines:
            source.refuse(line, f"`{key}` is given twice (first on line {lines[key]})", "keep one of them")
            continue
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and key not in known:
            _flatten(value_node, f"{key}.", known, source, lines)
        else:
            text = value_node.value if _is_plain(value_node) else None
            source.leaves[key] = Leaf(_plain(value_node, source), text, source.at(line))


def _plain(node: yaml.Node, source: SpecSource) -> Any:
    """The Python value of a node; a key that is given twice in a mapping is an error of `source`."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, source) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return parse_scalar(node.value) if _is_plain(node) else node.value
    mapping: dict[Any, Any] = {}
    for key_node, value in node.value:
        key = _plain(key_node, source) if _is_plain(key_node) else str(key_node.value)
        if key in mapping:
            source.refuse(_line(key_node), f"`{key}` is given twice in one mapping", "keep one of them")
        mapping[key] = _plain(value, source)
    return mapping


def _is_plain(node: yaml.Node) -> bool:
    """A scalar written without quotes or block indicators."""
    return isinstance(node, yaml.ScalarNode) and node.style is None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _fault_of_bytes(raw: bytes) -> tuple[int | None, str, str] | None:
    """Line, error and fix, for an error that is found without parsing."""
    if len(raw) > MAX_BYTES:
        return None, f"larger than {MAX_BYTES >> 20} MiB", "is this the right file?"
    if raw.startswith(b"\xef\xbb\xbf"):
        return 1, "starts with a byte-order mark", "save it as UTF-8 without BOM"
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].count(b"\n") + 1, "is not UTF-8 text", "save it as UTF-8"
    for number, line in enumerate(text.split("\n"), start=1):
        indentation = line[: len(line) - len(line.lstrip())].strip(" \r")
        if indentation:
            name = "a tab" if "\t" in indentation else f"the character {indentation[0]!r}"
            return number, f"{name} in the indentation", "indent with spaces"
    return None


def _fault_of_yaml(error: yaml.YAMLError, raw: bytes) -> tuple[int | None, str, str | None]:
    """Line, text and fix of an error of PyYAML."""
    if not isinstance(error, yaml.MarkedYAMLError):
        line = raw.decode()[: getattr(error, "position", 0)].count("\n") + 1
        return line, f"not readable as YAML: {getattr(error, 'reason', error)}", None
    mark = error.problem_mark or error.context_mark
    start = error.context_mark
    begun = f" from line {start.line + 1} on" if start and mark and start.line < mark.line else ""
    said = [f"{error.context}{begun}" if error.context else None, error.problem]
    is_unquoted = re.search(
        "mapping values are not|cannot start any token|expected <block end>", error.problem or ""
    )
    fix = "put a text with special characters in quotes, or correct the indentation" if is_unquoted else None
    return mark.line + 1 if mark else None, ": ".join(filter(None, said)), fix


#: Top-level key of a preset that `rlctl presets list` shows; not part of the RunSpec.
DESCRIPTION = "description"


@dataclass(frozen=True, slots=True)
class Preset:
    """A shipped spec fragment; `kind` is its folder (algorithms, examples, models…)."""

    name: str
    kind: str
    path: Path

    @property
    def description(self) -> str:
        """One line, read from the preset's file."""
        leaf = read_yaml_file(self.path, ()).leaves.get(DESCRIPTION)
        return str(leaf.value) if leaf else ""


@cache
def presets_dir() -> Path:
    """The shipped presets: inside the package when installed, at the root of a checkout.

    Raises:
        EnvironmentFailure: neither directory exists.
    """
    package = Path(rlctl.__file__).parent
    for candidate in (package / "presets", package.parent / "presets"):
        if candidate.is_dir():
            return candidate
    raise EnvironmentFailure(
        "the shipped presets are missing", where=str(package / "presets"), fix="reinstall rlctl"
    )


#: Folders of presets in the order of listings; within one, those of a sub-folder come last.
_KINDS = ("algorithms", "models", "hardware", "examples")


@cache
def all_presets() -> dict[str, Preset]:
    """Bare name → preset, ordered by kind and name; models that nobody starts with today come last."""
    root = presets_dir()
    paths = sorted(
        (path.relative_to(root) for path in root.rglob("*.yaml")),
        key=lambda path: (_KINDS.index(path.parts[0]), len(path.parts), path.stem),
    )
    return {path.stem: Preset(path.stem, path.parts[0], root / path) for path in paths}
