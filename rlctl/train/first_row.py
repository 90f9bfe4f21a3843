"""Before a run starts, and in its dry run: the first row goes through prompt, reward and environment.

No engine is started and no model is loaded. Users' code runs where it also runs in training: in processes of
its own, under their limits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlctl.capabilities.sections import other_models, sections_on
from rlctl.environment.build import SINGLE_TURN, TOOLS, EpisodeSource, build_environment
from rlctl.errors import EnvironmentFailure, Problem, SpecError, UsageError
from rlctl.extras import TRAINING, MissingPackage, first_missing, missing_package, require
from rlctl.model_files import looks_local
from rlctl.registry import ENVIRONMENTS
from rlctl.reward.build import grader_for, named_grader, scorer_of
from rlctl.reward.pool import RIGHT, GradingPool, is_ours
from rlctl.reward.protocol import Failure, Sample
from rlctl.run_spec.environment import is_agent, may_give_reward
from rlctl.run_spec.keys import known_leaves
from rlctl.run_spec.model_size import local_model
from rlctl.run_spec.rollout import RewardTerm
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.infer import CHECKED_ROWS, reader_of
from rlctl.train.preflight import check_inputs
from rlctl.user_code import is_file_function, is_users_code

if TYPE_CHECKING:
    from rlctl.data.schema import Row
    from rlctl.run_spec.environment import EnvironmentSpec
    from rlctl.run_spec.rollout import RewardSpec

#: Packages of extras, by the name of the environment that needs them.
_EXTRAS = {"verifiers": "verifiers"}


@dataclass(slots=True)
class FirstRow:
    """What was found."""

    problems: list[Problem] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)  # results, one line each
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, with the reason
    prompt: str = ""  # as the model reads it; "": not rendered

    def leave(self, name: str, missing: MissingPackage) -> None:
        """Adds what a missing package of an extra leaves unchecked."""
        self.unchecked.append(f"{name}: {missing}")

    def refuse(self, key: str, error: UsageError | EnvironmentFailure) -> None:
        """Adds an error, at the key that it names itself or else at `key`."""
        where = error.where
        if where in known_leaves():
            key = str(where)
            where = None
        self.problems.append(
            Problem(
                severity="error",
                key=key,
                what=error.what,
                fix=error.fix,
                where=where,
            )
        )


def check_first_row(spec: RunSpec, known: Iterable[Problem] = (), *, starts: bool) -> FirstRow:
    """Checks rows, prompt, reward and environment.

    Args:
        known: problems of `check_inputs`; a model and data that have errors are not read.
        starts: the run starts here: a model that is missing is downloaded, and a missing extra is an error.
    """
    if starts:
        require(*TRAINING)
    first_row = FirstRow()
    missing = first_missing(*TRAINING)
    if missing:
        first_row.leave("models and engines", missing)
    names = [*spec.environment.code_names, *(term.name for term in spec.reward.all_terms)]
    has_own_code = any(map(is_users_code, names)) or spec.environment.tools
    if spec.is_embedded and not (has_own_code or spec.data.train_files):
        return first_row  # the built-in tasks are made for their graders
    broken = {problem.key for problem in known if problem.severity == "error"}
    starts = starts and not broken
    rows = [] if "data.train_files" in broken else _read_rows(spec, first_row, fetch=starts)
    row = rows[0] if rows else None
    key = "reward.terms" if spec.reward.terms else "reward.name"
    # the environment's own reward counts where `auto` finds no answer
    terms = [t for t in spec.reward.all_terms if not (spec.environment.is_multi_turn and t.name == "auto")]
    grades = _has_needs(rows, spec.reward.model_copy(update={"terms": terms}), None, key, first_row)
    starts = starts and not first_row.problems  # nothing is downloaded for a run that cannot start
    reader = None
    if row is not None and not spec.is_embedded and "model.path" not in broken:
        reader = reader_of(spec, fetch=starts)
        _render(spec, row, reader, first_row)
    if grades:
        _check_reward(spec, row, reader and reader[0], first_row)
    is_built = _check_environment(spec, reader and reader[0], first_row, starts=starts)
    if "environment.name" not in {problem.key for problem in first_row.problems}:
        of_reset = spec.reward.model_copy(update={"terms": []})
        begins = _has_needs(rows, of_reset, spec.environment, "environment.name", first_row)
        begins = begins and is_built and bool(first_row.prompt) and spec.environment.is_multi_turn
        if begins and row is not None and reader:
            _begin_episode(spec, row, reader[0], first_row)
    _list_unread(spec, first_row)
    return first_row


def with_problems_of_files(error: SpecError) -> SpecError:
    """The error together with the problems of files, rows, reward and environment that the spec names."""
    if error.spec is None:
        return error
    of_files = check_inputs(error.spec)
    of_files += check_first_row(error.spec, of_files, starts=False).problems
    said = {problem.key for problem in error.problems if problem.severity == "error"}
    more = [problem for problem in of_files if problem.severity == "error" and problem.key not in said]
    return SpecError([*error.problems, *more])


def _has_needs(
    rows: list[Row], reward: RewardSpec, environment: EnvironmentSpec | None, key: str, outcome: FirstRow
) -> bool:
    """Whether every row has the columns that reward or `reset` ask for; otherwise adds errors."""
    from rlctl.prepare.needs import unmet_needs

    known = len(outcome.problems)
    try:
        for error in unmet_needs(rows, reward, environment):
            outcome.refuse(key, error)
    except UsageError as error:
        outcome.refuse(key, error)
    return len(outcome.problems) == known


def _read_rows(spec: RunSpec, outcome: FirstRow, *, fetch: bool) -> list[Row]:
    """The training rows, or the first of them; reads the rows of all files as training does."""
    if spec.is_embedded and not spec.data.train_files:
        from rlctl.tiny.embedded import example_row

        return [example_row()]
    from rlctl.data.read import load_rows
    from rlctl.prepare.data_files import hub_name, local_files
    from rlctl.prepare.sources import check_hub_package

    training: list[Row] = []
    continues = spec.data.continue_final_message
    options: dict[str, Any] = {"reward": spec.reward, "continue_final_message": continues}
    for key, names, split in (
        ("data.train_files", spec.data.train_files, "train"),
        ("data.val_files", spec.data.val_files, "test"),
    ):
        if not fetch and (of_hub := [name for name in names if hub_name(name)]):
            outcome.unchecked.append(f"{key}: {', '.join(of_hub)} is prepared at the start of the run")
            try:
                check_hub_package(of_hub[0])
            except EnvironmentFailure as error:
                outcome.refuse(key, error)
            continue
        try:
            files = local_files(names, split=split, **options)
            rows = load_rows(files, continue_final_message=continues, most=CHECKED_ROWS) if files else []
        except UsageError as error:
            outcome.refuse(key, error)
            continue
        if rows:
            outcome.checked.append(f"{key}: {len(rows):,} rows{' read' * (len(rows) == CHECKED_ROWS)}")
        training = rows if key == "data.train_files" else training
    return training


def _render(spec: RunSpec, row: Row, reader: tuple[Any, Any] | None, report: FirstRow) -> None:
    """Renders the row's prompt with the chat template."""
    from rlctl.data.prompts import Renderer

    if reader is None and (missing := first_missing("transformers")):
        report.leave("the prompt", missing)
        return
    if reader is None:
        report.unchecked.append(f"the prompt: the tokenizer of {spec.model.path} is not on this machine")
        return
    try:
        renderer = Renderer(reader[0], spec.data.chat_template_kwargs)
        report.prompt = renderer.text(row)
        [ids] = renderer.encode([report.prompt])
        renderer.check_start(row, ids)
    except UsageError as error:
        report.refuse("data.train_files", error)
        return
    if not spec.environment.is_multi_turn:  # else the environment adds to it
        report.checked.append(_fitting(len(ids), spec))


