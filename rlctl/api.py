"""Functions of `import rlctl`: the main commands of the command line, for programs and notebooks."""

from __future__ import annotations

import inspect
import json
import logging
import re
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from rlctl.errors import RunFailure, UsageError, failing_together, in_words
from rlctl.track.open_run import RunRecord, open_run
from rlctl.user_code import call_problem

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import Units
    from rlctl.diagnose.rule import Diagnosis
    from rlctl.prepare.recipes import Recipe
    from rlctl.run_spec.run_spec import RunSpec

_log = logging.getLogger("rlctl")

#: Called on rank 0 with a step and its metrics; step 0 is a validation before the first step.
Callback = Callable[[int, Mapping[str, float]], None]


#: Log-probs may exceed 0 by rounding.
_MAX_LOG_PROB = 1e-3


def load_spec(
    presets: str | Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    *,
    files: str | Path | Sequence[str | Path] = (),
) -> RunSpec:
    """Read, layer and check a spec: presets, then files, then single values.

    Args:
        presets: names or paths, weakest first.
        values: key → value, strongest: `{"actor.lr": 1e-6}` or `{"actor": {"lr": 1e-6}}`.
        files: YAML spec files.

    Raises:
        SpecError: every problem found, each with its key and what to write instead.

    Warns:
        UserWarning: problems that do not stop a run.
    """
    from rlctl.run_spec import load

    if not isinstance(values or {}, Mapping):
        message = f"values is a {type(values).__name__}"
        raise UsageError(message, fix='give a mapping of dotted keys, {"actor.lr": 1e-6}')
    names = _listed(presets)
    files = _listed(files)
    loaded = load.load_spec([str(name) for name in names], [Path(file) for file in files], values or {})
    for problem in loaded.warnings:
        warnings.warn(f"{problem.key}: {problem.what} ({problem.fix})", stacklevel=2)
    return loaded.spec


def train(
    spec: RunSpec,
    *,
    resume: str | Path | RunRecord | None = None,
    trust: bool = False,
    callbacks: Callback | Sequence[Callback] = (),
) -> RunRecord:
    """Train and return the run's record; a single rank runs in this process.

    A run that the guardrails stopped is returned too: its record's `state` is `stopped`. Several ranks
    (`trainer.n_gpus_per_node` above 1) are separate processes that import the calling script again: call
    `train` under `if __name__ == "__main__":`. To use callbacks with several ranks, start the script with
    torchrun.

    Args:
        spec: the run, from `load_spec`.
        resume: a run directory to continue from its last checkpoint, or its record.
        trust: with `resume`, run the code that the directory names, also if no run of yours wrote it.
        callbacks: called on rank 0 after each step; an exception ends the run. With `trainer.test_freq` they
            are first called with step 0 and the metrics of the validation, `val/*`.

    Raises:
        RlctlError: the run cannot start or cannot continue.
        SpecError: the spec was changed after `load_spec` and contradicts itself.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM arrived; the run is saved and can be resumed. At a
            second signal nothing is saved.
    """
    from rlctl.engine.launch import refuse_in_import, under_torchrun
    from rlctl.run_spec import load
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.start import start_run

    refuse_in_import()
    if not isinstance(spec, RunSpec):
        raise UsageError(f"spec is a {type(spec).__name__}", fix="give what load_spec returns")
    run_dir = None if resume is None else _path_of(resume, "resume")
    if run_dir is not None and (run_dir / load.RUN_SPEC_FILE).is_file():
        from rlctl.track.trust import require_permission_of_run

        accepts = spec.trainer.accept_changed_inputs
        require_permission_of_run(run_dir, trust=trust, accepts_changes=accepts)
    spec = load.load_spec(overrides=spec.model_dump(mode="json")).spec  # `model_copy` checks nothing
    callbacks = _checked_callbacks(callbacks)
    if callbacks and spec.world_size > 1 and not under_torchrun():
        raise UsageError(
            "callbacks need all ranks in processes that torchrun started",
            where="callbacks",
            fix=f"start this script with torchrun --nproc-per-node {spec.trainer.n_gpus_per_node}",
        )
    with _names_of_arguments():
        path, exit_code = start_run(
            spec,
            resume=run_dir,
            note=_log.info,
            callbacks=callbacks,
            on_second_signal=_interrupt,
        )
    if exit_code > 128:
        _interrupt(exit_code - 128)
    return open_run(path)


