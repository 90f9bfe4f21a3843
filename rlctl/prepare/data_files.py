"""Rows of any readable file, wherever rows are read: training, evaluation, tests of rewards and environments.

Prepared Parquet is read as it is. Everything else goes through the pipeline of `prepare-data` once, and is
kept in the user's cache by content, recipe and version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.read import check_splits, is_row_schema, load_rows, parquet_names
from rlctl.data.schema import Row
from rlctl.errors import UsageError
from rlctl.files import cache_root, matches
from rlctl.prepare.findings import DataFinding, lines
from rlctl.prepare.sources import HUB, is_readable

if TYPE_CHECKING:
    from rlctl.prepare.request import PrepareSummary
    from rlctl.run_spec.rollout import RewardSpec

#: organisation/name, and perhaps /configuration, @revision and :split.
_NAME = re.compile(r"\w[\w.-]*(?:/[\w.-]+){1,2}(?:@[\w./-]+)?(?::[\w.-]+)?", re.ASCII)
#: Graders that compare answers as mathematics, for which the pipeline checks them.
_MATHEMATICS = {"auto", "maths"}


def hub_name(name: str) -> str | None:
    """The name of a data set of the hub, with `hf:`; None for a file, a directory or a pattern.

    What exists here is never looked up on the hub.
    """
    if name.startswith(HUB):
        return name
    is_name = _NAME.fullmatch(name) and not matches(name) and not is_readable(Path(name))
    return f"{HUB}{name}" if is_name else None


def is_prepared(path: Path) -> bool:
    """Whether a file is Parquet in the row schema, or all files of a directory are.

    A damaged Parquet file counts as prepared: reading it reports the damage.

    Raises:
        UsageError: the directory has splits.
    """
    inside = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    check_splits(path, inside)
    return bool(inside) and all(_has_row_schema(file) for file in inside)


def _has_row_schema(file: Path) -> bool:
    if file.suffix.lower() != ".parquet":
        return False
    names = parquet_names(file)
    return names is None or is_row_schema(names)


def checks_answers(reward: RewardSpec | None) -> bool:
    """Whether a term of the reward may compare answers as mathematics."""
    return reward is not None and any(term.name in _MATHEMATICS for term in reward.all_terms)


def read_any(
    names: Sequence[str],
    *,
    split: str = "train",
    reward: RewardSpec | None = None,
    continue_final_message: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Reads the rows of any readable files, in order; a row may lack an answer.

    Args:
        names: files of any known format, directories, patterns, and data sets of the hub.
        split: of data sets of the hub that name none.
        reward: what grades the responses; None: nothing compares answers.
        continue_final_message: a prompt may end with the beginning of the response.
        note: gets what was recognised and found in files that are not prepared.

    Raises:
        UsageError: a file is missing or broken, or a row cannot be used; names file and row.
        EnvironmentFailure: a data set of the hub cannot be loaded, or the cache cannot be written.
    """
    files = local_files(
        names, split=split, reward=reward, continue_final_message=continue_final_message, note=note
    )
    return load_rows(files, continue_final_message=continue_final_message)


def local_files(
    names: Iterable[str],
    *,
    split: str,
    reward: RewardSpec | None = None,
    continue_final_message: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Prepared files: the names of those that are, and files of the cache for all others.

    Arguments and errors are those of `read_any`, except for errors in rows of prepared files.
    """
    by_name = files_by_name(
        names, split=split, reward=reward, continue_final_message=continue_final_message, note=note
    )
    return [file for files in by_name.values() for file in files]


def files_by_name(
    names: Iterable[str],
    *,
    split: str,
    reward: RewardSpec | None = None,
    continue_final_message: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, list[str]]:
    """Name → its prepared files; see `local_files`."""
    found: dict[str, list[str]] = {}
    for name in names:
        files = found.setdefault(name, [])
        hub = hub_name(name)
        paths = [] if hub else matches(name)
        if not hub and not paths:
            fix = "correct the path; a data set of the hub is organisation/name"
            raise UsageError("no such file or directory", where=name, fix=fix)
        if paths and all(map(is_prepared, paths)):
            files.append(name)
            continue
        if hub and ":" not in hub.removeprefix(HUB):
            hub = f"{hub}:{split}"
        for source in [hub] if hub else list(map(str, paths)):
            files += _prepared(source, checks_answers(reward), continue_final_message, note)
    return found


def _prepared(
    name: str, checks: bool, continue_final_message: bool, note: Callable[[str], None]
) -> list[str]:
    """Files of the cache with the rows of one name."""
    from rlctl.prepare.pipeline import prepare_cached
    from rlctl.prepare.recipes import Recipe
    from rlctl.prepare.request import PrepareRequest

    request = PrepareRequest(
        (name,),
        Path(),
        recipe=Recipe(continue_final_message=continue_final_message),
        val_fraction=0.0,
        near_duplicates="off",
        duplicates="keep",
        leakage="off",
        overwrite=True,
        check_graders=checks,
        no_answer="keep",
        keeps_places=True,
    )
    try:
        out, summary = prepare_cached(request, cache_root() / "datasets")
    except UsageError as error:
        fix = error.fix or f"prepare it: `rlctl prepare-data parquet {name} --out DIR`, and name the files"
        raise UsageError(error.what, where=error.where or name, fix=fix) from error
    for line in _notes(name, summary):
        note(line)
    return [str(out / file) for file in summary.outputs["train"]]


def _notes(name: str, summary: PrepareSummary) -> list[str]:
    """What was recognised in a file, in one line; findings, with their examples."""
    read = f"{name} (recipe {summary.recipe}): {described_columns(summary.report['columns'])}"
    read += "; `rlctl prepare-data parquet` has these options"
    found = [DataFinding(**entry) for entry in summary.report["findings"]]
    return [read, *lines(finding for finding in found if finding.severity != "info")]


def described_columns(columns: Mapping[str, Any]) -> str:
    """Where prompt and answer come from, the options that change it, and what becomes of other columns."""
    answer = repr(columns["answer"]) if columns["answer"] else "none"
    carried = f"; in extra_info: {', '.join(columns['carried'])}" if columns["carried"] else ""
    empty = f"; empty: {', '.join(columns['empty'])}" if columns["empty"] else ""
    return f"prompt: {columns['prompt']!r} (--prompt-key), answer: {answer} (--answer-key){carried}{empty}"
