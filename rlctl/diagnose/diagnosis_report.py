"""Converts a diagnosis to texts, which terminal, Markdown and page share, to Markdown, and to JSON.

Texts from a log are untrusted: every text here is one line, with control and invisible characters escaped.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rlctl import errors
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Fix, Severity, Skipped
from rlctl.diagnose.fixes import read_step
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.signals import steps_text
from rlctl.diagnose.table import STDIN, RunLog
from rlctl.markup import code, plain, table
from rlctl.run_spec.load import RUN_SPEC_FILE

#: Timestamp of rlctl's rows, to the minute; searched in the first row and in the last `_TAIL_BYTES` bytes.
_STAMP, _TAIL_BYTES = re.compile(r'"timestamp": "(\d{4}-\d\d-\d\dT\d\d:\d\d)'), 1 << 16
#: Framework → what would enable skipped rules; see the file.
_ENABLING = tomllib.loads(Path(__file__).with_name("enabling.toml").read_text(encoding="utf-8"))
#: Fact → its name in a sentence.
_FACTS = {"kl_coef": "coefficient of the KL penalty", "max_response_length": "length limit"}


@dataclass(frozen=True, slots=True)
class Line:
    """One labelled line of a finding."""

    label: str  # `seen`, `logged`, `cause`, `chain`, `try`, `or`, `confidence`, `unchecked` or `source`
    text: str  # may be empty where `code` is not
    code: str = ""  # settings, ready to paste; or empty
    evidence: Evidence | None = None  # the figure that the line is about


class FindingReport(NamedTuple):
    """A finding as texts."""

    severity: Severity
    rule: str
    what: str
    lines: tuple[Line, ...]
    consequences: tuple[FindingReport, ...] = ()  # findings that it explains; their lines are what is seen
    is_resolved: bool = False  # the log shows the fault no longer


@dataclass(frozen=True, slots=True)
class RunReport:
    """A diagnosis as texts."""

    name: str  # path of the log, for display
    todo: str  # the thing to do, in one line
    about: str  # steps, framework, experiment, model and dates, as far as they are known
    summary: str  # all findings in one line
    status: str  # as in `Diagnosis`
    notes: tuple[str, ...]  # problems that were tolerated when reading, and inferred facts
    findings: tuple[FindingReport, ...]  # first events, with what they explain; then remarks
    commands: tuple[str, ...]  # commands that apply fixes
    #: (`found`, `ok`, `SKIPPED` or `n/a`; rule; its healthy state, or why it was skipped)
    rules: tuple[tuple[str, str, str], ...]
    #: number of rules that lack metrics or steps, and what would enable them, in one line; may be empty
    skipped: str
    #: rules whose metrics are logged, but not what they mean in this run: rule, and the fact that is missing
    unjudged: tuple[tuple[str, str], ...] = ()


def run_report(diagnosis: Diagnosis) -> RunReport:
    """Converts the diagnosis to texts."""
    run = diagnosis.run
    hit = {finding.rule for finding in diagnosis.findings}
    rules = [("found" if rule.name in hit else "ok", rule.name, rule.label) for rule in diagnosis.checked]
    waits = {skip.rule: bool(skip.missing or skip.needs_steps) for skip in diagnosis.skipped}
    for skipped in sorted(diagnosis.skipped, key=lambda one: not waits[one.rule]):
        rules.append(("SKIPPED" if waits[skipped.rule] else "n/a", skipped.rule, _why_skipped(skipped, run)))
    inferred = (
        f"{_FACTS.get(fact, fact)} {getattr(run.facts, fact):g}, {origin}"
        for fact, origin in run.fact_origins.items()
        if "inferred" in origin
    )
    firsts = [finding for finding in diagnosis.findings if not finding.because_of]
    findings = [_finding_report(first, diagnosis) for first in firsts]
    has_settings = any(fix.spec for finding in firsts for fix in finding.fixes)
    return RunReport(
        name=run_name(run),
        todo=todo(diagnosis),
        about=", ".join(_about(run)),
        summary=_summary(diagnosis),
        status=diagnosis.status,
        notes=tuple(map(visible, (*run.notes, *inferred))),
        findings=tuple(findings),
        commands=_commands(run) if has_settings else (),
        rules=tuple(rules),
        skipped=_skipped(diagnosis),
        unjudged=tuple(
            (skip.rule, _why_skipped(skip, run))
            for skip in diagnosis.skipped
            if skip.missing == (RUN_SPEC_FILE,)
        ),
    )


def todo(diagnosis: Diagnosis) -> str:
    """The thing to do, in one line: the first remedy of the first finding, and that finding."""
    first = next((one for one in diagnosis.findings if one.severity != "info"), None)
    if first is None and diagnosis.run.is_supervised:
        return "nothing of reinforcement learning: a log of supervised fine-tuning, which no rule judges"
    if first is None:
        return (
            "nothing to change" if diagnosis.status == "no warnings" else "log more: too little was checked"
        )
    best = first.fixes[0] if first.fixes else read_step(first.since)
    pasted = settings(best, diagnosis.run)
    if best.spec and pasted:
        pasted = f"set {pasted}"
    elif best.why:  # a key alone says nothing
        pasted = ""
    return f"{pasted or visible(best.why)} — because {visible(first.what)}"


def _finding_report(first: Finding, diagnosis: Diagnosis) -> FindingReport:
    """A first event with the findings that it explains."""
    explained = [finding for finding in diagnosis.findings if finding.because_of == first.rule]
    consequences = (
        FindingReport(
            consequence.severity,
            consequence.rule,
            visible(consequence.what),
            tuple(_seen(consequence)),
            is_resolved=consequence.is_resolved,
        )
        for consequence in explained
    )
    lines = tuple(_lines(first, explained, diagnosis.run))
    message = visible(first.what)
    return FindingReport(
        severity=first.severity,
        rule=first.rule,
        what=message,
        lines=lines,
        consequences=tuple(consequences),
        is_resolved=first.is_resolved,
    )


def _about(run: RunLog) -> Iterator[str]:
    """Steps, framework, and where known the experiment, the model and the dates."""
    steps = run.table.steps
    yield steps_text(int(steps[0]), int(steps[-1])) if len(steps) else "no step"
    yield f"logged by {run.framework}"
    if run.spec is not None:
        yield visible(f"experiment {run.spec.trainer.experiment_name}, model {run.spec.model.path}")
    if run.path != STDIN and run.path.is_file():
        with run.path.open("rb") as log:
            first = log.readline()
            log.seek(max(0, run.path.stat().st_size - _TAIL_BYTES))
            stamps = _STAMP.findall((first + log.read()).decode("utf-8", "replace"))
        changed = f"{datetime.fromtimestamp(run.path.stat().st_mtime):%Y-%m-%d %H:%M}"
        ends = [stamp.replace("T", " ") for stamp in (stamps[:1] + stamps[-1:])]
        yield " to ".join(dict.fromkeys(ends)) if ends else f"last written {changed}"


def visible(text: str) -> str:
    """The text on one line, with control and invisible characters escaped."""
    return errors.visible(text, keep="")


def run_name(run: RunLog) -> str:
    """The log's path for display."""
    return "standard input" if run.path == STDIN else visible(str(run.path))


