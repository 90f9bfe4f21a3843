"""Single settings in a log: flags of a launch command, Hydra overrides, lines of YAML."""

from __future__ import annotations

import re
from typing import Any

from rlctl.diagnose.readers.framework_names import setting_names

_FLAG = re.compile(
    r"(?:^|\s)--(?P<key>[A-Za-z][\w.-]*)(?:[ =]+(?P<value>[^\s'\"\\,-][^\s'\"\\,]*|-[\d.]\S*))?"
)
_OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}(?P<key>[a-z_]+(?:\.\w+)+)=['\"]?(?P<value>[^\s'\"\\,]+)")
_LINE = re.compile(
    r"\s*['\"]?(?P<key>[A-Za-z][\w.]*)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?(?P<value>[^\s'\",#]+)['\"]?,?\s*(?:#.*)?$"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def keep_settings(text: str, stated: dict[str, Any]) -> None:
    """Adds to `stated` a line's settings that a framework's facts depend on; the first value counts.

    Numbers stay texts, which `Config` reads.
    """
    found: list[re.Match[str] | None] = list(_FLAG.finditer(text)) if "--" in text else []
    if "=" in text:
        found += _OVERRIDE.finditer(text)
    if ":" in text or "=" in text or "..." in text:
        found.append(_LINE.match(text))
    for match in filter(None, found):
        key = match["key"].replace("-", "_") if match.re is _FLAG else match["key"]
        if key in setting_names():
            value = match["value"] or "true"  # a flag without a value
            stated.setdefault(key, _WORDS.get(value.lower(), value))
