"""The rule about what a run's dumped rollouts and kept weights show: who sampled."""

from __future__ import annotations

from rlctl.diagnose import fixes as fix
from rlctl.diagnose.finding import Evidence, Severity, Skipped
from rlctl.diagnose.rule import Detection, Rule
from rlctl.diagnose.table import RunLog

_DUMP = "dumped rollouts"
_CAUSES = {
    "never delivered": "a weight sync is confirmed, but the engine goes on with its old weights",
    "late": "the engine samples while, or before, it receives the weights that it names",
    "base": "the engine samples without the adapter",
    "unknown": "the engine has weights that the run never had, or computes otherwise",
}


@Rule("who-sampled", thresholds="— / none of the kept weights / others than recorded")
def sampled_by_others(run: RunLog) -> Detection | Skipped | None:
    """The weights that a rollout names are those that sampled it."""
    if run.dumps is None or not run.dumps.who_sampled:
        return Skipped("no dumped rollouts were compared with two kept versions of the weights")
    fault = run.dumps.wrong_sampler
    if not fault:
        return None
    severity: Severity = "warning" if fault == "unknown" else "critical"
    seen = Evidence(_DUMP, f"{run.dumps.who_sampled} (`rlctl diagnose RUN --who-sampled`)")
    check = (fix.by_hand(run.dumps.fix), fix.PROVE_THE_SYNC)
    is_known = severity == "critical"
    # Weights that nobody knows are what any gap looks like: a rule that says which gap explains them.
    first_step = int(run.table.steps[0]) if len(run.table.steps) else None
    return Detection(
        severity=severity,
        what=run.dumps.who_sampled,
        evidence=(seen,),
        cause=_CAUSES.get(fault),
        fixes=check,
        since=None if is_known else first_step,
        explains=None if is_known else (),
        is_first=is_known,
    )
