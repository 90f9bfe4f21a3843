"""The embedded game needs its observations, and the built-in model can take part in it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from rlctl.batch import Turn
from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.environment.build import EpisodeSource
from rlctl.environment.guess_number import HIGHER, LOWER, MAX_GUESSES, NUMBERS, PROMPT, GuessNumber
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model import EOS, RECIPE, VOCABULARY
from rlctl.tiny import game
from rlctl.tiny.model import build_tokenizer


def score(secret: int, guess) -> float:
    """Reward of a game in which `guess(answers so far)` chooses each number."""
    one, answers = GuessNumber(), []
    one.reset(secret)
    while (answer := one.respond(str(guess(answers)))) is not None:
        answers.append(answer)
    return one.get_reward()


def mean(guess) -> float:
    return sum(score(secret, guess) for secret in NUMBERS) / len(NUMBERS)


def test_halving_always_wins_and_no_fixed_guesses_win_more_than_three_of_seven() -> None:
    def halving(answers: list[str]) -> int:
        guess, step = 4, 2
        for answer in answers:
            guess += step if answer == HIGHER else -step
            step //= 2
        return guess

    assert mean(halving) == 1.0
    fixed = [
        mean(lambda answers, plan=plan: plan[len(answers)]) for plan in product(NUMBERS, repeat=MAX_GUESSES)
    ]
    assert max(fixed) == pytest.approx(3 / 7)
    assert sum(fixed) / len(fixed) == pytest.approx(1 - (6 / 7) ** 3), "guessing at random"


@pytest.mark.parametrize("text", ["", "+", "1+", "four", "4 "])
def test_what_is_no_number_loses(text: str) -> None:
    one = GuessNumber()
    one.reset(4)
    assert one.respond(text) is None
    assert one.get_reward() == 0.0


class Player:
    """An engine that guesses with this function of the text that it reads."""

    def __init__(self, guess) -> None:
        self._guess = guess

    def sample(self, requests, sampling):
        del sampling
        found = []
        for request in requests:
            text = "".join(VOCABULARY[token] for token in request.token_ids)
            ids = [VOCABULARY.index(self._guess(text)), VOCABULARY.index(EOS)]
            zeros = torch.zeros(2)
            found.append(Turn(torch.tensor(ids), zeros, zeros.long(), "stop"))
        return found


def episodes_of(guess, tmp_path: Path):
    file = tmp_path / "games.parquet"
    rows = [game._row(secret, index) for index, secret in enumerate(NUMBERS)]
    game.write_rows(file, "train", rows)
    tokenizer = build_tokenizer(RECIPE)
    tokenizer.chat_template = game.CHAT_TEMPLATE
    spec = load_spec(["guess-number"]).spec
    prompts = PromptDataset(
        load_rows([str(file)]),
        tokenizer,
        max_prompt_length=spec.data.max_prompt_length,
        filter_overlong=False,
    )
    tasks = prompts.tasks(range(7), range(7))
    source = EpisodeSource.of(spec, tokenizer)
    sampling = Sampling(spec.data.max_response_length)
    return source.sample(Player(guess), [(task, 0) for task in tasks], sampling, 1)


def test_through_the_environment_a_player_that_reads_wins_and_a_blind_one_does_not(tmp_path: Path) -> None:
    def reads(text: str) -> str:
        marks = [mark for mark in text[len(PROMPT) :] if mark in (HIGHER, LOWER)]
        place = 4 + sum((1 if mark == HIGHER else -1) * (2 >> k) for k, mark in enumerate(marks))
        return str(place)

    def is_blind(text: str) -> str:
        return "426"[text.count(EOS)]

    found = episodes_of(reads, tmp_path)
    assert [episode.reward for episode in found] == [1.0] * 7
    assert [episode.metrics["num_turns"] for episode in found] == [3, 2, 3, 1, 3, 2, 3]
    assert {len(episode.sequences) for episode in found} == {1}, "the template keeps its prefix"
    [sequence] = found[0].sequences
    text = [VOCABULARY[token] for token in sequence.token_ids]
    assert text == [*PROMPT, "4", EOS, LOWER, "2", EOS, LOWER, "1", EOS]
    assert sequence.sampled.tolist() == [False] * 4 + [True, True, False] * 2 + [True] * 2
    blind = episodes_of(is_blind, tmp_path)
    assert sum(episode.reward for episode in blind) == 3.0
    assert not any(episode.error for episode in [*found, *blind])


def test_only_the_shipped_class_runs_in_this_process() -> None:
    source = EpisodeSource(EnvironmentSpec(name="guess_number"), build_tokenizer(RECIPE), 16)
    environment = source._environment("guess_number", Sampling(2))
    assert type(environment._instances).__name__ == "LocalInstances"
