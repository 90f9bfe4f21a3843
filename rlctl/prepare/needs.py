"""What graders and environments read of a row, checked for all rows before anything is sampled."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any

from rlctl.data.schema import Row
from rlctl.errors import UsageError
from rlctl.registry import ENVIRONMENTS
from rlctl.reward.build import named_grader
from rlctl.reward.pool import GradingPool, is_ours
from rlctl.user_code import files_of

if TYPE_CHECKING:
    from rlctl.run_spec.environment import EnvironmentSpec
    from rlctl.run_spec.rollout import RewardSpec, RewardTerm

_TRUTH = "ground_truth"
#: Parameters of TRL's functions that get the ground truth if no column has their name.
_TRUTHS = ("solution", "answer")
#: Columns that no recipe takes for the answer, because they may be a model's responses or something else.
_MAY_BE_ANSWERS = frozenset(
    {"response", "gold", "gold_answer", "golden_answer", "reference", "reference_answer", "correct_answer"}
    | {"answers", "expected", "expected_output", "gt", "truth", "result", "results", "correct", "label_text"}
)
#: What `reset` gets of every row.
_OF_EVERY_ROW = frozenset({"self", "prompt", "data_source"})


def check_needs(rows: Iterable[Row], reward: RewardSpec, environment: EnvironmentSpec | None = None) -> None:
    """Checks that every row has the answer and the columns that the reward and `reset` ask for.

    Raises:
        UsageError: a row lacks one; names the row, the column, and what reads it. Or a function cannot be
            loaded.
    """
    for error in unmet_needs(rows, reward, environment):
        raise error


def unmet_needs(
    rows: Iterable[Row], reward: RewardSpec, environment: EnvironmentSpec | None = None
) -> Iterator[UsageError]:
    """Yields the errors of `check_needs`: of each function that cannot be loaded, and of each column."""
    rows = list(rows)
    is_multi_turn = environment is not None and environment.is_multi_turn
    for term, graded in _graded_by(rows, reward):
        is_optional = is_multi_turn and term.name == "auto"  # then the environment's own reward counts
        if is_optional or not graded:
            continue
        try:
            asked = asked_by(term)
        except UsageError as error:
            yield error
            continue
        for name in asked:
            yield from _lacking(graded, name, f"the reward `{term.name}` asks for {_described(name)}")
    if environment is None or not is_multi_turn:
        return
    for environment_name in (environment.name, *environment.others):
        chosen = [row for row in rows if _plays(row, environment_name, environment.name)]
        for name in _asked_by_reset(environment_name):
            yield from _lacking(chosen, name, f"`reset` of {environment_name} asks for {_described(name)}")


def _graded_by(rows: list[Row], reward: RewardSpec) -> list[tuple[RewardTerm, list[Row]]]:
    """Each term, and the rows that it grades; a grader of `reward.by_source` counts as a term."""
    from rlctl.run_spec.rollout import RewardTerm

    graded_rows: list[tuple[RewardTerm, list[Row]]] = []
    for term in reward.all_terms:
        if term.name != "auto" or not reward.by_source:
            graded_rows.append((term, rows))
            continue
        by_grader: dict[str, list[Row]] = {}
        for row in rows:
            by_grader.setdefault(named_grader(reward.by_source, row.data_source) or "auto", []).append(row)
        graded_rows += [(RewardTerm(name=name), graded) for name, graded in by_grader.items()]
    return graded_rows


def asked_by(term: RewardTerm) -> tuple[str, ...]:
    """Names of what a term reads of every row: `ground_truth`, and columns by name.

    Raises:
        UsageError: its function cannot be loaded.
    """
    if is_ours(term.name):
        return () if term.name == "model" else (_TRUTH,)
    changed = tuple(file.stat().st_mtime_ns for file in files_of(term.name))
    return _asked_by_function(term.name, json.dumps(term.params), changed)


@cache
def _asked_by_function(name: str, params: str, changed: tuple[int, ...]) -> tuple[str, ...]:
    """What a user's function reads, which its process says when it starts; `changed`: times of its files."""
    with closing(GradingPool(name, json.loads(params), num_workers=1)) as pool:
        pool.check()
        return pool.asks


def _lacking(rows: list[Row], name: str, asks: str) -> Iterator[UsageError]:
    lacking = [row for row in rows if not _has(row, name)]
    if not lacking:
        return
    others = (
        "no row has one" if len(lacking) == len(rows) else f"{len(lacking):,} of {len(rows):,} rows lack it"
    )
    if name == _TRUTH:
        fix = "write the answer into the row, or use a reward that reads none; with an environment's own "
        fix += "reward alone: reward.terms=[]"
        columns = [column for column in lacking[0].extra if column.lower() in _MAY_BE_ANSWERS]
        if len(lacking) == len(rows) and columns:
            file = (lacking[0].where or "FILE").rpartition(":")[0]
            prepared = f"`rlctl prepare-data parquet {file} --out DIR --answer-key {columns[0]}`"
            fix = f"if {columns[0]!r} is the answer: {prepared}; or {fix}"
    else:
        fix = f"write {name!r} into the row, or give the parameter a default"
    yield UsageError(f"{asks}, and {others}", where=lacking[0].where or f"row {lacking[0].index}", fix=fix)


def _has(row: Row, name: str) -> bool:
    if name == _TRUTH:
        return bool(row.ground_truth)
    if row.extra.get(name) is not None:
        return True
    if name in _TRUTHS:
        return bool(row.ground_truth)
    return name in {"question", "answer"} and bool(getattr(row, name))


def _described(name: str) -> str:
    return "an answer (ground_truth)" if name == _TRUTH else f"the column {name!r}"


def _plays(row: Row, name: str, usual: str) -> bool:
    if not row.environment:
        return name == usual
    return row.environment in {name, name.rpartition(":")[2]}


def _asked_by_reset(name: str) -> list[str]:
    """Parameters of a class's `reset` without a default; nothing for other environments."""
    part = ENVIRONMENTS.part(name)
    reset = getattr(part.function, "reset", None) if inspect.isclass(part.function) else None
    if reset is None or part.is_decorated:
        return []
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters: Mapping[str, Any] = inspect.signature(reset).parameters
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in variable
        and name not in _OF_EVERY_ROW
    ]
