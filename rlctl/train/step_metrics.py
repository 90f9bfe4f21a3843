"""What a step reports: metrics of its batch, seconds by phase, and warnings.

Sums are merged over ranks, in one reduction for the sampled episodes and one for the tokens that were trained
on, before any division.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.estimators import has_spread
from rlctl.algos.losses import clamped_exp
from rlctl.algos.segments import HostSums, Moments, Sums, counts, moments, ratio
from rlctl.batch import TokenBatch
from rlctl.environment.protocol import PROMPT_OVERLONG, STOP_REASONS
from rlctl.errors import RunFailure, known
from rlctl.reward.build import refuse_errors
from rlctl.reward.protocol import FailureKind

if TYPE_CHECKING:
    from rlctl.reward.protocol import Graded
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.run import Run

#: Mean square of the log-ratio of a few tokens sampled right after a weight sync.
ENGINE = "rollout_corr/split/engine"
#: Share of tokens that attend to keys and values of older weights.
STALE_CACHE = "rollout_corr/stale_cache_fraction"

#: Sampled tokens whose id the tokenizer does not have: models have more rows than their tokenizers.
UNKNOWN = "response/num_unknown_tokens"

#: Episodes that ended before anything was sampled.
OVERLONG_PROMPTS = "episode/num_overlong_prompts"

_MAX_NAMED = 8
#: Metrics of episodes whose maximum is logged beside the mean.
_WITH_MAX = ("episode/num_turns", "episode/num_sequences")
#: Why updates could not be made, by `Updated.missed`.
_MISSED = {
    "empty": "no episode of them was graded",
    "rejected": "every response was rejected; widen rollout_rs_threshold or fix the mismatch",
    "nonfinite": "loss or gradient was not finite",
}
#: Turns whose mismatch is logged separately.
_NUM_TURNS = 4


def metrics_of_episodes(run: Run, graded: Graded) -> dict[str, float]:
    """Metrics of the episodes that were sampled, over all ranks.

    Raises:
        RunFailure: too many responses could not be graded, or failed by faults of the environment.
    """
    spec = run.spec
    ranks = run.ranks
    version = run.policy_version
    has_ages = spec.rollout.in_flight or spec.rollout.max_age_updates is not None
    own = episode_sums(graded, version, spec.data.max_prompt_length)
    tokens = graded.episodes.tokens
    own |= counts({UNKNOWN: int((tokens.sampled & (tokens.token_ids >= len(run.tokenizer))).sum())})
    if has_ages:
        own |= age_sums(graded, version, spec.rollout.max_age_updates)
    if run.episodes.is_multi_turn:
        names = set(ranks.exchange([name for metrics in graded.episodes.metrics for name in metrics]))
        own |= environment_sums(graded, sorted(names))
    sums = ranks.all_reduce({name: value.to(ranks.device) for name, value in own.items()})
    errors = graded.rewards.errors + (graded.baseline.errors if graded.baseline else [])
    refuse_ungraded(run, sums["reward/num_errors"], spec.data.train_batch_size * spec.rollout.n, errors)
    _refuse_failed(run, sums["episode/num_failed"], sums["response_length.n"], graded)
    _refuse_overlong(run, sums[OVERLONG_PROMPTS], graded)
    metrics = {UNKNOWN: sums[UNKNOWN]}
    metrics |= episode_metrics(sums, compares_siblings="group_ids" in run.estimator.needs)
    if has_ages:
        metrics |= age_metrics(sums)
    return metrics | (environment_metrics(sums) if run.episodes.is_multi_turn else {})


def metrics_of_tokens(
    run: Run, batch: TokenBatch, training_log_probs: Tensor, probed: float | None
) -> dict[str, float]:
    """Metrics of the tokens that were trained on, over all ranks.

    Args:
        training_log_probs: (M,) log π_train of the correction.
        probed: see `ratio_metrics`.
    """
    spec = run.spec
    own = token_sums(batch) | ratio_sums(batch, training_log_probs, spec)
    for capability in run.capabilities:
        own |= capability.token_sums(batch)
    if run.episodes.is_multi_turn:
        own |= turn_sums(batch, training_log_probs)
    sums = run.data_ranks.all_reduce(own)
    metrics = token_metrics(sums) | ratio_metrics(sums, spec, probed)
    for capability in run.capabilities:
        metrics |= capability.token_metrics(sums)
    return metrics | (turn_metrics(sums) if run.episodes.is_multi_turn else {})


def refuse_ungraded(run: Run, num_failed: float, num_total: float, errors: list[str]) -> None:
    """Ends the run if too many responses could not be graded (a collective).

    Args:
        num_failed, num_total: responses over all ranks.
        errors: this rank's failures.

    Raises:
        RunFailure: see `refuse_errors`.
    """
    limit = run.spec.reward.max_error_fraction
    refuse_errors(num_failed, num_total, lambda: run.ranks.first("".join(errors[:1])), limit)


def _refuse_failed(run: Run, num_failed: float, num_whole: float, graded: Graded) -> None:
    """Ends the run if too many episodes failed by faults of the environment (a collective)."""
    limit = run.spec.environment.max_failed_fraction
    total = num_failed + num_whole
    if num_failed > limit * total:
        first = run.ranks.first(next(filter(None, graded.episodes.errors), ""))
        message = f"{num_failed:.0f} of {total:.0f} episodes failed by faults of the environment"
        fix = f"correct the environment, or raise environment.max_failed_fraction (now {limit:g})"
        raise RunFailure(f"{message}; the first: {first}", where="environment", fix=fix)


def _refuse_overlong(run: Run, num_overlong: float, graded: Graded) -> None:
    """Ends the run if the first prompt of an episode is too long and may not be left out (a collective)."""
    if num_overlong and not run.spec.data.filter_overlong_prompts:
        episodes = graded.episodes
        columns = zip(episodes.tasks, episodes.stop_reasons, episodes.errors, strict=True)
        overlong = [f"row {task.row}: {error}" for task, why, error in columns if why == PROMPT_OVERLONG]
        first = run.ranks.first("".join(overlong[:1]))
        fix = "raise it, or set data.filter_overlong_prompts=true"
        raise RunFailure(f"{first}, with what reset said", where="data.max_prompt_length", fix=fix)


# --- episodes that were sampled ----------------------------------------------------------------------


def episode_sums(graded: Graded, policy_version: int, max_prompt_length: int) -> Sums:
    """Sums over the episodes that this rank sampled; `policy_version` is the trainer's.

    Moments: `critic/score` of the graded ones, `response_length` and `prompt_length` in tokens, `staleness`
    in optimizer updates between the weights that sampled the oldest token and the trained policy, and
    `term.NAME` per term of the reward. Counts: those that are metrics themselves, `errors.NAME` per term,
    full_prompts, truncated, groups, and flat_groups, whose grades (without the overlong penalty) are equal.
    Episodes that failed by faults of the environment are in `episode/num_failed` only.
    """
    episodes = graded.episodes
    rewards = graded.rewards
    is_whole = ~graded.episodes.failed
    valid = graded.valid & is_whole
    group_ids = episodes.tokens.group_ids
    stop_reasons = [
        reason for reason, error in zip(episodes.stop_reasons, episodes.errors, strict=True) if not error
    ]
    num_groups = len(set(group_ids[is_whole].tolist()))
    num_whole = len(stop_reasons)
    num_aborted = stop_reasons.count("aborted")
    num_overlong = episodes.stop_reasons.count(PROMPT_OVERLONG)
    prompts = episodes.num_prompt[is_whole]
    groups = group_ids[valid]
    spread = has_spread(rewards.graded[valid], groups)
    sums = moments("critic/score", rewards.scores[valid]) | moments("prompt_length", prompts)
    sums |= moments("response_length", episodes.num_sampled[is_whole])
    sums |= moments("staleness", episodes.ages(policy_version)[is_whole])
    for term, scores in rewards.parts.items():
        sums |= moments(f"term.{term}", scores.nan_to_num(), valid & ~scores.isnan())
    numbers = {
        "full_prompts": int((prompts >= max_prompt_length).sum()),
        "truncated": stop_reasons.count("max_tokens"),
        "response/num_aborted": num_aborted,
        "reward/num_errors": num_whole - num_aborted - int(valid.sum()),
        "reward/num_timeouts": sum(rewards.timeouts.values()),
        "episode/num_failed": len(episodes) - num_whole - num_overlong,
        OVERLONG_PROMPTS: num_overlong,
        "groups": num_groups,
        "flat_groups": num_groups - len(set(groups[spread].tolist())),
    }
    numbers |= {f"errors.{term}": rewards.errors_by_term.get(term, 0) for term in rewards.parts}
    return sums | counts(numbers)


def episode_metrics(sums: HostSums, *, compares_siblings: bool) -> dict[str, float]:
    """Metrics of the sampled episodes, under verl's names, from `episode_sums`.

    `reward/zero_spread_groups` is included only if the estimator compares the responses of a group.
    """
    metrics = _extremes(sums, "critic/score", "response_length", "prompt_length")
    counted = ("response/num_aborted", "reward/num_errors", "reward/num_timeouts")
    metrics |= {key: sums[key] for key in counted}
    terms = [name.removeprefix("errors.") for name in sums if name.startswith("errors.")]
    for term in terms if len(terms) > 1 else ():  # one term equals `critic/score`
        metrics[f"reward/{term}/mean"] = Moments.read(sums, f"term.{term}").mean
        metrics[f"reward/{term}/num_errors"] = sums[f"errors.{term}"]
    if compares_siblings:
        metrics["reward/zero_spread_groups"] = ratio(sums["flat_groups"], sums["groups"])
    lengths = Moments.read(sums, "response_length")
    staleness = Moments.read(sums, "staleness")
    return metrics | {
        "response_length/clip_ratio": ratio(sums["truncated"], lengths.count),
        "prompt_length/clip_ratio": ratio(sums["full_prompts"], lengths.count),
        "reward/error_fraction": ratio(sums["reward/num_errors"], lengths.count),
        "training/staleness_mean": staleness.mean,
        "training/staleness_max": staleness.max,
        "perf/total_num_tokens": lengths.total + sums["prompt_length.x"],
    }


def _extremes(sums: HostSums, *names: str) -> dict[str, float]:
    """Mean, largest and smallest value of moments, of those that there are."""
    metrics: dict[str, float] = {}
    for name in names:
        if f"{name}.n" in sums:
            values = Moments.read(sums, name)
            metrics |= {f"{name}/mean": values.mean, f"{name}/max": values.max, f"{name}/min": values.min}
    return metrics


def age_sums(graded: Graded, policy_version: int, limit: int | None) -> Sums:
    """Sums over the graded episodes that this rank sampled, by age.

    Moments: `age` per token, and with a limit, for the episodes `age/older_…` than it and those
    `age/within_…` it, `length` in sampled tokens, `score`, and `prompt_score`, the mean score of the group's
    graded episodes. Counts: `aged` episodes, and `mixed` ones, whose tokens were sampled by more than one
    version.
    """
    valid = graded.valid
    episodes = graded.episodes.tokens.units.episode
    tokens = graded.episodes.tokens
    scores = graded.rewards.graded[valid].double()
    versions = tokens.versions
    is_mixed = (episodes.max(versions) > -episodes.max(-versions)) & (episodes.lengths > 0)
    sums = moments("age", (policy_version - versions)[episodes.spread(valid)])
    sums |= counts({"aged": int(valid.sum()), "mixed": int((is_mixed & valid).sum())})
    if limit is None:
        return sums
    groups = tokens.group_ids[valid]
    prompt_scores = torch.bincount(groups, scores) / torch.bincount(groups)
    columns = {
        "length": episodes.lengths[valid],
        "score": scores,
        "prompt_score": prompt_scores[groups],
    }
    is_older = graded.episodes.ages(policy_version)[valid] > limit
    for name, values in columns.items():
        sums |= moments(f"age/older_{name}", values, is_older)
        sums |= moments(f"age/within_{name}", values, ~is_older)
    return sums


def age_metrics(sums: HostSums) -> dict[str, float]:
    """`age/*` of the whole batch, from `age_sums`."""
    metrics = {
        "age/token_mean": Moments.read(sums, "age").mean,
        "age/mixed_episodes": ratio(sums["mixed"], sums["aged"]),
    }
    if "age/older_length.n" in sums:
        metrics["age/older_episodes"] = sums["age/older_length.n"]
    described = [key.removesuffix(".n") for key in sums if key.startswith("age/") and key.endswith(".n")]
    return metrics | {key: Moments.read(sums, key).mean for key in described if sums[f"{key}.n"]}


def environment_sums(graded: Graded, names: Iterable[str]) -> Sums:
    """Sums over the episodes of environments that this rank sampled, without those that failed.

    Moments of their metrics with these names, the same on every rank, as `episode/NAME`; a number that an
    episode does not have is left out. Counts: `stop.REASON`, and `observed` tokens, which follow the first
    sampled token of their sequence and were not sampled.
    """
    episodes = graded.episodes
    is_whole = ~graded.episodes.failed
    columns = zip(episodes.metrics, episodes.stop_reasons, episodes.errors, strict=True)
    whole = [(metrics, reason) for metrics, reason, error in columns if not error]
    sums: Sums = {}
    for name in names:
        numbers = [metrics[name] for metrics, _ in whole if name in metrics]
        sums |= moments(f"episode/{name}", torch.tensor(numbers, dtype=torch.float64))
    tokens = episodes.tokens
    has_spoken = tokens.sequences.cumsum(tokens.sampled) > 0
    is_observed = ~tokens.sampled & has_spoken & tokens.sequences.spread(is_whole[tokens.owners])
    reasons = [reason for _, reason in whole]
    stops = {f"stop.{reason}": reasons.count(reason) for reason in STOP_REASONS}
    return sums | counts(stops | {"observed": int(is_observed.sum())})


def environment_metrics(sums: HostSums) -> dict[str, float]:
    """`episode/*` of the whole batch, from `environment_sums` and `episode_sums`."""
    metrics: dict[str, float] = {}
    for key in [key.removesuffix(".n") for key in sums if key.startswith("episode/") and key.endswith(".n")]:
        values = Moments.read(sums, key)
        metrics[f"{key}/mean" if key in _WITH_MAX else key] = values.mean
        if key in _WITH_MAX:
            metrics[f"{key}/max"] = values.max
    sampled = Moments.read(sums, "response_length")
    for reason in STOP_REASONS:
        metrics[f"episode/stop/{reason}"] = ratio(sums[f"stop.{reason}"], sampled.count)
    return metrics | {
        "episode/num_failed": sums["episode/num_failed"],
        OVERLONG_PROMPTS: sums[OVERLONG_PROMPTS],
        "episode/observation_fraction": ratio(sums["observed"], sums["observed"] + sampled.total),
    }


# --- tokens that were trained on -----------------------------------------------------------------------


def token_sums(batch: TokenBatch) -> Sums:
    """Moments of what this rank trains on: rewards per episode, advantages, values and returns per token."""
    sums = moments("critic/rewards", batch.episode_rewards)
    sums |= moments("critic/advantages", known(batch.advantages))
    if {"values", "returns"} <= batch.columns.keys():
        sums |= moments("critic/values", batch.column("values"))
        sums |= moments("critic/returns", batch.column("returns"))
    return sums


def token_metrics(sums: HostSums) -> dict[str, float]:
    """Metrics of the batch, under verl's names, from `token_sums`."""
    return _extremes(sums, "critic/rewards", "critic/advantages", "critic/values", "critic/returns")


