"""Each cause is planted and must be named; a healthy pair must be left alone; two at once are both named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlctl.batch import Turn
from rlctl.mismatch.causes import causes, open_questions, remainder
from rlctl.rollout.protocol import Request, Sampling
from tests.unit.mismatch.planted import (
    NUCLEUS,
    PLAIN,
    TOKENIZER,
    Engine,
    found,
    look,
    names,
    plain,
    raw,
    with_start,
    with_start_token,
)
from tests.unit.rollout.test_hf_rollout import random_model

#: For tests that distinguish distributions from samples: number of examined tokens.
MANY: dict[str, Any] = {"n": 11}


def shifted(by: int) -> Callable[[Request, Turn], torch.Tensor]:
    """Each value is that of the token before (1) or after (−1); one at the edge is wrong."""
    return lambda request, turn: turn.log_probs.roll(by)


# --- nothing wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [PLAIN, replace(PLAIN, temperature=0.6)], ids=["plain", "cool"])
def test_a_healthy_pair_is_left_alone(sampling: Sampling) -> None:
    examination = look(plain(), sampling=sampling, **MANY)
    assert causes(examination) == []
    assert examination.start.abs_max < 1e-5
    assert remainder(examination) is None
    assert any("raw or processed" in note for note in open_questions(examination)) == (sampling is PLAIN)


# --- which distribution -----------------------------------------------------------------------------


def test_wrong_temperature() -> None:
    (cause,) = found(Engine(plain(), sampling=lambda s: replace(s, temperature=0.7)), **MANY)
    assert cause.name == "temperature"
    assert "samples at temperature 0.7, 1 was requested" in cause.what
    assert cause.spec == ("rollout.temperature=0.7",)
    assert cause.share > 0.999


def test_top_p_unannounced() -> None:
    (cause,) = found(Engine(plain(), sampling=lambda s: replace(s, top_p=0.8)), **MANY)
    assert cause.name == "truncation"
    assert "samples with top_p 0.8, no truncation was requested" in cause.what


def test_truncation_as_asked_is_named_too() -> None:
    (cause,) = found(plain(), sampling=NUCLEUS)
    assert cause.name == "truncation"
    assert "as requested" in cause.what
    assert cause.spec == ("rollout.top_p=1",)


def test_a_trainer_with_exact_sampling_scores_the_truncated_distribution() -> None:
    assert found(plain(), sampling=NUCLEUS, exact_sampling=True, **MANY) == []
    ignores = Engine(plain(), sampling=lambda s: replace(s, top_p=1.0))
    (cause,) = found(ignores, sampling=NUCLEUS, exact_sampling=True, **MANY)
    assert cause.name == "truncation"
    assert "samples with no truncation, top_p 0.8 was requested" in cause.what
    assert cause.before is not None
    assert cause.after is not None
    assert cause.before.abs_mean > 0.01 > cause.after.abs_mean


def test_raw_log_probs() -> None:
    (cause,) = found(Engine(plain(), report=raw), sampling=NUCLEUS, **MANY)
    assert cause.name == "log-prob mode"
    assert "those of temperature 1 (the raw ones), temperature 0.7, top_p 0.8 was requested" in cause.what
    assert cause.spec == ("rollout.temperature=1 rollout.top_p=1",)


@pytest.mark.parametrize("by", [1, -1])
def test_shifted_by_one_token(by: int) -> None:
    (cause,) = found(Engine(plain(), report=shifted(by)))
    assert cause.name == "shifted log-probs"
    assert ("preceding" if by == 1 else "following") in cause.what


# --- what is read -----------------------------------------------------------------------------------


def test_an_extra_start_token() -> None:
    (cause,) = found(Engine(plain(), ask=with_start), tokenizer=with_start_token())
    assert cause.name == "token ids"
    assert "one more start token, although it was given others" in cause.what
    assert "from token 1 of prompt 1 on" in cause.what


def test_another_chat_template() -> None:
    other = copy.deepcopy(TOKENIZER)
    other.chat_template = "+" + TOKENIZER.chat_template
    (cause,) = found(plain(), engine_tokenizer=other)
    assert cause.name == "chat template"
    assert "from token 1 of prompt 1 on" in cause.what


# --- how it is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_precision(dtype: Any) -> None:
    (cause,) = found(plain(dtype=dtype), dtype=dtype, same_precision=plain)
    assert cause.name == "dtype"
    assert f"the engine computes in {dtype}, the trainer in fp32" in cause.what
    assert cause.spec[0] == "rollout.dtype=fp32"


def test_other_weights_are_not_guessed() -> None:
    examination = look(Engine(plain(random_model(2))))
    assert causes(examination) == []
    left = remainder(examination)
    assert left is not None
    assert "other weights" in left


# --- several, and bad numbers -----------------------------------------------------------------------


def test_temperature_and_precision() -> None:
    engine = Engine(plain(dtype="int8"), sampling=lambda s: replace(s, temperature=0.7))
    same = replace(engine, inner=plain())
    precise: dict[str, Any] = {"dtype": "int8", "same_precision": lambda: same}
    assert names(found(engine, **MANY, **precise)) == ["temperature", "dtype"]


def test_a_precision_that_is_not_stated_is_not_guessed() -> None:
    examination = look(plain(dtype="bf16"))
    assert causes(examination) == []
    left = remainder(examination)
    assert left is not None
    assert "as large as rounding differences" in left


def test_temperature_and_truncation() -> None:
    engine = Engine(plain(), sampling=lambda _: NUCLEUS)
    assert sorted(names(found(engine, **MANY))) == ["temperature", "truncation"]


def test_shift_and_start_token() -> None:
    engine = Engine(
        plain(),
        ask=with_start,
        report=shifted(1),
    )
    assert sorted(names(found(engine, tokenizer=with_start_token()))) == ["shifted log-probs", "token ids"]


def test_log_probs_that_are_no_numbers_are_counted_and_left_out() -> None:
    seen: list[Request] = []

    def broken(request: Request, turn: Turn) -> torch.Tensor:
        seen.append(request)
        return turn.log_probs + torch.nan if len(seen) == 4 else turn.log_probs

    examination = look(Engine(plain(), report=broken))
    assert examination.start.agrees
    assert examination.start.num_nonfinite == 1
    assert causes(examination) == []
    assert any("NaN" in note for note in open_questions(examination))
