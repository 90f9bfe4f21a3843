"""The models of a run: policy, sampling copy, and if required a critic, a reference and a teacher."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.engine.deepspeed import FrozenPolicy, load_partitioned
from rlctl.engine.deepspeed_setup import Settings, frozen_settings
from rlctl.engine.engines import TrainContext, build_training_engine
from rlctl.engine.lora import BasePolicy, OffloadedBase, add_lora, load_adapter
from rlctl.engine.model import load_other_model, load_policy
from rlctl.engine.protocol import CriticEngine, ReferencePolicy, Teacher, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import SequenceParallel, share_rows
from rlctl.engine.served_teacher import ServedTeacher
from rlctl.environment.template_audit import Findings, unknown_end
from rlctl.errors import UsageError
from rlctl.prefix import body_of
from rlctl.rollout.engines import EngineContext, build_rollout
from rlctl.rollout.hf import DTYPES, into_precision
from rlctl.rollout.protocol import EngineLock, InFlightRollout, LockedRollout, end_ids
from rlctl.routing import REPLAY, Mixture
from rlctl.spec.algorithm import ActorSpec, CriticSpec
from rlctl.spec.run_spec import RunSpec


@dataclass
class Models:
    """The models and engines of this rank."""

    tokenizer: Any  # Hugging Face tokenizer of the policy
    rollout: LockedRollout  # the rollout engine, for the training thread
    sampling_ahead: LockedRollout | InFlightRollout  # the same, for the thread that samples during training
    actor: TrainEngine
    base: BasePolicy | None  # the policy without its adapters; None without LoRA
    ref: ReferencePolicy | None  # only if a KL penalty needs it
    teacher: Teacher | None  # only with distillation
    critic: CriticEngine | None  # only if the estimator needs values (`gae`)
    data_ranks: Ranks  # sums over these count each row once, see `share_rows`
    notes: list[str]  # warnings for the user


def build_models(
    spec: RunSpec, model_path: str, ranks: Ranks, run_dir: Path, stack: contextlib.ExitStack
) -> Models:
    """Loads and wraps every model that the spec requires.

    Args:
        model_path: directory or hub id of the policy; for the embedded model, its directory.
        run_dir: rollout servers write their logs below it.
        stack: closes the rollout engine when it is closed.

    Raises:
        UsageError, EnvironmentFailure: a model cannot be loaded or does not fit the spec.
    """
    dtype, partitions = DTYPES[spec.engine.dtype], spec.engine.zero_stage == 3
    partition = partial(load_partitioned, _training(spec, spec.actor)) if partitions else None
    load = partial(load_policy, model_path, revision=spec.model.revision, **_loading(spec))
    engine_copies = spec.rollout_engine.starts_with_policy
    model, tokenizer = load(partition=None if engine_copies else partition)
    _refuse_unfit(model, spec)
    if spec.actor.routing_replay:
        Mixture.of(body_of(model), REPLAY)
    # Before DeepSpeed wraps the policy. The sampling copy and the other models start from the same
    # directory.
    rollout = build_rollout(
        EngineContext(
            spec=spec,
            model_path=model_path,
            model=_rounded(model, spec) if engine_copies else model,
            tokenizer=tokenizer,
            device=ranks.device,
            rank=ranks.rank,
            world_size=ranks.world_size,
            agree=ranks.first,
            run_dir=run_dir,
        )
    )
    stack.callback(rollout.close)
    if partition and engine_copies:
        del model
        model, _ = load(partition=partition)
    sequence, data_ranks = share_rows(ranks, spec.engine.sequence_parallel)

    def load_other(path: str | None, key: str, settings: Settings) -> Any:
        """Loads another model from `path`; None: from the policy's path."""
        loading = _loading(spec) | {"partition": partial(load_partitioned, settings) if partitions else None}
        revision = spec.model.revision if path in {None, spec.model.path} else None
        other = load_other_model(path or model_path, tokenizer, key=key, revision=revision, **loading)
        _refuse_unfit(other, spec)
        return other

    def frozen(path: str | None, key: str) -> Teacher:
        return _frozen(spec, load_other(path, key, frozen_settings(dtype)), ranks, sequence)

    ref: ReferencePolicy | None = None
    # With LoRA, the base model without adapters is the initial policy: no second copy is needed.
    if spec.needs_reference and (spec.ref.path or not spec.model.lora_rank):
        ref = frozen(spec.ref.path, "ref.path")
    teacher: Teacher | None = None
    if (path := spec.algorithm.teacher.path) and spec.algorithm.teacher.is_served:
        teacher = ServedTeacher(path, tokenizer, ranks.device, max_length=spec.max_length)
    elif path:
        teacher = frozen(path, "algorithm.teacher.path")
    critic = None
    if spec.trains_critic:
        critics = _training(spec, spec.critic)
        critic_model = load_other(spec.critic.path, "critic.path", critics)
        critic = build_training_engine(spec.engine.name, TrainContext(critic_model, ranks, critics))
    if spec.model.lora_rank:
        add_lora(model, spec.model.lora_rank, spec.model.lora_alpha, spec.model.target_modules)
        if spec.model.lora_adapter_path:
            load_adapter(model, spec.model)
    training = _training(spec, spec.actor) | {"sequence": sequence}
    context = TrainContext(model, ranks, training, temperature=spec.rollout.temperature)
    actor = build_training_engine(spec.engine.name, context)
    base = BasePolicy(actor, model) if spec.model.lora_rank else None
    if spec.needs_reference and ref is None:
        ref = base
    lock = EngineLock()
    offloadable = OffloadedBase(model) if spec.engine.offload_base else None
    trainers = LockedRollout(rollout, lock, first=True, offloadable=offloadable)
    ahead = InFlightRollout(rollout) if spec.rollout.in_flight else LockedRollout(rollout, lock, first=False)
    notes = _endless(tokenizer, end_ids(tokenizer, model.generation_config))
    return Models(tokenizer, trainers, ahead, actor, base, ref, teacher, critic, data_ranks, notes)


