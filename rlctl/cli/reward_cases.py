"""Test cases of `rlctl reward`: rows of prepared data, and stored responses with their rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.prompts import messages_of
from rlctl.data.read import load_rows, open_parquet, rows_of
from rlctl.errors import UsageError
from rlctl.reward.protocol import Sample
from rlctl.reward.trial import Case, Kind

if TYPE_CHECKING:
    from rlctl.data.schema import Row

_NEEDED = ("data_source", "prompt", "response", "ground_truth", "reward")
_KNOWN = (*_NEEDED, "messages", "extra_info")
_TEXTS = ("data_source", "prompt", "response", "ground_truth")
#: Kind of case → expected score.
_OF_ROW: Mapping[Kind, float] = {"ground truth": 1.0, "number changed": 0.0, "empty answer": 0.0}
_FIX = "name an evaluation's samples.parquet, or a run's rollouts directory"


def cases_of(
    data: Sequence[str], responses: Sequence[str], limit: int | None, *, is_shaped: bool
) -> list[Case]:
    """Cases with their expected scores: three per row, then the stored responses.

    The cases of a row are its ground truth (1 expected), the same with a number changed (0) and an empty
    answer (0).

    Args:
        data: Parquet in the row schema.
        responses: Parquet of an evaluation or of a run's rollouts, or directories of them.
        limit: maximum number of rows, and of responses.
        is_shaped: rewards of rollouts include a length penalty, so they are not compared.

    Raises:
        UsageError: a file is missing, broken, or of another kind.
    """
    rows = load_rows(data, continue_final_message=True)
    cases = [
        Case(kind, _sample(row), expected, row.where)
        for row in rows[:limit]
        for kind, expected in _OF_ROW.items()
    ]
    by_truth: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_truth.setdefault((row.data_source, row.ground_truth), []).append(row)
    stored = (case for name in responses for case in _stored(name, by_truth, is_shaped))
    return [*cases, *islice(stored, limit)]


def _sample(row: Row) -> Sample:
    """The row with an empty response."""
    return Sample("", row.ground_truth, row.prompt_text, row.data_source, row.extra, messages_of(row))


def _stored(name: str, rows: Mapping[tuple[str, str], Sequence[Row]], is_shaped: bool) -> Iterator[Case]:
    """Cases of the responses in a file, or in all Parquet files of a directory."""
    path = Path(name)
    if not path.exists():
        raise UsageError("no such file or directory", where=name, fix=_FIX)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UsageError("the directory holds no .parquet file", where=name, fix=_FIX)
    for file in files:
        with open_parquet(file, _NEEDED, fix=_FIX) as parquet:
            is_unlike = is_shaped and "rollout_log_probs" in parquet.schema_arrow.names
            for number, values in rows_of(parquet, file, _KNOWN):
                expected = None if is_unlike else values["reward"]
                yield _stored_case(values, rows, expected, f"{file}:{number}")


def _stored_case(
    values: Mapping[str, Any],
    rows: Mapping[tuple[str, str], Sequence[Row]],
    expected: float | None,
    where: str,
) -> Case:
    for name in _TEXTS:
        if not isinstance(values[name], str):
            kind = "empty" if values[name] is None else f"of type {type(values[name]).__name__}"
            raise UsageError(f"`{name}` is {kind}, not a text", where=where, fix=_FIX)
    if not isinstance(values["reward"], int | float | None):
        raise UsageError(f"`reward` is {values['reward']!r}, not a number", where=where, fix=_FIX)
    known = rows.get((values["data_source"], values["ground_truth"]), ())
    row = next((row for row in known if row.prompt[-1].content in values["prompt"]), None)
    of_row = _sample(row) if row else Sample("", "")
    sample = Sample(
        values["response"],
        values["ground_truth"],
        values["prompt"],
        values["data_source"],
        _from_json(values, "extra_info", where) or of_row.extra_info,
        _from_json(values, "messages", where) or of_row.messages,
    )
    return Case("stored response", sample, expected, where)


def _from_json(values: Mapping[str, Any], name: str, where: str) -> Any:
    text = values.get(name)
    if not isinstance(text, str) or not text:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"`{name}` is not JSON: {error}", where=where, fix=_FIX) from error
