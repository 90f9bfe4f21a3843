"""What a run leaves: checkpoints, from which it can continue, rollouts, and its summary.

Checkpoints: when they are due, what they contain, and how a run continues from one; only complete ones are
published. The summary, `summary.json`, is also the source of the last lines on the terminal.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rlctl.engine.checkpoint import (
    ADAPTER,
    CHECKPOINTS,
    Checkpoint,
    TrainerState,
    begin,
    bytes_of_newest,
    first_differing,
    hash_share,
    newest_intact,
    partial_path,
    parts_of_files,
    point_to,
    publish,
    writing,
)
from rlctl.engine.state_files import HeldFiles, StateFiles
from rlctl.episodes import Episodes
from rlctl.errors import RunFailure, UsageError, failing_together
from rlctl.files import write_text
from rlctl.metric_names import best_validation, validation_score
from rlctl.run_spec.base import seconds
from rlctl.run_spec.machine import free_host_bytes, gib
from rlctl.run_spec.model_size import BACKGROUND_BYTES, COPY_FACTOR, checkpoint_bytes
from rlctl.track.run_dir import SUMMARY_FILE
from rlctl.train.background import NOTES, BackgroundWriter, HeldCheckpoint, digests_below
from rlctl.train.early_stop import early_stop_reason
from rlctl.train.settings import is_due, is_sync_due
from rlctl.train.stream import PromptDraws

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Episode, TokenBatch
    from rlctl.engine.protocol import TrainedModule
    from rlctl.engine.ranks import Ranks
    from rlctl.reward.protocol import Graded, RewardResult
    from rlctl.train.mini_batch import SeenTokens
    from rlctl.train.run import Run

#: File in a checkpoint: the state of dynamic sampling.
_DRAWS = "draws/prompts.json"
#: Name of the environment's own reward among the terms.
ENVIRONMENT = "environment"
#: Steps averaged at the start and the end of the run, because the reward of one batch is noisy.
_WINDOW = 5
_AVERAGED = (
    "critic/score/mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_raw_eff_sample_size",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/kl",
    "response_length/mean",
    "perf/throughput",
)
_COUNTED = ("guardrails/alarms", "guardrails/interventions", "guardrails/skipped")


class Saver:
    """Decides after each step whether to save it; every rank creates one and calls `after`.

    A step is saved every `trainer.save_freq` steps, when its validation is the best so far, and when
    `trainer.save_every` has elapsed. The last case waits for a step after which the rollout engine has the
    current weights, as in a resumed run: with `rollout.sync_every` above 1, this is not every step.

    It is a context, at whose end a checkpoint that is being written is complete, or the run has failed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        every = run.spec.trainer.save_every
        self._every = None if every is None else seconds(every)
        self._saved_at = time.monotonic()
        self._writer = BackgroundWriter()
        self._ends = False
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._writer.finish(self._run.ranks)
        else:
            self._writer.abandon()

    def after(self, step: int, metrics: Mapping[str, float]) -> tuple[bool, bool]:
        """Whether to stop the run, and whether to save this step; a collective.

        Args:
            step: its number; the step is already logged.
            metrics: as logged; only the main rank has validation results.

        Raises:
            RlctlError: the checkpoint that was being written meanwhile could not be written.
        """
        run = self._run
        trainer = self._run.spec.trainer
        improves = validation_score(metrics) is not None and self._best_step() == step
        waited = self._every is not None and time.monotonic() - self._saved_at >= self._every
        may_end = run.ranks.is_main and step < run.total_steps
        ends = early_stop_reason(run.history, trainer.early_stop) if may_end else ""
        run.ended_early = ends
        has_failed = self._writer.failure is not None
        mine = [
            bool(ends) or run.stop.signal_number > 0,
            run.ranks.is_main and waited,
            improves,
            has_failed,
        ]
        stop, late, better, failed = (value > 0 for value in run.ranks.sum([float(value) for value in mine]))
        if failed:
            self._writer.finish(run.ranks)
        stop = stop or bool(run.stopped_because)
        late = late and is_sync_due(run.spec, step, run.total_steps)
        saves = is_due(step, trainer.save_freq) or better or late
        self._ends = stop or step == run.total_steps
        return stop, saves or self._ends

    def save(self, step: int) -> None:
        """Saves the state of the run after `step` under `<run_dir>/checkpoints` (called on all ranks).

        Raises:
            RunFailure: writing it or the one before failed; earlier checkpoints are intact.
        """
        run = self._run
        self._writer.finish(run.ranks)
        holds = not self._ends and self._may_hold()
        held = save_checkpoint(run, step, best=self._best_step(), holds=holds)
        if held:
            self._writer.start(held, run.ranks.world_size)
        self._saved_at = time.monotonic()

    def _may_hold(self) -> bool:
        """Whether the checkpoint is written while training goes on, the same on all ranks (a collective)."""
        run = self._run
        wish = self._run.spec.trainer.save_in_background
        if wish is False:
            return False
        size = 0.0
        if run.ranks.is_main:  # a thousand ranks would look at the files of a thousand
            size = float(bytes_of_newest(run.run_dir / CHECKPOINTS) or checkpoint_bytes(run.spec) or 0)
        [size] = run.ranks.sum([size])
        share = size / run.spec.trainer.nnodes
        reasons = {  # why training waits, if it applies on any rank; the first is not worth a note
            "": wish is None and size < BACKGROUND_BYTES,
            "the size of a checkpoint is not known before the first": size == 0,
            "the engine's own way of saving cannot copy the state": not all(
                _can_hold(module) for module in (run.actor, run.critic) if module
            ),
            f"a copy of {gib(share)} is too much for the host's free memory": (
                share * COPY_FACTOR > free_host_bytes()
            ),
        }
        found = run.ranks.sum([float(applies) for applies in reasons.values()])
        reason = next((why for why, count in zip(reasons, found, strict=True) if count), None)
        if reason and reason not in self._told and run.ranks.is_main:
            run.tracker.note(f"training waits while checkpoints are written: {reason}")
            self._told.add(reason)
        return reason is None

    def _best_step(self) -> int | None:
        """Step of the best validation so far, on the main rank; None without `trainer.keep_best`."""
        best = best_validation(self._run.history)
        return best[0] if best and self._run.spec.trainer.keep_best else None