def settings(fix: Fix, run: RunLog) -> str:
    """The fix's settings, to paste, in the keys of the log's framework or else rlctl's; empty without any."""
    ours = " ".join(shlex.quote(setting) for setting in fix.spec)
    return visible(fix.others.get(run.framework, ours))


def _summary(diagnosis: Diagnosis) -> str:
    counts = {s: sum(finding.severity == s for finding in diagnosis.findings) for s in SEVERITIES}
    rules = len(diagnosis.checked)
    steps = len(diagnosis.run.table.steps)
    basis = f"{_rules(rules)} checked on {steps:,} step{'s' * (steps != 1)}"
    if diagnosis.status in SEVERITIES:
        return f"{', '.join(f'{count} {s}' for s, count in counts.items() if count)} ({basis})"
    if diagnosis.status == "no warnings":
        return f"{basis}: no warnings."
    return f"Too little data for a conclusion: {basis}. No finding does not mean that the run is healthy."


def _skipped(diagnosis: Diagnosis) -> str:
    """Number of rules that lack metrics, with what would enable most of them, and that lack steps."""
    short = [one for one in diagnosis.skipped if one.needs_steps]
    steps = f"{_rules(len(short))} need more steps: {max((one.needs_steps for one in short), default=0)}"
    waiting = [one for one in diagnosis.skipped if one.missing]
    if not waiting:
        return f"{steps} for all of them" if short else ""
    run = diagnosis.run
    # TRL's asynchronous GRPO, or its PPO.
    has_other_settings = run.framework == "trl" and (run.facts.bypass_mode or run.facts.has_critic)
    settings = {} if has_other_settings else _ENABLING.get(run.framework, {}).get("settings", {})
    ways = {setting: re.compile(pattern) for setting, pattern in settings.items()}
    ways |= {key: re.compile(re.escape(key)) for one in waiting for key in one.missing}
    helps = {way: sum(any(map(key.match, one.missing)) for one in waiting) for way, key in ways.items()}
    way, count = max(helps.items(), key=lambda item: item[1])
    if way == RUN_SPEC_FILE:
        way += _or_configured(run)
    lacking = (
        f"{_rules(len(waiting))} SKIPPED: the log lacks their metrics. {count} of them would run with: {way}"
    )
    return visible(f"{lacking}. {steps}" if short else lacking)


