"""`rlctl diagnose mismatch`: loads the trainer and the engine of a request, and builds the report."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlctl.batch import torch_device
from rlctl.data.prompts import Renderer
from rlctl.data.schema import Row
from rlctl.engine.checkpoint import checkpoint_of_run
from rlctl.engine.model import load_policy
from rlctl.errors import UsageError
from rlctl.mismatch.causes import Cause, causes, open_questions, remainder
from rlctl.mismatch.examine import Sides, examine
from rlctl.mismatch.score import Gap, GapPart
from rlctl.mismatch.variants import question_rows, token_ids
from rlctl.model_files import model_directory
from rlctl.prepare.data_files import local_files, read_any
from rlctl.rollout.engines import chosen_engine, engine_outside_training, spec_outside_training
from rlctl.rollout.hf import DTYPES
from rlctl.rollout.protocol import ResponseSampler, Sampling
from rlctl.run_spec.load import RUN_SPEC_FILE, recorded_spec
from rlctl.run_spec.model import EMBEDDED, ModelSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.tiny.game import embedded_task
from rlctl.track.trust import require_permission, values_of

NUM_PROMPTS = 16
#: Most likely tokens that the engine lists for the distance of whole distributions.
NUM_LISTED = 16
MAX_RESPONSE_LENGTH = 32
#: Fraction of the GPU's memory for the engine; the trainer's model is on the same GPU.
_ENGINE_SHARE = 0.5

Dtype = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, slots=True)
class MismatchRequest:
    """What to compare, and how to sample."""

    model: str = EMBEDDED  # run directory, model directory, hub id or `embedded`: the trainer's side
    engine: str | None = None  # the engine that samples, as `rollout.name`; None: that of the run, else `hf`
    #: directory or hub id of the model and tokenizer the engine loads; None: the trainer's
    engine_model: str | None = None
    engine_dtype: Dtype | None = None  # its precision; None: that of the run's engine, else the trainer's
    #: Parquet files of prompts; empty: those of the run, or built-in questions
    data_files: list[str] = field(default_factory=list)
    #: temperature, top_p: requested of the engine; None: the run's, or 1
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 1  # of sampling
    trust: bool = False  # run the code that the run's spec names, also if no run of this user has written it


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """Result of a preflight."""

    #: trainer, engine: descriptions of what was compared
    trainer: str
    engine: str
    settings: str  # description of the requested settings
    num_sequences: int  # responses compared
    gap: Gap  # before any cause is accounted for
    parts: tuple[GapPart, ...]  # the same by position and probability
    causes: tuple[Cause, ...]  # each explains most of what the previous ones leave
    remainder: str | None  # possible origin of the part that no cause explains; None: there is none
    open_questions: tuple[str, ...]  # open questions, and what would answer them
    notes: tuple[str, ...] = ()  # messages to the user, such as damaged checkpoints that were skipped
    #: lower and upper bound of the total variation of the next-token distributions, mean over tokens; None:
    #: the engine lists no most likely tokens, or a truncated distribution was asked for
    total_variation: tuple[float, float] | None = None

    @property
    def conclusion(self) -> str:
        """The result in one sentence."""
        explained = f"{sum(cause.share for cause in self.causes):.0%} of the gap is explained"
        if self.gap.agrees:
            agreed = f"the engines agree to {_rounded_up(self.gap.abs_max)}"
            return f"{agreed}, but see below" if self.causes else agreed
        if not any(cause.share for cause in self.causes):
            return "none of the comparisons explains the gap"
        return f"{explained}: {', '.join(cause.name for cause in self.causes)}"


@dataclass(frozen=True, slots=True)
class _Trainer:
    """The trainer's side, before it is loaded."""

    model_path: str
    spec: RunSpec
    dtype: Literal["fp32", "bf16"]
    data_files: list[str]
    notes: tuple[str, ...] = ()

    def load(self, path: str | Path | None = None) -> tuple[Any, Any]:
        """Loads model and tokenizer, or those of another directory with the same settings."""
        model, tokenizer = load_policy(
            str(path or self.model_path),
            revision=None if path else self.spec.model.revision,
            trust_remote_code=self.spec.model.trust_remote_code,
            attn_implementation=self.spec.model.attn_implementation,
            dtype=DTYPES[self.dtype],
        )
        return model.to(torch_device()).eval().requires_grad_(False), tokenizer


