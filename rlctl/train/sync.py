"""Sends new weights to the rollout engine and verifies that it samples with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlctl.batch import TokenBatch
from rlctl.environment.single_turn import sample_episodes
from rlctl.errors import RunFailure
from rlctl.rollout.completions import MERGE_LORA
from rlctl.rollout.protocol import sampling_of
from rlctl.rollout.seeds import step_seed
from rlctl.train.deal import deal
from rlctl.train.run import is_sync_due
from rlctl.train.step_metrics import ENGINE, StepTimer

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from rlctl.rollout.shared_engine import LockedRollout
    from rlctl.train.run import Run

PROBE_PROMPTS, PROBE_TOKENS = 2, 32
#: Nats per token. Another precision or kernel causes a gap of 0.001 to 0.05, another temperature 0.3, an
#: output head with old weights 0.8.
LARGEST_GAP = 0.3
#: Nats per token. A smaller gap does not show which weights an engine has.
SMALLEST_GAP = 1e-3
#: `prove_sync` changes weights by about 2^−bit of themselves: the first of these bits that changes log-probs
#: by this many usual gaps, and by this many nats. An engine has the changed weights if its log-probs are at
#: most this share of the change away from theirs.
_BITS, _CLEAR, _VISIBLE, _NEAR = (5, 4, 3, 2, 1), 8.0, 0.02, 0.25


def sync_weights(run: Run, step: int, timer: StepTimer) -> dict[str, float]:
    """Sends the policy's weights to the rollout engine if due; returns the metrics of `confirm_sync`."""
    if not is_sync_due(run, step):
        return {}
    with timer("sync_weights"):
        run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
        return confirm_sync(run, step)


def check_first_sync(run: Run) -> None:
    """Tests the sync at the start of a run, by `prove_sync` or `confirm_sync`; raises as these."""
    wanted, checks = run.spec.rollout.prove_sync, run.spec.rollout_engine.checks_syncs
    if wanted or (wanted is None and checks and hasattr(run.actor, "perturbed")):  # not all engines of users
        run.tracker.note(prove_sync(run, run.start_step))
    else:
        confirm_sync(run, run.start_step)


def confirm_sync(run: Run, step: int) -> dict[str, float]:
    """Checks that engine and trainer have the same weights: samples a few tokens and scores them.

    Engines that copy tensor by tensor in this process need no such check.

    Raises:
        RunFailure: the log-probs differ by more than precision explains, or the engine ignores the adapter.
    """
    if not run.spec.rollout_engine.checks_syncs:
        return {}
    found = _checked(run, [("", _probe(run, run.rollout, step))], step)
    total = sum(one.tokens for one in found)
    return {
        "rollout/sync_gap": sum(one.new * one.tokens for one in found) / total,
        ENGINE: sum(one.square * one.tokens for one in found) / total,
    }


def _checked(run: Run, probes: list[tuple[str, TokenBatch]], step: int) -> list[_Distance]:
    """Distances of the engine from the policy; raises as `confirm_sync`."""
    found = [one for name, batch in probes for one in _compared(run, name, batch, _policy(run, batch))]
    for one in found:
        # An adapter that the engine ignores shows long before the gap to the policy is large.
        if one.new > SMALLEST_GAP and one.new > 2 * one.base:
            raise _without_adapter(one, one.replica)
        if not one.new <= LARGEST_GAP:  # NaN too
            raise RunFailure(
                f"after a weight sync the log-probs of {one.replica} are {one.new:.3g} nats per token away "
                "from the trainer's: it does not sample with the synced weights",
                where=f"rollout.name: {run.spec.rollout.name}, step {step}",
                fix="`rlctl diagnose mismatch` names the cause",
            )
    return found


