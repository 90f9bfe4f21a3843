"""Parses a bash script into commands, blocks and words, without expanding or executing them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ARRAY_START = re.compile(r"[A-Za-z_]\w*\+?=")
_OPENING = {"if", "then", "elif", "else", "do", "while", "until", "{", "!", "time"}


@dataclass(slots=True)
class ShellWord:
    """A word as written, with quotes; `elements` are those of an array assignment."""

    raw: str
    line: int
    elements: list[ShellWord] | None = None


@dataclass(slots=True)
class ShellCommand:
    """A simple command, with the preceding operator and the here-document that it reads."""

    words: list[ShellWord]
    before: str = "\n"
    document: str | None = None


@dataclass(slots=True)
class Compound:
    """A compound command: `kind` is if, for, while, case or function."""

    kind: str
    line: int
    words: list[ShellWord] = field(default_factory=list)
    branches: list[tuple[list[ShellNode], list[ShellNode]]] = field(default_factory=list)
    body: list[ShellNode] = field(default_factory=list)


ShellNode = ShellCommand | Compound


class Parser:
    """Parses text to nodes. Words are split here; `shell` expands them."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, 1
        self.operator = "\n"
        self.documents: list[tuple[str, ShellCommand]] = []

    def block(self, stops: set[str]) -> list[ShellNode]:
        """Parses nodes up to a command that starts with one of `stops`, which is consumed, or to the end."""
        nodes: list[ShellNode] = []
        while self.at < len(self.text):
            before = self.operator
            command = self._command(stops)
            if command is None:
                if self.operator == ")" and ")" in stops:
                    break
                continue
            first = command.words[0].raw if command.words else ""
            if first in stops:
                self.stopped_by = first
                return nodes
            command.before = before
            nodes.append(self._compound(first, command) or command)
        self.stopped_by = ""
        return nodes

    def _compound(self, first: str, command: ShellCommand) -> ShellNode | None:
        line = command.words[0].line if command.words else self.line
        if first == "if":
            found = Compound("if", line)
            condition = self.block({"then"})
            while True:
                body = self.block({"elif", "else", "fi"})
                found.branches.append((condition, body))
                if self.stopped_by != "elif":
                    break
                condition = self.block({"then"})
            if self.stopped_by == "else":
                found.branches.append(([], self.block({"fi"})))
            return found
        if first in {"for", "while", "until"}:
            self.block({"do"})
            words = [word for word in command.words[1:] if word.raw != "in"]
            kind = "for" if first == "for" else "while"
            return Compound(kind, line, words, body=self.block({"done"}))
        if first == "case":
            self.block({"esac"})
            return Compound("case", line)
        if first.endswith("()") or (first == "function" and command.words[1:]):
            name = command.words[1].raw if first == "function" else first
            if not any(word.raw == "{" for word in command.words):
                self.block({"{"})
            words = [ShellWord(name.removesuffix("()"), line)]
            return Compound("function", line, words, body=self.block({"}"}))
        if first == "{":
            return Compound("if", line, branches=[([], self.block({"}"}))])
        return None

    def _command(self, stops: set[str]) -> ShellCommand | None:
        """Parses words up to an operator; a keyword that opens or closes a block is a separate command."""
        command = ShellCommand([])
        skip_next = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t" or self.text.startswith("\\\n", self.at):
                self.line += char == "\\"
                self.at += 2 if char == "\\" else 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in "<>" or self.text.startswith("&>", self.at):
                skip_next = self._redirection(command)
            elif char in "\n;&|()":
                if self._operator(command):
                    break
            else:
                word = self._word()
                if skip_next:
                    skip_next = False
                    continue
                command.words.append(word)
                is_first = len(command.words) == 1
                if is_first and (word.raw in stops or word.raw in _OPENING):
                    self.operator = "\n"
                    break
                if word.raw == "{" and command.words[0].raw.endswith("()"):
                    break
        return command if command.words else None

    def _operator(self, command: ShellCommand) -> bool:
        """Consumes an operator; returns False if it belongs to an arithmetic command or `[[ … ]]`."""
        char = self.text[self.at]
        if self.text.startswith("((", self.at):
            end = _closing(self.text, self.at, "(", ")")
            command.words.append(ShellWord("true", self.line))
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            return False
        double = self.text[self.at : self.at + 2]
        inside_test = bool(command.words) and command.words[0].raw == "[["
        if inside_test and (double in {"&&", "||"} or char in "()"):
            mark = double if double in {"&&", "||"} else char
            command.words.append(ShellWord(mark, self.line))
            self.at += len(mark)
            return False
        self.operator = double if double in {"&&", "||", ";;"} else char
        self.at += len(self.operator)
        if self.operator == "\n":
            self.line += 1
            self._read_documents()
        return True

    def _redirection(self, command: ShellCommand) -> bool:
        """Consumes `>`, `<<EOF` and similar; returns whether the next word is the redirection's file."""
        found = re.compile(r"<<<|<<-?|&>>?|>&\s*[0-9-]|[<>]\(|>>|>\||[<>]").match(self.text, self.at)
        assert found is not None
        if found[0] in {"<(", ">("}:
            self.at = _closing(self.text, self.at + 1, "(", ")")
            return False
        self.at = found.end()
        if command.words and command.words[-1].raw.isdecimal():
            command.words.pop()  # 2>file
        if found[0] in {"<<", "<<-"}:
            while self.text[self.at : self.at + 1] in {" ", "\t"}:
                self.at += 1
            self.documents.append((self._word().raw.strip("'\"\\"), command))
            return False
        return "&" not in found[0] or found[0].startswith("&")

    def _read_documents(self) -> None:
        for mark, command in self.documents:
            lines: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at, self.line = min(end + 1, len(self.text)), self.line + 1
                if line.strip() == mark:
                    break
                lines.append(line)
            command.document = "\n".join(lines)
        self.documents.clear()

    def _word(self) -> ShellWord:
        start, line = self.at, self.line
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;&|<>":
                break
            if char == "(":
                if _ARRAY_START.fullmatch(self.text[start : self.at]):
                    return self._array(start, line)
                if self.text.startswith("()", self.at):
                    self.at += 2
                break
            if char == ")":
                break
            if char == "\\":
                self.line += self.text.startswith("\n", self.at + 1)
                self.at += 2
                continue
            end = end_of(self.text, self.at) if char in "'\"`$" else self.at + 1
            self.line += self.text.count("\n", self.at, end)
            self.at = end
        if self.at == start:
            self.at += 1  # a stray bracket
        return ShellWord(self.text[start : self.at], line)

    def _array(self, start: int, line: int) -> ShellWord:
        head = self.text[start : self.at]
        self.at += 1
        elements: list[ShellWord] = []
        while self.at < len(self.text):
            command = self._command(set())
            elements += command.words if command else []
            if self.operator == ")":
                break
        self.operator = "\n"
        return ShellWord(head, line, elements)


def end_of(text: str, at: int) -> int:
    """End position of the quoted or `$` piece that starts at `at`; `at + 1` for a single character."""
    char = text[at]
    if char == "'":
        end = text.find("'", at + 1)
        return len(text) if end < 0 else end + 1
    if char in '"`':
        position = at + 1
        while position < len(text) and text[position] != char:
            if text[position] == "\\":
                position += 1
            elif text[position] == "$" and char == '"':
                position = end_of(text, position) - 1
            position += 1
        return min(position + 1, len(text))
    following = text[at + 1 : at + 2]
    if following in {"(", "{"}:
        return _closing(text, at + 1, following, ")" if following == "(" else "}")
    name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]").match(text, at + 1)
    return name.end() if name else at + 1


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"" and not (char == "'" and opening == "{"):
            at = end_of(text, at) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)
