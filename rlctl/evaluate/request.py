"""The request for an evaluation, and its checks before torch is imported."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlctl.engine.checkpoint import checkpoint_of_run, model_checksums
from rlctl.errors import UsageError
from rlctl.evaluate.evaluate_report import EVALUATIONS
from rlctl.evaluate.questions import AUTO, Questions, load_questions
from rlctl.files import check_vacant
from rlctl.model_files import config_directory
from rlctl.prepare.data_files import local_files
from rlctl.prepare.needs import check_needs
from rlctl.prepare.recipes import Recipe
from rlctl.rollout.engines import chosen_engine
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.load import LEFT_TO_THE_USER, RUN_SPEC_FILE, load_spec, recorded_spec
from rlctl.run_spec.rollout import DataSpec, OverlongSpec, RewardSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.tiny.game import embedded_task
from rlctl.track.open_run import chosen_step
from rlctl.track.redaction import is_masked
from rlctl.track.trust import require_permission, values_of
from rlctl.user_code import absolute_name

#: Name of the engine of models behind an API, before the URL.
API_ENGINE = "openai"
DEFAULT_KS = (1, 4, 8)
#: Dividing logits of some hundreds by a smaller temperature overflows float32.
MIN_TEMPERATURE = 1e-30


#: Beginnings of keys of a reward → a part of the names of the graders that use them.
_USED_BY = {"reward.by_source.": "auto", "reward.judge.": "judge", "reward.model.": "model"}


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Model, data and options of an evaluation."""

    model_or_run: str  # run directory, model directory or hub id
    #: benchmarks by name, and files; empty: the validation files of the run
    data: list[str] = field(default_factory=list)
    step: int | str | None = None  # of the run: its number, or `best`; None: the newest checkpoint
    columns: Recipe = AUTO  # for files not in verl's row schema
    #: variables of the chat template, `{"enable_thinking": false}`, in addition to those of the run
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False  # as `data.continue_final_message`; also if the run has it
    #: directory of benchmark files; None: `$RLCTL_BENCHMARKS`, else the hub
    benchmarks_dir: Path | None = None
    n: int = 8  # responses per question
    ks: Sequence[int] | None = None  # values of k for pass@k; None: those of 1, 4, 8 up to n
    temperature: float = 1.0  # sampling temperature; 0: greedy, requires n = 1
    top_p: float = 1.0  # nucleus sampling
    #: in tokens; None: the value of the run, else 512 or half of the model's context if that is less
    max_response_length: int | None = None
    limit: int | None = None  # use only the first `limit` questions of each data source; None: all
    seed: int = 1  # sampling seed
    #: name of a grader, `file.py:function`, or a YAML file with the section `reward`; None: the reward of the
    #: run, or a grader by data source if there is no run or the data includes a benchmark
    reward: str | None = None
    #: name of an environment, `file.py:Class`, or a YAML file with the section `environment`; None: the run's
    environment: str | None = None
    #: rollout engine, as `rollout.name` of a spec, or `openai:URL` for a model behind an API; None: that of
    #: the run, else `hf`
    engine: str | None = None
    fresh: bool = False  # replace stored responses
    #: output directory, new or empty; None: `evaluations/<time>` in the run or in the current directory
    out: Path | None = None
    batch_size: int = 256  # sequences per generation batch
    trust: bool = False  # run the code that the run's spec names, also if no run of this user has written it


@dataclass(frozen=True, slots=True)
class Target:
    """A model, its run if it has one, and the data to evaluate it on."""

    model_path: str  # Hugging Face directory or hub id
    data_files: list[str]  # as in `EvaluateRequest.data`; without these, the validation files of the run
    #: run_dir, step, spec: the run and checkpoint step the model comes from; None without a run
    run_dir: Path | None = None
    step: int | None = None
    spec: RunSpec | None = None
    #: model file → SHA-256, for files with a known hash
    checksums: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # messages for the user, such as skipped damaged checkpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request."""

    request: EvaluateRequest  # the original request
    ks: list[int]  # values of k for pass@k, ascending
    target: Target  # the model
    engine: str  # the rollout engine
    reward: RewardSpec  # grades the responses
    environment: EnvironmentSpec  # in which episodes are sampled
    questions: Questions  # truncated to the limit of the request
    chat_template_kwargs: Mapping[str, Any]  # variables of the chat template

    @property
    def is_behind_api(self) -> bool:
        """Whether the model is at a server, and this machine has no files of it."""
        return is_api(self.engine)


