"""Evaluation: questions → n responses each → grades → figures with intervals.

The sampling, the tokenisation and the graders are those of training. Question by question the same
seed gives the same responses, whatever `batch_size`: questions are drawn in blocks of `BLOCK`, each
with random numbers of its own, and a batch never crosses a block.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlctl.batch import Rollouts
from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.data.write import check_vacant, clear_leftovers, staged_directory
from rlctl.engine.model import load_policy
from rlctl.errors import UsageError
from rlctl.evaluate.report import RESULTS_FILE, Evaluation, results_text
from rlctl.evaluate.samples import SAMPLES_FILE, SampleWriter
from rlctl.evaluate.scores import QuestionScores, summarise
from rlctl.evaluate.target import Target, find_target
from rlctl.reward.build import MAX_ERRORS_KEPT, build_reward
from rlctl.reward.protocol import Reward, RewardResult
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling, step_seed
from rlctl.spec.data import DataSpec
from rlctl.spec.reward import OverlongSpec, RewardSpec

BLOCK = 64
DEFAULT_KS = (1, 4, 8)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """What to evaluate, and how.

    Attributes:
        model_or_run: run directory, model directory or hub id.
        data_files: Parquet files; empty: the run's own validation files.
        n: responses per question.
        ks: of pass@k; None: those of 1, 4, 8 that n allows.
        temperature: of sampling; 0: the likeliest token, which takes n = 1.
        top_p: nucleus sampling.
        max_response_length: tokens; None: the run's own, or 512.
        limit: questions at most, the first ones; None: all.
        seed: of sampling.
        out: directory to write, new or empty; None: `evaluations/<time>` in the run, or here.
        batch_size: sequences generated at once.
    """

    model_or_run: str
    data_files: list[str] = field(default_factory=list)
    n: int = 8
    ks: Sequence[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_length: int | None = None
    limit: int | None = None
    seed: int = 1
    out: Path | None = None
    batch_size: int = 256


#: Called with the number of questions done and of all.
Progress = Callable[[int, int], None]


def evaluate(request: EvaluateRequest, progress: Progress) -> Evaluation:
    """Sample, grade, and write `results.json` and `samples.parquet`, both or neither.

    Raises:
        UsageError: k > n, no such model or run, no data, or `out` is taken.
        EnvironmentFailure: the model is neither here nor on the hub, or `out` cannot be written.
    """
    ks = _checked_ks(request)
    target = find_target(request.model_or_run, request.data_files)
    out = request.out or _default_out(target)
    check_vacant(out)
    rows = load_rows(target.data_files)[: request.limit]
    model, tokenizer, device = _load(target)
    sampling, max_prompt_length = _lengths(request, target, model)
    questions = PromptDataset(rows, tokenizer, max_prompt_length=max_prompt_length, filter_overlong=True)
    engine = HFRollout(model, tokenizer, device, max_num_seqs=request.batch_size)
    del model  # the engine has a copy
    started = time.monotonic()
    clear_leftovers(out)
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(staged_directory(out))
        graded = target.spec.reward if target.spec else RewardSpec()
        reward = build_reward(
            graded.model_copy(update={"overlong": OverlongSpec()}),  # it shapes training only
            max_response_length=sampling.max_response_length,
            device=device,
        )
        stack.callback(reward.close)
        scores, errors = _ask(stage, request, sampling, questions, engine, reward, progress)
        evaluation = Evaluation(
            target=target,
            out=out,
            n=request.n,
            sampling=sampling,
            seed=request.seed,
            scores=summarise(scores, ks),
            num_overlong=questions.num_dropped,
            grader_errors=errors,
            seconds=time.monotonic() - started,
            chat_template=tokenizer.chat_template,
        )
        (stage / RESULTS_FILE).write_text(results_text(evaluation), encoding="utf-8")
    return evaluation


def _ask(
    stage: Path,
    request: EvaluateRequest,
    sampling: Sampling,
    questions: PromptDataset,
    engine: HFRollout,
    reward: Reward,
    progress: Progress,
) -> tuple[list[QuestionScores], list[str]]:
    """Scores of every question in order, and the first few grader failures."""
    scores: list[QuestionScores] = []
    errors: list[str] = []
    with SampleWriter(stage / SAMPLES_FILE) as writer:
        progress(0, len(questions))
        for first, places in _batches(len(questions), max(1, request.batch_size // request.n)):
            rollouts = engine.generate(
                questions.prompts([first + place for place in places], places),
                sampling,
                n=request.n,
                step_seed=step_seed(request.seed, first // BLOCK, "evaluation"),
                num_groups_total=BLOCK,
            )
            rewards = reward.score(rollouts)
            writer.add(first + places[0], request.n, rollouts, rewards)
            scores += _per_question(rollouts, rewards, request.n)
            errors += rewards.errors[: MAX_ERRORS_KEPT - len(errors)]
            progress(len(scores), len(questions))
    return scores, errors


def _batches(count: int, size: int) -> Iterator[tuple[int, range]]:
    """(first question of the block, places within the block) of every batch."""
    for first in range(0, count, BLOCK):
        length = min(BLOCK, count - first)
        for start in range(0, length, size):
            yield first, range(start, min(start + size, length))


def _per_question(rollouts: Rollouts, rewards: RewardResult, n: int) -> Iterator[QuestionScores]:
    """The scores of each question of one batch."""
    scores, valid = rewards.scores.tolist(), rewards.valid.tolist()
    truncated, lengths = rollouts.truncated.tolist(), rollouts.response_mask.sum(-1).tolist()
    for start in range(0, len(scores), n):
        rows = range(start, start + n)
        yield QuestionScores(
            data_source=rollouts.data_sources[start],
            rewards=[scores[row] for row in rows if valid[row]],
            num_samples=n,
            num_truncated=sum(truncated[row] for row in rows),
            num_tokens=sum(lengths[row] for row in rows),
        )


def _checked_ks(request: EvaluateRequest) -> list[int]:
    """The k of pass@k in ascending order.

    Raises:
        UsageError: one is not between 1 and n, or n > 1 repeats one greedy response.
    """
    if request.temperature == 0.0 and request.n > 1:
        what = f"temperature 0 always takes the likeliest token: {request.n} responses would be one"
        raise UsageError(what, where="--temperature", fix="add --n 1, or sample at a temperature above 0")
    if request.ks is None:
        return [k for k in DEFAULT_KS if k <= request.n]
    for k in request.ks:
        if not 1 <= k <= request.n:
            raise UsageError(
                f"pass@{k} cannot be estimated from {request.n} responses per question",
                where="--k",
                fix=f"sample more with --n {k}, or ask for smaller k" if k > 1 else "k is 1 or more",
            )
    return sorted(set(request.ks))


def _load(target: Target) -> tuple[Any, Any, torch.device]:
    """Model, tokenizer, and the device to sample on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = target.spec
    dtype = _DTYPES[spec.engine.dtype if spec else ("bf16" if device.type == "cuda" else "fp32")]
    model, tokenizer = load_policy(
        target.model_path,
        revision=None,
        trust_remote_code=spec.model.trust_remote_code if spec else False,
        attn_implementation=spec.model.attn_implementation if spec else "sdpa",
        dtype=dtype,
    )
    return model, tokenizer, device


def _lengths(request: EvaluateRequest, target: Target, model: Any) -> tuple[Sampling, int]:
    """How to sample, and the longest prompt that leaves room for a response.

    Raises:
        UsageError: the model's context has no room for the response.
    """
    data = target.spec.data if target.spec else DataSpec()
    length = request.max_response_length or data.max_response_length
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = data.max_prompt_length if context is None else context - length
    if room < 1:
        raise UsageError(
            f"{length} response tokens leave no room for a prompt, the model's context is {context}",
            where="--max-response-length",
            fix=f"make it less than {context}",
        )
    sampling = Sampling(
        max_response_length=length,
        temperature=request.temperature or 1.0,
        top_p=request.top_p,
        greedy=request.temperature == 0.0,
    )
    return sampling, min(room, data.max_prompt_length) if target.spec else room


def _default_out(target: Target) -> Path:
    """A new directory named after the time."""
    parent = (target.run_dir or Path()) / "evaluations"
    name = time.strftime("%Y%m%d-%H%M%S")
    candidates = (parent / name, *(parent / f"{name}-{number}" for number in range(2, 1000)))
    return next(path for path in candidates if not path.exists())