def _frozen(spec: RunSpec, model: Any, ranks: Ranks, sequence: SequenceParallel | None) -> Teacher:
    numbers: Any = {"dtype": DTYPES[spec.engine.dtype], "temperature": spec.rollout.temperature}
    if spec.engine.name == "fsdp":
        from rlctl.engine.fsdp import FsdpReference

        return FsdpReference(model, ranks, **numbers)
    return FrozenPolicy(model, ranks, zero_stage=spec.engine.zero_stage, sequence=sequence, **numbers)


def _rounded(model: Any, spec: RunSpec) -> Any:
    """The model in the engine's precision: a copy if it was loaded in another one."""
    if all(parameter.dtype == DTYPES[spec.engine.dtype] for parameter in model.parameters()):
        return model
    rounded = copy.deepcopy(model)
    into_precision(rounded, spec.engine.dtype)
    return rounded


def _endless(tokenizer: Any, ends: list[int]) -> list[str]:
    audit = Findings()
    if token := unknown_end(tokenizer, ends):
        audit.add("end_of_turn", token=token)
    return [f"warning: {found.what}; {found.fix}" for found in audit.findings]


def _training(spec: RunSpec, of: ActorSpec | CriticSpec) -> Settings:
    return Settings(
        zero_stage=spec.engine.zero_stage,
        dtype=DTYPES[spec.engine.dtype],
        weight_decay=of.weight_decay,
        betas=of.betas,
        grad_clip=of.grad_clip,
        gradient_checkpointing=spec.model.enable_gradient_checkpointing,
        offload=spec.engine.offload,
        more_config=spec.engine.deepspeed,
    )


def _loading(spec: RunSpec) -> dict[str, Any]:
    """Loading arguments of a model."""
    # As stored: files are mapped, and no rank has a copy of its own in host memory; and the float32 copies of
    # trained weights must not start rounded. ZeRO-3 partitions weights, in the engine's dtype, as it reads.
    return {
        "trust_remote_code": spec.model.trust_remote_code,
        "attn_implementation": spec.model.attn_implementation,
        "dtype": DTYPES[spec.engine.dtype] if spec.engine.zero_stage == 3 else "auto",
        "use_liger": spec.model.use_liger,
    }


def _refuse_unfit(model: Any, spec: RunSpec) -> None:
    """Refuses quantised weights, and lengths at which the model's positions are undefined or change."""
    if getattr(model, "is_quantized", False):
        what, fix = "its weights are quantised, and cannot be trained", "name a checkpoint in bf16 or fp32"
        raise UsageError(what, where=f"model.path={model.name_or_path}", fix=fix)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limit, why = getattr(config, "max_position_embeddings", None), "the model's context is"
    if rope.get("rope_type") == "longrope":
        # transformers chooses the frequencies by the longest sequence of a batch, vLLM by max_model_len.
        limit, why = (
            rope["original_max_position_embeddings"],
            "its rotary embedding changes for sequences over",
        )
    wanted = spec.data.max_prompt_length + spec.data.max_response_length
    if limit is not None and wanted > limit:
        raise UsageError(
            f"prompt and response may have {wanted} tokens together, {why} {limit}",
            where="data.max_prompt_length, data.max_response_length",
            fix=f"make their sum {limit} or less",
        )