def _check_place(evaluations: Path) -> None:
    """Refuses to write to the directory of a run's evaluations if it is a link.

    Raises:
        UsageError: as above.
    """
    if evaluations.is_symlink():
        message = f"it is a link to {evaluations.readlink()}, maybe of someone else"
        raise UsageError(message, where=str(evaluations), fix="add --out DIR")


def is_api(engine: str | None) -> bool:
    """Whether `--engine` names a server instead of an engine of this machine."""
    return engine is not None and engine.startswith(f"{API_ENGINE}:")


def check_request(request: EvaluateRequest) -> Plan:
    """Checks a request; reads the data but loads neither model nor torch.

    Raises:
        UsageError: k > n, the model or run does not exist, there is no data, an option is invalid, or `out`
            is not empty, or the run's `evaluations` is a link, or the run would execute code that this user
            has not allowed.
        EnvironmentFailure: a benchmark is not available.
    """
    _check_sampling(request)
    ks = checked_ks(request.ks, request.n)
    if request.out:
        check_vacant(request.out)
    chosen_reward(RewardSpec(), request.reward)
    named = chosen_environment(request.environment)
    behind_api = is_api(request.engine)
    target = find_target(request.model_or_run, request.data, request.step, behind_api=behind_api)
    if request.out is None and target.run_dir is not None:
        _check_place(target.run_dir / EVALUATIONS)
    questions = load_questions(
        request.data or target.data_files,
        request.columns,
        benchmarks_dir=request.benchmarks_dir,
        continue_final_message=request.continue_final_message
        or (target.spec is not None and target.spec.data.continue_final_message),
    )
    if request.limit is not None:
        seen = Counter[str]()
        first = []
        for row in questions.rows:
            seen[row.data_source] += 1
            if seen[row.data_source] <= request.limit:
                first.append(row)
        questions = replace(questions, rows=first)
    own = RewardSpec() if target.spec is None or questions.benchmarks else target.spec.reward
    if target.run_dir is not None and target.spec is not None:
        sections = {"model", "rollout"} | ({"environment"} if named is None else set())
        sections |= {"reward"} if own is target.spec.reward else set()
        require_permission(
            target.run_dir,
            values_beside(values_of(target.spec, request.engine), request.reward),
            sections=sections,
            trust=request.trust,
            model_dir=Path(target.model_path),
        )
    reward = chosen_reward(own, request.reward)
    environment = named or (EnvironmentSpec() if target.spec is None else target.spec.environment)
    check_needs(questions.rows, reward, environment)
    lengths(request, target, None if behind_api else _context_in(config_directory(target.model_path)))
    engine = str(request.engine) if behind_api else chosen_engine(target.spec, request.engine, "--engine")
    of_run = {} if target.spec is None else target.spec.data.chat_template_kwargs
    variables = {**of_run, **(request.chat_template_kwargs or {})}
    return Plan(
        request=request,
        ks=ks,
        target=target,
        engine=engine,
        reward=reward,
        environment=environment,
        questions=questions,
        chat_template_kwargs=variables,
    )


