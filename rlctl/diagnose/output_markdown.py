"""A diagnosis as Markdown, for pull requests and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlctl.diagnose.diagnosis_report import RunReport, run_report
from rlctl.diagnose.rules import Diagnosis
from rlctl.markdown import code, plain, table

_CHECKED = {"found", "ok"}


def as_markdown(diagnoses: Sequence[Diagnosis]) -> str:
    """One section per run. Texts from a log are escaped: they are shown literally, and contain no links."""
    return "\n".join(line for diagnosis in diagnoses for line in _run(run_report(diagnosis)))


def _run(report: RunReport) -> Iterator[str]:
    yield f"## {plain(report.name)}\n"
    yield f"{report.about[:1].upper()}{report.about[1:]}. **{report.summary}**\n"
    yield from (f"> {plain(note)}\n" for note in report.notes)
    for finding in report.findings:
        yield f"### {finding.severity.upper()}: {plain(finding.what)} ({finding.rule})\n"
        for line in finding.lines:
            words = filter(None, (line.code and code(line.code), plain(line.text)))
            yield f"- {line.label}: {' '.join(words)}"
        yield ""
    yield from (f"- forecast: {plain(one)}\n" for one in report.forecasts)
    yield from (f"{code(command)}\n" for command in report.commands)
    rows = [(name, word, plain(text)) for word, name, text in report.rules if word in _CHECKED]
    if rows:
        yield from table(("rule", "checked", ""), rows)
        yield ""
    if report.skipped:
        yield f"{plain(report.skipped)}\n"