def run_preflight(request: MismatchRequest) -> MismatchReport:
    """Samples a few prompts with the engine, scores them with the trainer's code, and finds what differs.

    Raises:
        UsageError: the model, run or data does not exist, no prompt fits, or the run would execute code that
            this user has not allowed.
        EnvironmentFailure: the engine is not installed or does not start, or the hub cannot be reached.
        RunFailure: the engine failed.
    """
    trainer = _trainer(request)
    name = chosen_engine(trainer.spec, request.engine, "--engine")
    model, tokenizer = trainer.load()
    sampling = _sampling(request, trainer.spec)
    template_kwargs = trainer.spec.data.chat_template_kwargs
    renderer = Renderer(tokenizer, template_kwargs)
    rows = _rows(trainer, model, renderer, sampling.max_response_length)
    rollout = trainer.spec.rollout
    is_runs = request.engine in {None, rollout.name}
    dtype = request.engine_dtype or (rollout.dtype if is_runs else None) or trainer.dtype
    engine_model = model
    engine_tokenizer = None
    if request.engine_model:
        engine_model, engine_tokenizer = trainer.load(request.engine_model)
        renderer = Renderer(engine_tokenizer, template_kwargs)
    longest = max(map(len, token_ids(rows, renderer)))

    def start(running: ExitStack, dtype: Dtype) -> ResponseSampler:
        """Stops the running engine and starts one in this precision."""
        running.close()
        spec = spec_outside_training(trainer.spec, name, dtype=dtype, gpu_share=_ENGINE_SHARE)
        if dtype not in spec.rollout_engine.dtypes:
            supported = " or ".join(sorted(spec.rollout_engine.dtypes))
            fix = f"write {supported}, or choose another engine: --engine hf"
            raise UsageError(f"{name} does not run in {dtype}", where="--engine-dtype", fix=fix)
        return running.enter_context(
            engine_outside_training(
                spec,
                model_directory(request.engine_model or trainer.model_path),
                tokenizer,
                lambda: engine_model,
                max_prompt_length=longest,
                max_response_length=sampling.max_response_length,
            )
        )

    with ExitStack() as running:
        sides = Sides(
            model=model,
            tokenizer=tokenizer,
            engine=start(running, dtype),
            rows=rows,
            sampling=replace(sampling, num_most_likely=_num_listed(trainer.spec, name, len(tokenizer))),
            exact_sampling=rollout.exact_sampling,
            engine_tokenizer=engine_tokenizer,
            template_kwargs=template_kwargs,
            seed=request.seed,
            dtype=dtype,
            same_precision=None if dtype == trainer.dtype else partial(start, running, trainer.dtype),
        )
        examination = examine(sides)
    return MismatchReport(
        trainer=f"{trainer.model_path}, {trainer.dtype}, {model.config._attn_implementation}",
        engine=f"{name}, {dtype}" + (f", {request.engine_model}" if request.engine_model else ""),
        settings=str(examination.sides.asked),
        num_sequences=len(examination.scorer.sample.prompts),
        gap=examination.start,
        parts=examination.parts,
        causes=tuple(causes(examination)),
        remainder=remainder(examination),
        open_questions=tuple(open_questions(examination)),
        notes=trainer.notes,
        total_variation=examination.total_variation,
    )


def _trainer(request: MismatchRequest) -> _Trainer:
    """The trainer's side of a run or of a model."""
    path = Path(request.model).expanduser()
    if (path / RUN_SPEC_FILE).is_file():
        return _of_run(path, request)
    spec = RunSpec(model=ModelSpec(path=request.model))
    if spec.is_embedded:
        task = embedded_task(spec)
        data = request.data_files or [str(task.val_file)]
        return _Trainer(str(task.model_dir), spec, "fp32", data)
    return _Trainer(str(path) if path.exists() else request.model, spec, "fp32", request.data_files)


def _of_run(run_dir: Path, request: MismatchRequest) -> _Trainer:
    spec = recorded_spec(run_dir / RUN_SPEC_FILE)
    values = values_of(spec, request.engine)
    newest, notes = checkpoint_of_run(run_dir)
    require_permission(
        run_dir,
        values,
        sections={"model", "rollout"},
        trust=request.trust,
        model_dir=newest.model_dir,
    )
    own = local_files(spec.data.val_files, split="test") or local_files(spec.data.train_files, split="train")
    own = [str(embedded_task(spec).val_file)] if spec.is_embedded else own
    return _Trainer(
        model_path=str(newest.model_dir),
        spec=spec,
        dtype=spec.engine.dtype,
        data_files=request.data_files or own,
        notes=tuple(notes),
    )


def _sampling(request: MismatchRequest, spec: RunSpec) -> Sampling:
    rollout = spec.rollout
    return Sampling(
        max_response_length=min(spec.data.max_response_length, MAX_RESPONSE_LENGTH),
        temperature=rollout.temperature if request.temperature is None else request.temperature,
        top_p=rollout.top_p if request.top_p is None else request.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )


def _num_listed(spec: RunSpec, engine: str, vocabulary: int) -> int:
    """Number of most likely tokens to ask an engine for; 0: it can list none."""
    can = spec_outside_training(spec, engine).rollout_engine.reports_kept != "never"
    return min(NUM_LISTED, vocabulary) if can else 0


def _rows(trainer: _Trainer, model: Any, renderer: Renderer, response_length: int) -> list[Row]:
    """The first prompts that fit into the model's context together with a response."""
    continues = trainer.spec.data.continue_final_message
    rows = read_any(trainer.data_files, continue_final_message=continues) if trainer.data_files else []
    rows = rows[: 4 * NUM_PROMPTS] or question_rows()
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    limit = context - response_length - 1  # one more start token must fit too
    lengths = map(len, token_ids(rows, renderer))
    kept = [row for row, length in zip(rows, lengths, strict=True) if 0 < length <= limit][:NUM_PROMPTS]
    if not kept:
        raise UsageError(f"no prompt has at most {limit} tokens", where="--data", fix="name shorter prompts")
    return kept


def as_document(report: MismatchReport) -> dict[str, Any]:
    """The report as values that can be written as JSON."""
    return {"conclusion": report.conclusion, **asdict(report)}


def _rounded_up(value: float) -> str:
    """Rounds up to one digit: 4.2e-7 → `5e-7`."""
    if value == 0.0:
        return "the last bit"
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power):.0f}e{power}"