def find_target(
    model_or_run: str, data_files: list[str], step: int | str | None = None, *, behind_api: bool = False
) -> Target:
    """Determines whether a name is a run directory or a model, and finds its checkpoint and data.

    With `behind_api` it is a model's name at a server.

    Raises:
        UsageError: a model is given without data, or the run has no checkpoint or no readable spec, or no
            data is given and the run has no validation files.
    """
    if behind_api and data_files and step is None:
        note = (
            "the server, not a hash of its files, says which model answered and how it rendered the prompts"
        )
        return Target(model_or_run, data_files, notes=(note,))
    path = Path(model_or_run).expanduser()
    if (path / RUN_SPEC_FILE).is_file():
        return _run_target(path, data_files, step)
    if step is not None:
        message = f"`{model_or_run}` is no run, and a model has no steps"
        raise UsageError(message, where="--step", fix="leave it out, or name the run's directory")
    if data_files:
        return Target(str(path) if path.exists() else model_or_run, data_files)
    is_there = path.exists()
    message = "is not a run directory" if is_there else "does not exist here; a model of the hub needs --data"
    fix = f"name a directory with a {RUN_SPEC_FILE}, such as runs/rlctl/run-…; for a model add --data FILE"
    raise UsageError(f"`{model_or_run}` {message}", where="MODEL_OR_RUN", fix=fix)


def _run_target(run_dir: Path, data_files: list[str], step: int | str | None) -> Target:
    spec = recorded_spec(run_dir / RUN_SPEC_FILE)
    checkpoint, notes = checkpoint_of_run(run_dir, chosen_step(run_dir, step))
    continues = spec.data.continue_final_message
    data_files = data_files or local_files(
        spec.data.val_files, split="test", reward=spec.reward, continue_final_message=continues
    )
    if not data_files and spec.is_embedded:
        data_files = [str(embedded_task(spec).val_file)]
    if not data_files:
        message = "the run has no validation files (data.val_files)"
        raise UsageError(message, where=str(run_dir), fix="add --data FILE")
    return Target(
        model_path=str(checkpoint.model_dir),
        data_files=data_files,
        run_dir=run_dir,
        step=checkpoint.state.step,
        spec=spec,
        checksums=model_checksums(checkpoint),
        notes=tuple(notes),
    )


def checked_ks(ks: Sequence[int] | None, n: int) -> list[int]:
    """Values of k for pass@k in ascending order; for None, those of `DEFAULT_KS` up to n.

    Raises:
        UsageError: a k is not between 1 and n.
    """
    if ks is None:
        return [k for k in DEFAULT_KS if k <= n]
    for k in ks:
        if not 1 <= k <= n:
            raise UsageError(
                f"pass@{k} cannot be estimated from {n} responses per question",
                where="--k",
                fix=f"sample more with --n {k}, or request a smaller k" if k > 1 else "k is 1 or more",
            )
    return sorted(set(ks))


def chosen_environment(name: str | None) -> EnvironmentSpec | None:
    """The environment that is named for the episodes; None: the run's.

    Args:
        name: an environment, `file.py:Class`, or a YAML file with the section `environment`.

    Raises:
        SpecError: there is no such environment, or the YAML file is not a valid spec.
    """
    if name is None:
        return None
    is_file = name.endswith((".yaml", ".yml"))
    files, overrides = ([Path(name)], []) if is_file else ([], [f"environment.name={absolute_name(name)}"])
    return load_spec(files=files, overrides=overrides, left_open=LEFT_TO_THE_USER).spec.environment


def values_beside(values: Mapping[str, Any], reward: str | None) -> dict[str, Any]:
    """Those values of a recorded spec (dotted key → value) that count beside a command's own reward.

    Graders of sources, the judge and the reward model are kept for those graders that use them; `auto` may
    use all of them.

    Args:
        reward: as `chosen_reward`; None: the recorded one.
    """
    if reward is None:
        return dict(values)
    if reward.endswith((".yaml", ".yml")):
        return {key: value for key, value in values.items() if not key.startswith("reward.")}
    replaced = ["reward.name", "reward.terms"]
    if absolute_name(reward) != absolute_name(str(values.get("reward.name"))):
        replaced.append("reward.params.")
    if reward != "auto":
        replaced += [prefix for prefix, grader in _USED_BY.items() if grader not in reward]
    return {key: value for key, value in values.items() if not key.startswith(tuple(replaced))}


