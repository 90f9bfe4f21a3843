"""Which random numbers belong to which response."""

from collections import Counter
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.batch import Turn
from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.environment.build import EpisodeSource
from rlctl.evaluate.local_model import _batches, sample_responses
from rlctl.evaluate.samples import as_samples
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.tiny.model import build_tokenizer
from tests.unit.evaluate.runs import QUICK

TOKENIZER = build_tokenizer(QUICK)
SOURCE = EpisodeSource(EnvironmentSpec(), TOKENIZER, 256)


class Recorder:
    """Answers every request with the digits of its seed."""

    def __init__(self):
        self.calls = []

    def sample(self, requests, sampling):
        self.calls.append(len(requests))
        found = []
        for request in requests:
            ids = torch.tensor(TOKENIZER(str(request.seed))["input_ids"])
            found.append(Turn(ids, torch.zeros(len(ids)), torch.zeros_like(ids), "length"))
        return found


def questions(count):
    rows = [Row("a", (Message("user", "12+34="),), str(place)) for place in range(count)]
    return PromptDataset(rows, TOKENIZER, max_prompt_length=99, filter_overlong=True)


def numbers(count, n, *, batch_size=64, pairs=None):
    pairs = pairs or [(question, sample) for question in range(count) for sample in range(n)]
    found = {}
    sampling = Sampling(max_response_length=3)
    for batch in sample_responses(
        Recorder(), questions(count), pairs, sampling, SOURCE, seed=5, batch_size=batch_size
    ):
        assert not found.keys() & batch.keys()
        found |= batch
    return {pair: response.text for pair, response in found.items()}


def test_a_response_is_the_same_whatever_n_how_many_questions_batch_size_and_what_is_asked_for():
    whole = numbers(60, 8)
    assert len(set(whole.values())) == 60 * 8
    fewer = numbers(60, 4, batch_size=7)
    assert fewer == {pair: text for pair, text in whole.items() if pair[1] < 4}
    assert numbers(20, 8) == {pair: text for pair, text in whole.items() if pair[0] < 20}
    some = sorted(whole)[3::5]
    assert numbers(60, 8, pairs=some) == {pair: whole[pair] for pair in some}


@given(
    st.dictionaries(st.integers(0, 300), st.integers(1, 9), max_size=40),
    st.integers(1, 20),
)
def test_batches_hold_every_pair_once_in_order_and_siblings_together(counts, size):
    pairs = sorted((question, sample) for question, n in counts.items() for sample in range(n))
    batches = list(_batches(pairs, size))
    assert [pair for batch in batches for pair in batch] == pairs
    homes = Counter()
    for batch in batches:
        assert len(batch) <= size or len({question for question, _ in batch}) == 1
        homes.update({question for question, _ in batch})
    assert set(homes.values()) <= {1}
    for batch, after in pairwise(batches):  # they are full: siblings of the next question do not fit
        assert len(batch) + sum(pair[0] == after[0][0] for pair in after) > size


def test_samples_carry_what_graders_need():
    rows = [Row("a", (Message("user", "1+1="),), "2", extra={"split": "test", "hint": [1]})]
    asked = PromptDataset(rows, TOKENIZER, max_prompt_length=99, filter_overlong=True)
    sampling = Sampling(max_response_length=1)
    responses = {}
    for batch in sample_responses(
        Recorder(), asked, [(0, 0), (0, 1)], sampling, SOURCE, seed=1, batch_size=2
    ):
        responses |= batch
    first, second = as_samples(asked.rows, asked.texts, responses)
    assert (first.sample_index, second.sample_index) == (0, 1)
    assert first.extra_info == {"split": "test", "hint": [1]}
    assert first.messages == ({"role": "user", "content": "1+1="},)
    assert first.ground_truth == "2"
