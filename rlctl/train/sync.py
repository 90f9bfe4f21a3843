"""Sends new weights to the rollout engine and verifies that it samples with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlctl.algos.total_variation import total_variation_bounds
from rlctl.batch import TokenBatch
from rlctl.environment.single_turn import sample_episodes
from rlctl.errors import RunFailure
from rlctl.rollout.completions import MERGE_LORA
from rlctl.rollout.seeds import step_seed
from rlctl.train.capability import Probe
from rlctl.train.deal import deal
from rlctl.train.settings import is_sync_due
from rlctl.train.step_metrics import ENGINE, StepTimer

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from rlctl.rollout.shared_engine import LockedRollout
    from rlctl.train.run import Run

PROBE_PROMPTS, PROBE_TOKENS = 2, 32
#: Most likely tokens that an engine lists for a probe: within vLLM's default limit of 20.
PROBE_LISTED = 16
#: Nats per token. Another precision or kernel causes a gap of 0.001 to 0.05, another temperature 0.3, an
#: output head with old weights 0.8.
LARGEST_GAP = 0.3
#: Nats per token. A smaller gap does not show which weights an engine has.
SMALLEST_GAP = 1e-3
#: `prove_sync` changes weights by about 2^−bit of themselves: the first of these bits that changes log-probs
#: by this many usual gaps, and by this many nats. An engine has the changed weights if its log-probs are at
#: most this share of the change away from theirs.
_BITS = (5, 4, 3, 2, 1)
_CLEAR = 8.0
_VISIBLE = 0.02
_NEAR = 0.25


def sync_weights(run: Run, step: int, timer: StepTimer) -> dict[str, float]:
    """Sends the policy's weights to the rollout engine if due; returns the metrics of `confirm_sync`."""
    if not is_sync_due(run.spec, step, run.total_steps):
        return {}
    with timer("sync_weights"):
        run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
        return confirm_sync(run, step)


def check_first_sync(run: Run) -> None:
    """Tests the sync at the start of a run, by `prove_sync` or `confirm_sync`; raises as these."""
    wanted = run.spec.rollout.prove_sync
    checks = run.spec.rollout_engine.checks_syncs
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
    distances = _checked(run, [("", _probe(run, run.rollout, step))], step)
    num_tokens = sum(replica.tokens for replica in distances)
    return {
        "rollout/sync_gap": sum(replica.new * replica.tokens for replica in distances) / num_tokens,
        ENGINE: sum(replica.square * replica.tokens for replica in distances) / num_tokens,
    }


def _checked(run: Run, probes: list[tuple[str, TokenBatch]], step: int) -> list[_Distance]:
    """Distances of the engine from the policy; raises as `confirm_sync`."""
    distances: list[_Distance] = []
    for name, batch in probes:
        distances += _compared(run, name, batch, _policy(run, batch))
    for replica in distances:
        # An adapter that the engine ignores shows long before the gap to the policy is large.
        if replica.new > SMALLEST_GAP and replica.new > 2 * replica.base:
            raise _without_adapter(replica, replica.name)
        if not replica.new <= LARGEST_GAP:  # NaN too
            raise RunFailure(
                f"after a weight sync the log-probs of {replica.name} are {replica.new:.3g} nats per token "
                "away from the trainer's: it does not sample with the synced weights",
                where=f"rollout.name: {run.spec.rollout.name}, step {step}",
                fix="`rlctl diagnose mismatch` names the cause",
            )
    return distances