def _rules(count: int) -> str:
    return f"{count} rule{'s' * (count != 1)}"


def _seen(finding: Finding) -> Iterator[Line]:
    for evidence in finding.evidence:
        first = evidence.first_step
        last = evidence.last_step
        where = "" if first is None or last is None else f", {steps_text(first, last)}"
        yield Line("seen", visible(f"{evidence.metric}: {evidence.figure}{where}"), evidence=evidence)


def _lines(finding: Finding, explained: Sequence[Finding], run: RunLog) -> Iterator[Line]:
    yield from _seen(finding)
    for key in dict.fromkeys(evidence.metric for evidence in finding.evidence):
        origin = run.origins.get(key)
        if origin is not None and (origin.name != key or origin.meaning):
            meaning = f": {origin.meaning}" if origin.meaning else ""
            yield Line("logged", visible(f"{key} as {origin.name}{meaning}"))
    yield Line("cause", visible(finding.cause))
    if explained:
        events = [
            f"{consequence.rule}{'' if consequence.since is None else f' in step {consequence.since:,}'}"
            for consequence in explained
        ]
        begin = finding.rule if finding.since is None else f"{finding.rule} in step {finding.since:,}"
        yield Line("chain", visible(f"first {begin}, then {', '.join(events)}"))
    for index, fix in enumerate(finding.fixes):
        is_ours = bool(fix.spec) and run.framework not in {"rlctl", "unknown", *fix.others}
        why = "; ".join(filter(None, ("in rlctl's keys" if is_ours else "", visible(fix.why))))
        yield Line("or" if index else "try", why, settings(fix, run))
    confidence = filter(None, (finding.confidence, finding.confidence_reason))
    yield Line("confidence", visible(": ".join(confidence)))
    for missing in finding.could_not_check:
        yield Line("unchecked", visible(missing))
    yield Line("source", visible(finding.source))


def _why_skipped(skipped: Skipped, run: RunLog) -> str:
    """The reason, and what would enable the rule."""
    if not skipped.missing:
        return visible(skipped.why)
    configured = _or_configured(run) if RUN_SPEC_FILE in skipped.missing else ""
    return visible(f"{skipped.why}: {', '.join(skipped.missing)}{configured}")


def _or_configured(run: RunLog) -> str:
    """Where the log may contain the settings of a spec; an empty text where that is unknown."""
    where = _ENABLING.get(run.framework, {}).get("configured")
    return f", or {where}" if where else ""


def _commands(run: RunLog) -> tuple[str, ...]:
    """Commands that apply fixes; none where the run has no spec of rlctl."""
    if run.spec is None:
        return ()
    again = train_again(run.path.parent / RUN_SPEC_FILE, run, "KEY=VALUE …")
    return again, f"rlctl diagnose {shlex.quote(visible(str(run.path)))} --fix fixed.yaml"


def train_again(spec: Path, run: RunLog, *settings: str) -> str:
    """The command that trains with a run's spec and other settings, in another directory."""
    has_directory = run.spec is not None and run.spec.trainer.run_dir is not None
    other = ["trainer.run_dir=null"] if has_directory else []
    return " ".join(("rlctl train --spec", shlex.quote(visible(str(spec))), *other, *settings))


