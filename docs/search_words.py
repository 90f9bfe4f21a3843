"""What the search of the site finds besides headings: keys, metrics, and other frameworks' names of both.

The entries come from the tables of `rlctl import` and `rlctl diagnose`; each leads to the row of its key.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SPEC, METRICS, IMPORT = "reference/spec/", "reference/metrics/", "evidence/import-keys/"
_READERS = Path(__file__).parents[1] / "rlctl" / "diagnose" / "readers" / "frameworks"
_ROW = re.compile(r'<tr>\s*<td><code>([^\s<&"]+)</code></td>')


def with_anchors(html: str) -> str:
    """The same tables, with the key of the first column as `id` of its row."""
    seen: set[str] = set()

    def row(match: re.Match[str]) -> str:
        if match[1] in seen:
            return match[0]
        seen.add(match[1])
        return match[0].replace("<tr>", f'<tr id="{match[1]}">')

    return _ROW.sub(row, html)


def entries() -> list[dict[str, str]]:
    """Sections for the index of the search: location (each occurs once), title and text."""
    from rlctl.metric_names import SECTIONS
    from rlctl.run_spec.key_table import key_rows

    keys = {row.key: row.meaning for row in key_rows()}
    metrics = {metric.name: metric.definition for some in SECTIONS.values() for metric in some}
    names_of_keys, refused = _import_keys(keys)
    names_of_metrics = _logged_names(metrics)
    return [
        *(_entry(SPEC, key, names_of_keys.get(key, []), text) for key, text in keys.items()),
        *(_entry(METRICS, name, names_of_metrics.get(name, []), text) for name, text in metrics.items()),
        *(
            {"location": f"{IMPORT}#{key}", "title": f"{key}: not in rlctl", "text": " ".join(reasons)}
            for key, reasons in refused.items()
        ),
    ]


def _entry(page: str, name: str, elsewhere: Iterable[tuple[str, str]], text: str) -> dict[str, str]:
    """Title: all names. The text ends with their words: `completion` finds `max_completion_length`."""
    others: dict[str, dict[str, None]] = defaultdict(dict)
    for other, framework in elsewhere:
        others[other][framework] = None
    words = dict.fromkeys(re.findall(r"[A-Za-z0-9]+", " ".join([name, *others])))
    told = (f"{other} ({', '.join(frameworks)})".removesuffix(" ()") for other, frameworks in others.items())
    title = "; ".join([name, *told])
    return {"location": f"{page}#{name}", "title": title, "text": f"{text} ({' '.join(words)})"}


def _import_keys(keys: Mapping[str, str]) -> tuple[dict[str, list[tuple[str, str]]], dict[str, list[str]]]:
    """Key of the spec → its names elsewhere, with the framework; key elsewhere → why rlctl has none.

    A key that is only read to compute others is a name of the first of these.
    """
    from rlctl.convert.table import tables

    names, refused = defaultdict(list), defaultdict(list)
    for name, table in tables().items():
        framework = "" if name == "words" else table.title.partition(" ")[0]
        reasons = dict(table.unsupported)
        for key, rule in table.keys.items():
            targets = [target for target in (rule.to, *table.read_by.get(key, [])) if target in keys]
            if targets and targets[0] != key:
                names[targets[0]].append((key, framework))
            elif rule.unsupported:
                reasons[key] = rule.unsupported
        for key, reason in reasons.items():
            refused[key].append(f"{table.title}: {reason}.")
    return names, refused


def _logged_names(metrics: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Metric → its names in other frameworks' logs, with the framework."""
    import tomllib

    names = defaultdict(list)
    for path in sorted(_READERS.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        framework = content.get("framework") or content["extends"]
        for name, reading in content.get("names", {}).items():
            key = reading if isinstance(reading, str) else reading["key"]
            if key in metrics and (name, framework) not in names[key] and name != key:
                names[key].append((name, framework))
    return names


def merged(index: dict[str, Any], more: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """The index with more sections; each belongs to a page that is in it.

    Raises:
        ValueError: the page of a section is not in the index.
    """
    pages = {document["location"] for document in index["docs"]}
    sections = [dict(section) for section in more]
    if strangers := {section["location"].partition("#")[0] for section in sections} - pages:
        raise ValueError(f"pages that the search does not know: {sorted(strangers)}")
    return {**index, "docs": [*index["docs"], *sections]}
