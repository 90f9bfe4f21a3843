"""Checks of what a rollout engine returns, which may be a user's: number, columns, types, values, lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlctl.batch import FINISH_REASONS, TokenLists, Turn
from rlctl.episodes import Turns
from rlctl.errors import RunFailure
from rlctl.lazy import torch
from rlctl.rollout.protocol import Request, Requests, Sampling

if TYPE_CHECKING:
    from torch import Tensor


#: Columns of what an engine samples, and their types.
_DTYPES = {"token_ids": "int64", "log_probs": "float32", "versions": "int64"}
#: Largest log-prob of a token: 0 up to rounding.
LARGEST_LOG_PROB = 1e-2


def checked_turns(engine: Any, returned: Any, requests: Sequence[Request], sampling: Sampling) -> Turns:
    """The columns of what an engine returned for these requests.

    Raises:
        RunFailure: it is not one valid turn per request, see `ResponseSampler.sample`.
    """
    fault = _wrong_types(returned, len(requests), sampling)
    if not fault:
        turns = Turns.of(returned)
        fault = _wrong_values(turns, requests, sampling)
    if fault:
        raise RunFailure(f"{type(engine).__name__}.sample returned {fault}", where="rollout.name")
    return turns


def _wrong_types(returned: Any, count: int, sampling: Sampling) -> str:
    """What is wrong with the types and shapes of `count` turns; empty: nothing."""
    if not isinstance(returned, list | Turns) or len(returned) != count:
        size = f" of {len(returned)}" if isinstance(returned, list | Turns) else ""
        return f"{type(returned).__name__}{size} instead of a list of {count} turns"
    if isinstance(returned, Turns):
        fault = _wrong_columns(returned, sampling)
        if fault or not sampling.asks_for["experts"]:
            return fault
    faults = (_wrong_turn(turn, f"turn {number}", sampling) for number, turn in enumerate(returned, 1))
    return next(filter(None, faults), "")


def _wrong_columns(turns: Turns, sampling: Sampling) -> str:
    """What is wrong with the columns of all turns; empty: nothing."""
    fault = _wrong_column("lengths", turns.lengths, "int64", len(turns))
    if fault:
        return fault
    count = int(turns.lengths.sum())
    for name, dtype in _DTYPES.items():
        fault = _wrong_column(name, getattr(turns, name), dtype, count)
        if fault:
            return fault
    fault = _wrong_lists(turns, count, sampling)
    if fault:
        return fault
    unknown = set(turns.finish_reasons) - set(FINISH_REASONS)
    return f"finish_reason {min(unknown)!r}; it is one of {FINISH_REASONS}" if unknown else ""


def _wrong_column(name: str, values: Any, type_name: str, count: int) -> str:
    """What is wrong with a column of `count` tokens or turns; empty: nothing."""
    dtype = getattr(torch, type_name)
    expected = f"instead of a tensor of shape {(count,)} and type {dtype} on the CPU"
    if not isinstance(values, torch.Tensor):
        return f"{name} of type {type(values).__name__}, {expected}"
    if values.dtype == dtype and values.shape == (count,) and values.is_cpu:
        return ""
    return f"{name} of shape {tuple(values.shape)} and type {values.dtype} on {values.device}, {expected}"


def _wrong_turn(turn: Any, name: str, sampling: Sampling) -> str:
    """What is wrong with one turn; empty: nothing."""
    if not isinstance(turn, Turn):
        return f"{type(turn).__name__} instead of {name}"
    count = turn.token_ids.numel() if isinstance(turn.token_ids, torch.Tensor) else 0
    for column, dtype in _DTYPES.items():
        fault = _wrong_column(f"{column} of {name}", getattr(turn, column), dtype, count)
        if fault:
            return fault
    fault = _wrong_lists(turn, count, sampling)
    if fault:
        return f"{fault} of {name}"
    if sampling.asks_for["experts"] and turn.finish_reason != "abort" and _lacks_experts(turn.experts, count):
        return f"no list for each of the {count} tokens in experts of {name}"
    if turn.finish_reason not in FINISH_REASONS:
        return f"finish_reason {turn.finish_reason!r} of {name}; it is one of {FINISH_REASONS}"
    return ""


def _lacks_experts(experts: Tensor | None, count: int) -> bool:
    """Experts are those of all tokens that were read, not of the turn's last one."""
    return experts is None or len(experts) < count - 1


def _wrong_lists(turns: Turn | Turns, count: int, sampling: Sampling) -> str:
    """What is wrong with the lists of `count` tokens that `sampling` asks for; empty: nothing."""
    for name in ("kept", "most_likely"):
        lists: TokenLists | None = getattr(turns, name)
        if not sampling.asks_for[name]:
            continue
        if lists is None or len(lists) != count:
            return f"no list for each of the {count} tokens in {name}"
        num_listed = int(lists.counts.sum())
        if len(lists.ids) != num_listed:
            return f"{len(lists.ids)} ids in {name} for lists of {num_listed} tokens together"
        if name == "most_likely" and (lists.log_probs is None or len(lists.log_probs) != num_listed):
            return f"no log-prob for each of the {num_listed} tokens in {name}"
    return ""


def _wrong_values(turns: Turns, requests: Sequence[Request], sampling: Sampling) -> str:
    """What is wrong with the numbers of turns whose types are right; empty: nothing.

    NaN is not: it is the trainer's to say which tokens have no log-prob.
    """
    if not requests:
        return ""
    limits = torch.tensor(Requests.of(requests).limits(sampling))
    too_long = (turns.lengths > limits).nonzero().flatten().tolist()
    if too_long:
        number = too_long[0]
        return f"{int(turns.lengths[number])} tokens of turn {number + 1}, of at most {int(limits[number])}"
    if (turns.token_ids < 0).any():
        return f"the token {int(turns.token_ids.min())}"
    largest = turns.log_probs.nan_to_num(nan=-math.inf).amax().item() if len(turns.log_probs) else 0.0
    return f"a log-prob of {largest:.3g}, above 0" if largest > LARGEST_LOG_PROB else ""