def _interrupt(signal_number: int) -> None:
    raise KeyboardInterrupt if signal_number == signal.SIGINT else SystemExit(128 + signal_number)


def _checked_callbacks(callbacks: Callback | Sequence[Callback]) -> list[Callback]:
    fix = "give functions (step, metrics)"
    if not callable(callbacks) and not isinstance(callbacks, Sequence):
        raise UsageError(f"is a {type(callbacks).__name__}", where="callbacks", fix=fix)
    listed = [callbacks] if callable(callbacks) else list(callbacks)
    for callback in listed:
        if not callable(callback):
            raise UsageError(f"a callback is a {type(callback).__name__}", where="callbacks", fix=fix)
        if inspect.iscoroutinefunction(callback):
            raise UsageError("a callback cannot be an async function", where="callbacks", fix="write `def`")
        problem = call_problem(callback, 1, {})
        if problem:
            message = f"a callback is called with (step, metrics): {problem}"
            raise UsageError(message, where="callbacks", fix=fix)
    return listed


def _path_of(run: str | Path | RunRecord, name: str) -> Path:
    if isinstance(run, RunRecord):
        return run.path
    if not isinstance(run, str | Path):
        raise UsageError(f"is a {type(run).__name__}", where=name, fix="give a path, or the record of a run")
    return Path(run).expanduser()


#: Options whose name on the command line is not that of the argument.
_ARGUMENTS = {"--k": "ks", "MODEL_OR_RUN": "model_or_run"}


@contextmanager
def _names_of_arguments() -> Iterator[None]:
    """Errors that name options of the command line get the names of arguments: `--top-p` is `top_p`."""

    def argument(option: re.Match[str]) -> str:
        return _ARGUMENTS.get(option[0], option[0].lstrip("-").replace("-", "_"))

    def renamed(text: str) -> str:
        return re.sub(r"--[a-z][a-z-]*|MODEL_OR_RUN", argument, text)

    try:
        yield
    except UsageError as error:
        error.what = renamed(error.what)
        error.where, error.fix = (text and renamed(text) for text in (error.where, error.fix))
        raise


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation on disk.

    Attributes:
        path: its directory, with results, samples and page.
        results: content of the results file.
    """

    path: Path
    results: dict[str, Any]


class EvaluateOptions(TypedDict, total=False):
    """Options of `evaluate`: the fields of `rlctl.evaluate.request.EvaluateRequest`, with its defaults."""

    columns: Recipe
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool
    benchmarks_dir: Path | None
    n: int
    ks: Sequence[int] | None
    temperature: float
    top_p: float
    max_response_length: int | None
    limit: int | None
    seed: int
    reward: str | None
    environment: str | None
    step: int | str | None
    engine: str | None
    fresh: bool
    out: Path | None
    batch_size: int
    trust: bool


def evaluate(
    model_or_run: str | Path | RunRecord,
    data: str | Sequence[str] = (),
    **options: Unpack[EvaluateOptions],
) -> EvaluationRecord:
    """Sample responses, grade them and compute scores; stored responses are not sampled again.

    Args:
        model_or_run: a run, a model directory or a hub id.
        data: names of benchmarks, and files; empty: the run's validation files.
        options: fields of `rlctl.evaluate.request.EvaluateRequest`: n, ks, temperature, engine …

    Raises:
        RlctlError: as `rlctl evaluate`.
    """
    from rlctl.evaluate.evaluate_report import RESULTS_FILE
    from rlctl.evaluate.evaluation import evaluate as run_evaluation
    from rlctl.evaluate.request import EvaluateRequest

    target = str(_path_of(model_or_run, "model_or_run"))
    known = [field.name for field in fields(EvaluateRequest)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UsageError(f"evaluate has no option {unknown[0]}", fix=f"one of {', '.join(known[2:])}")
    request_fields = {"model_or_run": target, "data": [str(name) for name in _listed(data)], **options}
    request = _checked(EvaluateRequest, request_fields)
    with _names_of_arguments():
        path, _ = run_evaluation(request, lambda phase, done, total: None)
    return EvaluationRecord(path, json.loads((path / RESULTS_FILE).read_text(encoding="utf-8")))


def diagnose(
    log: str | Path | RunRecord,
    *,
    rules: str | Sequence[str] = (),
    maps: str | Path | Sequence[str | Path] = (),
    readers: str | Path | Sequence[str | Path] = (),
) -> Diagnosis:
    """Find faults in a run from its logged metrics, with spec changes to try.

    The result's `status` is `critical`, `warning`, `no warnings` or `insufficient data`.

    Args:
        log: a run directory, or a log of any framework that `rlctl diagnose` reads.
        rules: user-defined rules in addition, as `path/to/file.py:function`.
        maps: TOML files of lines `"name in the log" = "metric"`.
        readers: TOML files that describe formats of logs.

    Raises:
        UsageError: the log does not exist, contains nothing readable or several runs, or a rule, map or
            reader cannot be used.
    """
    from rlctl.diagnose.readers.detect import read_run
    from rlctl.diagnose.readers.reader_files import BUILT_IN
    from rlctl.diagnose.rule import all_rules, examine, metrics_read
    from rlctl.report.run_dumps import with_dumps

    path = _path_of(log, "log")
    own = tuple(map(str, _listed(rules)))
    with _names_of_arguments():
        known = BUILT_IN.with_files(*(list(map(Path, _listed(names))) for names in (readers, maps)))
        run = read_run(path, metrics_read(own), readers=known)
        return examine(with_dumps(run), all_rules(own))


def _checked(kind: Any, value: object, *name: str) -> Any:
    """The value as this type, without conversion if it has a name; raises a `UsageError` if it is not."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(value, strict=bool(name))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(in_words(first), where=".".join(map(str, (*name, *first["loc"])))) from None


