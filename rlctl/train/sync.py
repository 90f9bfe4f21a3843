"""Sends new weights to the rollout engine and verifies that it samples with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlctl.batch import TokenBatch
from rlctl.environment.single_turn import sample_episodes
from rlctl.errors import RunFailure
from rlctl.rollout.completions import MERGE_LORA
from rlctl.rollout.protocol import Sampling, step_seed
from rlctl.train.deal import deal
from rlctl.train.run import is_sync_due
from rlctl.train.step_metrics import StepTimer

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.engine.ranks import Ranks
    from rlctl.train.run import Run

PROBE_PROMPTS, PROBE_TOKENS = 2, 32
#: Nats per token. Another precision or kernel causes a gap of 0.001 to 0.05, another temperature 0.3, an
#: output head with old weights 0.8.
LARGEST_GAP = 0.3
#: Nats per token. A smaller gap does not show which weights an engine has.
SMALLEST_GAP = 1e-3


def sync_weights(run: Run, step: int, timer: StepTimer) -> dict[str, float]:
    """Sends the policy's weights to the rollout engine if due; returns the metrics of `confirm_sync`."""
    if not is_sync_due(run, step):
        return {}
    with timer("sync_weights"):
        run.rollout.sync_weights(run.actor, policy_version=run.policy_version)
        return confirm_sync(run, step)


def confirm_sync(run: Run, step: int) -> dict[str, float]:
    """Checks that engine and trainer have the same weights: samples a few tokens and scores them.

    Engines that copy tensor by tensor in this process need no such check.

    Raises:
        RunFailure: the log-probs differ by more than precision explains, or the engine ignores the adapter.
    """
    if not run.spec.rollout_engine.checks_syncs:
        return {}
    ranks, prompts = run.ranks, run.train_prompts
    first = ranks.rank * PROBE_PROMPTS
    places = [(first + i) % len(prompts) for i in range(PROBE_PROMPTS)]
    episodes = sample_episodes(
        run.rollout,
        prompts.tasks(places, list(range(first, first + PROBE_PROMPTS))),
        1,
        Sampling(
            max_response_length=min(PROBE_TOKENS, run.spec.data.max_response_length),
            temperature=run.spec.rollout.temperature,
            with_experts=run.spec.actor.routing_replay,
        ),
        step_seed(run.spec.trainer.seed, step, "probe"),
        run.tokenizer,
    )
    if run.rollout.shares_device:
        run.rollout.release(weights_follow=False)
    count = ranks.world_size * PROBE_PROMPTS
    batch = deal(TokenBatch.of(episodes, ranks.device), ranks, count, run.spec.engine.sequence_parallel)
    with torch.no_grad():
        gap = _gap(ranks, batch, run.actor.policy(batch.inputs).log_probs)
    if run.base and run.spec.syncs_adapter:
        # An adapter that the engine ignores shows long before the gap to the policy is large.
        base_gap = _gap(ranks, batch, run.base.log_probs(batch.inputs))
        if gap > SMALLEST_GAP and gap > 2 * base_gap:
            raise RunFailure(
                f"the rollout engine samples without the adapter: its log-probs are {gap:.3g} nats per token "
                f"away from the policy's and {base_gap:.3g} from the base model's",
                where=f"rollout.name, step {step}",
                fix=MERGE_LORA,
            )
    if not gap <= LARGEST_GAP:  # NaN too
        raise RunFailure(
            f"after a weight sync the rollout engine's log-probs are {gap:.3g} nats per token away from the "
            "trainer's: it does not sample with the synced weights",
            where=f"rollout.name: {run.spec.rollout.name}, step {step}",
            fix="`rlctl diagnose mismatch` names the cause",
        )
    return {"rollout/sync_gap": gap}


def _gap(ranks: Ranks, batch: TokenBatch, log_probs: Tensor) -> float:
    """Mean |log π − log π_rollout| over the sampled tokens of all ranks, nats."""
    gaps = (log_probs - batch.rollout_log_probs).abs()
    total, count = ranks.sum([gaps.sum().item(), float(len(gaps))])
    if not count:
        raise RunFailure("the rollout engine sampled no token after a weight sync", where="rollout.name")
    return total / count