def prove_sync(run: Run, step: int) -> str:
    """Proves that weight syncs reach all trained weights of every replica of the engine (a collective).

    The weights are changed and synced: each replica's log-probs must be those of the changed policy. The
    change is undone and synced: they must be those of the policy. The trainer's weights are as before.

    Returns:
        The result in words.

    Raises:
        RunFailure: a replica keeps old weights (it names the replica, or the weights) or ignores the adapter.
    """
    probes = _probes(run, step)
    usual = _worst(_checked(run, probes, step))
    own = [(name, batch, _policy(run, batch)) for name, batch in probes]
    for bit in _BITS:
        with run.actor.perturbed(bit):
            moved = [(name, batch, _policy(run, batch), old) for name, batch, old in own]
        change = min(one.change for row in moved for one in _compared(run, *row))
        if change >= max(_CLEAR * usual, _VISIBLE):
            break
    else:
        what = f"a change of the weights moves log-probs by {change:.2g} nats per token"
        return f"warning: the weight sync is not proven: {what}, engine and trainer differ by {usual:.2g}"
    found = _after_change(run, step, bit)
    lost = [one for one in found if not one.has_new]
    parts = []
    if lost and not any(one.has_old for one in lost):
        for part, names in run.actor.parts.items():
            seen = [one for one in _after_change(run, step, min(_BITS), names) if one.change > _CLEAR * usual]
            parts += [part] if any(not one.has_new for one in seen) else []
    run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
    if lost:
        raise _unproven(run, lost, len(found), parts)
    left = _worst(_checked(run, _probes(run, step), step))
    if not left <= _NEAR * change:
        raise RunFailure(
            "after a change of the weights and its reversal, the rollout engine's log-probs are "
            f"{left:.2g} nats per token away from the trainer's, {usual:.2g} before",
            where=f"rollout.name: {run.spec.rollout.name}",
        )
    reached = f"all {len(found)} replicas" if len(found) > 1 else found[0].replica
    return (
        f"the weight sync reaches {reached}: a change of the weights moves log-probs by {change:.2g} nats "
        f"per token, the same in trainer and engine up to {_worst(found):.1g}, and can be undone"
    )


def _unproven(run: Run, lost: list[_Distance], count: int, parts: list[str]) -> RunFailure:
    """The error that names what does not arrive."""
    where, one = f"rollout.name: {run.spec.rollout.name}", lost[0]
    who = one.replica if len(lost) in {1, count} else f"{one.replica} and {len(lost) - 1} other replicas"
    who = f"every replica ({who}, …)" if 1 < count == len(lost) else who
    far = f"after a change of the weights, its log-probs are {one.new:.2g} nats away from the trainer's"
    if len(lost) == count and one.base <= _NEAR * one.new:
        return _without_adapter(one, who)
    if one.has_old:
        what = f"no weight sync reaches {who}: {far}, and those of the weights before it"
        return RunFailure(what, where=where, fix="restart that engine; see its log for a failed update")
    named = f" {', '.join(parts)}" if parts else " some weights"
    fix = "sample with rollout.name=hf, or use an engine that reloads them"
    if any("tied" in part for part in parts):
        fix = f"untie the output head, or let the engine repack it after a reload; or {fix}"
    return RunFailure(f"a weight sync to {who} does not reach{named}: {far}", where=where, fix=fix)


def _without_adapter(one: _Distance, who: str) -> RunFailure:
    return RunFailure(
        f"{who} samples without the adapter: its log-probs are {one.new:.3g} nats per token away from the "
        f"policy's and {one.base:.3g} from the base model's",
        where="rollout.name",
        fix=MERGE_LORA,
    )


@dataclass(frozen=True, slots=True)
class _Distance:
    """Distances over the tokens that a replica sampled, in nats per token."""

    replica: str
    tokens: float
    #: mean |log π − log π_rollout|: of the policy, of the one before a change, and without its adapter, if
    #: the engine applies it (else that of the policy)
    new: float
    old: float
    base: float
    change: float  # mean |difference| of the log-probs of these two policies
    square: float  # mean (log π − log π_rollout)² of the policy

    @property
    def has_new(self) -> bool:
        """Whether the replica samples with the weights after the change; False with NaN."""
        return self.new <= _NEAR * self.change

    @property
    def has_old(self) -> bool:
        """Whether it samples with the weights before the change."""
        return self.old <= _NEAR * self.change