def turn_sums(batch: TokenBatch, training_log_probs: Tensor) -> Sums:
    """Moments by turn of what this rank trains on: `kl.N` and `weight.N`, for the first turns.

    Of each token log π_rollout − log π_train, and of each turn Π ρ, clamped as weights are.
    """
    gaps = batch.rollout_log_probs - training_log_probs
    unit = batch.units.turn
    number = batch.turns[unit.starts[unit.lengths > 0]]
    weights = clamped_exp(-unit.sum(gaps))[unit.lengths > 0]
    sums: Sums = {}
    for turn in range(_NUM_TURNS):
        sums |= moments(f"kl.{turn}", gaps[(batch.turns == turn) & gaps.isfinite()])
        sums |= moments(f"weight.{turn}", weights[(number == turn) & weights.isfinite()])
    return sums


def turn_metrics(sums: HostSums) -> dict[str, float]:
    """`rollout_corr/turn_N/*` of the whole batch, from `turn_sums`, for the turns that there are."""
    metrics: dict[str, float] = {}
    for turn in range(_NUM_TURNS):
        weights = Moments.read(sums, f"weight.{turn}")
        if weights.count:
            metrics[f"rollout_corr/turn_{turn + 1}/kl"] = Moments.read(sums, f"kl.{turn}").mean
            metrics[f"rollout_corr/turn_{turn + 1}/eff_sample_size"] = weights.ess
    return metrics