def save_checkpoint(
    run: Run, step: int, best: int | None = None, *, holds: bool = False
) -> HeldCheckpoint | None:
    """Saves the state of `run` after `step`; see `Saver.save`. The checkpoint of `best` is never removed.

    Args:
        holds: copy the state to memory.

    Returns:
        With `holds` this rank's part, which is still to be written.
    """
    ranks = run.ranks
    spec = run.spec
    root = run.run_dir / CHECKPOINTS
    keep = spec.trainer.max_ckpt_to_keep
    if run.rollout_writer:  # a resumed run does not repeat these steps: store their rollouts
        run.rollout_writer.flush()
    held = HeldFiles() if holds else None
    files = held or StateFiles()
    partial = partial_path(root, step)
    with writing(root, step):
        _save_parts(run, step, files)
        state = _state_of(run, step)
        if held:
            return HeldCheckpoint(
                root=root,
                rank=ranks.rank,
                state=state,
                files=held,
                keep=keep,
                best=best,
            )
        # Files not hashed while being written are on the main rank's machine; its ranks share the hashing.
        hashed = dict(ranks.exchange(list(digests_below(partial, files.digests).items())))
        sharers = min(spec.trainer.n_gpus_per_node, ranks.world_size)
        mine = hash_share(partial, hashed, ranks.rank, sharers) if ranks.rank < sharers else {}
        shares = ranks.exchange(list(mine.items()))
        if ranks.is_main:
            digests = {**hashed, **dict(shares)}
            publish(root, partial, state, keep=keep, best=best, digests=digests)
            point_to(root, "latest", step)
            point_to(root, "best", best)
        ranks.barrier()
    return None


def _state_of(run: Run, step: int) -> TrainerState:
    """What the training loop continues with; training may go on and change the originals."""
    kl_coef = run.kl.kl_coef if run.spec.algorithm.use_kl_in_reward else None
    own_states = {each.name: each.state() for each in run.capabilities if run.ranks.is_main and each.state()}
    return TrainerState(
        step=step,
        policy_version=run.policy_version,
        world_size=run.ranks.world_size,
        kl_coef=kl_coef,
        capabilities=copy.deepcopy(own_states),
    )


def _can_hold(module: TrainedModule) -> bool:
    return getattr(module, "holds_state", False)


def _passed_to(module: TrainedModule, files: StateFiles) -> tuple[StateFiles, ...]:
    """An engine of a user's own may know only how to write at once: its files are hashed afterwards."""
    return (files,) if _can_hold(module) else ()