def grade(
    grader: str,
    responses: Iterable[str],
    ground_truths: Iterable[str],
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    params: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> list[float | None]:
    """Score responses as training does, in child processes with a deadline.

    With `code`, and `auto` for rows from sources of programming problems, the responses are run as programs,
    in the sandbox of training.

    Args:
        grader: name of a registered grader, such as `maths`, or `file.py:function`.
        responses: responses of a model.
        ground_truths: one per response.
        rows: other fields that the grader reads, one mapping per response: `prompt`, `messages`,
            `data_source`, `extra_info`, `response_ids`.
        params: parameters that the grader declares; for `code` the keys of `reward.code`.
        deadline_s: seconds that grading one response may take; None: as in training, 5 for a built-in grader,
            30 for another one. For `code` its `timeout_s`.

    Returns:
        A score per response: 0.0 where the response made its grading fail, for example by its length; None
        where it could not be graded for another reason.

    Raises:
        UsageError: no such grader, or it cannot be loaded; or the lengths differ.
        EnvironmentFailure: this machine cannot confine programs.

    Warns:
        UserWarning: responses could not be graded, and why the first one could not.
    """
    from pydantic import Field, JsonValue

    from rlctl.registry import GRADERS
    from rlctl.reward.pool import GradingPool, is_scorer
    from rlctl.reward.protocol import Failure, Sample, Scorer
    from rlctl.run_spec.rollout import RewardSpec

    def checked_list(kind: Any, some: Any, name: str) -> Any:
        is_many = isinstance(some, Iterable) and not isinstance(some, str)
        return _checked(list[kind], list(some) if is_many else some, name)

    _checked(str, grader, "grader")
    texts = checked_list(str, responses, "responses")
    truths = checked_list(str, ground_truths, "ground_truths")
    others = checked_list(dict[str, Any], [{}] * len(texts) if rows is None else rows, "rows")
    params = _checked(dict[str, JsonValue], params or {}, "params")
    _checked(Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, deadline_s, "deadline_s")
    if grader == "model":
        message = "this grader needs settings of a run"
        fix = "name another one, such as maths; `rlctl reward SPEC --data FILE` reads a spec's settings"
        raise UsageError(message, where=grader, fix=fix)
    if not len(texts) == len(truths) == len(others):
        and_rows = "" if rows is None else f" and {len(others)} rows"
        message = f"{len(texts)} responses and {len(truths)} ground truths{and_rows}"
        raise UsageError(message, fix="give one of each for every response")
    try:
        samples = [Sample(text, truth, **row) for text, truth, row in zip(texts, truths, others, strict=True)]
    except TypeError as error:
        fix = "give mappings of prompt, messages, data_source, extra_info or response_ids"
        raise UsageError(str(error).removeprefix("Sample.__init__() "), where="rows", fix=fix) from None
    scorer: Scorer
    if is_scorer(grader):
        limit = {} if deadline_s is None else {"timeout_s": deadline_s}
        sections = {"code": limit} | ({grader: {**params, **limit}} if params else {})
        scorer = GRADERS[grader](_checked(RewardSpec, sections), None)
    else:
        scorer = pool = GradingPool(grader, dict(params), deadline_s=deadline_s)
        pool.check()
    try:
        graded = scorer.grade(samples)
    finally:
        scorer.close()
    failures = [result for result in graded if isinstance(result, Failure) and result.score is None]
    if failures:
        message = f"{len(failures)} of {len(graded)} responses could not be graded; the first one"
        warnings.warn(f"{message}: {failures[0].text}", stacklevel=2)
    return [result.score if isinstance(result, Failure) else result for result in graded]


@dataclass(frozen=True, slots=True, repr=False)
class CorrectedBatch:
    """Result of rollout correction for one mini-batch; tensors have the shape of the log-probs.

    Attributes:
        weights: (B, T) or (M,) float32, detached: multiply the token losses by them. 0.0 for rejected tokens
            and outside the mask; 1.0 for kept tokens if no weight is configured; divided by their mean if
            that is configured.
        keep_mask: (B, T) or (M,) bool, False for rejected tokens and outside the mask.
        metrics: `rollout_corr/*` and `training/rollout_*` of the whole mini-batch, over all ranks.
    """

    weights: Tensor
    keep_mask: Tensor
    metrics: dict[str, float]

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.weights.shape))
        metrics = self.metrics
        ess = metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0)
        return f"CorrectedBatch({shape} tokens, ESS {ess:.4g}, {len(metrics)} metrics)"