def diagnosis_document(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """The diagnoses as plain values for JSON."""
    return {"runs": [_run_document(diagnosis) for diagnosis in diagnoses]}


def _run_document(diagnosis: Diagnosis) -> dict[str, Any]:
    run = diagnosis.run
    steps: list[int] = run.table.steps.tolist() or [None]
    return {
        "log": str(run.path),
        "framework": run.framework,
        "steps": {"first": steps[0], "last": steps[-1], "count": len(run.table.steps)},
        "status": diagnosis.status,
        "summary": _summary(diagnosis),
        "has_spec": run.spec is not None,
        "facts": asdict(run.facts),
        "fact_origins": dict(run.fact_origins),
        "notes": list(run.notes),
        "unread": list(run.unread),
        "findings": [_finding_document(finding) for finding in diagnosis.findings],
        "checked": [{"rule": rule.name, "label": rule.label} for rule in diagnosis.checked],
        "skipped": [asdict(skipped) for skipped in diagnosis.skipped],
    }


def _finding_document(finding: Finding) -> dict[str, Any]:
    content = asdict(finding)
    return {key: value for key, value in content.items() if key not in {"explains", "is_first"}}


def overview(diagnoses: Sequence[Diagnosis]) -> str:
    """Of several runs, how many are sick, and the thing to do first; one line."""
    worst = by_severity(diagnoses)[0]
    sick = sum(one.status in SEVERITIES for one in diagnoses)
    if not sick:
        return f"none of {len(diagnoses)} runs has a warning"
    return f"{sick} of {len(diagnoses)} runs are sick; begin with {run_name(worst.run)}: {todo(worst)}"


def by_severity(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """The sickest first; of equal ones, in their order."""
    order = (*SEVERITIES[:2], "insufficient data", "no warnings")
    return sorted(diagnoses, key=lambda one: order.index(one.status))


def shown(diagnoses: Sequence[Diagnosis], *, all_: bool) -> list[Diagnosis]:
    """Those that a report describes: a single run, and of several the sick ones, or all."""
    ordered = by_severity(diagnoses)
    return ordered if all_ or len(ordered) == 1 else [one for one in ordered if one.status in SEVERITIES]


def as_markdown(diagnoses: Sequence[Diagnosis], *, all_: bool = False) -> str:
    """One section per run that is `shown`, after a table of several.

    Texts from a log are escaped: they are shown literally, and contain no links.
    """
    lines: list[str] = []
    if len(diagnoses) > 1:
        headings = ("run", "logged by", "steps", "status", "first finding")
        rows = [tuple(map(plain, overview_row(one))) for one in by_severity(diagnoses)]
        lines = [f"**{plain(overview(diagnoses))}**\n", *table(headings, rows), ""]
    for diagnosis in shown(diagnoses, all_=all_):
        lines += _markdown(run_report(diagnosis), all_=all_)
    return "\n".join(lines)


def overview_row(diagnosis: Diagnosis) -> tuple[str, str, str, str, str]:
    """Log, program, number of steps, status, and first finding of a run."""
    first = diagnosis.findings[0].what if diagnosis.findings and diagnosis.status in SEVERITIES else ""
    run = diagnosis.run
    return run_name(run), run.framework, str(len(run.table.steps)), diagnosis.status, visible(first)


def _markdown(report: RunReport, *, all_: bool) -> Iterator[str]:
    yield f"**{plain(report.todo)}**\n"
    yield f"## {plain(report.name)}\n"
    yield f"{report.about[:1].upper()}{report.about[1:]}. **{report.summary}**\n"
    yield from (f"> {plain(note)}\n" for note in report.notes)
    for finding in report.findings:
        yield f"### {finding.severity.upper()}: {plain(finding.what)} ({finding.rule})\n"
        for line in finding.lines:
            words = filter(None, (line.code and code(line.code), plain(line.text)))
            yield f"- {line.label}: {' '.join(words)}"
        yield from (
            f"- then {consequence.severity}: {plain(consequence.what)} ({consequence.rule})"
            for consequence in finding.consequences
        )
        yield ""
    yield from (f"{code(command)}\n" for command in report.commands)
    rows = [(name, word, plain(text)) for word, name, text in report.rules if word in {"found", "ok"}]
    if rows and all_:
        yield from table(("rule", "checked", ""), rows)
        yield ""
    yield from (f"Not judged: {name}: {plain(why)}\n" for name, why in report.unjudged)
    if report.skipped:
        yield f"{plain(report.skipped)}\n"