def prove_sync(run: Run, step: int) -> str:
    """Proves that weight syncs reach all trained weights of every replica of the engine (a collective).

    The weights are changed and synced: each replica's log-probs must be those of the changed policy. The
    change is undone and synced: they must be those of the policy. The trainer's weights are as before.

    Returns:
        The result in words.

    Raises:
        RunFailure: a replica keeps old weights (it names the replica, or the weights) or ignores the adapter.
    """
    probes = _probes(run, step, num_most_likely=_num_listed(run))
    usual = _worst(_checked(run, probes, step))
    for name, batch in probes:
        probe = Probe(name, batch, partial(_policy, run), run.ranks)
        for capability in run.capabilities:
            capability.check_probe(probe)
    apart = _total_variation(run, [batch for _, batch in probes])
    bit, change = _visible_change(run, probes, usual)
    if bit is None:
        return (
            "warning: the weight sync is not proven: a change of the weights moves log-probs by "
            f"{change:.2g} nats per token, engine and trainer differ by {usual:.2g}{apart}"
        )
    distances = _after_change(run, step, bit)
    stale = [replica for replica in distances if not replica.has_new]
    unreached: list[str] = []
    if stale and not any(replica.has_old for replica in stale):
        unreached = _unreached_weights(run, step, usual)
    run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
    if stale:
        raise _unproven(run, stale, len(distances), unreached)
    left = _worst(_checked(run, _probes(run, step), step))
    if not left <= _NEAR * change:
        raise RunFailure(
            "after a change of the weights and its reversal, the rollout engine's log-probs are "
            f"{left:.2g} nats per token away from the trainer's, {usual:.2g} before",
            where=f"rollout.name: {run.spec.rollout.name}",
        )
    reached = f"all {len(distances)} replicas" if len(distances) > 1 else distances[0].name
    return (
        f"the weight sync reaches {reached}: a change of the weights moves log-probs by {change:.2g} nats "
        f"per token, the same in trainer and engine up to {_worst(distances):.1g}, and can be undone{apart}"
    )


def _total_variation(run: Run, batches: list[TokenBatch]) -> str:
    """Bounds of the distance of the engine's next-token distributions from the trainer's, in words.

    The mean over the tokens of all probes; empty: the engine lists no most likely tokens.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        lists = batch.columns.get("most_likely")
        if lists is None:
            continue
        with torch.no_grad():
            own = run.actor.policy(batch.inputs).most_likely
        if own is None:  # a training engine of the user may not compute them
            continue
        _, listed = lists.padded()
        bounds = total_variation_bounds(own, listed)
        has_list = listed.isfinite().any(-1)
        sums += torch.stack([has_list.double().sum(), *(b[has_list].sum() for b in bounds)]).cpu()
    count, lower, upper = run.ranks.sum(sums.tolist())
    if not count:
        return ""
    ends = f"{lower / count:.2g} and {upper / count:.2g}"
    return f"; the total variation of their next-token distributions is between {ends} on average"


def _visible_change(run: Run, probes: list[tuple[str, TokenBatch]], usual: float) -> tuple[int | None, float]:
    """The smallest change of the weights that shows in every replica's log-probs.

    Args:
        usual: distance of engine and trainer before any change, nats per token.

    Returns:
        Its bit, see `_BITS`, None if no change shows; by how many nats per token the last one tried moves
        log-probs.
    """
    before = [_policy(run, batch) for _, batch in probes]
    change = 0.0
    for bit in _BITS:
        with run.actor.perturbed(bit):
            after = [_policy(run, batch) for _, batch in probes]
        moved: list[_Distance] = []
        for (name, batch), new, old in zip(probes, after, before, strict=True):
            moved += _compared(run, name, batch, new, old)
        change = min(replica.change for replica in moved)
        if change >= max(_CLEAR * usual, _VISIBLE):
            return bit, change
    return None, change


def _unreached_weights(run: Run, step: int, usual: float) -> list[str]:
    """Names of those groups of weights whose largest change some replica does not show."""
    unreached = []
    for group, names in run.actor.parts.items():
        visible = [
            replica
            for replica in _after_change(run, step, min(_BITS), names)
            if replica.change > _CLEAR * usual
        ]
        if any(not replica.has_new for replica in visible):
            unreached.append(group)
    return unreached


def _unproven(run: Run, stale: list[_Distance], num_replicas: int, unreached: list[str]) -> RunFailure:
    """The error that names what does not arrive, and where."""
    where = f"rollout.name: {run.spec.rollout.name}"
    first = stale[0]
    if 1 < num_replicas == len(stale):
        who = f"every replica ({first.name}, …)"
    elif len(stale) > 1:
        who = f"{first.name} and {len(stale) - 1} other replicas"
    else:
        who = first.name
    far = f"after a change of the weights, its log-probs are {first.new:.2g} nats away from the trainer's"
    if len(stale) == num_replicas and first.base <= _NEAR * first.new:
        return _without_adapter(first, who)
    if first.has_old:
        return RunFailure(
            f"no weight sync reaches {who}: {far}, and those of the weights before it",
            where=where,
            fix="restart that engine; see its log for a failed update",
        )
    weights = ", ".join(unreached) or "some weights"
    fix = "sample with rollout.name=hf, or use an engine that reloads them"
    if any("tied" in group for group in unreached):
        fix = f"untie the output head, or let the engine repack it after a reload; or {fix}"
    return RunFailure(f"a weight sync to {who} does not reach {weights}: {far}", where=where, fix=fix)


def _without_adapter(replica: _Distance, who: str) -> RunFailure:
    return RunFailure(
        f"{who} samples without the adapter: its log-probs are {replica.new:.3g} nats per token away from "
        f"the policy's and {replica.base:.3g} from the base model's",
        where="rollout.name",
        fix=MERGE_LORA,
    )


@dataclass(frozen=True, slots=True)
class _Distance:
    """Distances over the tokens that a replica sampled, in nats per token."""

    name: str  # of the replica
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


def _worst(distances: list[_Distance]) -> float:
    """The largest distance from the policy; NaN if one is NaN."""
    return max((replica.new for replica in distances), key=lambda gap: (math.isnan(gap), gap))


def _after_change(run: Run, step: int, bit: int, names: Collection[str] | None = None) -> list[_Distance]:
    """Changes these weights, syncs, and samples with each replica; the trainer's are then as before."""
    with run.actor.perturbed(bit, names):
        run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
        probes = _probes(run, step)
        changed = [_policy(run, batch) for _, batch in probes]
    distances: list[_Distance] = []
    for (name, batch), new in zip(probes, changed, strict=True):
        distances += _compared(run, name, batch, new, old=_policy(run, batch))
    return distances


