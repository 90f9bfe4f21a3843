"""Formats translations as text, JSON and YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rlctl.convert.table import word
from rlctl.convert.translate import STATUSES, KeyOutcome, Translation
from rlctl.errors import visible
from rlctl.run_spec.keys import known_leaves
from rlctl.run_spec.load import NO_VALUE


def spec_yaml(result: Translation, name: str) -> str:
    """Formats the spec as YAML, with the origin of every value; missing values are `???`."""
    lines = [f"# {name}, a configuration of {result.table.title}, translated by `rlctl import`."]
    missing = {problem.key: problem.what for problem in result.problems if problem.severity == "error"}
    given = {
        key: f"{key}: {_yaml(value)}  # {visible(result.origins[key], keep='')}"
        for key, value in result.spec.items()
    }
    section = ""
    for key in dict.fromkeys((*known_leaves(), *given, *missing)):
        if key not in given and key not in missing:
            continue
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines.append("")
        if key in missing:
            lines.append(f"# Missing: {key}: {visible(missing[key], keep='')}")
        if key in given:
            lines.append(given[key])
        elif key in known_leaves():
            lines.append(f"{key}: {NO_VALUE}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Formats a value for the spec; text is quoted so that it is not parsed as another type."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=False)


def document(result: Translation, text: str) -> dict[str, Any]:
    """Converts a translation to a JSON document; `text` is the resulting spec file."""
    return {
        "framework": result.table.title,
        "counts": result.counts,
        "keys": [asdict(row) for row in result.rows],
        "defaults": [asdict(row) for row in result.implied],
        "problems": [asdict(problem) for problem in result.problems],
        "notes": result.notes,
        "spec": result.spec,
        "spec_text": text,
        "functions": result.functions and {"file": str(result.functions[0]), "text": result.functions[1]},
    }


def sections(result: Translation) -> Iterator[tuple[str, list[KeyOutcome] | list[str]]]:
    """Yields the headings of a report, and the rows or lines below each."""
    for status, title in STATUSES.items():
        rows = [row for row in result.rows if row.status == status]
        if rows:
            yield f"{title} ({len(rows)})", rows
    if result.implied:
        yield f"framework defaults that differ from rlctl's ({len(result.implied)})", result.implied
    if result.notes:
        yield "not followed in the file" if len(result.notes) > 1 else "note", result.notes
    problems = [(problem, f" ({problem.fix})" if problem.fix else "") for problem in result.problems]
    if problems:
        yield (
            "before it runs",
            [f"{problem.severity}: `{problem.key}`: {problem.what}{fix}" for problem, fix in problems],
        )


def as_text(row: KeyOutcome) -> str:
    """Formats the outcome for one key as one or two lines."""
    place = f"{row.where}: " if row.where else ""
    arrow = f" → {became(row)}" if row.became else ""
    return f"  {place}{row.key} = {shown(row.value)}{arrow}" + (f"\n      {row.note}" if row.note else "")


def became(row: KeyOutcome) -> str:
    """Formats the resulting keys, for example `actor.lr = 1e-06`."""
    return ", ".join(f"{key} = {shown(value)}" for key, value in row.became.items())


def shown(value: Any) -> str:
    """Formats a value on one line, shortened to 60 characters."""
    text = " ".join(
        (json.dumps(value, default=str) if isinstance(value, list | dict) else word(value)).split()
    )
    return text if len(text) <= 60 else f"{text[:57]}…"


def summary(result: Translation) -> str:
    """Number of keys per status, in one sentence."""
    parts = [f"{count} {STATUSES[status]}" for status, count in result.counts.items() if count]
    return f"{len(result.rows)} keys: {', '.join(parts) or 'none'}."
