"""Findings in words that fit whoever reads them: the framework's own keys, and nothing that hides or acts."""

from __future__ import annotations

import re
import shlex

from rlctl.diagnose.finding import Evidence, Remedy, Skipped
from rlctl.diagnose.readers.source import STDIN
from rlctl.diagnose.table import RunLog
from rlctl.spec.load import RUN_SPEC_FILE

#: Control characters, those that turn or hide text, and halves of characters.
_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)


#: Where a framework's own log tells what a `spec.yaml` would.
_CONFIGURED = {
    "verl": "the configuration that verl prints first",
    "trl": "the training arguments, which are in TensorBoard's and W&B's logs",
    **dict.fromkeys(("openrlhf", "slime", "nemo-rl"), "the configuration, which is in W&B's log"),
}


def visible(text: str) -> str:
    """The text on one line, with characters that could act on a terminal or hide shown by their number."""
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def run_name(run: RunLog) -> str:
    """The log's path as it is shown."""
    return "standard input" if run.path == STDIN else visible(str(run.path))


def seen(evidence: Evidence) -> str:
    """`metric: figure, steps 3–40`."""
    where = "" if evidence.first_step is None else f", steps {evidence.first_step}–{evidence.last_step}"
    return visible(f"{evidence.metric}: {evidence.figure}{where}")


def not_checked(skipped: Skipped, run: RunLog) -> str:
    """Why, and what would enable it."""
    if not skipped.missing:
        return visible(skipped.why)
    enabling = ", ".join(skipped.missing)
    if RUN_SPEC_FILE in skipped.missing and run.framework in _CONFIGURED:
        enabling += f", or {_CONFIGURED[run.framework]}"
    return visible(f"{skipped.why}: {enabling}")


def settings(remedy: Remedy, run: RunLog) -> str:
    """The remedy in the keys of what wrote the log, ready to paste; empty where no setting helps.

    A framework that has no key for it is told rlctl's.
    """
    if run.framework in remedy.others:
        return visible(remedy.others[run.framework])
    return visible(" ".join(shlex.quote(setting) for setting in remedy.spec))


def is_in_other_words(remedy: Remedy, run: RunLog) -> bool:
    """Whether `settings` has only rlctl's keys for a log of another framework."""
    return bool(remedy.spec) and run.framework not in {"rlctl", "unknown", *remedy.others}


def how_to_apply(run: RunLog) -> tuple[str, ...]:
    """Commands that apply remedies; none where the run has no spec of rlctl's."""
    if run.spec is None:
        return ()
    spec = shlex.quote(visible(str(run.path.parent / RUN_SPEC_FILE)))
    log = shlex.quote(visible(str(run.path)))
    return (f"rlctl train --spec {spec} KEY=VALUE …", f"rlctl diagnose {log} --fix fixed.yaml")
