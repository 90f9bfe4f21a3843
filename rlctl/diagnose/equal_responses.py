"""Do equal responses to a prompt get equal rewards? Asked of a run's dumped rollouts.

A reward that is a function of the response is the same for all equal responses to a prompt in one step. What
differs among them is noise, a judge that samples, or the reward of another response. Responses are compared
within a step only, because a reward may change during a run on purpose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.table import RewardNoise
from rlctl.errors import UsageError, first_line

#: Most rows and tokens that are read; of more, files at equal distances, and of these whole steps until one
#: is reached.
MOST_ROWS, MOST_TOKENS = 200_000, 200_000_000
#: A shift of the rewards is named if with it at most this share of the variance, with 95 % confidence, is
#: among equal responses, at least `MOSTLY` is without it, and the rewards vary as much. `REPEATS` repeats or
#: more must differ without it, and the few that do with it have at most the probability `BY_CHANCE` in noise.
#: Both probabilities are of all shifts that are tried together.
FITS, MOSTLY, REPEATS, BY_CHANCE = 0.1, 0.5, 20, 0.01
#: Prompts whose equal responses differ in their rewards, and their share, from which that is common.
NOISY_PROMPTS, NOISY_SHARE = 5, 0.1
#: Prompts from which a standard error over prompts is known.
_LEAST_PROMPTS = 5
#: Rows that are decoded at once, to bound the memory.
_BATCH = 1024
#: Difference of rewards that counts as none, relative to the largest.
_ROUNDING = 1e-6
_COLUMNS = ("step", "group_id", "episode_id", "token_ids", "reward", "terms")


@dataclass(frozen=True, slots=True)
class RewardedEpisodes:
    """N episodes in the order of the dump."""

    steps: NDArray[np.int64]  # (N,)
    prompts: NDArray[np.int64]  # (N,) equal for the episodes of one prompt in one step
    responses: NDArray[np.int64]  # (N,) equal for those of them that have equal tokens
    rewards: NDArray[np.float64]  # (N,) NaN: the grader failed
    terms: dict[str, NDArray[np.float64]]  # label → (N,) scores; NaN: unknown


def reward_noise(files: Sequence[Path], weights: Mapping[str, float] | None = None) -> RewardNoise | None:
    """Compares the rewards of equal episodes; None where no episode is repeated, or all rewards are equal.

    Args:
        weights: label → factor of a term's scores in the reward; 1 for terms that it lacks.

    Raises:
        UsageError: a file is damaged, or no part of dumped rollouts.
    """
    import pyarrow as pa

    try:
        return noise_among(read_episodes(files), weights or {})
    except (OSError, LookupError, ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise UsageError(
            f"cannot be read as rollouts: {first_line(error)}", where=str(files[0].parent)
        ) from error


def noise_among(episodes: RewardedEpisodes, weights: Mapping[str, float]) -> RewardNoise | None:
    """As `reward_noise`, of episodes that are read."""
    noise = compared(episodes, episodes.rewards)
    if noise is None or noise.first_step is None:
        return noise
    noisy = {
        label: weights.get(label, 1.0) ** 2 * _within(episodes, scores)
        for label, scores in episodes.terms.items()
    }
    term = max(noisy, key=lambda label: noisy[label]) if len(noisy) > 1 else ""
    return replace(noise, term=term, shift=_shift(episodes, noise))


def is_common(noise: RewardNoise) -> bool:
    """Whether so many prompts differ: where nearly all is right, or a grader rarely fails, few do."""
    return noise.num_differing >= max(NOISY_PROMPTS, NOISY_SHARE * noise.num_prompts)


def read_episodes(files: Sequence[Path]) -> RewardedEpisodes:
    """The episodes of the files, or of some of them."""
    prompts: dict[tuple[int, int], int] = {}
    responses: dict[tuple[int, bytes], int] = {}
    rows: list[tuple[int, int, int, float]] = []
    scores: list[dict[str, float | None]] = []
    for step, group, tokens, reward, terms in _episodes(files):
        prompt = prompts.setdefault((step, group), len(prompts))
        response = responses.setdefault((prompt, tokens), len(responses))
        rows.append((step, prompt, response, reward))
        scores.append(terms)
    labels = sorted(set().union(*scores))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    if not np.isfinite(columns[:3]).all():
        raise ValueError("a step is no number")
    steps, prompt_ids, response_ids = columns[:3].astype(np.int64)
    terms_of = {label: np.array([one.get(label) for one in scores], dtype=np.float64) for label in labels}
    return RewardedEpisodes(steps, prompt_ids, response_ids, columns[3], terms_of)


_Episode = tuple[int, int, bytes, float, dict[str, float | None]]


def _episodes(files: Sequence[Path]) -> Iterator[_Episode]:
    """Step, group, digest of the tokens of all sequences, reward (NaN: none) and terms of each episode."""
    sizes = [_size(file) for file in files]
    rows, tokens = (sum(size) for size in zip(*sizes, strict=True))
    stride = max(1, math.ceil(rows / MOST_ROWS), math.ceil(tokens / MOST_TOKENS))
    num_rows = num_tokens = 0
    for file in files[::stride]:
        step = name = last = None
        digest = hashlib.blake2b(digest_size=16)
        for row in _rows(file):
            if row["step"] != step and (num_rows >= MOST_ROWS or num_tokens >= MOST_TOKENS):
                break
            num_rows += 1
            num_tokens += len(row["token_ids"])
            if last is None or row["episode_id"] != name:
                if last is not None:
                    yield _episode(last, digest.digest())
                digest = hashlib.blake2b(digest_size=16)
                step, name, last = row["step"], row["episode_id"], row
            content = row["token_ids"].tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
        if last is not None:
            yield _episode(last, digest.digest())


def _size(file: Path) -> tuple[int, int]:
    """Number of rows and of tokens of a file, from its metadata."""
    import pyarrow.parquet as pq

    stored = pq.read_metadata(file)
    groups = [stored.row_group(index) for index in range(stored.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    tokens = (column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
    return stored.num_rows, sum(tokens)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """The columns of each row; `token_ids` as an array.

    Raises:
        ValueError: null in a column that says which episodes are to be compared.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as stored:
        columns = [name for name in _COLUMNS if name in stored.schema_arrow.names]
        for batch in stored.iter_batches(_BATCH, columns=columns):
            for name in ("step", "group_id", "episode_id", "token_ids"):
                if batch[name].null_count:
                    raise ValueError(f"null in the column {name}")
            ids = batch["token_ids"].flatten().to_numpy()
            ends = np.cumsum(np.diff(batch["token_ids"].offsets.to_numpy()))[:-1]
            others = [name for name in columns if name != "token_ids"]
            values = zip(*(batch[name].to_pylist() for name in others), strict=True)
            for tokens, row in zip(np.split(ids, ends), values, strict=True):
                yield dict(zip(others, row, strict=True)) | {"token_ids": tokens}