def _save_parts(run: Run, step: int, files: StateFiles) -> None:
    """Begins the checkpoint of `step`, and saves all that it contains besides `TrainerState`."""
    ranks = run.ranks
    root = run.run_dir / CHECKPOINTS
    partial = partial_path(root, step)
    has = {"critic": run.critic, "waiting": run.spec.batches_ahead > 0, ADAPTER: run.spec.model.lora_rank}
    has |= {"draws": run.draws is not None, NOTES: files.are_held}
    if ranks.is_main:
        _require_space(run, step)
        begin(root, step, ["engine", "model", *(name for name, there in has.items() if there)])
    ranks.barrier()
    run.actor.save(partial / "engine", *_passed_to(run.actor, files))
    run.actor.export(partial / "model", *_passed_to(run.actor, files))
    if has[ADAPTER]:
        adapter = run.actor.adapter()
        if ranks.is_main:
            adapter.save(partial / ADAPTER)
    if run.critic:
        run.critic.save(partial / "critic", *_passed_to(run.critic, files))
    run.stream.save(partial / "waiting", ranks.rank, files)
    if ranks.is_main:
        run.tokenizer.save_pretrained(partial / "model")
        if run.draws is not None:
            run.draws.save(partial / _DRAWS)


def _require_space(run: Run, step: int) -> None:
    """Refuses to begin a checkpoint without enough disk space.

    Raises:
        RunFailure: less is free than the newest checkpoint takes, or the first is estimated to take.
    """
    root = run.run_dir / CHECKPOINTS
    needed = bytes_of_newest(root) or checkpoint_bytes(run.spec) or 0
    free = shutil.disk_usage(run.run_dir).free
    if free < needed:
        raise RunFailure(
            f"not enough disk space for the checkpoint of step {step}: it needs {needed / 2**30:.3g} GiB, "
            f"{free / 2**30:.3g} GiB are free",
            where=str(root),
            fix="free space or set trainer.max_ckpt_to_keep lower, then continue with --resume; earlier "
            "checkpoints are intact",
        )


def restore(run: Run) -> list[str]:
    """Continues after the newest intact checkpoint; returns notes for the user.

    Raises:
        UsageError: there is none, or its batches sampled ahead are those of another number of ranks.
    """
    ranks = run.ranks
    root = run.run_dir / CHECKPOINTS
    found, notes = verified_together(ranks, root)
    shared = ranks.exchange([found] if found else [])
    if not shared:
        raise UsageError(
            "there is no complete checkpoint to resume from",
            where=str(root),
            fix="start the run again without --resume, in the same directory if you like",
        )
    [checkpoint] = shared
    state = checkpoint.state
    path = checkpoint.path
    if state.world_size != ranks.world_size and run.spec.batches_ahead:
        raise UsageError(
            f"batches sampled ahead are those of {state.world_size} ranks, this run has {ranks.world_size}",
            where=str(path),
            fix=f"resume with trainer.n_gpus_per_node={state.world_size}",
        )
    run.actor.load(path / "engine")
    if run.critic:
        run.critic.load(path / "critic")
    run.rollout.sync_weights(run.actor, policy_version=state.policy_version)
    run.stream.resume(state.step, path / "waiting", ranks.rank)
    run.start_step = state.step
    run.policy_version = state.policy_version
    if state.kl_coef is not None:
        run.kl = replace(run.kl, kl_coef=state.kl_coef)
    for capability in run.capabilities:
        own = (state.capabilities or {}).get(capability.name)
        if own:
            capability.restore(own)
    if run.draws is not None:
        run.draws = PromptDraws.load(path / _DRAWS)
    return [*notes, f"resuming after step {state.step}"]


def verified_together(ranks: Ranks, root: Path) -> tuple[Checkpoint | None, list[str]]:
    """`newest_intact` on the main rank, which sets others aside; each rank hashes its part (a collective).

    Returns:
        On other ranks None and no problems.

    Raises:
        RunFailure: a rank cannot read a file that the main rank can read.
    """
    found: tuple[Checkpoint | None, list[str]] = (None, [])

    def differing(path: Path, expected: Mapping[str, str]) -> str:
        parts = parts_of_files(path, expected, ranks.world_size)
        ranks.from_main((path, parts))
        for rank, problem in _problems_of_parts(ranks, path, parts):
            if not first_differing(
                path, parts[rank]
            ):  # a disk that not all nodes share, or a stale view of it
                message = f"rank {rank} reads other files than rank 0: {problem}"
                fix = "the run directory must be on a disk that all nodes share; nothing was changed"
                raise RunFailure(message, where=str(path), fix=fix)
            return problem
        return ""

    with failing_together(ranks.first):
        if ranks.is_main:
            try:
                found = newest_intact(root, differing=differing, set_aside=True)
            finally:
                ranks.from_main(None)
        else:
            work: tuple[Path, list[dict[str, str]]] | None
            while work := ranks.from_main(None):
                _problems_of_parts(ranks, *work)
    return found


