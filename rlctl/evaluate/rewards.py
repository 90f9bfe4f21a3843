"""Who grades an evaluation."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rlctl.errors import UsageError
from rlctl.spec.reward import OverlongSpec, RewardSpec


def chosen_reward(own: RewardSpec, name: str | None) -> RewardSpec:
    """The reward to grade with.

    Args:
        own: of the run or the earlier evaluation.
        name: a grader's name or `file.py:function` in its place; None: `own` itself.

    Returns:
        Without the overlong penalty, which shapes training only; a function's path is absolute.

    Raises:
        UsageError: `name` is neither.
    """
    values = own.model_dump() | {"overlong": OverlongSpec()}
    if name is not None:
        values |= {"name": _absolute(name), "terms": None}
    try:
        return RewardSpec.model_validate(values)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"no such reward: {name}", where="--reward", fix=reason) from error


def _absolute(name: str) -> str:
    """A function's file as seen from everywhere."""
    file, colon, function = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{function}" if colon else name
