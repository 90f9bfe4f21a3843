"""What a replay adds up: gradients of a small surrogate policy under every setting, in blocks of groups.

The true score ∇log π of a token is not in a dump. Its stand-in is the score of a policy with a table
of `CLASSES` × `CLASSES` logits that picks a token's class from the class of the token before it. Only
the chosen token's logit is kept, its score being 1 − π(token), which the dump has; what the other
logits would have contributed is taken out on average (`ScoreMoments.centred`).

Prompt groups are independent of one another, siblings are not. Groups are dealt out to `BLOCKS`
blocks: products of different blocks estimate squared expectations without bias, and resampling
blocks gives intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

BLOCKS = 32
#: Classes of tokens, and of tokens before: ids modulo this.
CLASSES = 32
#: Token ratios that centre the scores are capped: the mean must not hang on one token.
_CENTRING_CAP = 10.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole groups of one step, padded; all on the CPU."""

    #: log_probs, rollout_log_probs: (B, T) float32, finite
    log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor  # (B, T) bool, response tokens of sequences with finite log-probs
    token_ids: Tensor  # (B, T) int64
    advantages: Tensor  # (B,) float64
    groups: Tensor  # (B,) int64, number of the group within this chunk
    blocks: Tensor  # (B,) int64, the group's block


class StepMoments:
    """The sums over groups that depend on the setting, by setting (S) and block (K).

    c, v index classes of context and token, κ = 1 − π(token), e = A²κ², W = Π ρ and q = 2/(1 + W).
    """

    def __init__(self, num_settings: int) -> None:
        #: (S, K, c·v) Σ w·A·κ at the token's cell
        self.gradient = np.zeros((num_settings, BLOCKS, CLASSES**2))
        #: (S, K, c) Σ w·A, from which the centring follows
        self.context = np.zeros((num_settings, BLOCKS, CLASSES))
        #: (S, 4, K) Σ w·e, Σ w²·e, Σ q·w²·e, Σ q·w·W·e
        self.energy = np.zeros((num_settings, 4, BLOCKS))


class ScoreMoments(StepMoments):
    """All sums over groups, the weights normalised."""

    def __init__(self, num_settings: int) -> None:
        super().__init__(num_settings)
        #: (K, c·v) and (K, c): gradient and context with the exact weight W
        self.exact, self.exact_context = np.zeros((BLOCKS, CLASSES**2)), np.zeros((BLOCKS, CLASSES))
        self.exact_energy = np.zeros((2, BLOCKS))  # Σ W·e, Σ q·W²·e
        self.product = np.zeros((2, BLOCKS))  # Σ W and Σ W² over sequences
        self.counts = np.zeros((3, BLOCKS))  # groups, sequences with tokens, tokens
        #: squares and cross products per group without any weight; their centred sum is a group's noise
        self.noise, self.noise_cross = np.zeros(BLOCKS), np.zeros((BLOCKS, CLASSES**2))
        self.noise_context = np.zeros((BLOCKS, CLASSES))
        #: Σ ρ·κ at the token's cell and Σ ρ, for the centring
        self.centre, self.centre_context = np.zeros(CLASSES**2), np.zeros(CLASSES)

    def add_step(self, part: StepMoments, factors: list[float]) -> None:
        """Take one step's sums, its weights divided by each setting's normalising factor."""
        scale = 1.0 / np.asarray(factors)
        self.gradient += part.gradient * scale[:, None, None]
        self.context += part.context * scale[:, None, None]
        for row, power in enumerate((1, 2, 2, 1)):  # of w
            self.energy[:, row] += part.energy[:, row] * (scale**power)[:, None]

    def centred(self) -> tuple[Floats, Floats, Floats]:
        """Gradients (S, K, c·v), the exact one (K, c·v), and the noise Σ_groups |·|² (K,).

        A score has expectation zero in every context. Where a context class occurred, the mean of κ at
        each of its cells (under π_train: every token counts ρ times) is what must be taken out.
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
    """A chunk's response tokens as flat vectors, made once and used under every setting.

    Args:
        chunk: the tokens.
        product: (B,) float64, Π ρ; any number for a sequence without tokens.
    """

    def __init__(self, chunk: Chunk, product: Tensor) -> None:
        self.product, self._halfway = product, 2.0 / (1.0 + product)
        self.chunk, mask = chunk, chunk.mask
        before = torch.roll(chunk.token_ids, 1, dims=1)
        before[:, 0] = -1  # nothing comes before the first token: it falls into the last class
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
        """Everything that does not depend on a setting."""
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
        """Squares of every group's unweighted gradient, to be centred later."""
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
        np.add.at(moments.counts[0], block_of, 1.0)

    def weighted(self, part: StepMoments, setting: int, weights: Tensor) -> None:
        """One setting's sums; `weights` (B, T) are not yet normalised."""
        signed = weights[self.chunk.mask] * self._advantage
        part.gradient[setting] += _sums(self._cells, signed * self._kappa, BLOCKS, CLASSES**2)
        part.context[setting] += _sums(self._contexts, signed, BLOCKS, CLASSES)
        energy = weights * self._energy
        first, second = energy.sum(-1), (weights * energy).sum(-1)
        mixed = self._halfway * self.product * first
        for row, value in enumerate((first, second, self._halfway * second, mixed)):
            part.energy[setting, row] += _sums(self.chunk.blocks, value, BLOCKS)


def _sums(where: Tensor, values: Tensor, *shape: int) -> Floats:
    """Σ values by flat index, as an array of this shape."""
    counted = torch.bincount(where, weights=values.double(), minlength=int(np.prod(shape)))
    result: Floats = counted.numpy().reshape(shape)
    return result