class CorrectOptions(TypedDict, total=False):
    """Options of `correct`: keys of `algorithm.rollout_correction` in a spec, with the same defaults."""

    dialect: Literal["rlctl", "guide", "verl"]
    rollout_is: str | None
    rollout_is_params: Mapping[str, Any]
    rollout_is_threshold: str | float
    rollout_is_bound: Literal["clip", "truncate", "mask"] | None
    rollout_is_batch_normalize: bool
    rollout_rs: str | None
    rollout_rs_params: Mapping[str, Any]
    rollout_rs_threshold: str | float | None


def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    turns: Tensor | None = None,
    episodes: Tensor | None = None,
    advantages: Tensor | None = None,
    age: Tensor | None = None,
    **options: Unpack[CorrectOptions],
) -> CorrectedBatch:
    """Importance weights and rejection between the sampling and the trained policy, for any trainer.

    Call it once per optimizer step, with the whole mini-batch of this rank: normalisation and metrics are
    computed over the mini-batch. If torch.distributed is initialised, they are computed over all ranks, and
    every rank must call it.

        corrected = rlctl.correct(old_log_probs, rollout_log_probs, mask, rollout_is="sequence")
        loss = (corrected.weights * token_loss * mask).sum() / mask.sum()

    Tensors are padded (B, T) with a mask, or flat (M,) with the lengths of the B responses.

    Args:
        log_probs: float32, log π_train of the sampled tokens: π_old, or π_θ detached.
        rollout_log_probs: float32, log π_rollout of the same tokens at the same temperature.
        response_mask: (B, T) bool or integers 0 and 1, tokens that the policy sampled; other positions are
            never read.
        lengths: (B,) integers, sampled tokens of each response, instead of `response_mask`.
        turns: of the shape of `log_probs`, integers: the turn of each token, for the level `turn`. None:
            each response is one turn.
        episodes: (B,) integers: the episode of each response, for responses that are parts of one episode
            and adjacent; rules of sequences apply to episodes. None: each response is one episode.
        advantages: of the shape of `log_probs`, for criteria that depend on their sign (`off_policy`).
        age: (B,), optimizer updates since the weights that sampled each response, for the criterion `age`.
        options: keys of `algorithm.rollout_correction`: rollout_is, rollout_is_threshold,
            rollout_rs, rollout_rs_threshold, dialect …; their defaults are those of a spec, but for
            `rollout_is`: "sequence".

    Raises:
        UsageError: an unknown or impossible setting, or one without effect here.
        ValueError: shapes or devices differ, the mask has other values, log-probs are in half precision or
            above 0, or advantages are not finite.
        RunFailure: a weight or criterion returned NaN, or this call raised on another rank.

    Warns:
        UserWarning: sequences have NaN or infinite log-probs; all their tokens are rejected.
    """
    from rlctl.algos import correction
    from rlctl.engine.ranks import current_ranks

    rules = _correction_rules(options)
    required = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs}
    extra = {"response_mask": response_mask, "lengths": lengths, "turns": turns, "episodes": episodes}
    for name, value in {**required, **extra, "advantages": advantages, "age": age}.items():
        if not hasattr(value, "detach") and (value is not None or name in required):
            raise UsageError(f"is a {type(value).__name__}", where=name, fix="give a torch tensor")
    if (response_mask is None) == (lengths is None):
        message = (
            "neither a mask nor lengths are given" if lengths is None else "a mask and lengths are given"
        )
        fix = "give response_mask with (B, T) log-probs, lengths with (M,) log-probs"
        raise UsageError(message, where="response_mask", fix=fix)
    ranks = current_ranks(log_probs.device)
    with failing_together(ranks.first):
        batch = _Flat.of(required, extra)
        both = [batch.column(x.detach()) for x in required.values()]
        signs = None if advantages is None else batch.column(batch.checked("advantages", advantages)).float()
        ages = None if age is None else batch.per_token(batch.checked("age", age, per_response=True))
        result = correction.correct(both[0], both[1], batch.units, rules, advantages=signs, age=ages)
        for name, values in zip(required, both, strict=True):
            if (values[values.isfinite()] > _MAX_LOG_PROB).any():
                raise ValueError(f"{name} are above 0: give log-probs in nats, not probabilities")
        if signs is not None and not signs.isfinite().all():
            where = "" if response_mask is None else " where response_mask is True"
            raise ValueError(f"advantages are NaN or infinite{where}")
    sums = ranks.all_reduce(result.sums)
    parts = correction.parts_with_nan(sums, rules)
    if parts:
        raise RunFailure(f"{' or '.join(parts)} returned NaN")
    num_bad = int(sums["sequences"] - sums["finite_sequences"])
    if num_bad:
        message = f"{num_bad} of {int(sums['sequences'])} sequences have NaN or infinite log-probs"
        warnings.warn(f"{message}: all their tokens are rejected", stacklevel=2)
    factor = correction.normalization_factor(sums, rules)
    weights = result.weights / factor
    metrics = correction.correction_metrics(correction.normalized(sums, factor, rules), rules)
    return CorrectedBatch(batch.shaped(weights), batch.shaped(result.keep), metrics)


