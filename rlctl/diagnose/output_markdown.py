"""A diagnosis as Markdown, for pull requests and notebooks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlctl.diagnose.diagnosis_report import RunReport, run_report
from rlctl.diagnose.rules import Diagnosis

_CHECKED = {"found", "ok"}
#: Everything that could begin markup, HTML included.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@])")


def as_markdown(diagnoses: Sequence[Diagnosis]) -> str:
    """One section per run. Texts of a log are escaped: they show as they are and link nowhere."""
    return "\n".join(line for diagnosis in diagnoses for line in _run(run_report(diagnosis)))


def _run(report: RunReport) -> Iterator[str]:
    yield f"## {_plain(report.name)}\n"
    yield f"{report.about[:1].upper()}{report.about[1:]}. **{report.summary}**\n"
    yield from (f"> {_plain(note)}\n" for note in report.notes)
    for finding in report.findings:
        yield f"### {finding.severity.upper()}: {_plain(finding.what)} ({finding.rule})\n"
        for line in finding.lines:
            words = filter(None, (line.code and _code(line.code), _plain(line.text)))
            yield f"- {line.label}: {' '.join(words)}"
        yield ""
    yield from (f"- forecast: {_plain(one)}\n" for one in report.forecasts)
    yield from (f"{_code(command)}\n" for command in report.commands)
    rows = [f"| {name} | {word} | {_plain(text)} |" for word, name, text in report.rules if word in _CHECKED]
    if rows:
        yield "| rule | checked | |\n|---|---|---|"
        yield from rows
        yield ""
    if report.skipped:
        yield f"{_plain(report.skipped)}\n"


def _plain(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def _code(text: str) -> str:
    """A code span that the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
