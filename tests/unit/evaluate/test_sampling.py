"""Which random numbers belong to which response."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.evaluate.local_model import BLOCK, _batches, sample_responses
from rlctl.evaluate.samples import as_samples
from rlctl.rollout.hf import global_uniforms
from rlctl.rollout.protocol import Sampling
from rlctl.tiny.model import build_tokenizer
from tests.unit.evaluate.runs import QUICK


class Recorder:
    """Answers every prompt with the random number its response would be drawn from."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, *, n, step_seed, num_groups_total):
        assert n == 1
        places = prompts.group_ids
        assert int(places.max()) < num_groups_total
        self.calls.append(len(places))
        numbers = global_uniforms(step_seed, places, num_groups_total, sampling.max_response_length)
        count = len(places)

        class Said:
            response_texts = tuple(str(row.tolist()) for row in numbers)
            truncated = aborted = torch.zeros(count, dtype=torch.bool)
            response_mask = torch.ones(count, sampling.max_response_length)

        return Said


def questions(count):
    rows = [Row("a", (Message("user", "12+34="),), str(place)) for place in range(count)]
    return PromptDataset(rows, build_tokenizer(QUICK), max_prompt_length=99, filter_overlong=True)


def numbers(count, n, *, batch_size=64, pairs=None, greedy=False):
    pairs = pairs or [(question, sample) for question in range(count) for sample in range(n)]
    found = {}
    sampling = Sampling(max_response_length=3, greedy=greedy)
    for batch in sample_responses(
        Recorder(), questions(count), pairs, sampling, seed=5, batch_size=batch_size
    ):
        assert not found.keys() & batch.keys()
        found |= batch
    return {pair: response.text for pair, response in found.items()}


def test_a_response_is_the_same_whatever_n_how_many_questions_batch_size_and_what_is_asked_for():
    whole = numbers(BLOCK + 40, 8)
    assert len(set(whole.values())) == (BLOCK + 40) * 8
    fewer = numbers(BLOCK + 40, 4, batch_size=7)
    assert fewer == {pair: text for pair, text in whole.items() if pair[1] < 4}
    assert numbers(20, 8) == {pair: text for pair, text in whole.items() if pair[0] < 20}
    some = sorted(whole)[3::5]
    assert numbers(BLOCK + 40, 8, pairs=some) == {pair: whole[pair] for pair in some}


def test_greedy_batches_are_full_whatever_the_blocks():
    engine = Recorder()
    pairs = [(question, 0) for question in range(BLOCK + 10)]
    sampling = Sampling(max_response_length=2, greedy=True)
    list(sample_responses(engine, questions(len(pairs)), pairs, sampling, seed=1, batch_size=BLOCK + 10))
    assert engine.calls == [BLOCK + 10]


@given(
    st.dictionaries(st.integers(0, 3 * BLOCK), st.integers(1, 9), max_size=40),
    st.integers(1, 20),
)
def test_batches_hold_every_pair_once_in_order_within_a_block_and_siblings_together(counts, size):
    pairs = sorted((question, sample) for question, n in counts.items() for sample in range(n))
    batches = list(_batches(pairs, size, BLOCK))
    assert [pair for batch in batches for pair in batch] == pairs
    homes = Counter()
    for batch in batches:
        assert len({question // BLOCK for question, _ in batch}) == 1
        assert len(batch) <= size or len({question for question, _ in batch}) == 1
        homes.update({question for question, _ in batch})
    assert set(homes.values()) <= {1}


def test_samples_carry_what_graders_need():
    rows = [Row("a", (Message("user", "1+1="),), "2", extra={"split": "test", "hint": [1]})]
    asked = PromptDataset(rows, build_tokenizer(QUICK), max_prompt_length=99, filter_overlong=True)
    sampling = Sampling(max_response_length=1)
    responses = {}
    for batch in sample_responses(Recorder(), asked, [(0, 0), (0, 1)], sampling, seed=1, batch_size=2):
        responses |= batch
    first, second = as_samples(asked.rows, asked.texts, responses)
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.extra_info == {"split": "test", "hint": [1]}
    assert first.messages == ({"role": "user", "content": "1+1="},)
    assert first.ground_truth == "2"