def _correction_rules(options: CorrectOptions) -> CorrectionRules:
    from pydantic import ValidationError

    from rlctl.run_spec.algorithm import READ_WITH, RolloutCorrectionSpec
    from rlctl.run_spec.keys import did_you_mean
    from rlctl.run_spec.resolve import correction_rules

    try:
        spec = RolloutCorrectionSpec(**({"rollout_is": "sequence"} | options))
    except ValidationError as error:
        first = error.errors()[0]
        names = list(CorrectOptions.__annotations__)
        where = ".".join(map(str, first["loc"]))
        is_unknown = first["type"] == "extra_forbidden"
        fix = (
            did_you_mean(where, names, f"one of {', '.join(names)}")
            if is_unknown
            else first.get("ctx", {}).get("fix")
        )
        raise UsageError(in_words(first), where=where, fix=fix) from None
    others = spec.model_fields_set.difference(CorrectOptions.__annotations__)
    without_effect = dict.fromkeys(others, ("has no effect on weights and rejection", "leave it out"))
    for switch, keys in READ_WITH.items():
        if not getattr(spec, switch):
            without_effect |= dict.fromkeys(keys, (f"has no effect: {switch} is None", f"set {switch} too"))
    for key, (why, fix) in without_effect.items():
        if getattr(spec, key) != RolloutCorrectionSpec.model_fields[key].get_default():
            raise UsageError(why, where=key, fix=fix)
    return correction_rules(spec)


