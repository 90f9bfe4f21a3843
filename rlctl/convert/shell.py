"""Determines the commands that a launch script would run, without executing the bash script.

Supported: variables with defaults, arrays, quoting, line continuations, comments, arithmetic, `if` and
`[ … ]` with conditions that can be evaluated, the first iteration of `for`, functions, `source`,
here-documents. Values known only at run time (`$(…)`, unset variables) stay in the text unchanged.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import regex

from rlctl.convert.expressions import evaluate
from rlctl.digits import whole_number

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_MAX_BYTES = 1 << 20
_MAX_COMMANDS, _MAX_DEPTH = 5_000, 50
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"(#?)(!?)(\w+|[@*#?$!])(\[[^\]]*\])?(.*)", re.DOTALL)
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
#: A quoted text, or `$` with what follows; one that is not closed ends with the text.
_PIECE = regex.compile(
    r"""(?&quoted)|(?&value)
    (?(DEFINE)
        (?P<escaped>\\.?)
        (?P<double>"(?:(?&escaped)|(?&value)|[^"\\])*+(?:"|\Z))
        (?P<quoted>'[^']*+(?:'|\Z)|`(?:(?&escaped)|[^`\\])*+(?:`|\Z)|(?&double))
        (?P<round>\((?:(?&escaped)|'[^']*+(?:'|\Z)|(?&double)|(?&round)|[^()'"\\])*+(?:\)|\Z))
        (?P<curly>\{(?:(?&escaped)|(?&double)|(?&curly)|[^{}"\\])*+(?:\}|\Z))
        (?P<value>\$(?:(?&round)|(?&curly)|[A-Za-z_]\w*+|[0-9@*\#?$!]))
    )""",
    regex.DOTALL | regex.VERBOSE,
)
#: Variables with known values: programs that read a path expand `~`.
_ENVIRONMENT = {"HOME": "~", "PWD": ".", "USER": "user", "RANDOM": "0"}
#: Types of nodes of conditions, and of statements that are not evaluated.
_CONDITIONS = {"binary_expression", "unary_expression", "parenthesized_expression", "negated_command"}
_UNREAD = {"while_statement", "case_statement", "c_style_for_statement", "select_statement"}


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of a command, expanded, or a word as it is written, with quotes; and its line."""

    text: str
    line: int


def commands(
    text: str, *, path: Path, environment: Mapping[str, str], arguments: list[str], notes: list[str]
) -> list[list[Arg]]:
    """Returns the commands that the script would run, in order, with expanded words.

    Args:
        text: the script.
        path: its file; `source` and `dirname "$0"` are relative to it.
        environment: environment variables.
        arguments: arguments of the script, `$1` ….
        notes: list to which notes about unsupported parts are added.
    """
    shell = _Shell(path, dict(_ENVIRONMENT) | dict(environment), arguments, notes)
    try:
        shell.run(text)
    except RecursionError:
        notes.append("the script nests too deeply: it is read up to there")
    return shell.started


def is_unresolved(text: str) -> bool:
    """Whether an expanded text still contains values that are known only at run time."""
    return bool(re.search(r"\$\{?[A-Za-z_@*0-9]|\$\(|`", text))


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _parsed(text: str) -> Node:
    return _parser().parse(text.encode("utf-8", "replace")).root_node


def _raw(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _words(node: Node, after: str = "") -> list[Arg]:
    """Words of a command, of an array, or of a `for` after `in`.

    The parser divides some words; nothing is between their parts.
    """
    words: list[Arg] = []
    end = -1
    is_read = not after
    for child in node.children:
        is_read = is_read or child.type == after
        is_other = child.type in {"(", ")", ";", "comment", "do_group", after}
        if is_other or not is_read or child.type.endswith("redirect"):
            continue
        raw = _raw(child)
        if child.start_byte == end:
            words[-1] = Arg(words[-1].text + raw, words[-1].line)
        else:
            words.append(Arg(raw, child.start_point.row + 1))
        end = child.end_byte
    return words


class _Shell:
    def __init__(self, path: Path, variables: dict[str, str], arguments: list[str], notes: list[str]) -> None:
        self.path = path
        self.notes = notes
        self.variables: dict[str, str | list[Arg]] = dict(variables)
        self.arguments = arguments
        self.functions: dict[str, Node] = {}
        self.started: list[list[Arg]] = []
        self.depth = self.steps = 0

    def run(self, text: str) -> None:
        """Runs a script in this shell."""
        self._run(_parsed(text.replace("\r\n", "\n")).children)

    def _note(self, node: Node, what: str) -> None:
        note = f"line {node.start_point.row + 1}: {what}"
        if note not in self.notes:
            self.notes.append(note)

    def _run(self, nodes: Iterable[Node]) -> bool | None:
        """Runs statements in order; returns the success of the last one, None if unknown."""
        status: bool | None = None
        self.depth += 1
        for node in nodes:
            self.steps += 1
            if self.depth > _MAX_DEPTH or self.steps > _MAX_COMMANDS:
                break
            if node.is_named and node.type not in {"comment", "heredoc_body"}:
                status = self._statement(node)
        self.depth -= 1
        return status

    def _statement(self, node: Node, document: str | None = None) -> bool | None:  # noqa: PLR0911, PLR0912
        match node.type:
            case "command":
                return self._command(node, document)
            case "variable_assignment":
                self._assign(node)
                return True
            case "declaration_command":
                for child in node.named_children:
                    self._assign(child)
                return True
            case "test_command":
                return _test(list(self._condition(node)))
            case "negated_command":
                success = self._run(node.children)
                return None if success is None else not success
            case "list":
                left = node.children[0]
                sign = node.children[1].type
                right = node.children[-1]
                success = self._run([left])
                return success if success is (sign == "||") else self._run([right])
            case "redirected_statement":
                bodies = [
                    child
                    for inner in node.named_children
                    for child in inner.named_children
                    if child.type == "heredoc_body"
                ]
                lines = _raw(bodies[0]).removesuffix("\n") if bodies else document
                return self._statement(node.children[0], lines)
            case "if_statement":
                self._branches(node)
            case "for_statement":
                self._loop(node)
            case "function_definition":
                name = node.child_by_field_name("name")
                body = node.child_by_field_name("body")
                if name and body:
                    self.functions[_raw(name)] = body
            case child if child in _UNREAD:
                self._note(
                    node, f"`{child.removesuffix('_statement').removeprefix('c_style_')}` is not evaluated"
                )
            case _:  # a pipeline, a block, or what the parser did not understand
                return self._run(node.children)
        return None

    def _branches(self, node: Node) -> bool:
        """Runs the first branch of an `if` whose condition does not fail; False if there is none."""
        condition: list[Node] = []
        body: list[Node] = []
        others: list[Node] = []
        is_body = False
        for child in node.children:
            if child.type in {"elif_clause", "else_clause"}:
                others.append(child)
            elif child.type in {"then", "else"}:
                is_body = True
            elif child.is_named:
                (body if is_body else condition).append(child)
        success = self._run(condition) if condition else True
        if success is None:
            self._note(node, "this condition depends on the machine; its first branch is read")
        if success is not False:
            self._run(body)
            return True
        return any(map(self._branches, others))

    def _loop(self, node: Node) -> None:
        """Runs the first iteration of a `for`."""
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        values = [arg for word in _words(node, after="in") for arg in self._expand(word)]
        if not (values and variable and body):
            return
        self.variables[_raw(variable)] = values[0].text
        if len(values) > 1:
            turn = f"{_raw(variable)}={values[0].text}"
            self._note(node, f"a loop: only its first iteration is read, {turn}")
        self._run(body.children)

    def _command(self, node: Node, document: str | None) -> bool | None:
        words = _words(node)
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0].text)):
            self._set(*assigned.groups())
            words.pop(0)
        if not words:
            return True
        args = [arg for word in words for arg in self._expand(word)]
        if args and args[0].text in {"exec", "eval"}:
            args = [arg for arg in args[1:] if not arg.text.startswith("-")]
        if not args:
            return None
        name = args[0].text
        if name == "test":
            return _test([arg.text for arg in args[1:]])
        if name in {"true", ":", "false"}:
            return name != "false"
        if name in {"source", "."} and len(args) > 1:
            self._source(args[1])
        elif name == "read" and document is not None:
            self.variables[args[-1].text] = document
        elif name == "shift":
            self.arguments = self.arguments[1:]
        elif name in self.functions:
            outer = self.arguments
            self.arguments = [arg.text for arg in args[1:]]
            self._run(self.functions[name].children)
            self.arguments = outer
        else:
            self.started.append(args)
        return None

    def _assign(self, node: Node) -> None:
        """Sets the variable of an assignment; an array, or a text."""
        value = node.child_by_field_name("value")
        assigned = _ASSIGNMENT.fullmatch(_raw(node))
        if assigned is None:
            return
        name, plus, raw = assigned.groups()
        if value is None or value.type != "array":
            self._set(name, plus, raw)
            return
        before = self.variables.get(name, "")
        values = [arg for word in _words(value) for arg in self._expand(word)]
        self.variables[name] = [*before, *values] if isinstance(before, list) and plus else values

    def _set(self, name: str, plus: str, raw: str) -> None:
        before = self.variables.get(name, "")
        value = self._text(raw, quoted=False)
        self.variables[name] = f"{before}{value}" if plus and isinstance(before, str) else value

    def _source(self, arg: Arg) -> None:
        file = Path(arg.text) if Path(arg.text).is_absolute() else self.path.parent / arg.text
        if is_unresolved(arg.text) or not file.is_file() or file.stat().st_size > _MAX_BYTES:
            note = f"line {arg.line}: `source {arg.text}` is not read: no such file next to this file"
            self.notes += [] if note in self.notes else [note]
            return
        self.run(file.read_text(encoding="utf-8", errors="replace"))

    def _expand(self, word: Arg) -> list[Arg]:
        """Expands a word to arguments; elements of an array keep their lines."""
        args: list[Arg] = []
        current: str | None = None  # text of an argument that is not complete yet
        for part, is_whole in self._parts(word.text):
            if isinstance(part, list) and not current:
                args += part
                current = None
                continue
            text = _joined(part)
            for number, piece in enumerate([text] if is_whole else re.split(r"\s+", text)):
                if number and current is not None:
                    args.append(Arg(current, word.line))
                    current = None
                if piece or is_whole:
                    current = (current or "") + piece
        return args if current is None else [*args, Arg(current, word.line)]

    def _parts(self, raw: str, *, quoted: bool = False) -> Iterator[tuple[str | list[Arg], bool]]:
        """Yields (text or the elements of an array, whether it is not split at spaces) per part of a word."""
        at = 0
        while at < len(raw):
            char = raw[at]
            following = raw[at + 1 : at + 2]
            end = at + 1
            if char == "\\" and following:
                end = at + 2
                is_escape = not quoted or following in '$`"\\\n'
                if following == "\n":
                    yield "", True
                else:
                    yield following if is_escape else f"\\{following}", True
            elif not quoted and (char == "'" or char + following == "$'"):
                start = at + 1 + (char == "$")
                end = _end_of(raw, start - 1)
                yield raw[start : end - 1], True
            elif not quoted and char == '"':
                end = _end_of(raw, at)
                yield "", True
                yield from self._parts(raw[at + 1 : end - 1], quoted=True)
            elif char in "$`" and (end := _end_of(raw, at)) > at + 1:
                value = self._value(raw[at:end])
                yield value, quoted or isinstance(value, list) or is_unresolved(value)
            else:
                yield char, quoted
            at = end

    def _text(self, raw: str, *, quoted: bool = True) -> str:
        """Expands `raw` to one text, as if in double quotes if `quoted`."""
        return "".join(_joined(part) for part, _ in self._parts(raw, quoted=quoted))

    def _condition(self, node: Node) -> Iterator[str]:
        """Words of a `[ … ]`."""
        for child in node.children:
            if child.type in _CONDITIONS:
                yield from self._condition(child)
            elif child.is_named and child.type != "test_operator":
                yield self._text(_raw(child), quoted=False)
            elif child.type not in {"(", ")", "[", "]", "[[", "]]"}:
                yield _raw(child)

    def _value(self, raw: str) -> str | list[Arg]:
        """Value of `$NAME`, `${…}`, `$((…))` or `$(…)`; `raw` itself if unknown."""
        if raw.startswith("$(("):
            known = {name: value for name, value in self.variables.items() if isinstance(value, str)}
            names = re.compile(r"[A-Za-z_]\w*")
            expression = names.sub(lambda name: known.get(name[0], name[0]), self._text(raw[3:-2]))
            try:
                return str(int(evaluate(re.sub(r"(?<!/)/(?!/)", "//", expression), {})))
            except (ValueError, TypeError, OverflowError):  # not a number, or infinite
                return raw
        if raw.startswith(("$(", "`")):
            return self._output(raw)
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        parsed = _PARAMETER.fullmatch(inner)
        if parsed is None:
            return raw
        is_length, indirect, name, index, rest = parsed.groups()
        value = self._variable(name, index)
        if indirect and isinstance(value, str):
            value = self._variable(value, None)
        if is_length and value is not None:
            return str(len(value))
        return self._operated(raw, value, rest)

    def _variable(self, name: str, index: str | None) -> str | list[Arg] | None:  # noqa: PLR0911
        if name in {"@", "*"}:
            return [Arg(argument, 0) for argument in self.arguments]
        if name == "#":
            return str(len(self.arguments))
        if name == "BASH_SOURCE" or not name.strip("0"):
            return str(self.path)
        if name.isdecimal():
            place = whole_number(name)
            return self.arguments[place - 1] if place and place <= len(self.arguments) else ""
        value = self.variables.get(name)
        if not isinstance(value, list):
            return value
        if index in {"[@]", "[*]"}:
            return value
        number = whole_number(index[1:-1]) if index and index[1:-1].isdecimal() else 0
        return value[number].text if number is not None and number < len(value) else ""

    def _operated(self, raw: str, value: str | list[Arg] | None, rest: str) -> str | list[Arg]:
        """Applies `:-default`, `%suffix`, `/a/b` and similar operators to `value`."""
        is_empty = value is None or (rest.startswith(":") and not value)
        symbol = rest.lstrip(":")[:1]
        operand = rest.lstrip(":")[1:]
        if symbol in {"-", "="}:
            return self._text(operand.strip('"')) if is_empty or value is None else value
        if symbol == "+":
            return "" if is_empty else self._text(operand)
        if value is None:
            return raw
        if isinstance(value, list) or not rest or symbol == "?":
            return value
        return _trimmed(value, rest, self._text)

    def _output(self, raw: str) -> str:
        """Value of `dirname …`, `basename …`, `echo …`, `pwd`, and the script's directory; else `raw`."""
        inner = (raw[2:-1] if raw.startswith("$(") else raw[1:-1]).strip()
        if "pwd" in inner and ("BASH_SOURCE" in inner or "$0" in inner):
            start = self.path.parent
            up = re.search(r"(?:/\.\.)+", inner)
            return str((start / up[0].lstrip("/")).resolve() if up else start)
        nodes = _parsed(inner).named_children
        if len(nodes) == 1 and nodes[0].type == "command":
            args = [arg.text for word in _words(nodes[0]) for arg in self._expand(word) if arg.text != "--"]
            if len(args) == 2 and args[0] in {"dirname", "basename"}:
                found = Path(args[1])
                return str(found.parent) if args[0] == "dirname" else found.name
            if args == ["pwd"]:
                return str(self.variables["PWD"])
            if args and args[0] == "echo":
                return " ".join(args[1:])
        return raw


def _joined(piece: str | list[Arg]) -> str:
    return piece if isinstance(piece, str) else " ".join(arg.text for arg in piece)


def _trimmed(value: str, rest: str, text_of: Callable[[str], str]) -> str:
    if rest in {"^^", ",,"}:
        return value.upper() if rest == "^^" else value.lower()
    if rest.startswith("/"):
        old, _, new = rest.lstrip("/").partition("/")
        return value.replace(text_of(old), text_of(new), -1 if rest.startswith("//") else 1)
    mark = rest[:2] if rest[:2] in {"##", "%%"} else rest[:1]
    if mark[:1] not in {"#", "%"}:
        return value
    pattern = re.compile(translate(text_of(rest[len(mark) :])))
    is_prefix = mark[0] == "#"
    cuts = range(len(value) + 1)
    matching = [cut for cut in cuts if pattern.fullmatch(value[:cut] if is_prefix else value[cut:])]
    if not matching:
        return value
    cut = max(matching) if mark in {"##", "%"} else min(matching)  # doubled: the longest match
    return value[cut:] if is_prefix else value[:cut]


def _test(words: list[str]) -> bool | None:  # noqa: PLR0911
    """Evaluates `[ … ]` for text and numbers; None: the result depends on the machine."""
    at = next((index for index, word in enumerate(words) if word in {"&&", "||", "-a", "-o"}), None)
    if at is not None:
        sides = {_test(words[:at]), _test(words[at + 1 :])}
        decides = words[at] in {"||", "-o"}
        if decides in sides:
            return decides
        return None if None in sides else not decides
    if words[:1] == ["!"]:
        inner = _test(words[1:])
        return None if inner is None else not inner
    if len(words) == 2 and words[0] in {"-z", "-n"}:
        is_empty = words[1] == "" or (is_unresolved(words[1]) and "$(" not in words[1])
        return None if "$(" in words[1] else is_empty is (words[0] == "-z")
    if len(words) != 3 or any(is_unresolved(word) for word in words):
        return None
    left_text, symbol, right_text = words
    if symbol in {"=", "==", "!="}:
        is_equal = re.fullmatch(translate(right_text), left_text) is not None
        return is_equal is (symbol != "!=")
    try:
        return bool(_COMPARISONS[symbol](int(left_text), int(right_text)))
    except (KeyError, ValueError):
        return None


def _end_of(text: str, at: int) -> int:
    """End position of the quoted or `$` piece that starts at `at`; `at + 1` for a single character."""
    piece = _PIECE.match(text, at)
    return piece.end() if piece else at + 1