def _fitting(num_tokens: int, spec: RunSpec) -> str:
    return f"the first prompt has {num_tokens:,} tokens of at most {spec.data.max_prompt_length:,}"


def _begin_episode(spec: RunSpec, row: Row, tokenizer: Any, report: FirstRow) -> None:
    """Begins the episode of the first row in its environment, up to what the policy reads first.

    What fails here may be a server that is away for a moment: a warning.
    """
    from rlctl.data.prompts import PromptDataset
    from rlctl.rollout.protocol import Sampling

    options = spec.data.chat_template_kwargs
    limits: dict[str, Any] = {"max_prompt_length": sys.maxsize, "filter_overlong": False}
    [task] = PromptDataset([row], tokenizer, chat_template_kwargs=options, **limits).all_tasks()
    try:
        with closing(EpisodeSource.of(spec, tokenizer)) as source:
            [prompt] = source.first_prompts([task], Sampling(spec.data.max_response_length))
    except (UsageError, EnvironmentFailure) as error:
        report.refuse("environment.name", error)
        return
    if prompt.problem:
        message = f"the first row's episode failed before the policy could speak: {prompt.problem}"
        fix = "such episodes are excluded; `rlctl environment test` plays more of them"
        report.problems.append(
            Problem(
                severity="warning",
                key="environment.name",
                what=message,
                fix=fix,
                where=row.where,
            )
        )
        return
    report.prompt = tokenizer.decode(prompt.token_ids)
    length = len(prompt.token_ids)
    limit = spec.data.max_prompt_length
    if length <= limit:
        report.checked.append(_fitting(length, spec))
        return
    message = f"with what the environment adds, the first prompt has {length:,} tokens, more than {limit:,}"
    fix = f"such episodes are excluded: raise it to {length} or more"
    report.problems.append(
        Problem(
            severity="warning",
            key="data.max_prompt_length",
            what=message,
            fix=fix,
            where=row.where,
        )
    )


