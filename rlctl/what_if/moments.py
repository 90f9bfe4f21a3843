"""Sums that a replay accumulates: a surrogate policy's gradients under every setting, per block of groups.

A dump does not contain the true score ∇log π of a token. It is replaced by the score of a policy with a table
of `CLASSES` × `CLASSES` logits that predicts a token's class from the class of the previous token. Only the
score of the sampled token's logit is used, 1 − π(token), because the dump contains π(token). The contribution
of the other logits is accounted for on average (`ScoreMoments.centred`).

Prompt groups are independent of each other; responses of one group are not. Groups are divided into `BLOCKS`
blocks: products of different blocks estimate squared expectations without bias, and resampling blocks gives
intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.what_if.dumps import Step

Floats = NDArray[np.float64]

BLOCKS = 32
#: Number of classes of tokens and of previous tokens. The class is the token id modulo this number.
CLASSES = 32
#: Upper bound of the token ratios that weight the centring, so that no single token dominates the mean.
_CENTRING_CAP = 10.0
#: Padded tokens per chunk. Bounds the memory used in addition to the rows of one step.
CHUNK_TOKENS = 1 << 18
#: Groups per chunk. Each group temporarily has a dense surrogate gradient.
CHUNK_GROUPS = 512


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole groups of one step, padded, on the CPU."""

    #: log_probs, rollout_log_probs: (B, T) float32, finite
    log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor  # (B, T) bool, response tokens of graded sequences with finite log-probs
    token_ids: Tensor  # (B, T) int64
    advantages: Tensor  # (B,) float64
    groups: Tensor  # (B,) int64, number of the group within this chunk
    blocks: Tensor  # (B,) int64, the group's block