@dataclass(frozen=True, slots=True)
class _Flat:
    """Which entries of tensors of `shape` are the M sampled tokens, and what responses these form."""

    shape: tuple[int, ...]
    mask: Tensor | None  # bool, of this shape; None: all
    units: Units

    @classmethod
    def of(cls, required: Mapping[str, Tensor], extra: Mapping[str, Tensor | None]) -> _Flat:
        """From what `correct` is given.

        Raises:
            ValueError: as `correct`.
        """
        import torch

        from rlctl.algos.segments import Segments, Units

        mask, lengths, turns, episodes = extra.values()
        together = {**required} if mask is None else {**required, "response_mask": mask}
        for attribute, of in (("shapes", lambda x: tuple(x.shape)), ("devices", lambda x: x.device)):
            if len({of(x) for x in together.values()}) > 1:
                each = ", ".join(f"{name} {of(x)}" for name, x in together.items())
                raise ValueError(f"{attribute} differ: {each}")
        log_probs = required["log_probs"]
        kind = "(B, T)" if lengths is None else "(M,)"
        shape = tuple(log_probs.shape)
        if len(shape) != (2 if lengths is None else 1):
            raise ValueError(f"log-probs must be {kind}, not of shape {shape}")
        if mask is not None:
            if mask.is_floating_point() or ((mask != 0) & (mask != 1)).any():
                values = str(mask.dtype) if mask.is_floating_point() else "other values"
                raise ValueError(f"response_mask must be bool or integers 0 and 1, not {values}")
            mask = mask.bool()
            lengths = mask.sum(1)
        elif lengths is not None:
            total = int(lengths.sum()) if lengths.ndim == 1 and not lengths.is_floating_point() else -1
            if total != shape[0] or (lengths < 0).any():
                raise ValueError(f"lengths must be (B,) integers ≥ 0 with the sum {shape[0]}, as log_probs")
        assert lengths is not None
        sequence = Segments(lengths.long().to(log_probs.device))
        batch = cls(shape, mask, Units(sequence, sequence, sequence))
        episode = sequence
        if episodes is not None:
            index = batch.checked("episodes", episodes, per_response=True)
            _, counts = torch.unique_consecutive(index, return_counts=True)
            if len(counts) != len(set(index.tolist())):
                raise ValueError("episodes: the responses of an episode must be adjacent")
            episode = Segments(Segments(counts).sum(sequence.lengths).long())
        units = Units(sequence, sequence, episode)
        if turns is not None:
            units = Units.nested(sequence, episode, batch.column(batch.checked("turns", turns)).long())
        return cls(shape, mask, units)

    def checked(self, name: str, values: Tensor, *, per_response: bool = False) -> Tensor:
        """`values`, which must have the shape of the log-probs, or one value per response."""
        shape = (len(self.units.sequence),) if per_response else self.shape
        if tuple(values.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(values.shape)}")
        if name in {"turns", "episodes"} and (values.is_floating_point() or values.is_complex()):
            raise ValueError(f"{name} must be integers, not {values.dtype}")
        return values

    def column(self, values: Tensor) -> Tensor:
        """(M,): values at the sampled tokens."""
        return values if self.mask is None else values[self.mask]

    def per_token(self, values: Tensor) -> Tensor:
        """(M,): the value (B,) of each token's response."""
        return self.units.sequence.spread(values)

    def shaped(self, column: Tensor) -> Tensor:
        """A column (M,) in the shape of the log-probs; 0 elsewhere."""
        if self.mask is None:
            return column
        return column.new_zeros(self.shape).masked_scatter(self.mask, column)


def _listed(paths: str | Path | Sequence[str | Path]) -> list[str | Path]:
    if isinstance(paths, str | Path):
        return [paths]
    if isinstance(paths, Sequence) and all(isinstance(name, str | Path) for name in paths):
        return list(paths)
    raise UsageError(
        f"{paths!r} is no name and no list of names", fix="give a str, a Path, or a list of them"
    )
