"""Evidence from a run's dumped rollouts, which decides what its log leaves open.

Whether equal responses got equal rewards is asked of every run. The test of the sampler's log-probs reads the
dumps of a run that does not log it. Which of the kept weights sampled is asked where the policies are visibly
apart, and the weights small enough to be scored in seconds; it needs the permission that the run's own code
needs. How many updates the optimizer remembers is asked where updates or policies are visibly apart. All but
the first import torch, which takes longer than a diagnosis.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlctl.diagnose.equal_responses import reward_noise
from rlctl.diagnose.table import DumpEvidence, RunLog
from rlctl.diagnose.thresholds import K3
from rlctl.errors import RlctlError
from rlctl.track.jsonl import METRICS_FILE

#: Bytes of all kept weights together up to which they are compared unasked.
LARGEST = 1 << 30
#: Distance of the policies, or of the updates on a batch, in nats per token, from which weights are read.
APART = 0.01
PPO_KL = "actor/ppo_kl"


def with_dumps(run: RunLog, *, trust: bool = False) -> RunLog:
    """A copy of the run with the evidence of its dumps; the run itself without any."""
    directory = run.path.parent
    is_own = run.spec is not None and run.path.name == METRICS_FILE
    # Without this pattern, which costs no import, there is no dump.
    has_dumps = is_own and any(directory.glob("*/rollouts-*.parquet"))
    if not has_dumps:
        return run
    evidence = DumpEvidence()
    notes = []
    logged = run.table.series("rollout_corr/log_wealth")
    gap = run.table.series(K3.key).values
    asked = [_reward_noise]
    if importlib.util.find_spec("torch") is not None:
        asked += [_sampler_test] if not len(logged) else []
        asked += [_who_sampled] if not len(gap) or gap.max() > APART else []
        moved = np.abs(run.table.series(PPO_KL).values)
        asked += [_optimizer_state] if max(gap.max(initial=0.0), moved.max(initial=0.0)) > APART else []
    for add in asked:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # libraries print when they are imported
                evidence = add(evidence, run, trust)
        except RlctlError as error:
            notes.append(f"{_ASKED[add]}: {error.what}")
    return replace(run, dumps=evidence, notes=(*run.notes, *notes))


def _reward_noise(evidence: DumpEvidence, run: RunLog, trust: bool) -> DumpEvidence:
    del trust  # it runs no code of the run
    files = sorted(file for file in run.path.parent.glob("*/rollouts-*.parquet") if file.is_file())
    weights = {term.label: term.weight for term in run.spec.reward.all_terms} if run.spec else {}
    return replace(evidence, reward_noise=reward_noise(files, weights)) if files else evidence


def _sampler_test(evidence: DumpEvidence, run: RunLog, trust: bool) -> DumpEvidence:
    from rlctl.mismatch.sampler_report import sampler_report

    del trust  # it runs no code of the run
    report = sampler_report(run.path.parent)
    return replace(
        evidence,
        sampler=report.conclusion,
        accuses_sampler=report.alarm_step is not None,  # a cut vocabulary is the rule of its own metric
        alarm_step=report.alarm_step,
        no_guarantee=report.no_guarantee,
        num_tokens=report.num_tokens,
    )


def _who_sampled(evidence: DumpEvidence, run: RunLog, trust: bool) -> DumpEvidence:
    directory = run.path.parent
    checkpoints = [path for path in (directory / "checkpoints").glob("*") if path.is_dir()]
    if not checkpoints or _size(directory / "checkpoints") > LARGEST:
        return evidence
    import torch

    if not torch.cuda.is_available():  # transformers imports DeepSpeed, which would print a warning
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from rlctl.mismatch.who_sampled import who_sampled

    found = who_sampled(directory, trust=trust)
    return replace(
        evidence, who_sampled=found.conclusion, wrong_sampler=found.fault or "", fix=found.fix or ""
    )


def _optimizer_state(evidence: DumpEvidence, run: RunLog, trust: bool) -> DumpEvidence:
    from rlctl.report.optimizer_state import optimizer_state

    del trust  # it runs no code of the run
    directory = run.path.parent
    if _size(directory / "checkpoints") > LARGEST:
        return evidence
    return replace(evidence, optimizer=optimizer_state(directory))


#: What a run that cannot answer does not show.
_ASKED = {
    _reward_noise: "the dumped rollouts do not show whether equal responses got equal rewards",
    _sampler_test: "the dumped rollouts do not show whether log-probs are true",
    _who_sampled: "the dumped rollouts do not show which weights sampled",
    _optimizer_state: "the checkpoints do not show what the optimizer remembers",
}


def _size(directory: Path) -> int:
    """Bytes of all files below a directory; 0 where there is none."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
