"""What a step reports: metrics of its batch, seconds by phase, and warnings.

Sums of a batch are merged over ranks before any division.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.correction import clamped_exp
from rlctl.algos.estimators import has_spread
from rlctl.algos.segments import HostSums, Moments, Sums, moments, ratio
from rlctl.batch import Episode, TokenBatch
from rlctl.environment.protocol import STOP_REASONS
from rlctl.reward.protocol import FailureKind

if TYPE_CHECKING:
    from rlctl.reward.protocol import Graded

_MAX_NAMED = 8
#: Metrics of episodes whose maximum is logged beside the mean.
_WITH_MAX = ("num_turns", "num_sequences")
#: Turns whose mismatch is logged separately.
_NUM_TURNS = 4


def episode_sums(graded: Graded, policy_version: int, max_prompt_length: int) -> Sums:
    """Sums over the episodes that this rank sampled; `policy_version` is the trainer's.

    Moments: `score` of the graded ones, `response_length` and `prompt_length` in tokens, `staleness` in
    optimizer updates between the weights that sampled the oldest token and the trained policy, and
    `term.NAME` per term of the reward. Counts: full_prompts, truncated, aborted, invalid, timeouts, failed
    by faults of the environment (which are in no other sum), groups, and flat_groups, whose grades (without
    the overlong penalty) are equal.
    """
    rewards, is_whole = graded.rewards, [not episode.error for episode in graded.episodes]
    whole = torch.tensor(is_whole, dtype=torch.bool)
    valid, episodes = graded.valid & whole, [e for e, ok in zip(graded.episodes, is_whole, strict=True) if ok]
    num_groups = len({episode.task.group_id for episode in episodes})
    num_aborted = sum(episode.aborted for episode in episodes)

    def of_each(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    def number(count: float) -> Tensor:
        return torch.tensor(float(count), dtype=torch.float64)

    prompts = of_each(len(episode.task.prompt_ids) for episode in episodes)
    groups = torch.tensor([episode.task.group_id for episode in graded.episodes], dtype=torch.int64)[valid]
    spread = has_spread(rewards.graded[valid], groups)
    sums = moments("score", rewards.scores[valid])
    sums |= moments("response_length", of_each(episode.num_sampled for episode in episodes))
    sums |= moments("prompt_length", prompts)
    sums |= moments("staleness", ages_of(episodes, policy_version))
    for term, scores in rewards.parts.items():
        sums |= moments(f"term.{term}", scores.nan_to_num(), valid & ~scores.isnan())
        sums[f"errors.{term}"] = number(rewards.errors_by_term.get(term, 0))
    return sums | {
        "full_prompts": (prompts >= max_prompt_length).double().sum(),
        "truncated": number(sum(episode.truncated for episode in episodes)),
        "aborted": number(num_aborted),
        "invalid": number(len(episodes) - num_aborted) - valid.double().sum(),
        "timeouts": number(sum(rewards.timeouts.values())),
        "failed": number(is_whole.count(False)),
        "groups": number(num_groups),
        "flat_groups": number(num_groups - len(set(groups[spread].tolist()))),
    }


def ages_of(episodes: Sequence[Episode], policy_version: int) -> Tensor:
    """(E,) float64: optimizer updates from the weights that sampled the oldest token to the trained policy.

    0 for an episode without sampled tokens.
    """
    oldest = [
        min((int(s.versions.min()) for s in e.sequences if len(s.versions)), default=policy_version)
        for e in episodes
    ]
    return policy_version - torch.tensor(oldest, dtype=torch.float64)


def age_sums(graded: Graded, policy_version: int, limit: int | None) -> Sums:
    """Sums over the graded episodes that this rank sampled, by age.

    Moments: `age` per token, and with a limit, for the episodes `older` than it and those `within` it,
    `length` in sampled tokens, `score`, and `prompt_score`, the mean score of the group's graded episodes.
    Counts: `mixed` episodes, whose tokens were sampled by more than one version.
    """
    places = graded.valid.nonzero().squeeze(1)
    episodes = [graded.episodes[place] for place in places.tolist()]
    scores = graded.rewards.graded[places].double()
    none = torch.empty(0, dtype=torch.int64)
    versions = [torch.cat([none, *(s.versions for s in episode.sequences)]) for episode in episodes]
    sums = moments("age", policy_version - torch.cat([none, *versions]))
    sums["mixed"] = torch.tensor(float(sum(len(set(found.tolist())) > 1 for found in versions)))
    if limit is None:
        return sums
    groups = torch.tensor([episode.task.group_id for episode in episodes], dtype=torch.int64)
    prompt_scores = torch.bincount(groups, scores) / torch.bincount(groups)
    columns = {
        "length": torch.tensor([float(episode.num_sampled) for episode in episodes]),
        "score": scores,
        "prompt_score": prompt_scores[groups],
    }
    is_older = ages_of(episodes, policy_version) > limit
    for name, values in columns.items():
        sums |= moments(f"older.{name}", values, is_older) | moments(f"within.{name}", values, ~is_older)
    return sums


def age_metrics(sums: HostSums, num_episodes: float) -> dict[str, float]:
    """`age/*` of the whole batch, from `age_sums`."""
    tokens = Moments.read(sums, "age")
    metrics = {
        "age/token_mean": tokens.mean,
        "age/mixed_episodes": ratio(sums["mixed"], num_episodes),
    }
    if "older.length.n" not in sums:
        return metrics
    metrics["age/older_episodes"] = sums["older.length.n"]
    for part in ("older", "within"):
        if sums[f"{part}.length.n"]:
            for name in ("length", "score", "prompt_score"):
                metrics[f"age/{part}_{name}"] = Moments.read(sums, f"{part}.{name}").mean
    return metrics


def environment_sums(graded: Graded, names: Iterable[str]) -> Sums:
    """Sums over the episodes of environments that this rank sampled, without those that failed.

    Moments of their metrics with these names, the same on every rank; a number that an episode does not have
    is left out. Counts: whole and failed episodes, `stop.REASON`, sampled tokens, and observed tokens, which
    follow the first sampled token of their sequence and were not sampled.
    """
    whole = [episode for episode in graded.episodes if not episode.error]
    sums: Sums = {}
    for name in names:
        found = [episode.metrics[name] for episode in whole if name in episode.metrics]
        sums |= moments(f"environment.{name}", torch.tensor(found, dtype=torch.float64))
    sequences = [sequence for episode in whole for sequence in episode.sequences]
    counts = {
        "episodes": len(whole),
        "failed": len(graded.episodes) - len(whole),
        "sampled": sum(int(s.sampled.sum()) for s in sequences),
        "observed": sum(int((~s.sampled & (s.sampled.cumsum(0) > 0)).sum()) for s in sequences),
    }
    counts |= {f"stop.{reason}": sum(e.stop_reason == reason for e in whole) for reason in STOP_REASONS}
    return sums | {name: torch.tensor(float(count), dtype=torch.float64) for name, count in counts.items()}


def environment_metrics(sums: HostSums) -> dict[str, float]:
    """`episode/*` of the whole batch, from `environment_sums`."""
    metrics: dict[str, float] = {}
    for name in (key[len("environment.") : -2] for key in sums if key.endswith(".n")):
        values = Moments.read(sums, f"environment.{name}")
        metrics[f"episode/{name}/mean" if name in _WITH_MAX else f"episode/{name}"] = values.mean
        if name in _WITH_MAX:
            metrics[f"episode/{name}/max"] = values.max
    for reason in STOP_REASONS:
        metrics[f"episode/stop/{reason}"] = ratio(sums[f"stop.{reason}"], sums["episodes"])
    return metrics | {
        "episode/num_failed": sums["failed"],
        "episode/observation_fraction": ratio(sums["observed"], sums["observed"] + sums["sampled"]),
    }


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


def token_sums(batch: TokenBatch) -> Sums:
    """Moments of what this rank trains on: `reward` per episode, `advantage`, `value`, `return` per token.

    With routing replay also `live_routed`, the number of tokens whose experts the engine did not report; the
    last one of a sequence, which is not read, does not count.
    """
    assert batch.rewards is not None
    assert batch.advantages is not None
    sums = moments("reward", batch.units.episode.sum(batch.rewards)) | moments("advantage", batch.advantages)
    if batch.values is not None and batch.returns is not None:
        sums |= moments("value", batch.values) | moments("return", batch.returns)
    if batch.experts is not None:
        is_live = (batch.experts < 0).flatten(1).all(1)
        is_last = batch.sequences.places + 1 == batch.sequences.spread(batch.lengths)
        sums["live_routed"] = (is_live & ~is_last).double().sum()
    return sums


def batch_metrics(sums: HostSums, *, compares_siblings: bool) -> dict[str, float]:
    """Metrics of the whole batch, under verl's names, from `episode_sums` and `token_sums`.

    `reward/zero_spread_groups` is included only if the estimator compares the responses of a group.
    """
    logged = {
        "critic/score": "score",
        "critic/rewards": "reward",
        "critic/advantages": "advantage",
        "critic/values": "value",
        "critic/returns": "return",
        "response_length": "response_length",
        "prompt_length": "prompt_length",
    }
    metrics: dict[str, float] = {}
    for name, key in logged.items():
        if f"{key}.n" in sums:
            values = Moments.read(sums, key)
            metrics |= {f"{name}/mean": values.mean, f"{name}/max": values.max, f"{name}/min": values.min}
    terms = [name.removeprefix("errors.") for name in sums if name.startswith("errors.")]
    for term in terms if len(terms) > 1 else ():  # one term equals `critic/score`
        metrics[f"reward/{term}/mean"] = Moments.read(sums, f"term.{term}").mean
        metrics[f"reward/{term}/num_errors"] = sums[f"errors.{term}"]
    if compares_siblings:
        metrics["reward/zero_spread_groups"] = ratio(sums["flat_groups"], sums["groups"])
    if "live_routed" in sums:
        metrics["actor/live_routed_tokens"] = sums["live_routed"]
    lengths, staleness = Moments.read(sums, "response_length"), Moments.read(sums, "staleness")
    return metrics | {
        "response_length/clip_ratio": ratio(sums["truncated"], lengths.count),
        "prompt_length/clip_ratio": ratio(sums["full_prompts"], lengths.count),
        "response/num_aborted": sums["aborted"],
        "reward/num_errors": sums["invalid"],
        "reward/num_timeouts": sums["timeouts"],
        "reward/error_fraction": ratio(sums["invalid"], lengths.count),
        "training/staleness_mean": staleness.mean,
        "training/staleness_max": staleness.max,
        "perf/total_num_tokens": lengths.total + sums["prompt_length.x"],
    }


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
        self._show, self._label = show, label
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
    metrics: Mapping[str, float], nonfinite: Sequence[str], timeouts: Mapping[FailureKind, int]
) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) for every problem in one step.

    Args:
        nonfinite: this rank's responses with non-finite log-probs, as group and member.
        timeouts: of this rank, see `RewardResult.timeouts`.
    """
    if skipped := metrics["rollout_corr/skipped_updates"]:
        why = "everything was rejected, or loss or gradient was not finite"
        if metrics["rollout_corr/rollout_rs_masked_fraction"] >= 1.0:
            why = "every response was rejected; widen rollout_rs_threshold or fix the mismatch"
        yield "skipped", f"{skipped:.0f} updates withheld: {why}"
    if count := metrics["rollout_corr/nonfinite_sequences"]:
        named = ", ".join(nonfinite[:_MAX_NAMED]) + (", …" if len(nonfinite) > _MAX_NAMED else "")
        where = f" (on this rank those of group and member {named})" if nonfinite else ""
        yield "nonfinite", f"{count:.0f} sequences with NaN or infinite log-probs{where}"
    if missed := metrics.get("critic/skipped_updates", 0.0):
        why = "loss or gradient was not finite; lower critic.lr"
        yield "critic", f"{missed:.0f} updates of the critic withheld: {why}"
    if metrics.get("reward/zero_spread_groups") == 1.0:
        what = "within every group all grades are equal: group-relative advantages are zero"
        yield "flat", f"{what}, or come from the penalties alone"
    if metrics.get("response_length/clip_ratio") == 1.0:
        yield (
            "endless",
            "every response reached data.max_response_length; check the model's end-of-sequence token",
        )
    if failed := metrics.get("episode/num_failed"):
        yield "environment", f"{failed:.0f} episodes failed by faults of the environment; they are excluded"
    if errors := metrics["reward/num_errors"]:
        yield "grader", f"the grader failed on {errors:.0f} responses; they are excluded"
    if count := metrics["reward/num_timeouts"]:
        kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(timeouts.items()))
        where = f" (on this rank {kinds})" if kinds else ""
        yield "timeouts", f"{count:.0f} responses made their grading fail{where} and are scored as wrong"
