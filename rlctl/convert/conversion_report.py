"""Formats translations and exports as Markdown, JSON and YAML."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rlctl.convert.export import Export
from rlctl.convert.table import word
from rlctl.convert.translate import STATUSES, Conversion, KeyOutcome, Translation
from rlctl.markdown import block, code, plain, prose, table


def spec_yaml(result: Translation, name: str) -> str:
    """Formats the spec as YAML, with the origin of every value and missing keys as comments."""
    lines = [f"# {name}, a configuration of {result.table.title}, translated by `rlctl import`."]
    missing = [problem for problem in result.problems if problem.severity == "error"]
    lines += [f"# Missing: {problem.key}: {problem.what}" for problem in missing]
    section = ""
    for key, value in result.spec.items():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        lines.append(f"{key}: {_yaml(value)}  # {result.origins[key]}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Formats a value for the spec; text is quoted so that it is not parsed as another type."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def document(result: Translation, spec_text: str) -> dict[str, Any]:
    """Converts a translation to a JSON document."""
    return _document(result) | {
        "defaults": [asdict(row) for row in result.implied],
        "problems": [asdict(problem) for problem in result.problems],
        "notes": result.notes,
        "spec": result.spec,
        "spec_text": spec_text,
    }


def export_document(result: Export, text: str) -> dict[str, Any]:
    """Converts an export to a JSON document."""
    return _document(result) | {"text": text, "settings": result.settings}


def _document(result: Conversion) -> dict[str, Any]:
    rows = [asdict(row) for row in result.rows]
    return {"framework": result.table.title, "counts": result.counts, "keys": rows}


def export_markdown(result: Export, text: str) -> str:
    """Formats an export as Markdown: its tables and its text."""
    parts = [f"# rlctl → {result.table.title}", "", summary(result), "", *_sections(result.rows)]
    return "\n".join([*parts, block(text)])


def _sections(rows: list[KeyOutcome]) -> list[str]:
    lines: list[str] = []
    for status, title in STATUSES.items():
        if some := [row for row in rows if row.status == status]:
            lines += [f"## {title[0].upper()}{title[1:]} ({len(some)})", "", *_markdown_table(some), ""]
    return lines


def as_markdown(result: Translation, spec_text: str) -> str:
    """Formats a translation as Markdown tables."""
    lines = [f"# {result.table.title} → rlctl", "", summary(result), "", *_sections(result.rows)]
    if result.implied:
        lines += ["## Defaults that differ from rlctl's", "", *_markdown_table(result.implied), ""]
    if result.problems:
        lines += ["## Before it runs", ""]
        for one in result.problems:
            lines.append(f"- {code(one.key)}: {prose(one.what + (f' ({one.fix})' if one.fix else ''))}")
        lines.append("")
    lines += [f"- {prose(note)}" for note in result.notes]
    return "\n".join([*lines, "", block(spec_text, "yaml")])


def _markdown_table(rows: list[KeyOutcome]) -> list[str]:
    cells = [
        (
            plain(row.where.removeprefix("line ")),
            code(row.key),
            code(shown(row.value)),
            code(became(row)) if row.became else "–",
            prose(row.note),
        )
        for row in rows
    ]
    return table(("line", "key", "value", "becomes", "note"), cells)


def became(row: KeyOutcome) -> str:
    """Formats the resulting keys, for example `actor.lr = 1e-06`, or a dash."""
    return ", ".join(f"{key} = {shown(value)}" for key, value in row.became.items()) or "–"


def shown(value: Any) -> str:
    """Formats a value on one line, shortened to 60 characters."""
    text = " ".join((json.dumps(value) if isinstance(value, list | dict) else word(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}…"


def summary(result: Conversion) -> str:
    """Number of keys per status, in one sentence."""
    parts = [f"{count} {STATUSES[status]}" for status, count in result.counts.items() if count]
    return f"{len(result.rows)} keys: {', '.join(parts) or 'none'}."
