"""Entry point of `rlctl diagnose --what-if`: finds the dump and the spec, and runs the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlctl.algos.usable_length import PrefixSums
from rlctl.capabilities.sections import sections_on
from rlctl.run_spec.resolve import correction_rules, loss_rule
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.run_dir import SPEC_FILE
from rlctl.track.trust import spec_or_note
from rlctl.what_if.dumps import Dump, Step, find_dump
from rlctl.what_if.settings import grid
from rlctl.what_if.tradeoff import Tradeoff


def what_if(path: Path, *, trust: bool = False) -> Tradeoff:
    """Replays the dumped rollouts of a run under every setting of the grid.

    Args:
        path: run directory, directory of dumped rollouts, or one dumped file. A `spec.yaml` in the files'
            directory or its parent provides the run's setting, advantage estimator and mini-batch size.
        trust: run the code that this spec names, also if no run of this user has written it.

    Raises:
        UsageError: there are no dumped rollouts, they cannot be read, or none has finite log-probs.
    """
    from rlctl.what_if.replay import replay  # imports torch, which takes seconds

    dump = find_dump(path)
    lengths = PrefixSums()
    dump = dump._replace(steps=_noted(dump.steps, lengths))
    spec, notes = _spec_of_dump(dump, trust)
    if spec is None:
        tradeoff = replay(dump.steps, grid())
        return replace(tradeoff, notes=(*notes, *tradeoff.notes), usable_length=lengths.result())
    algorithm = spec.algorithm
    correction = spec.algorithm.rollout_correction
    omitted = "the run's own setting is omitted"
    why_omitted = {
        f"in bypass mode loss_type={correction.loss_type} corrects by its own ratio and applies no weight: "
        f"{omitted}; weights need loss_type=reinforce or bypass_mode=false": (
            correction.bypass_mode and loss_rule(spec).has_ratio
        ),
        f"the ages of responses are not in the dump: {omitted}": "age" in correction_rules(correction).needs,
    }
    for section in sections_on(spec).values():
        why = section.why_not_replayed(spec)
        if why:
            why_omitted[f"{why}: {omitted}"] = True
    notes += [why for why, is_so in why_omitted.items() if is_so]
    if algorithm.use_kl_in_reward:
        notes.append("advantages are without the penalty of use_kl_in_reward, which is not in the dump")
    if algorithm.filter_groups.curriculum:
        notes.append("advantages are without the curriculum's probabilities, which are not in the dump")
    is_dr_grpo = algorithm.adv_estimator == "grpo" and not algorithm.norm_adv_by_std_in_grpo
    tradeoff = replay(
        dump.steps,
        grid(None if any(why_omitted.values()) else correction),
        estimator="dr_grpo" if is_dr_grpo else algorithm.adv_estimator,
        groups_per_batch=spec.ppo_mini_batch_size,
        mean_per_sequence=spec.actor.loss_agg_mode == "seq-mean-token-mean",
    )
    return replace(tradeoff, notes=(*notes, *tradeoff.notes), usable_length=lengths.result())


def _noted(steps: Iterator[Step], lengths: PrefixSums) -> Iterator[Step]:
    """The steps; the ratios of the sequences of each are added to `lengths` as it is read."""
    for step in steps:
        sizes = step.lengths if step.sequence_lengths is None else step.sequence_lengths
        lengths.add(step.log_probs - step.rollout_log_probs, sizes)
        yield step


def _spec_of_dump(dump: Dump, trust: bool) -> tuple[RunSpec | None, list[str]]:
    """Reads the spec next to the dump, where `rlctl train` writes it; an invalid spec gives a note, not an
    error."""
    for directory in (dump.files[0].parent, dump.files[0].parent.parent):
        path = directory / SPEC_FILE
        if path.is_file():
            return spec_or_note(path, trust=trust)
    return None, ["no spec.yaml next to the dump: advantages as in rloo, one dumped step as one mini-batch"]