def chosen_reward(own: RewardSpec, name: str | None) -> RewardSpec:
    """The reward that grades the responses.

    Args:
        own: reward of the run or of the earlier evaluation.
        name: a grader, `file.py:function`, or a YAML file with the section `reward`, to use instead.

    Returns:
        The reward without the overlong penalty, which applies only in training; paths of functions are
        absolute. A grader other than `own`'s has no parameters.

    Raises:
        UsageError: `name` is neither a grader nor a function, the file of a function does not exist, or a
            parameter is masked.
        SpecError: the YAML file is not a valid spec.
    """
    if name is not None and name.endswith((".yaml", ".yml")):
        own = load_spec(files=[Path(name)], left_open=LEFT_TO_THE_USER).spec.reward
        name = None
    values = own.model_dump() | {"overlong": OverlongSpec()}
    if name is not None:
        is_own = absolute_name(name) == absolute_name(own.name)
        values |= {"name": name, "params": own.params if is_own else {}, "terms": None}
    for term in (values, *(values["terms"] or ())):
        term["name"] = absolute_name(term["name"])
    try:
        reward = RewardSpec.model_validate(values)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(f"no such reward: {name}", where="--reward", fix=reason) from error
    if is_masked(reward):
        message = "a parameter of the run's reward is masked in spec.yaml"
        raise UsageError(message, where="reward", fix="restore it there, or add --reward")
    for one in reward.all_terms:
        file = one.name.rpartition(":")[0]
        if file and not Path(file).is_file():
            raise UsageError(
                f"{file}: no such file", where="reward", fix=f"paths are relative to {Path.cwd()}"
            )
    return reward


def lengths(request: EvaluateRequest, target: Target, context: int | None) -> tuple[Sampling, int]:
    """Returns the sampling settings and the maximum prompt length in tokens.

    `context`: maximum tokens of prompt and response together; None: unknown.

    Raises:
        UsageError: the response would fill the model's context, so that no prompt fits.
    """
    data = target.spec.data if target.spec else DataSpec()
    default = data.max_response_length
    if target.spec is None and context is not None:
        default = max(1, min(default, context // 2))
    length = request.max_response_length or default
    longest_prompt = data.max_prompt_length if context is None else context - length
    if longest_prompt < 1:
        raise UsageError(
            f"{length} response tokens leave no tokens for a prompt: the model's context is {context}",
            where="--max-response-length",
            fix=f"make it less than {context}",
        )
    sampling = Sampling(
        max_response_length=length,
        temperature=request.temperature or 1.0,
        top_p=request.top_p,
        greedy=request.temperature == 0.0,
    )
    if target.spec:
        longest_prompt = min(longest_prompt, data.max_prompt_length)
    return sampling, longest_prompt


def _check_sampling(request: EvaluateRequest) -> None:
    for name in ("n", "batch_size", "max_response_length", "limit"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UsageError(f"{value} is not a positive integer", where=f"--{name.replace('_', '-')}")
    if request.temperature != 0.0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        message = f"sampling is not possible at a temperature of {request.temperature:g}"
        raise UsageError(
            message, where="--temperature", fix="for the most likely tokens: --temperature 0 --n 1"
        )
    if request.temperature == 0.0 and request.n > 1:
        message = f"temperature 0 always selects the most likely token: {request.n} responses would be equal"
        raise UsageError(message, where="--temperature", fix="add --n 1, or sample at a temperature above 0")
    if not 0.0 < request.top_p <= 1.0:
        wrong = f"--top-p must be above 0 and at most 1, not {request.top_p:g}"
        message = wrong if request.top_p else "--top-p 0 leaves no token"
        raise UsageError(message, where="--top-p", fix="for the most likely token: --temperature 0")


def _context_in(directory: Path) -> int | None:
    """Context length in tokens from the model's config.json; None if the file or the value is missing."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        found = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None