def ratio_sums(batch: TokenBatch, training_log_probs: Tensor, spec: RunSpec) -> Sums:
    """Moments of log π_train − log π_rollout of what this rank trains on: of all tokens, `fresh` and `mixed`.

    Both are sampled by the weights under which π_train is computed. The keys and values that `mixed` ones
    attend to may be of older weights, which sampled an earlier token of their sequence; if later requests use
    no old blocks, one of their turn. `is_mixed`: 1 for these tokens of any age, else 0.
    """
    gaps = training_log_probs - batch.rollout_log_probs
    clears = spec.rollout.stale_cache == "clear"
    current = (batch.column("age") == 0) & gaps.isfinite()
    if spec.algorithm.rollout_correction.bypass_mode:  # π_train moves with every update after the first
        current &= batch.units.episode.spread(batch.group_ids < spec.ppo_mini_batch_size)
    unit = batch.units.turn if clears else batch.units.sequence
    versions = batch.versions - (unit.index << 32)  # so that the running minimum begins anew in each
    mixed = versions > versions.cummin(0).values
    sums = moments("all", gaps[gaps.isfinite()]) | moments("is_mixed", mixed)
    return sums | moments("fresh", gaps[current & ~mixed]) | moments("mixed", gaps[current & mixed])


def ratio_metrics(sums: HostSums, spec: RunSpec, probed: float | None) -> dict[str, float]:
    """`rollout_corr/split/*`: parts of the mean square of the log-ratio, nats², whose sum it is.

    Independent parts add up in the mean square. A part is the difference of two mean squares, over other
    tokens, and may be negative where it is small. One that the step does not tell is left out; then so are
    those that follow from it. In flight also the share of tokens whose cache is of older weights.

    `probed`: the mean square right after a weight sync, without truncation.
    """

    def square(name: str) -> float | None:
        values = Moments.read(sums, name)
        return values.squares / values.count if values.count else None

    total, fresh, mixed = map(square, ("all", "fresh", "mixed"))
    rollout = spec.rollout
    truncates = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    is_apart = not truncates or rollout.exact_sampling  # then fresh tokens show the engine alone
    engine = fresh if is_apart and fresh is not None else probed
    share = Moments.read(sums, "is_mixed").mean
    metrics = {} if engine is None else {ENGINE: engine}
    if rollout.in_flight:
        metrics[STALE_CACHE] = 0.0 if rollout.stale_cache == "recompute" else share
    if not is_apart and engine is not None and fresh is not None:
        metrics["rollout_corr/split/kept_set"] = fresh - engine
    known = fresh
    if fresh is None and is_apart:
        known = engine
    if known is None or total is None:
        return metrics
    cache = share * (mixed - known) if mixed is not None else 0.0
    if mixed is not None:
        metrics["rollout_corr/split/cache"] = cache
    return metrics | {"rollout_corr/split/staleness": total - known - cache}