def whole_groups(step: Step) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields (rows, group number of each row) per chunk; the rows of a group are adjacent, never split."""
    _, numbers = np.unique(step.group_ids, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order])) + 1
    rows, count = order[:0], 0
    for group in np.split(order, ends):
        ahead = np.concatenate([rows, group])
        is_full = count == CHUNK_GROUPS or step.lengths[ahead].max() * len(ahead) > CHUNK_TOKENS
        if count and is_full:
            yield rows, numbers[rows]
            ahead, count = group, 0
        rows, count = ahead, count + 1
    yield rows, numbers[rows]


def pad(step: Step, rows: NDArray[np.int64], groups: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chunk:
    """Pads the rows of a step with advantages to (B, T) tensors; padding is zero."""
    assert step.advantages is not None
    starts = np.cumsum(step.lengths) - step.lengths
    lengths = step.lengths[rows]
    places = np.arange(max(lengths.max(), 1))
    inside = places < lengths[:, None]
    index = np.where(inside, starts[rows][:, None] + places, 0)

    def take(flat: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.where(inside, flat[index], flat.dtype.type(0)))

    sampled = torch.from_numpy(inside) if step.mask is None else take(step.mask)
    return Chunk(
        log_probs=take(step.log_probs),
        rollout_log_probs=take(step.rollout_log_probs),
        mask=sampled & torch.from_numpy(np.isfinite(step.rewards[rows]))[:, None],  # as in training
        token_ids=take(step.token_ids),
        advantages=torch.from_numpy(step.advantages[rows]),
        groups=torch.from_numpy(groups),
        blocks=torch.from_numpy(blocks),
    )


class StepMoments:
    """The sums over groups that depend on the setting, per setting (S) and block (K).

    c and v index the classes of previous token (context) and token; a pair (c, v) is a cell.
    κ = 1 − π(token), e = A²κ², W = Π ρ and q = 2/(1 + W).
    """

    def __init__(self, num_settings: int) -> None:
        #: (S, K, c·v) Σ w·A·κ at the token's cell
        self.gradient = np.zeros((num_settings, BLOCKS, CLASSES**2))
        #: (S, K, c) Σ w·A, used for centring
        self.context = np.zeros((num_settings, BLOCKS, CLASSES))
        #: (S, 4, K) Σ w·e, Σ w²·e, Σ q·w²·e, Σ q·w·W·e
        self.energy = np.zeros((num_settings, 4, BLOCKS))


class ScoreMoments(StepMoments):
    """All sums over groups, with normalised weights."""

    def __init__(self, num_settings: int) -> None:
        super().__init__(num_settings)
        #: (K, c·v) and (K, c): gradient and context with the exact weight W
        self.exact, self.exact_context = np.zeros((BLOCKS, CLASSES**2)), np.zeros((BLOCKS, CLASSES))
        self.exact_energy = np.zeros((2, BLOCKS))  # Σ W·e, Σ q·W²·e
        self.product = np.zeros((2, BLOCKS))  # Σ W and Σ W² over sequences
        self.counts = np.zeros((3, BLOCKS))  # groups and sequences with tokens, tokens
        #: squares and cross products per group without weights; their centred sum is the noise of a group
        self.noise, self.noise_cross = np.zeros(BLOCKS), np.zeros((BLOCKS, CLASSES**2))
        self.noise_context = np.zeros((BLOCKS, CLASSES))
        #: Σ ρ·κ at the token's cell and Σ ρ, for the centring
        self.centre, self.centre_context = np.zeros(CLASSES**2), np.zeros(CLASSES)

    def add_step(self, part: StepMoments, factors: list[float]) -> None:
        """Adds one step's sums; divides the weights by each setting's normalisation factor."""
        scale = 1.0 / np.asarray(factors)
        self.gradient += part.gradient * scale[:, None, None]
        self.context += part.context * scale[:, None, None]
        for row, power in enumerate((1, 2, 2, 1)):  # power of w in each row
            self.energy[:, row] += part.energy[:, row] * (scale**power)[:, None]

    def centred(self) -> tuple[Floats, Floats, Floats]:
        """Centred gradients (S, K, c·v), exact gradient (K, c·v), and noise Σ_groups |·|² (K,).

        A score has expectation zero in every context. For every occurrence of a context class, the mean of κ
        per cell is therefore subtracted. The mean is under π_train: each token is weighted by ρ.
        """
        total = np.maximum(self.centre_context, 1e-12)
        mean = self.centre.reshape(CLASSES, CLASSES) / total[:, None]

        def without(cells: Floats, context: Floats) -> Floats:
            rest: Floats = cells - (context[..., :, None] * mean).reshape(cells.shape)
            return rest

        noise = self.noise - 2.0 * self.noise_cross @ mean.reshape(-1)
        noise = noise + self.noise_context @ np.square(mean).sum(1)
        return without(self.gradient, self.context), without(self.exact, self.exact_context), noise


class Tokens:
    """Flat vectors of a chunk's response tokens, computed once and used for every setting.

    Args:
        chunk: the tokens.
        product: (B,) float64, Π ρ; the value for a sequence without tokens is not used.
    """

    def __init__(self, chunk: Chunk, product: Tensor) -> None:
        self.product, self._halfway = product, 2.0 / (1.0 + product)
        self.chunk, mask = chunk, chunk.mask
        before = torch.roll(chunk.token_ids, 1, dims=1)
        before[:, 0] = -1  # the first token has no previous token; −1 modulo CLASSES is the last class
        context = (before % CLASSES)[mask]
        lengths = mask.sum(-1)
        self._group = torch.repeat_interleave(chunk.groups, lengths)
        self._context, self._cell = context, context * CLASSES + (chunk.token_ids % CLASSES)[mask]
        self._kappa = -torch.expm1(chunk.log_probs[mask].double())
        self._advantage = torch.repeat_interleave(chunk.advantages, lengths)
        self._product = torch.repeat_interleave(product, lengths)
        score = chunk.advantages[:, None] * torch.expm1(chunk.log_probs.double())
        self._energy = torch.where(mask, score.square(), 0.0)  # (B, T)
        block = torch.repeat_interleave(chunk.blocks, lengths)
        self._cells = block * CLASSES**2 + self._cell
        self._contexts = block * CLASSES + context

    def once(self, moments: ScoreMoments) -> None:
        """Adds the sums that do not depend on a setting."""
        chunk = self.chunk
        exact = self._product * self._advantage
        moments.exact += _sums(self._cells, exact * self._kappa, BLOCKS, CLASSES**2)
        moments.exact_context += _sums(self._contexts, exact, BLOCKS, CLASSES)
        own = self.product * self._energy.sum(-1)
        moments.exact_energy[0] += _sums(chunk.blocks, own, BLOCKS)
        moments.exact_energy[1] += _sums(chunk.blocks, self._halfway * self.product * own, BLOCKS)
        moments.product[0] += _sums(chunk.blocks, self.product, BLOCKS)
        moments.product[1] += _sums(chunk.blocks, self.product.square(), BLOCKS)
        moments.counts[1] += _sums(chunk.blocks, chunk.mask.any(-1).double(), BLOCKS)
        moments.counts[2] += _sums(chunk.blocks, chunk.mask.sum(-1).double(), BLOCKS)
        ratio = (chunk.log_probs - chunk.rollout_log_probs)[chunk.mask].double().exp()
        ratio = ratio.clamp(max=_CENTRING_CAP)
        moments.centre += _sums(self._cell, ratio * self._kappa, CLASSES**2)
        moments.centre_context += _sums(self._context, ratio, CLASSES)
        self._noise(moments)

    def _noise(self, moments: ScoreMoments) -> None:
        """Adds the squares of every group's unweighted gradient; `centred` centres them later."""
        count = int(self.chunk.groups.max()) + 1
        own, value = self._group * CLASSES**2 + self._cell, self._advantage * self._kappa
        cells = _sums(own, value, count, CLASSES**2)
        contexts = _sums(self._group * CLASSES + self._context, self._advantage, count, CLASSES)
        block_of = np.zeros(count, np.int64)
        block_of[self.chunk.groups.numpy()] = self.chunk.blocks.numpy()
        cross = cells.reshape(count, CLASSES, CLASSES) * contexts[:, :, None]
        np.add.at(moments.noise, block_of, np.square(cells).sum(1))
        np.add.at(moments.noise_cross, block_of, cross.reshape(count, -1))
        np.add.at(moments.noise_context, block_of, np.square(contexts))
        np.add.at(moments.counts[0], block_of[np.unique(self._group.numpy())], 1.0)

    def weighted(self, part: StepMoments, setting: int, weights: Tensor) -> None:
        """Adds one setting's sums; `weights` (B, T) are not normalised yet."""
        signed = weights[self.chunk.mask] * self._advantage
        part.gradient[setting] += _sums(self._cells, signed * self._kappa, BLOCKS, CLASSES**2)
        part.context[setting] += _sums(self._contexts, signed, BLOCKS, CLASSES)
        energy = weights * self._energy
        first, second = energy.sum(-1), (weights * energy).sum(-1)
        mixed = self._halfway * self.product * first
        for row, value in enumerate((first, second, self._halfway * second, mixed)):
            part.energy[setting, row] += _sums(self.chunk.blocks, value, BLOCKS)


def _sums(where: Tensor, values: Tensor, *shape: int) -> Floats:
    """Sums of values per flat index, as an array of this shape."""
    counted = torch.bincount(where, weights=values.double(), minlength=int(np.prod(shape)))
    result: Floats = counted.numpy().reshape(shape)
    return result
