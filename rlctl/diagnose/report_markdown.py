"""A diagnosis as Markdown, for pull requests and notebooks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlctl.diagnose.finding import Diagnosis, Finding
from rlctl.diagnose.report import verdict
from rlctl.diagnose.table import RunLog
from rlctl.diagnose.wording import (
    how_to_apply,
    is_in_other_words,
    not_checked,
    run_name,
    seen,
    settings,
    visible,
)

#: Everything that could begin markup, HTML included.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@])")


def as_markdown(diagnoses: Sequence[Diagnosis]) -> str:
    """One section per run. Texts of a log are escaped: they show as they are and link nowhere."""
    return "\n".join(line for diagnosis in diagnoses for line in _run(diagnosis))


def _run(diagnosis: Diagnosis) -> Iterator[str]:
    run = diagnosis.run
    steps = run.table.steps
    yield f"## {_plain(run_name(run))}\n"
    yield f"Steps {steps[0]}–{steps[-1]}, logged by {run.framework}. **{verdict(diagnosis)[0]}**\n"
    for note in run.notes:
        yield f"> {_plain(note)}\n"
    for finding in diagnosis.findings:
        yield from _finding(finding, run)
    if any(remedy.spec for finding in diagnosis.findings for remedy in finding.remedies):
        for command in how_to_apply(run):
            yield f"{_code(command)}\n"
    yield "| rule | checked | |\n|---|---|---|"
    hit = {finding.rule for finding in diagnosis.findings}
    for rule in diagnosis.checked:
        yield f"| {rule.name} | {'found' if rule.name in hit else 'ok'} | {_plain(rule.looks_for)} |"
    for skipped in sorted(diagnosis.skipped, key=lambda one: not one.missing):
        word = "SKIPPED" if skipped.missing else "n/a"
        yield f"| {skipped.rule} | {word} | {_plain(not_checked(skipped, run))} |"
    yield ""


def _finding(finding: Finding, run: RunLog) -> Iterator[str]:
    yield f"### {finding.severity.upper()}: {_plain(finding.what)} ({finding.rule})\n"
    for evidence in finding.evidence:
        yield f"- seen: {_plain(seen(evidence))}"
    yield f"- cause: {_plain(finding.cause)}"
    for place, remedy in enumerate(finding.remedies):
        to_paste = settings(remedy, run)
        words = [_code(to_paste)] if to_paste else []
        words += ["in rlctl's keys;"] if is_in_other_words(remedy, run) else []
        words += [_plain(remedy.why)] if remedy.why else []
        yield f"- {'or' if place else 'try'}: {' '.join(words).rstrip(';')}"
    sure = f": {finding.why_so_sure}" if finding.why_so_sure else ""
    yield f"- confidence: {finding.confidence}{_plain(sure)}"
    for missing in finding.could_not_check:
        yield f"- could not be checked: {_plain(missing)}"
    yield f"- source of the threshold: {_plain(finding.source)}\n"


def _plain(text: str) -> str:
    return _MARKUP.sub(r"\\\1", visible(text))


def _code(text: str) -> str:
    """A code span that the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"
