"""Do equal responses to a prompt get equal rewards? Asked of a run's dumped rollouts.

A reward that is a function of the response is the same for all equal responses to a prompt in one step. What
differs among them is noise, a judge that samples, or the reward of another response. Responses are compared
within a step only, because a reward may change during a run on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.table import RewardNoise
from rlctl.errors import UsageError, first_line

#: Most rows that are read; of more, files at equal distances.
MOST_ROWS = 200_000
#: A shift of the rewards is named if with it at most this share of the variance, with 95 % confidence, is
#: among equal responses, at least `MOSTLY` is without it, and the rewards vary as much.
FITS, MOSTLY = 0.1, 0.5
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


def reward_noise(files: Sequence[Path]) -> RewardNoise | None:
    """Compares the rewards of equal episodes; None where no episode is repeated, or all rewards are equal.

    Raises:
        UsageError: a file is damaged, or no part of dumped rollouts.
    """
    import pyarrow as pa

    try:
        episodes = read_episodes(files)
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:  # null in a column
        raise UsageError(
            f"cannot be read as rollouts: {first_line(error)}", where=str(files[0].parent)
        ) from error
    noise = compared(episodes, episodes.rewards)
    if noise is None or noise.first_step is None:
        return noise
    noisy = {label: _within(episodes, scores) for label, scores in episodes.terms.items()}
    term = max(noisy, key=lambda label: noisy[label]) if len(noisy) > 1 else ""
    return replace(noise, term=term, shift=_shift(episodes, noise))


def read_episodes(files: Sequence[Path]) -> RewardedEpisodes:
    """The episodes of the files, or of some of them."""
    prompts: dict[tuple[int, int], int] = {}
    responses: dict[tuple[int, bytes], int] = {}
    rows: list[tuple[int, int, int, float]] = []
    scores: list[dict[str, float]] = []
    for step, group, tokens, reward, terms in _episodes(files):
        prompt = prompts.setdefault((step, group), len(prompts))
        response = responses.setdefault((prompt, tokens), len(responses))
        rows.append((step, prompt, response, reward))
        scores.append(terms)
    labels = sorted(set().union(*scores))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    steps, prompt_ids, response_ids = columns[:3].astype(np.int64)
    terms_of = {label: np.array([one.get(label, np.nan) for one in scores]) for label in labels}
    return RewardedEpisodes(steps, prompt_ids, response_ids, columns[3], terms_of)


def _episodes(files: Sequence[Path]) -> Iterator[tuple[int, int, bytes, float, dict[str, float]]]:
    """Step, group, tokens of all sequences, reward (NaN: none) and terms of each episode."""
    import pyarrow.parquet as pq

    stride = max(1, math.ceil(sum(pq.read_metadata(file).num_rows for file in files) / MOST_ROWS))
    for file in files[::stride]:
        with pq.ParquetFile(file) as stored:
            table = stored.read(columns=[name for name in _COLUMNS if name in stored.schema_arrow.names])
        tokens = table["token_ids"].combine_chunks()
        ids = tokens.flatten().to_numpy()
        ends = np.cumsum(np.diff(tokens.offsets.to_numpy()))
        starts = ends - np.diff(tokens.offsets.to_numpy())
        terms = table["terms"].to_pylist() if "terms" in table.column_names else [None] * len(table)
        names = table["episode_id"].to_pylist()
        last: tuple[int, int, bytes, float, dict[str, float]] | None = None
        for row, (step, group, reward) in enumerate(
            zip(*(table[key].to_pylist() for key in ("step", "group_id", "reward")), strict=True)
        ):
            content = ids[starts[row] : ends[row]].tobytes()
            if last is not None and names[row] == names[row - 1]:
                last = (*last[:2], last[2] + b"|" + content, *last[3:])
                continue
            if last is not None:
                yield last
            last = (step, group, content, np.nan if reward is None else reward, dict(terms[row] or ()))
        if last is not None:
            yield last


def compared(episodes: RewardedEpisodes, rewards: NDArray[np.float64]) -> RewardNoise | None:
    """The noise of (N,) rewards; None where no episode is repeated, or no reward of their prompts differs."""
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
    differing = np.isin(responses, np.flatnonzero(differ))
    return RewardNoise(
        num_repeats=int(count.sum()),
        num_prompts=int(has_repeats.sum()),
        num_differing=len(np.unique(prompts[differing])),
        share=min(1.0, share),
        low=max(0.0, min(1.0, share - 1.96 * error)),
        high=min(1.0, share + 1.96 * error),
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
    """Number of rows by which the rewards are shifted; 0: none fits."""
    if noise.low < MOSTLY:
        return 0
    size = int(np.bincount(episodes.prompts).max())
    variance = _variance(episodes, episodes.rewards)
    for shift in sorted((shift for shift in range(-size, size + 1) if shift), key=abs):
        moved = _moved(episodes, shift)
        fitting = compared(episodes, moved)
        if fitting is None or 2 * fitting.num_repeats < noise.num_repeats:
            continue
        if fitting.high < FITS and _variance(episodes, moved) > variance / 2.0:
            return -shift
    return 0


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