def _problems_of_parts(ranks: Ranks, path: Path, parts: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Rank and problem of the parts with a file that is missing or differs; each rank hashes its own."""
    problem = first_differing(path, parts[ranks.rank])
    return ranks.exchange([(ranks.rank, problem)] if problem else [])


# --- rollouts ----------------------------------------------------------------------------------------


def save_rollouts(run: Run, step: int, graded: Graded, batch: TokenBatch, seen: SeenTokens) -> None:
    """Stores the first whole groups of the batch with what the update used, if rollouts are kept.

    Episodes are on the rank that sampled them, log-probs and weights on the rank that trained on them: both
    go to the main rank. An episode that was not trained on has log-probs of NaN.
    """
    limit = run.spec.trainer.rollouts_per_step
    if not limit:
        return
    count = run.spec.data.train_batch_size if limit < 0 else max(limit // run.spec.rollout.n, 1)
    shares = run.ranks.exchange([_sampled(graded, count)])
    further = [name for capability in run.capabilities for name in capability.dumped]
    trained = dict(run.data_ranks.exchange(_trained(batch, seen, further, count)))
    if not run.rollout_writer:
        return
    sampled = _joined(shares)
    episodes = sampled.episodes
    unknown = torch.tensor([[math.nan], [0.0], [0.0], *[[math.nan]] * len(further)])
    parts: list[Tensor] = []
    for key, size in zip(_keys(episodes.tokens), episodes.num_sampled.tolist(), strict=True):
        parts.append(trained.get(key, unknown.expand(-1, size)))
    log_probs, weights, keep, *more = torch.cat(parts, 1)
    values = {"training_log_probs": log_probs, "rollout_is_weights": weights, "keep_mask": keep > 0}
    values |= zip(further, more, strict=True)
    run.rollout_writer.add(step, episodes, sampled.scores, values, sampled.terms, sampled.remarks)
    if is_due(step, run.spec.trainer.log_samples):
        rows = sample_rows(episodes, sampled.scores, sampled.terms, log_probs)
        run.tracker.log_samples(step, rows)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Episodes, and how each was graded.

    Attributes:
        scores: None: it was not.
        terms: see `terms_of`.
        remarks: of its graders, by term.
    """

    episodes: Episodes
    scores: list[float | None]
    terms: list[dict[str, float]]
    remarks: list[dict[str, str]]


def _sampled(graded: Graded, count: int) -> _Sampled:
    """Those of the first `count` groups that this rank sampled."""
    is_first = graded.episodes.tokens.group_ids < count
    chosen = is_first.nonzero().squeeze(1).tolist()
    episodes = graded.episodes.pick(chosen)
    rewards = graded.rewards.pick(chosen)
    scores: list[float | None] = []
    for score, is_valid in zip(rewards.scores.tolist(), rewards.valid.tolist(), strict=True):
        scores.append(score if is_valid else None)
    remarks = rewards.remarks or [{} for _ in chosen]
    return _Sampled(episodes, scores, terms_of(rewards, episodes.rewards), remarks)


def _joined(shares: Sequence[_Sampled]) -> _Sampled:
    """The episodes of all ranks by group and member."""
    episodes = Episodes.joined([share.episodes for share in shares])
    keys = _keys(episodes.tokens)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    scores = [score for share in shares for score in share.scores]
    terms = [each for share in shares for each in share.terms]
    remarks = [each for share in shares for each in share.remarks]
    return _Sampled(
        episodes=episodes.pick(order),
        scores=[scores[place] for place in order],
        terms=[terms[place] for place in order],
        remarks=[remarks[place] for place in order],
    )


def _trained(
    batch: TokenBatch, seen: SeenTokens, further: Sequence[str], count: int
) -> list[tuple[tuple[int, int], Tensor]]:
    """Group and member, and columns (3 + number of `further`, m), of episodes that this rank trained on.

    Those of the first `count` groups. The columns: log-probs in training, weights, whether a token was kept,
    and the further ones of the batch.
    """
    own = [batch.column(name).float() for name in further]
    columns = torch.stack([seen.training_log_probs, seen.weights, seen.keep.float(), *own]).cpu()
    of_episodes = torch.split(columns, batch.units.episode.lengths.tolist(), 1)
    pairs = zip(_keys(batch), of_episodes, strict=True)
    return [(key, values) for key, values in pairs if key[0] < count]


def _keys(batch: TokenBatch) -> list[tuple[int, int]]:
    """Group and member of every episode."""
    return list(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True))


