"""Settings that a log states one by one: flags of a launch line, Hydra overrides, lines of YAML."""

from __future__ import annotations

import re
from typing import Any

from rlctl.diagnose.readers.collect import LogReading
from rlctl.diagnose.readers.framework_names import setting_names

_FLAG = re.compile(
    r"(?:^|\s)--(?P<key>[A-Za-z][\w.-]*)(?:[ =]+(?P<value>[^\s'\"\\,-][^\s'\"\\,]*|-[\d.]\S*))?"
)
_OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}(?P<key>[a-z_]+(?:\.\w+)+)=['\"]?(?P<value>[^\s'\"\\,]+)")
_LINE = re.compile(
    r"\s*['\"]?(?P<key>[A-Za-z][\w.]*)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?(?P<value>[^\s'\",#]+)['\"]?,?\s*(?:#.*)?$"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}


class PrintedConfig:
    """Collects settings that some framework's facts depend on; of two values the first counts."""

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading

    def take(self, text: str) -> None:
        """Look at one line that is no row."""
        if "--" in text:
            self._keep(_FLAG, text)
        if "=" in text:
            self._keep(_OVERRIDE, text)
        if ":" in text or "=" in text or "..." in text:
            self._keep(_LINE, text)

    def _keep(self, pattern: re.Pattern[str], text: str) -> None:
        for match in pattern.finditer(text) if pattern is not _LINE else filter(None, [pattern.match(text)]):
            key = match["key"].replace("-", "_") if pattern is _FLAG else match["key"]
            if key in setting_names():
                value = match["value"]
                self._reading.stated.setdefault(key, True if value is None else _value(value))


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text
