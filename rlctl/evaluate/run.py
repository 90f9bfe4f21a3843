"""`evaluate`: questions → n responses each → grades → figures with intervals.

    Target ─▶ Policy ─▶ questions ─▶ responses ─────────▶ EvalSample ─▶ Score
              tokenizer  PromptDataset  stored, or asked    graded        figures
              identity                  for and stored

Rendering, sampling and graders are those of training. A response is stored when it arrives, so what
was sampled once is never sampled again, and a model is loaded only if something is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.data.write import check_vacant
from rlctl.errors import UsageError
from rlctl.evaluate.ask import BLOCK, Pair, Response, as_samples, ask, rendered
from rlctl.evaluate.grading import grade
from rlctl.evaluate.policy import EngineName, Policy, find_policy, sampling_device
from rlctl.evaluate.report import Evaluation, default_out, write_evaluation
from rlctl.evaluate.rewards import chosen_reward
from rlctl.evaluate.scores import summarise
from rlctl.evaluate.store import ResponseStore, prompt_hash
from rlctl.evaluate.target import Target, find_target
from rlctl.files import cache_root
from rlctl.reward.build import build_reward
from rlctl.reward.protocol import Reward
from rlctl.rollout.protocol import Sampling
from rlctl.spec.data import DataSpec
from rlctl.spec.reward import RewardSpec

DEFAULT_KS = (1, 4, 8)
#: Logits of some hundreds divided by less leave float32.
MIN_TEMPERATURE = 1e-30


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
        max_response_length: tokens; None: the run's own, or 512, at most half of the model's context.
        limit: questions at most, the first ones; None: all.
        seed: of sampling.
        reward: a grader's name or `file.py:function`; None: the run's own, or by data source.
        engine: who samples; None: the run's own, or `hf`.
        fresh: replace stored responses.
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
    reward: str | None = None
    engine: EngineName | None = None
    fresh: bool = False
    out: Path | None = None
    batch_size: int = 256


#: Called with what is going on (`sampling`, `grading`), and the number of responses done and of all.
Progress = Callable[[str, int, int], None]


def evaluate(request: EvaluateRequest, progress: Progress) -> tuple[Path, Evaluation]:
    """Sample what is not stored, grade, and write the evaluation's directory.

    Raises:
        UsageError: k > n, no such model or run, no data, or `out` is taken.
        RunFailure: another process samples the same, or a stored response is damaged.
        EnvironmentFailure: the model is neither here nor on the hub, or a disk is full.
    """
    ks = checked_ks(request.ks, request.n)
    _refuse_temperature(request)
    target = find_target(request.model_or_run, request.data_files)
    if request.out:
        check_vacant(request.out)
    reward_spec = chosen_reward(target.spec.reward if target.spec else RewardSpec(), request.reward)
    rows = load_rows(target.data_files)[: request.limit]
    policy = find_policy(target, request.engine)
    sampling, max_prompt_length = _lengths(request, target, policy)
    questions = PromptDataset(
        rows, policy.tokenizer, max_prompt_length=max_prompt_length, filter_overlong=True
    )
    started = time.monotonic()
    with grading(reward_spec, sampling.max_response_length) as reward:
        responses, num_stored = _responses(
            request, policy, questions, sampling, partial(progress, "sampling")
        )
        samples, errors = grade(reward(), as_samples(questions, responses), partial(progress, "grading"))
    evaluation = Evaluation(
        about=_about(request, target, policy, sampling, questions.num_dropped),
        reward=reward_spec,
        scores=summarise(samples, ks, request.n),
        grader_errors=errors,
        seconds=time.monotonic() - started,
        num_stored=num_stored,
        notes=target.notes,
    )
    out = request.out or default_out((target.run_dir or Path()) / "evaluations")
    write_evaluation(out, evaluation, samples)
    return out, evaluation


@contextmanager
def grading(spec: RewardSpec, max_response_length: int) -> Iterator[Callable[[], Reward]]:
    """A function that gives the reward; leaving ends its processes.

    It is built at once, so that nothing is sampled for a reward that cannot be used; one with a reward
    model when first asked for, so that the model need not share the device with what is evaluated.
    """
    build = partial(build_reward, spec, max_response_length=max_response_length, device=sampling_device())
    built = [] if any(term.name == "model" for term in spec.all_terms) else [build()]

    def reward() -> Reward:
        if not built:
            built.append(build())
        return built[0]

    try:
        yield reward
    finally:
        for each in built:
            each.close()


def checked_ks(ks: Sequence[int] | None, n: int) -> list[int]:
    """The k of pass@k in ascending order; None: those of `DEFAULT_KS` that n allows.

    Raises:
        UsageError: one is not between 1 and n.
    """
    if ks is None:
        return [k for k in DEFAULT_KS if k <= n]
    for k in ks:
        if not 1 <= k <= n:
            raise UsageError(
                f"pass@{k} cannot be estimated from {n} responses per question",
                where="--k",
                fix=f"sample more with --n {k}, or ask for smaller k" if k > 1 else "k is 1 or more",
            )
    return sorted(set(ks))


def _responses(
    request: EvaluateRequest,
    policy: Policy,
    questions: PromptDataset,
    sampling: Sampling,
    progress: Callable[[int, int], None],
) -> tuple[dict[Pair, Response], int]:
    """Every response in order, and how many of them were stored before."""
    prompts = dict(rendered(questions, range(len(questions))))
    keys = {
        (prompt_hash(prompt.texts[0]), question, sample, request.seed): (question, sample)
        for question, prompt in prompts.items()
        for sample in range(request.n)
    }
    settings = {
        "model": policy.sha256,
        "template": policy.template_sha256,
        "engine": policy.engine,
        "dtype": policy.dtype,
        "sampling": asdict(sampling),
    }
    with ResponseStore(cache_root(), settings) as store:
        if request.fresh:
            store.forget(keys)
        found = store.find(keys)
        num_stored = len(found)
        progress(num_stored, len(keys))
        missing = {pair: key for key, pair in keys.items() if pair not in found}
        if missing:
            longest = max(prompts[question].prompt_ids.shape[1] for question, _ in missing)
            with policy.sampling_engine(longest + sampling.max_response_length, request.batch_size) as engine:
                # vLLM fills its own batches: the more it is given at once, the better.
                size = BLOCK * request.n if policy.engine == "vllm" else request.batch_size
                wanted = list(missing)
                for batch in ask(engine, questions, wanted, sampling, seed=request.seed, batch_size=size):
                    store.add({missing[pair]: response for pair, response in batch.items()})
                    found |= batch
                    progress(len(found), len(keys))
    return {pair: found[pair] for pair in keys.values()}, num_stored


def _refuse_temperature(request: EvaluateRequest) -> None:
    if request.temperature != 0.0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        what = f"logits cannot be divided by a temperature of {request.temperature:g}"
        raise UsageError(what, where="--temperature", fix="for the likeliest tokens: --temperature 0 --n 1")
    if request.temperature == 0.0 and request.n > 1:
        what = f"temperature 0 always takes the likeliest token: {request.n} responses would be one"
        raise UsageError(what, where="--temperature", fix="add --n 1, or sample at a temperature above 0")


def _lengths(request: EvaluateRequest, target: Target, policy: Policy) -> tuple[Sampling, int]:
    """How to sample, and the longest prompt that leaves room for a response.

    Raises:
        UsageError: the model's context has no room for the response.
    """
    data = target.spec.data if target.spec else DataSpec()
    default = data.max_response_length
    if target.spec is None and policy.context is not None:
        default = max(1, min(default, policy.context // 2))
    length = request.max_response_length or default
    room = data.max_prompt_length if policy.context is None else policy.context - length
    if room < 1:
        raise UsageError(
            f"{length} response tokens leave no room for a prompt, the model's context is {policy.context}",
            where="--max-response-length",
            fix=f"make it less than {policy.context}",
        )
    sampling = Sampling(
        max_response_length=length,
        temperature=request.temperature or 1.0,
        top_p=request.top_p,
        greedy=request.temperature == 0.0,
    )
    return sampling, min(room, data.max_prompt_length) if target.spec else room


def _about(
    request: EvaluateRequest, target: Target, policy: Policy, sampling: Sampling, num_overlong: int
) -> dict[str, object]:
    return {
        "model": {
            "path": target.model_path,
            "run_dir": str(target.run_dir) if target.run_dir else None,
            "step": target.step,
            "sha256": policy.sha256,
            "template_sha256": policy.template_sha256,
        },
        "data": {"files": target.data_files, "num_overlong_prompts": num_overlong},
        "sampling": asdict(sampling)
        | {"n": request.n, "seed": request.seed, "engine": policy.engine, "dtype": policy.dtype},
    }
