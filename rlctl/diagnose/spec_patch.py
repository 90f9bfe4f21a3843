"""Writes the best fixes of a diagnosis as a spec file for `rlctl train --spec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from rlctl.diagnose.diagnosis_report import run_name, settings, visible
from rlctl.diagnose.finding import Finding, Fix
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.table import RunLog
from rlctl.errors import SpecError, UsageError
from rlctl.run_spec.keys import flat, nested
from rlctl.run_spec.load import dump_spec, dump_value, load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.sources import read_value


class Applied(NamedTuple):
    """A fix that goes into the new spec, and its finding."""

    finding: Finding
    fix: Fix


class NotApplied(NamedTuple):
    """A finding that changes nothing in the new spec, and why."""

    finding: Finding
    why: str


@dataclass(frozen=True, slots=True)
class SpecPatch:
    """The new spec that `--fix` writes, and the fixes in it."""

    run: RunLog  # the diagnosed run
    applied: tuple[Applied, ...]  # the worst finding's fix first
    not_applied: tuple[NotApplied, ...]  # findings without a fix in the new spec
    #: the run's spec with the changes; None where the log has no spec, so that only the changes are written
    spec: RunSpec | None

    @property
    def changes(self) -> Mapping[str, str]:
        """Dotted key → value as text."""
        return {key: value for each in self.applied for key, value in each.fix.settings.items()}


def propose_patch(diagnosis: Diagnosis) -> SpecPatch:
    """Chooses the first possible fix of the first cause: the worst event that is at least a warning.

    Changes for other events are left out: one change at a time shows whether it was the cause.

    A fix is possible if the spec with it passes the checks. Without a spec of the run, it is checked on top
    of the defaults.
    """
    base = diagnosis.run.spec
    chosen: list[Applied] = []
    left: list[NotApplied] = []
    spec = base or load_spec().spec
    first = next((one for one in diagnosis.findings if one.severity != "info" and not one.because_of), None)
    for finding in diagnosis.findings:
        outcome = _best(finding, base, spec) if finding is first else _why_left(finding, first)
        if isinstance(outcome, str):
            left.append(NotApplied(finding, outcome))
        else:
            chosen.append(outcome[0])
            spec = outcome[1]
    return SpecPatch(diagnosis.run, tuple(chosen), tuple(left), spec if base else None)


def _why_left(finding: Finding, first: Finding | None) -> str:
    """Why a finding that is not the first cause changes nothing."""
    if finding.severity == "info" or first is None:
        return "only a remark"
    if finding.because_of:
        return f"a consequence of {finding.because_of}"
    return f"first see whether it is left without {first.rule}"


def _best(finding: Finding, base: RunSpec | None, spec: RunSpec) -> tuple[Applied, RunSpec] | str:
    """The first possible fix and the resulting spec; or the reason why there is none."""
    with_settings = [fix for fix in finding.fixes if fix.spec]
    if not with_settings:
        by_hand = "; ".join(fix.why for fix in finding.fixes)
        return f"no config key fixes this; what to do: {by_hand}" if by_hand else "no fix is known"
    own = flat(base.model_dump(mode="json")) if base else {}
    before = [f"{key}={dump_value(value)}" for key, value in own.items()]
    whys: list[str] = []
    for fix in with_settings:
        try:
            changed = load_spec(overrides=[*before, *fix.spec]).spec
        except SpecError as error:
            first = next(problem for problem in error.problems if problem.severity == "error")
            whys.append(f"{' '.join(fix.spec)}: {first.what}")
            continue
        if changed == spec and base is not None:
            return "the spec has this value already"
        return Applied(finding, fix), changed
    return "; ".join(whys)


def check_free(path: Path) -> None:
    """Checks, before the work is done, that a new file can be created at the path.

    Raises:
        UsageError: the file exists, or its directory does not.
    """
    if path.exists() or path.is_symlink():
        where = str(path)
        how = "choose another name, or remove it first"
        raise UsageError("the file exists; --fix does not overwrite", where=where, fix=how)
    if not path.parent.is_dir():
        raise UsageError("no such directory", where=str(path.parent), fix="create it first")


def write_patch(path: Path, patch: SpecPatch) -> None:
    """Writes the new spec; comments at its beginning give each change, its finding and the previous value.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    check_free(path)
    text = as_yaml(patch)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error


def as_yaml(patch: SpecPatch) -> str:
    """The text that `write_patch` writes."""
    run = patch.run
    if patch.spec is not None:
        head = [f"The spec of {run_name(run)} with what `rlctl diagnose` proposes."]
        text = dump_spec(patch.spec)
    else:
        head = [f"Only the changes that `rlctl diagnose` proposes for {run_name(run)}, in rlctl's keys:"]
        head.append("the log has no spec of rlctl. Combine the file with yours: a second --spec.")
        changes = {key: read_value(value).value for key, value in patch.changes.items()}
        text = yaml.safe_dump(nested(changes), sort_keys=False, allow_unicode=True, width=1 << 20)
    before = flat(run.spec.model_dump(mode="json")) if run.spec else {}
    for each in patch.applied:
        for key, value in each.fix.settings.items():
            was = f" (was {dump_value(before[key])})" if key in before else ""
            head.append(f"{key}={value}{was}: {each.finding.rule}, {each.finding.what}")
        if run.framework in each.fix.others:
            head.append(f"in {run.framework}: {settings(each.fix, run)}")
    head += [
        f"Not applied: {each.finding.rule} ({each.finding.severity}): {each.why}"
        for each in patch.not_applied
        if each.finding.severity != "info"
    ]
    return "".join(f"# {visible(line)}\n" for line in head) + text