# --- seconds, notices and warnings ---------------------------------------------------------------------


class StepTimer:
    """Seconds by phase, as `timing_s/<phase>`; phases may nest.

    Args:
        show: called with the name of every phase that begins.
    """

    def __init__(self, device: torch.device, show: Callable[[str], None] = lambda _: None) -> None:
        self._is_cuda = device.type == "cuda"
        self._show = show
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block; on CUDA, waits for its kernels, which would otherwise count for the next phase."""
        self._show(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._is_cuda:
                torch.cuda.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/*` of every phase."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


class Notices:
    """Shows lines, limited per kind, and counts the kinds.

    Args:
        label: prefix of every line.
    """

    def __init__(self, show: Callable[[str], None], label: str) -> None:
        self._show = show
        self._label = label
        self._times: Counter[str] = Counter()

    def once(self, kind: str, text: str) -> None:
        """Shows the line if it is the first of its kind."""
        self._times[kind] += 1
        if self._times[kind] == 1:
            self._show(f"{self._label}: {text}")

    def doubling(self, kind: str, text: str) -> None:
        """Shows the line if it is the 1st, 2nd, 4th, 8th … of its kind."""
        self._times[kind] += 1
        times = self._times[kind]
        if times & (times - 1) == 0:  # a power of two
            self._show(f"{self._label}: {text}" + (f" ({times} times so far)" if times > 1 else ""))


def step_warnings(
    spec: RunSpec,
    metrics: Mapping[str, float],
    missed: Mapping[str, int],
    nonfinite: Sequence[str],
    timeouts: Mapping[FailureKind, int],
) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) for every problem in one step.

    Args:
        missed: see `Updated.missed`.
        nonfinite: this rank's responses with non-finite log-probs, as group and member.
        timeouts: of this rank, see `RewardResult.timeouts`.
    """
    for reason, number in missed.items():
        why = _MISSED[reason]
        if reason == "empty" and spec.rollout.beyond_max_age == "drop" and metrics.get("age/older_episodes"):
            limit = f"rollout.max_age_updates = {spec.rollout.max_age_updates}"
            why = f"all graded episodes were older than {limit}; set it higher, or beyond_max_age to pace"
        yield f"skipped {reason}", f"{number} updates withheld: {why}"
    count = metrics["rollout_corr/nonfinite_sequences"]
    if count:
        named = ", ".join(nonfinite[:_MAX_NAMED]) + (", …" if len(nonfinite) > _MAX_NAMED else "")
        where = f" (on this rank those of group and member {named})" if nonfinite else ""
        yield "nonfinite", f"{count:.0f} sequences with NaN or infinite log-probs{where}"
    skipped = metrics.get("critic/skipped_updates")
    if skipped:
        why = "loss or gradient was not finite; lower critic.lr"
        yield "critic", f"{skipped:.0f} updates of the critic withheld: {why}"
    if metrics.get("reward/zero_spread_groups") == 1.0:
        message = "within every group all grades are equal: group-relative advantages are zero"
        yield "flat", f"{message}, or come from the penalties alone"
    if metrics.get("response_length/clip_ratio") == 1.0:
        yield (
            "endless",
            "every response reached data.max_response_length; check the model's end-of-sequence token",
        )
    failed = metrics.get("episode/num_failed")
    if failed:
        yield "environment", f"{failed:.0f} episodes failed by faults of the environment; they are excluded"
    overlong = metrics.get(OVERLONG_PROMPTS)
    if overlong:
        limit = f"data.max_prompt_length = {spec.data.max_prompt_length}"
        message = f"the first prompts of {overlong:.0f} episodes, with tools and what reset said"
        yield "overlong", f"{message}, have more than {limit} tokens; they are excluded"
    errors = metrics["reward/num_errors"]
    if errors:
        yield "grader", f"the grader failed on {errors:.0f} responses; they are excluded"
    count = metrics["reward/num_timeouts"]
    if count:
        kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(timeouts.items()))
        where = f" (on this rank {kinds})" if kinds else ""
        yield "timeouts", f"{count:.0f} responses made their grading fail{where} and are scored as wrong"