def _check_reward(spec: RunSpec, row: Row | None, tokenizer: Any, outcome: FirstRow) -> None:
    key = "reward.terms" if spec.reward.terms else "reward.name"
    for term in spec.reward.all_terms:
        if spec.is_embedded and not is_file_function(term.name):
            continue
        try:
            _grade_first(spec, term, row, tokenizer, key, outcome)
        except MissingPackage as error:
            outcome.leave(f"the reward {term.name}", error)
        except (UsageError, EnvironmentFailure) as error:
            outcome.refuse(key, error)


def _grade_first(
    spec: RunSpec, term: RewardTerm, row: Row | None, tokenizer: Any, key: str, report: FirstRow
) -> None:
    """Grades the row's ground truth as a response; without a row only imports a user's function.

    Raises:
        UsageError, EnvironmentFailure: the reward cannot be loaded.
    """
    name = term.name
    if name == "auto" and row:
        chosen = named_grader(spec.reward.by_source, row.data_source)
        name = chosen or (grader_for(row.data_source) if row.ground_truth else name)
    if name in {"model", "auto"}:
        why = "it is loaded at the start of the run" if name == "model" else "the first row has no answer"
        report.unchecked.append(f"the reward {name}: {why}")
        return
    scorer = scorer_of(name, term.params, spec.reward, device=None)
    with closing(scorer):
        if row is None:
            if isinstance(scorer, GradingPool):
                scorer.check()
            report.unchecked.append(f"the reward {name}: there is no row to grade")
            return
        try:
            sample = _known_sample(name, row, tokenizer)
        except ValueError as error:
            message = f"{name} cannot read the ground truth {row.ground_truth[:80]!r}: {error}"
            fix = "correct the row, or choose another reward"
            report.problems.append(
                Problem(
                    severity="error",
                    key=key,
                    what=message,
                    fix=fix,
                    where=row.where,
                )
            )
            return
        [grade] = scorer.grade([sample])
    if isinstance(grade, Failure) and grade.kind == "inapplicable":
        report.checked.append(f"{name} does not grade the first row")
    elif isinstance(grade, Failure) and grade.score is None:
        message = f"{name} fails on the first row: {grade.text.strip().splitlines()[-1]}"
        fix = "`rlctl reward` shows more rows and the whole error"
        report.problems.append(
            Problem(
                severity="error",
                key=key,
                what=message,
                fix=fix,
                where=row.where,
            )
        )
    else:
        score = grade.score if isinstance(grade, Failure) else grade
        report.checked.append(
            f"{name} gives the ground truth of the first row, {row.ground_truth[:40]!r}, {score:g}"
        )
        if is_ours(name) and sample.response and score != RIGHT:
            message = f"{name} gives the ground truth of the first row {score:g}, not 1"
            fix = "`rlctl reward` tries all rows; choose the reward that reads these answers"
            if r"\boxed" in row.ground_truth:
                fix = r"`rlctl prepare-data parquet --recipe math` reads what the last \boxed{} contains"
            report.problems.append(
                Problem(
                    severity="warning",
                    key=key,
                    what=message,
                    fix=fix,
                    where=row.where,
                )
            )