def terms_of(rewards: RewardResult, own: Sequence[float | None]) -> list[dict[str, float]]:
    """Label → score of the terms that grade each episode, before weights, and of the environment's reward.

    `own`: the environment's rewards.
    """
    columns = {label: scores.tolist() for label, scores in rewards.parts.items()}
    graded = rewards.valid.tolist()
    rows = []
    for place, reward in enumerate(own):
        scores = {label: column[place] for label, column in columns.items() if graded[place]}
        terms = {label: score for label, score in scores.items() if math.isfinite(score)}
        rows.append(terms if reward is None else terms | {ENVIRONMENT: float(reward)})
    return rows


def sample_rows(
    episodes: Sequence[Episode],
    rewards: Sequence[float | None],
    terms: Sequence[Mapping[str, float]],
    log_probs: Tensor,
) -> list[dict[str, Any]]:
    """Rows of a tracker's table: prompt, response, reward, `reward/<term>` and log ρ of each episode.

    `log_probs` (M,) are those of the training policy, of all sampled tokens in order; nats.
    """
    labels = sorted({label for each in terms for label in each})
    sizes = [episode.num_sampled for episode in episodes]
    rows = []
    for episode, reward, scores, trained in zip(
        episodes, rewards, terms, torch.split(log_probs, sizes), strict=True
    ):
        sampled = torch.cat([sequence.log_probs for sequence in episode.sequences]).to(trained)
        ratio = float((trained - sampled).double().sum())
        row = {"prompt": episode.task.text, "response": episode.response, "reward": reward}
        row |= {f"reward/{label}": scores.get(label) for label in labels}
        rows.append(row | {"log_ratio": ratio if math.isfinite(ratio) else None})
    return rows


# --- the summary ------------------------------------------------------------------------------------


def write_summary(run: Run) -> None:
    """Writes `summary.json`; called on one rank after the loop."""
    trained = [metrics for metrics in run.history if metrics["step"] > 0]
    validated = [metrics for metrics in run.history if any(key.startswith("val/") for key in metrics)]
    step = int(trained[-1]["step"]) if trained else run.start_step
    window = max(1, min(_WINDOW, len(trained) // 2))  # first and last steps do not overlap
    best = best_validation(run.history)
    here = f"{CHECKPOINTS}/step_{step:06d}"
    summary: dict[str, Any] = {
        "step": step,
        "total_steps": run.total_steps,
        "interrupted": step < run.total_steps,
        "seconds": sum(metrics["timing_s/step"] for metrics in trained),
        "num_updates": run.policy_version,
        "early_stop": run.ended_early or None,
        "guardrails": _guardrails(run, trained),
        "first": _mean(trained[:window]),
        "last": _mean(trained[-window:]),
        "validation_first": _validation(validated[0]) if validated else {},
        "validation_last": _validation(validated[-1]) if validated else {},
        "best": best and _saved_best(run.run_dir, *best),
        "checkpoint": here,
        "model": f"{here}/model",
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(run.run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def _saved_best(run_dir: Path, step: int, score: float) -> dict[str, Any]:
    """The best validation, and its checkpoint if it was saved."""
    place = f"{CHECKPOINTS}/step_{step:06d}"
    return {"step": step, "reward_mean": score, "checkpoint": place if (run_dir / place).is_dir() else None}


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means of the averaged metrics, each over the steps that have it: one without an update lacks some."""
    values = {key: [metrics[key] for metrics in steps if key in metrics] for key in _AVERAGED}
    return {key: sum(of_steps) / len(of_steps) for key, of_steps in values.items() if of_steps}


def _guardrails(run: Run, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Counts of alarms and interventions, and why guardrails ended the run; empty if they are off."""
    counts = {
        key.removeprefix("guardrails/"): int(sum(metrics.get(key, 0.0) for metrics in steps))
        for key in _COUNTED
    }
    is_off = run.spec.trainer.guardrails.mode == "off"
    return {} if is_off else counts | {"stopped_because": run.stopped_because or None}


def _validation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("val/")}
