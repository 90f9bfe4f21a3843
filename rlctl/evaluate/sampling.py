"""Responses of a model on this machine, each dependent on nothing but its question's place and its number.

Random numbers are drawn in blocks of `BLOCK` questions, each block with a seed of its own, the first
samples of its questions before the second ones. So the same seed gives the same response number i to
question q whatever n, the number of questions, the batch size, the ranks, and what is stored already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rlctl.data.prompts import PromptDataset
from rlctl.evaluate.samples import Pair, Response
from rlctl.rollout.protocol import ResponseSampler, Sampling, step_seed

BLOCK = 256
_PURPOSE = "evaluation"


def sample_responses(
    engine: ResponseSampler,
    questions: PromptDataset,
    pairs: Sequence[Pair],
    sampling: Sampling,
    *,
    seed: int,
    batch_size: int,
) -> Iterator[dict[Pair, Response]]:
    """Sample these responses, a batch at a time.

    Args:
        engine: who samples.
        questions: what is asked.
        pairs: which responses, ascending.
        sampling: the distribution to draw from.
        seed: of all of it.
        batch_size: sequences at once; the siblings of a question stay together.
    """
    for batch in _batches(pairs, batch_size, block=len(questions) if sampling.greedy else BLOCK):
        if sampling.greedy:  # nothing is drawn
            block, places = 0, list(range(len(batch)))
        else:
            block = batch[0][0] // BLOCK
            places = [sample * BLOCK + question % BLOCK for question, sample in batch]
        rollouts = engine.generate(
            questions.prompts([question for question, _ in batch], places),
            sampling,
            n=1,
            step_seed=step_seed(seed, block, _PURPOSE),
            num_groups_total=max(places) + 1,
        )
        said = zip(
            rollouts.response_texts,
            rollouts.truncated.tolist(),
            rollouts.response_mask.sum(-1).tolist(),
            strict=True,
        )
        yield {pair: Response(*values) for pair, values in zip(batch, said, strict=True)}


def _batches(pairs: Sequence[Pair], size: int, block: int) -> Iterator[list[Pair]]:
    """Cut into batches of about `size`: never across blocks, and only between questions."""
    for _, of_block in groupby(pairs, key=lambda pair: pair[0] // block):
        batch: list[Pair] = []
        for _, siblings in groupby(of_block, key=lambda pair: pair[0]):
            more = list(siblings)
            if batch and len(batch) + len(more) > size:
                yield batch
                batch = []
            batch += more
        yield batch