def _episode(row: dict[str, Any], digest: bytes) -> _Episode:
    reward = np.nan if row["reward"] is None else row["reward"]
    return row["step"], row["group_id"], digest, reward, dict(row.get("terms") or ())


def compared(
    episodes: RewardedEpisodes, rewards: NDArray[np.float64], sigmas: float = 1.96
) -> RewardNoise | None:
    """The noise of (N,) rewards; None where no episode is repeated, or no reward of their prompts differs.

    Args:
        sigmas: half the width of the interval of the share, in standard errors; with few prompts, whose
            standard error is not known, it is from 0 to 1.
    """
    known = np.isfinite(rewards)
    prompts, responses = episodes.prompts[known], episodes.responses[known]
    rewards, steps = rewards[known], episodes.steps[known]
    if not len(rewards):
        return None
    among_equal, repeats, differ = _squares(responses, rewards)
    among_all, others, _ = _squares(prompts, rewards)
    prompt_of = np.zeros(len(repeats), dtype=np.int64)
    prompt_of[responses] = prompts
    noise = _sums(prompt_of, among_equal, len(others))
    count = _sums(prompt_of, repeats, len(others))
    has_repeats = count > 0
    if not among_all[has_repeats].any():
        return None
    share, error = _ratio(noise[has_repeats], count[has_repeats], among_all[has_repeats], others[has_repeats])
    is_known = has_repeats.sum() >= _LEAST_PROMPTS
    differing = np.isin(responses, np.flatnonzero(differ))
    return RewardNoise(
        num_repeats=int(count.sum()),
        num_prompts=int(has_repeats.sum()),
        num_differing=len(np.unique(prompts[differing])),
        share=min(1.0, share),
        low=max(0.0, min(1.0, share - sigmas * error)) if is_known else 0.0,
        high=min(1.0, share + sigmas * error) if is_known else 1.0,
        first_step=int(steps[differing].min()) if differing.any() else None,
    )


