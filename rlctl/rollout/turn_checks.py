"""Checks of what a rollout engine returns, which may be a user's: number, columns, types, lists."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlctl.batch import FINISH_REASONS, Turn
from rlctl.episodes import Turns
from rlctl.lazy import torch
from rlctl.rollout.protocol import Sampling

if TYPE_CHECKING:
    from torch import Tensor


#: Columns of what an engine samples, and their types.
_DTYPES = {"token_ids": "int64", "log_probs": "float32", "versions": "int64"}


def wrong_turns(turns: Any, count: int, sampling: Sampling) -> str:
    """What is wrong with the result of an engine for `count` requests; empty: nothing."""
    if not isinstance(turns, list | Turns) or len(turns) != count:
        size = f" of {len(turns)}" if isinstance(turns, list | Turns) else ""
        return f"{type(turns).__name__}{size} instead of a list of {count} turns"
    if isinstance(turns, Turns) and not sampling.asks_for["experts"]:
        return _wrong_columns(turns, sampling)
    faults = (_wrong_turn(turn, f"turn {number}", sampling) for number, turn in enumerate(turns, 1))
    return next(filter(None, faults), "")


def _wrong_columns(turns: Turns, sampling: Sampling) -> str:
    """What is wrong with the columns of all turns; empty: nothing."""
    count = int(turns.lengths.sum())
    for name, dtype in _DTYPES.items():
        fault = _wrong_column(name, getattr(turns, name), dtype, count)
        if fault:
            return fault
    for name, is_asked in sampling.asks_for.items():
        lists = getattr(turns, name)
        if is_asked and (lists is None or len(lists) != count):
            return f"no list for each of the {count} tokens in {name}"
    unknown = set(turns.finish_reasons) - set(FINISH_REASONS)
    return f"finish_reason {min(unknown)!r}; it is one of {FINISH_REASONS}" if unknown else ""


def _wrong_column(name: str, values: Tensor, type_name: str, count: int) -> str:
    """What is wrong with a column of `count` tokens; empty: nothing."""
    dtype = getattr(torch, type_name)
    if values.dtype == dtype and values.shape == (count,) and values.is_cpu:
        return ""
    shown = f"{name} of shape {tuple(values.shape)} and type {values.dtype} on {values.device}"
    return f"{shown}, instead of {(count,)}, {dtype}, on the CPU"


def _wrong_turn(turn: Any, name: str, sampling: Sampling) -> str:
    """What is wrong with one turn; empty: nothing."""
    if not isinstance(turn, Turn):
        return f"{type(turn).__name__} instead of {name}"
    count = turn.token_ids.numel()
    for column, dtype in _DTYPES.items():
        fault = _wrong_column(f"{column} of {name}", getattr(turn, column), dtype, count)
        if fault:
            return fault
    for column, is_asked in sampling.asks_for.items():
        if not is_asked or (column == "experts" and turn.finish_reason == "abort"):
            continue
        lists = getattr(turn, column)
        # Experts are those of all tokens that were read, not of the turn's last one.
        least, most = (count - 1, math.inf) if column == "experts" else (count, count)
        if lists is None or not least <= len(lists) <= most:
            return f"no list for each of the {count} tokens in {column} of {name}"
    if turn.finish_reason not in FINISH_REASONS:
        return f"finish_reason {turn.finish_reason!r} of {name}; it is one of {FINISH_REASONS}"
    return ""