def _known_sample(name: str, row: Row, tokenizer: Any) -> Sample:
    """The row with a right response, as far as the grader knows one.

    Raises:
        ValueError: the grader cannot read the ground truth.
    """
    from rlctl.data.prompts import messages_of
    from rlctl.reward.trial import known_responses  # imports NumPy

    known = known_responses(name, row.ground_truth) if row.ground_truth else None
    response = (known[0] if known else row.ground_truth) or ""
    ids = tokenizer(response, add_special_tokens=False)["input_ids"] if tokenizer and response else ()
    about = (row.ground_truth, row.prompt_text, row.data_source, row.extra, messages_of(row))
    return Sample(response, *about, response_ids=ids)


def _check_environment(spec: RunSpec, tokenizer: Any, report: FirstRow, *, starts: bool) -> bool:
    """Builds the environments, and says what they are; whether all could be built."""
    is_built = True
    for name in dict.fromkeys((spec.environment.name, *spec.environment.others)):
        if name == SINGLE_TURN or (spec.is_embedded and name != TOOLS and not is_users_code(name)):
            continue
        package = _EXTRAS.get(name)
        if package and not starts and not find_spec(package):
            report.unchecked.append(f"{name}: the package {package} is not installed here")
            is_built = False
            continue
        try:
            report.checked.append(f"{name}: {_described(spec, name, tokenizer)}")
        except ModuleNotFoundError as error:
            missing = missing_package(error)
            if not missing:
                raise
            report.leave(name, missing)
            is_built = False
        except (UsageError, EnvironmentFailure) as error:
            report.refuse("environment.name", error)
            is_built = False
    return is_built


def _described(spec: RunSpec, name: str, tokenizer: Any) -> str:
    """Builds the environment once; says what kind it is.

    Raises:
        UsageError: it cannot be built.
    """
    from rlctl.environment.byte_tokenizer import byte_tokenizer
    from rlctl.environment.protocol import EnvironmentContext
    from rlctl.rollout.protocol import Sampling

    options = spec.data.chat_template_kwargs if tokenizer else {}
    sampling = Sampling(spec.data.max_response_length)
    settings = (spec.environment, tokenizer or byte_tokenizer(), sampling, spec.max_length)
    environment = build_environment(name, EnvironmentContext(*settings, chat_template_kwargs=options))
    environment.close()
    registered = ENVIRONMENTS.part(name)
    tools = [tool["function"]["name"] for tool in getattr(environment, "tools", ())]
    if registered.is_decorated:
        label = registered.label or "a registered environment"
        return f"{label}: {', '.join(tools)}" if tools else label
    if is_agent(registered.function):
        return "an agent class" if inspect.isclass(registered.function) else "an agent function"
    reward = "with its own reward" if may_give_reward(registered.function) else "without get_reward"
    return f"a class {reward}; tools: {', '.join(tools) or 'none'}"


def _list_unread(spec: RunSpec, outcome: FirstRow) -> None:
    """Lists models and adapters that are on no disk of this machine, and servers."""
    models = {
        "model.path": spec.model.path,
        **other_models(spec),
        "reward.model.path": spec.reward.model.path,
    }
    models["model.lora_adapter_path"] = spec.model.lora_adapter_path
    for key, path in models.items():
        if path is None or (spec.is_embedded and key == "model.path"):
            continue
        if local_model(
            spec.model.model_copy(update={"path": path, "revision": None})
        ) is None and not looks_local(path):
            outcome.unchecked.append(f"{key}: {path} is not on this machine and is downloaded at the start")
    for section in sections_on(spec).values():
        outcome.unchecked.extend(section.unchecked(spec))
