"""Finds the exception that a log ends with."""

from __future__ import annotations

import re

from rlctl.diagnose.readers.printed_rows import PrintedRows
from rlctl.diagnose.table import LoggedException

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r"File \"(?P<file>[^\"]+)\", line (?P<line>\d+)(?:, in (?P<function>\S+))?")
_EXCEPTION = re.compile(
    r"(?:\[?rank\d+\]?:?\s*)?(?:[\w.]+::\S+.*?:\s)?"
    r"(?P<text>(?:\w+\.)*(?P<type>\w*(?:Error|Exception|Interrupt|Exit|Timeout|Died\w*))(?:\(\w+\))?(?::\s.*)?)\s*$"
)
_KILLED = re.compile(r"(?:.*\s)?(?P<text>(?:Killed|Segmentation fault|Bus error)(?:\s*\(core dumped\))?)\s*$")
#: An exception that ends a run even if no traceback is printed.
_FATAL = "OutOfMemoryError"
#: Exceptions that launchers raise when a child process has failed; its exception is printed above.
_OF_LAUNCHERS = frozenset({"ChildFailedError", "CalledProcessError", "SystemExit", "RayTaskError"})
#: Exceptions of a run that was stopped from outside.
_STOPS = frozenset({"KeyboardInterrupt", "SignalException"})
_LONGEST = 500
_LINES_AFTER = 200


class LastException:
    """Collects exceptions from the lines that are not rows.

    A handled exception may be printed without a traceback, or far from the log's end; neither counts. Nor
    does an exception that was already printed before a row, because training continued after it.
    """

    def __init__(self) -> None:
        self._found: LoggedException | None = None
        self._frame = ""
        self._in_traceback = False
        self._since_row: set[str] = set()
        self._survived: set[str] = set()

    def clear(self) -> None:
        """Discards the exceptions found so far, because a row follows them: training continued."""
        self._survived |= self._since_row
        self._since_row.clear()
        self._found, self._in_traceback = None, False

    def at_end(self, last_line: int) -> LoggedException | None:
        """The last exception since the last row, if it is near the end of the log.

        A launcher's exception counts only if there is no other.
        """
        found = self._found
        return found if found and last_line - found.line <= _LINES_AFTER else None

    def take(self, text: str, line: int, rows: PrintedRows) -> None:
        """Processes one line that is not a row."""
        if _TRACEBACK in text:
            self._in_traceback, self._frame = True, ""
        elif 'File "' in text and (frame := _FRAME.search(text)):
            function = f", in {frame['function']}" if frame["function"] else ""
            self._in_traceback = True
            self._frame = f"{frame['file'].rpartition('/')[2]}, line {frame['line']}{function}"
        elif not self._in_traceback and _FATAL not in text:
            if text.rstrip()[-1:] in "dr)" and (match := _KILLED.match(text)):
                self._keep(match["text"], "", line, rows)
        elif not text[:1].isspace() and (match := _EXCEPTION.match(text)):
            self._keep(match["text"], match["type"], line, rows)

    def _keep(self, text: str, kind: str, line: int, rows: PrintedRows) -> None:
        where, self._in_traceback = self._frame if self._in_traceback else "", False
        known = {text[:_LONGEST], where} - {""}
        self._since_row |= known
        if known & self._survived:
            return
        if self._found is not None and (kind in _OF_LAUNCHERS or self._found.text == text[:_LONGEST]):
            return
        self._found = LoggedException(text[:_LONGEST], where, line, rows.last_step, kind in _STOPS)