def _worst(found: list[_Distance]) -> float:
    return max((one.new for one in found), key=lambda gap: (math.isnan(gap), gap))


def _after_change(run: Run, step: int, bit: int, names: Collection[str] | None = None) -> list[_Distance]:
    """Changes these weights, syncs, and samples with each replica; the trainer's are then as before."""
    with run.actor.perturbed(bit, names):
        run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
        new = [(name, batch, _policy(run, batch)) for name, batch in _probes(run, step)]
    return [one for row in new for one in _compared(run, *row, _policy(run, row[1]))]


#: Probes are sampled without truncation, and nothing but experts is recorded.
_WHOLE_DISTRIBUTION: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "with_kept": False,
    "num_most_likely": 0,
}


def _probes(run: Run, step: int) -> list[tuple[str, TokenBatch]]:
    """Each replica's name, or `""`, and tokens that it sampled."""
    return [(name, _probe(run, engine, step)) for name, engine in run.rollout.each()]


def _probe(run: Run, engine: LockedRollout, step: int) -> TokenBatch:
    """Tokens that the engine samples on each rank for a few prompts, dealt to the ranks that score them."""
    ranks, prompts = run.ranks, run.train_prompts
    first = ranks.rank * PROBE_PROMPTS
    places = [(first + i) % len(prompts) for i in range(PROBE_PROMPTS)]
    episodes = sample_episodes(
        engine,
        prompts.tasks(places, list(range(first, first + PROBE_PROMPTS))),
        1,
        replace(
            sampling_of(run.spec),
            max_response_length=min(PROBE_TOKENS, run.spec.data.max_response_length),
            **_WHOLE_DISTRIBUTION,
        ),
        step_seed(run.spec.trainer.seed, step, "probe"),
        run.tokenizer,
    )
    if engine.shares_device:
        engine.release(weights_follow=False)
    count = ranks.world_size * PROBE_PROMPTS
    return deal(episodes.tokens.to(ranks.device), ranks, count, run.spec.engine.sequence_parallel)


@torch.no_grad()
def _policy(run: Run, batch: TokenBatch) -> Tensor:
    """(M,) log-probs of the trainer's policy."""
    return run.actor.policy(batch.inputs).log_probs


def _compared(
    run: Run, name: str, batch: TokenBatch, new: Tensor, old: Tensor | None = None
) -> list[_Distance]:
    """Distances of a named replica over all ranks, or without a name of each rank's engine.

    Args:
        new, old: (M,) log-probs under both policies; `old` None: there is one.

    Raises:
        RunFailure: no token was sampled.
    """
    rollout, old = batch.rollout_log_probs, new if old is None else old
    base = run.base.log_probs(batch.inputs) if run.base and run.spec.syncs_adapter else new
    parts = torch.stack(
        [torch.ones_like(new), new - rollout, old - rollout, base - rollout, new - old, (new - rollout) ** 2]
    )
    columns = parts.abs().double().cpu()
    source = batch.units.episode.spread(batch.group_ids // PROBE_PROMPTS).cpu()
    world = run.ranks.world_size
    sums = [columns[:, source == rank].sum(1).tolist() for rank in range(world)]
    total = torch.tensor(run.ranks.sum([value for of_rank in sums for value in of_rank]), dtype=torch.float64)
    rows = total.view(world, len(columns))
    rows = rows.sum(0, keepdim=True) if name else rows
    if not rows[:, 0].all():
        raise RunFailure("the rollout engine sampled no token after a weight sync", where="rollout.name")
    names = [
        name or ("the rollout engine" if world == 1 else f"the engine of rank {r}") for r in range(world)
    ]
    return [
        _Distance(replica, tokens, *(value / tokens for value in more))
        for replica, (tokens, *more) in zip(names, rows.tolist(), strict=False)
    ]
