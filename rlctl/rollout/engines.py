"""Rollout engines by name: factories and capabilities.

    @ROLLOUT_ENGINES.register(label="…", capabilities=EngineCapabilities(…))
    def my_engine(context: EngineContext) -> RolloutEngine: …

A user-defined engine is named `path/to/file.py:function`, see docs/how-to/extend.md. Does not import torch,
because the spec reads names and capabilities; an engine's dependencies are imported when it is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rlctl.errors import RunFailure, SpecError, UsageError
from rlctl.files import keep_compiled_code
from rlctl.leftovers import temporary_directory
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.protocol import EngineContext
from rlctl.run_spec.rollout import EngineCapabilities, RolloutSpec
from rlctl.user_code import absolute_name, call_problem, missing_methods

if TYPE_CHECKING:
    from rlctl.rollout.protocol import ResponseSampler, RolloutEngine
    from rlctl.rollout.vllm import VLLMRollout
    from rlctl.run_spec.run_spec import RunSpec

__all__ = [
    "EngineCapabilities",
    "EngineContext",
    "build_rollout",
    "chosen_engine",
    "engine_outside_training",
    "spec_outside_training",
]


def build_rollout(context: EngineContext) -> RolloutEngine:
    """Builds the engine that the spec names, with its validated `params`.

    Raises:
        EnvironmentFailure, UsageError: the engine is not available here, or does not support the model.
        RunFailure: the factory does not return a rollout engine.
    """
    from rlctl.run_spec.base import params_of

    keep_compiled_code()
    registered = ROLLOUT_ENGINES.part(context.spec.rollout.name)
    params = params_of(registered, context.spec.rollout.engine_params)
    engine: RolloutEngine = registered.function(replace(context, params=params))
    methods = ["sample", "close"] if context.model is None else ["sample", "sync_weights", "close"]
    if context.spec.rollout.in_flight:
        methods += ["sample_in_flight", "cancel_requests"]
    message = missing_methods(engine, *methods)
    if message:
        raise RunFailure(
            message, where=f"rollout.name: {registered.name}", fix="see rlctl/rollout/protocol.py"
        )
    problem = call_problem(engine.sample, [], None)
    if problem:
        fix = "def sample(self, requests, sampling)"
        raise RunFailure(f"sample: {problem}", where=f"rollout.name: {registered.name}", fix=fix)
    return engine


def chosen_engine(spec: RunSpec | None, name: str | None, option: str) -> str:
    """The rollout engine `name`, or that of the run, or `hf`; a user's function with its absolute path.

    `option` is the command's option that names an engine, for messages.

    Raises:
        UsageError: there is no such engine, or the user's file cannot be imported.
    """
    try:
        return ROLLOUT_ENGINES.part(name or (spec.rollout.name if spec else "hf")).name
    except UsageError as error:
        if name is None:
            error.fix = f"{error.fix}; or choose another engine: {option} hf"
        elif error.where == ROLLOUT_ENGINES.key:
            error.where = option
        raise


def spec_outside_training(
    spec: RunSpec,
    name: str,
    *,
    dtype: Literal["fp32", "bf16", "int8"] | None = None,
    max_num_seqs: int | None = None,
    gpu_share: float = 0.9,
) -> RunSpec:
    """The spec of one engine in this process, for `engine_outside_training`.

    Args:
        spec: settings of the model and, if it names this engine, of the engine.
        name: a registered engine, or `path/to/file.py:function` with an absolute path.
        dtype: precision of the engine; None: that of `engine.dtype`.
        max_num_seqs: sequences generated at once; None: no limit.
        gpu_share: fraction of the GPU's memory for an engine that sizes its cache by it.

    Raises:
        UsageError: the engine runs only in servers, or does not support the parameters.
    """
    from rlctl.run_spec.base import param_problems

    rollout = spec.rollout if name == absolute_name(spec.rollout.name) else RolloutSpec()
    settings = {"name": name, "mode": "colocated", "dtype": dtype, "gpu_memory_utilization": gpu_share}
    settings["max_num_seqs"] = max_num_seqs
    spec = spec.model_copy(
        update={
            "rollout": rollout.model_copy(update=settings),
            "trainer": spec.trainer.model_copy(update={"nnodes": 1, "n_gpus_per_node": 1}),
        }
    )
    if "colocated" not in spec.rollout_engine.modes:
        message = f"{name} runs only in servers"
        fix = "choose another engine, such as hf"
        raise UsageError(message, where="rollout.mode", fix=fix)
    problems = param_problems(ROLLOUT_ENGINES, name, "rollout.engine_params", rollout.engine_params)
    if problems:
        raise SpecError(problems)
    return spec


@contextlib.contextmanager
def engine_outside_training(
    spec: RunSpec,
    model_path: str,
    tokenizer: Any,
    load: Callable[[], Any],
    *,
    max_prompt_length: int,
    max_response_length: int,
) -> Iterator[ResponseSampler]:
    """The engine of a spec with the weights of a model directory, on one rank; closed on exit.

    What it samples is checked as in training.

    Args:
        load: returns the model on any device; not called if the engine reads the files itself.
        max_prompt_length, max_response_length: in tokens.

    Raises:
        EnvironmentFailure, UsageError, RunFailure: as `build_rollout`.
    """
    from rlctl.batch import torch_device
    from rlctl.rollout.expected_weights import PlainWeights
    from rlctl.rollout.shared_engine import EngineLock, LockedRollout

    lengths = {"max_prompt_length": max_prompt_length, "max_response_length": max_response_length}
    model_spec = spec.model.model_copy(update={"path": model_path, "revision": None, "lora_rank": 0})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=lengths), "model": model_spec})
    model = None if spec.rollout_engine.reads_model_files else load()
    with temporary_directory("engine") as run_dir:
        engine = build_rollout(
            EngineContext(
                spec=spec,
                model_path=model_path,
                model=model,
                tokenizer=tokenizer,
                device=torch_device(),
                rank=0,
                world_size=1,
                agree=str,
                run_dir=run_dir,
            )
        )
        try:
            if model is not None and not spec.rollout_engine.starts_with_policy:
                engine.sync_weights(PlainWeights(model.state_dict().items()), 0)
            del model
            yield LockedRollout(engine, EngineLock(), first=True)
        finally:
            engine.close()


@ROLLOUT_ENGINES.register(
    label="Hugging Face generation in the trainer's process",
    capabilities=EngineCapabilities(
        dtypes=frozenset({"fp32", "bf16", "int8"}),
        starts_with_policy=True,
        checks_syncs=False,
        samples_while_training=frozenset({"colocated"}),
        slow_on_gpu="Hugging Face generation on a GPU takes about five times as long as vLLM's",
        reports_kept="always",
        reports_experts=True,
    ),
)
def hf(context: EngineContext) -> RolloutEngine:
    """Plain `model.generate` on a copy of the policy."""
    from rlctl.rollout.hf import HFRollout

    rollout = context.spec.rollout
    return HFRollout(context.model, context.tokenizer, context.device, rollout.max_num_seqs, rollout.dtype)


@ROLLOUT_ENGINES.register(
    label="vLLM in the trainer's processes, or in servers",
    capabilities=EngineCapabilities(
        modes=frozenset({"colocated", "server"}),
        samples_while_training=frozenset({"server"}),
        samples_in_flight=frozenset({"server"}),
        reads_model_files=True,
        applies_adapters=True,
        takes_engine_kwargs=True,
        frees_memory=True,
        forms_batches=True,
        tensor_parallel=True,
        min_temperature=0.01,  # vLLM raises lower ones to this, with a warning in its log
        reports_kept="top_k",
        reports_experts=True,
    ),
)
def vllm(context: EngineContext) -> RolloutEngine | VLLMRollout:
    """vLLM: paged attention, continuous batching."""
    from rlctl.rollout.build_vllm import build_vllm

    return build_vllm(context)