#: Probes are sampled without truncation; experts and the most likely tokens are recorded.
_WHOLE_DISTRIBUTION: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "with_kept": False}


def _num_listed(run: Run) -> int:
    """Number of the engine's most likely tokens that a probe asks for; 0: it can list none.

    Servers that the user started may be limited to fewer (`--max-logprobs`).
    """
    can = run.spec.rollout_engine.reports_kept != "never" and not run.spec.rollout.server.urls
    return min(PROBE_LISTED, len(run.tokenizer)) if can else 0


def _probes(run: Run, step: int, num_most_likely: int = 0) -> list[tuple[str, TokenBatch]]:
    """Each replica's name, or `""`, and tokens that it sampled."""
    return [(name, _probe(run, engine, step, num_most_likely)) for name, engine in run.rollout.each()]


def _probe(run: Run, engine: LockedRollout, step: int, num_most_likely: int = 0) -> TokenBatch:
    """Tokens that the engine samples on each rank for a few prompts, dealt to the ranks that score them."""
    ranks = run.ranks
    prompts = run.train_prompts
    first = ranks.rank * PROBE_PROMPTS
    places = [(first + i) % len(prompts) for i in range(PROBE_PROMPTS)]
    episodes = sample_episodes(
        engine,
        prompts.tasks(places, list(range(first, first + PROBE_PROMPTS))),
        1,
        replace(
            run.sampling,
            max_response_length=min(PROBE_TOKENS, run.spec.data.max_response_length),
            num_most_likely=num_most_likely,
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
    rollout = batch.rollout_log_probs
    old = new if old is None else old
    base = run.base.log_probs(batch.inputs) if run.base and run.spec.syncs_adapter else new
    summands = torch.stack(
        [torch.ones_like(new), new - rollout, old - rollout, base - rollout, new - old, (new - rollout) ** 2]
    )
    summands = summands.abs().double().cpu()
    source = batch.units.episode.spread(batch.group_ids // PROBE_PROMPTS).cpu()
    world = run.ranks.world_size
    own_sums = torch.stack([summands[:, source == rank].sum(1) for rank in range(world)])
    all_sums = torch.tensor(run.ranks.sum(own_sums.flatten().tolist()), dtype=torch.float64)
    by_source = all_sums.view(world, len(summands))
    if name:
        names = [name]
        by_replica = by_source.sum(0, keepdim=True)
    elif world == 1:
        names = ["the rollout engine"]
        by_replica = by_source
    else:
        names = [f"the engine of rank {rank}" for rank in range(world)]
        by_replica = by_source
    if not by_replica[:, 0].all():
        raise RunFailure("the rollout engine sampled no token after a weight sync", where="rollout.name")
    return [
        _Distance(replica, num_tokens, *(value / num_tokens for value in sums))
        for replica, (num_tokens, *sums) in zip(names, by_replica.tolist(), strict=True)
    ]
