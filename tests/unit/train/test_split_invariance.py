"""One episode as one sequence or as several: the same weights, loss and gradient.

A conversation that only grows can be trained on as one sequence, or each turn after its own copy of the
context, which is not sampled then.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from rlctl.batch import Episode, TokenBatch, TokenSequence
from rlctl.train.update import update
from tests.changed import changed
from tests.episodes import task_of
from tests.models import VOCABULARY, naive_log_probs, tiny_model
from tests.unit.train.updates import BYPASS, CLIP, DECOUPLED, REINFORCE, RS, PlainEngine, alone, settings_of

#: Sampled tokens of each turn, of each episode; tool output of two tokens is between turns.
TURNS = [(3, 2, 4), (1, 5), (2, 2, 1, 3), (4,), (2, 1, 2)]
EPISODES = len(TURNS)
#: Of each episode the turns at which a new sequence begins.
Cuts = tuple[tuple[int, ...], ...]


def episode(member: int, cuts: tuple[int, ...]) -> Episode:
    """The conversation with a new sequence at the turns in `cuts`."""
    draw = torch.Generator().manual_seed(member)
    task, sizes = task_of(), TURNS[member]
    ids, turn_of = [torch.tensor(task.prompt_ids)], [torch.full((len(task.prompt_ids),), -1)]
    for turn, size in enumerate(sizes):
        tool = 2 if turn else 0
        ids.append(torch.randint(2, VOCABULARY, (tool + size,), generator=draw))
        turn_of.append(torch.tensor([-1] * tool + [turn] * size))
    tokens, turns = torch.cat(ids), torch.cat(turn_of)
    bounds = [0, *cuts, len(sizes)]
    sequences = []
    for first, end in pairwise(bounds):
        length = int(((turns >= 0) & (turns < end)).nonzero().max()) + 1
        sampled = (turns[:length] >= first) & (turns[:length] >= 0)
        own = turns[:length][sampled]
        zeros = torch.zeros_like(own)
        sequences.append(TokenSequence(tokens[:length], sampled, zeros.float(), zeros, own))
    return Episode(task, member, tuple(sequences), "")


@cache
def batch_of(cuts_of: Cuts) -> TokenBatch:
    """All episodes, with log-probs near the model's, and advantages of each token."""
    batch = TokenBatch.of([episode(member, cuts) for member, cuts in enumerate(cuts_of)])
    batch = replace(batch, group_ids=torch.arange(EPISODES))
    with torch.no_grad():
        own = naive_log_probs(tiny_model(), batch)[0].float()
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(5, len(own), generator=draw)
    old = own + 0.1 * noise[1]
    policies = {"rollout_log_probs": own + 0.3 * noise[0], "old_log_probs": old}
    of_episodes = batch.units.episode.spread(noise[3][:EPISODES])
    return changed(batch, **policies, ref_log_probs=old + 0.2 * noise[2], advantages=of_episodes)


WHOLE: Cuts = ((),) * EPISODES
#: Every turn on its own; at every second one; in a way of its own for each episode.
CUTS = {
    "every turn": tuple(tuple(range(1, len(turns))) for turns in TURNS),
    "one cut": tuple((1,) if len(turns) > 1 else () for turns in TURNS),
    "mixed": ((2,), (1,), (1, 3), (), ()),
}
KL = {"entropy_coeff": 0.1, "kl_loss_type": "sequence", "kl_loss_coef": 0.5}
OF_TOKENS = {"dialect": "verl", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.75_1.3"}
#: Fields of `rollout_correction`, and further arguments of `settings_of`.
CASES = {
    "token": (DECOUPLED | CLIP | OF_TOKENS | {"rollout_is": "token"}, {}),
    "turn": (DECOUPLED | CLIP | {"rollout_is": "turn"}, {}),
    "prefix": (DECOUPLED | CLIP | {"rollout_is": "prefix"}, {}),
    "episode": (BYPASS | REINFORCE | RS | {"rollout_is": "sequence"}, {}),
    "after rejection": (
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence", "loss_denominator": "after_rejection"},
        KL,
    ),
    "geometric": (BYPASS | REINFORCE | {"rollout_is": "geometric"}, {"agg_mode": "seq-mean-token-mean"}),
    "gspo": (DECOUPLED | {"loss_type": "gspo", "rollout_is": "sequence"}, {"agg_mode": "seq-mean-token-sum"}),
    "horizon": (DECOUPLED | CLIP | {"rollout_is": "token"}, KL | {"agg_mode": "seq-mean-token-sum-norm"}),
}


@cache
def whole_update(name: str):
    return updated(WHOLE, name)


def updated(cuts: Cuts, name: str, micro: int | None = None):
    """Outcome and gradient of one update."""
    correction, options = CASES[name]
    batch = batch_of(cuts)
    if correction["bypass_mode"]:
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    engine = PlainEngine(tiny_model())
    sizes = {"mini_rows": 16, "micro_sequences": micro or 16}
    settings = settings_of(correction, max_nonfinite_fraction=0.0, **sizes, **options)
    return update(batch, engine, alone(), settings, lambda _: 0.05, 0), engine.gradient


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("micro", [None, 1])
def test_sequences_do_not_change_the_update(name: str, how: str, micro: int | None) -> None:
    (whole, wanted), (cut, found) = whole_update(name), updated(CUTS[how], name, micro)
    assert whole.metrics["rollout_corr/rollout_is_raw_std"] > 0.05
    if "rollout_rs" in CASES[name][0]:
        assert 0.0 < whole.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1.0
    assert cut.metrics.keys() == whole.metrics.keys()
    for key, value in whole.metrics.items():
        assert cut.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for column in ("training_log_probs", "weights", "keep"):
        torch.testing.assert_close(getattr(cut.seen, column), getattr(whole.seen, column))
    for column in ("nonfinite", "saturated"):
        assert torch.equal(getattr(cut.seen, column), getattr(whole.seen, column))
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)


def test_the_tokens_are_the_same_columns() -> None:
    whole = batch_of(WHOLE)
    for cuts in CUTS.values():
        batch = batch_of(cuts)
        assert torch.equal(batch.inputs.tokens, whole.inputs.tokens)
        assert torch.equal(batch.units.episode.lengths, whole.units.episode.lengths)
        assert torch.equal(batch.units.turn.lengths, whole.units.turn.lengths)
        assert batch.units.turn.lengths.tolist() == [size for turns in TURNS for size in turns]
        torch.testing.assert_close(batch.rollout_log_probs, whole.rollout_log_probs)
    assert len(batch_of(CUTS["every turn"]).lengths) == sum(map(len, TURNS))


@pytest.mark.parametrize("how", CUTS)
def test_weights_of_turns_are_those_of_their_own_tokens(how: str) -> None:
    """At level `turn`, by the definition; not those of the episode."""
    batch = batch_of(CUTS[how])
    batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    correction = {"rollout_is": "turn", "rollout_is_threshold": "1e3", "rollout_is_batch_normalize": False}
    settings = settings_of(BYPASS | REINFORCE | correction, mini_rows=16)
    outcome = update(batch, PlainEngine(tiny_model()), alone(), settings, lambda _: 0.0, 0)
    gaps = (outcome.seen.training_log_probs - batch.rollout_log_probs).double()
    sizes = [size for turns in TURNS for size in turns]
    expected = [part.sum().exp().item() for part in gaps.split(sizes)]
    per_token = [weight for weight, size in zip(expected, sizes, strict=True) for _ in range(size)]
    assert outcome.seen.weights.tolist() == pytest.approx(per_token, rel=1e-4)
    assert len({round(w, 6) for w in expected}) == len(expected)
