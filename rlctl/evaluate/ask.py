"""Questions → responses, so that a response depends on nothing but its question's place and its number.

Random numbers are drawn in blocks of `BLOCK` questions, each block with a seed of its own, the first
samples of its questions before the second ones. So the same seed gives the same response number i to
question q whatever n, the number of questions, the batch size, the ranks, and what is stored already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlctl.batch import Prompts
from rlctl.data.prompts import PromptDataset
from rlctl.evaluate.samples import EvalSample
from rlctl.rollout.protocol import ResponseSampler, Sampling, step_seed

BLOCK = 256
_PURPOSE = "evaluation"

#: (question, sample): the question's place in the data, from 0, and the response's number, from 0.
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Response:
    """What a model said: its text, whether it was cut off at the length limit, and its tokens."""

    text: str
    truncated: bool
    num_tokens: int


def ask(
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


def as_samples(questions: PromptDataset, responses: Mapping[Pair, Response]) -> list[EvalSample]:
    """Questions and responses as ungraded samples, in the order of `responses`."""
    asked = dict(rendered(questions, sorted({question for question, _ in responses})))
    return [
        EvalSample(
            question_index=question,
            sample_index=sample,
            data_source=asked[question].data_sources[0],
            prompt=asked[question].texts[0],
            response=response.text,
            ground_truth=asked[question].ground_truths[0],
            truncated=response.truncated,
            num_tokens=response.num_tokens,
            messages=asked[question].messages[0],
            extra_info=asked[question].extra_infos[0],
        )
        for (question, sample), response in responses.items()
    ]


def rendered(questions: PromptDataset, indices: Sequence[int]) -> Iterator[tuple[int, Prompts]]:
    """Each of these questions as the model is asked it."""
    for index in indices:
        yield index, questions.prompts([index], [0])


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