def _squares(
    index: NDArray[np.int64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """For each index: sum of squared deviations from its mean, number of values − 1, any difference."""
    size = int(index.max()) + 1
    count = _sums(index, np.ones(len(index)), size)
    mean = _sums(index, values, size) / np.maximum(count, 1.0)
    deviations = values - mean[index]
    is_apart = np.abs(deviations) > _ROUNDING * np.abs(values).max()
    squares = _sums(index, np.where(is_apart, deviations**2, 0.0), size)
    return squares, np.maximum(count - 1.0, 0.0), _sums(index, is_apart, size) > 0.0


def _sums(index: NDArray[np.int64], values: NDArray[Any], size: int) -> NDArray[np.float64]:
    """(size,) sums of the values with each index."""
    return np.asarray(np.bincount(index, values, minlength=size), dtype=np.float64)


def _ratio(
    noise: NDArray[np.float64],
    repeats: NDArray[np.float64],
    total: NDArray[np.float64],
    others: NDArray[np.float64],
) -> tuple[float, float]:
    """(Σ noise / Σ repeats) / (Σ total / Σ others) over prompts, and its standard error (delta method)."""
    ratio = float(noise.sum() / repeats.sum() / (total.sum() / others.sum()))
    if ratio == 0.0:
        return 0.0, 0.0
    influence = noise / noise.sum() - repeats / repeats.sum() - total / total.sum() + others / others.sum()
    return ratio, ratio * float(np.sqrt((influence**2).sum()))


def _within(episodes: RewardedEpisodes, scores: NDArray[np.float64]) -> float:
    """Sum of squared deviations of scores among equal episodes."""
    known = np.isfinite(scores)
    return float(_squares(episodes.responses[known], scores[known])[0].sum()) if known.any() else 0.0


def _shift(episodes: RewardedEpisodes, noise: RewardNoise) -> int:
    """Number of rows by which the rewards are shifted; 0: none fits, or too little is repeated to tell."""
    differing = _num_differing(episodes, episodes.rewards)
    if noise.low < MOSTLY or not is_common(noise) or differing < REPEATS:
        return 0
    size = int(np.bincount(episodes.prompts).max())
    variance = _variance(episodes, episodes.rewards)
    shifts = sorted((shift for shift in range(-size, size + 1) if shift), key=abs)
    sigmas = NormalDist().inv_cdf(1.0 - 0.025 / len(shifts))
    for shift in shifts:
        moved = _moved(episodes, shift)
        fitting = compared(episodes, moved, sigmas)
        if fitting is None or 2 * fitting.num_repeats < noise.num_repeats:
            continue
        expected = differing * fitting.num_repeats / noise.num_repeats
        by_chance = len(shifts) * _at_most(_num_differing(episodes, moved), expected)
        is_as_varied = _variance(episodes, moved) > variance / 2.0
        if fitting.high < FITS and by_chance < BY_CHANCE and is_as_varied:
            return -shift
    return 0


def _num_differing(episodes: RewardedEpisodes, rewards: NDArray[np.float64]) -> int:
    """Number of repeats whose (N,) reward is not that of the response; that is its least or its greatest."""
    known = np.isfinite(rewards)
    responses, rewards = episodes.responses[known], rewards[known]
    if not len(rewards):
        return 0
    size = int(responses.max()) + 1
    counts = []
    for extreme, start in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        ends = np.full(size, start)
        extreme.at(ends, responses, rewards)
        is_apart = np.abs(rewards - ends[responses]) > _ROUNDING * np.abs(rewards).max()
        counts.append(_sums(responses, is_apart, size))
    return int(np.minimum(*counts).sum())


def _at_most(count: int, expected: float) -> float:
    """Upper bound (Chernoff) of the probability of at most so many events where so many are expected."""
    if count >= expected:
        return 1.0
    return math.exp(count - expected + (count * math.log(expected / count) if count else 0.0))


def _moved(episodes: RewardedEpisodes, shift: int) -> NDArray[np.float64]:
    """The rewards (N,) of the episodes `shift` rows later in the same step; NaN where there is none."""
    places = np.arange(len(episodes.steps)) + shift
    inside = (places >= 0) & (places < len(places))
    places = np.where(inside, places, 0)
    inside &= episodes.steps[places] == episodes.steps
    return np.where(inside, episodes.rewards[places], np.nan)


def _variance(episodes: RewardedEpisodes, rewards: NDArray[np.float64]) -> float:
    """Of the rewards within prompts that have equal episodes."""
    known = np.isfinite(rewards)
    repeated = np.bincount(episodes.responses) > 1
    has_repeats = np.isin(episodes.prompts, episodes.prompts[repeated[episodes.responses]]) & known
    squares, others, _ = _squares(episodes.prompts[has_repeats], rewards[has_repeats])
    return float(squares.sum() / max(1.0, others.sum()))
