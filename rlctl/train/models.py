"""The models of a run: policy, sampling copy, and if required critic, reference, those of capabilities."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlctl.engine.deepspeed import load_partitioned
from rlctl.engine.deepspeed_setup import INDUCTOR, Settings
from rlctl.engine.engines import TrainContext, build_training_engine
from rlctl.engine.lora import BasePolicy, OffloadedBase, add_lora, load_adapter
from rlctl.engine.model import load_policy, load_tokenizer
from rlctl.engine.protocol import CriticEngine, ReferencePolicy, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import share_rows
from rlctl.environment.template_audit import Findings, unknown_end
from rlctl.rollout.engines import EngineContext, build_rollout
from rlctl.rollout.hf import DTYPES, into_precision
from rlctl.rollout.protocol import InFlightEngine, end_ids
from rlctl.rollout.shared_engine import EngineLock, InFlightRollout, LockedRollout
from rlctl.run_spec.algorithm import ActorSpec, CriticSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.capability import Capability, capabilities_of
from rlctl.train.model_loader import ModelLoader, loading_arguments, refuse_unfit


@dataclass
class Models:
    """The models and engines of this rank."""

    tokenizer: Any  # Hugging Face tokenizer of the policy
    rollout: LockedRollout  # the rollout engine, for the training thread
    sampling_ahead: LockedRollout | InFlightRollout  # the same, for the thread that samples during training
    actor: TrainEngine
    base: BasePolicy | None  # the policy without its adapters; None without LoRA
    ref: ReferencePolicy | None  # only if a KL penalty needs it
    capabilities: tuple[Capability, ...]  # that the spec uses, with their models
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
    partitions = spec.engine.zero_stage == 3
    partition = partial(load_partitioned, _training(spec, spec.actor)) if partitions else None
    load = partial(load_policy, model_path, revision=spec.model.revision, **loading_arguments(spec))
    engine_copies = spec.rollout_engine.starts_with_policy
    model, tokenizer = load(partition=None if engine_copies else partition)
    refuse_unfit(model, spec)
    capabilities = capabilities_of(spec)
    for capability in capabilities:
        capability.check_policy(model)
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

    loader = ModelLoader(
        spec=spec,
        model_path=model_path,
        tokenizer=tokenizer,
        ranks=ranks,
        sequence=sequence,
    )
    ref: ReferencePolicy | None = None
    # With LoRA, the base model without adapters is the initial policy: no second copy is needed.
    if spec.needs_reference and (spec.ref.path or not spec.model.lora_rank):
        ref = loader.frozen(spec.ref.path, "ref.path")
    for capability in capabilities:
        capability.load(loader)
    critic = None
    if spec.trains_critic:
        critics = _training(spec, spec.critic)
        critic_model = loader.other(spec.critic.path, "critic.path", critics)
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
    ahead: InFlightRollout | LockedRollout = LockedRollout(rollout, lock, first=False)
    if spec.rollout.in_flight:
        ahead = InFlightRollout(cast(InFlightEngine, rollout))  # `build_rollout` has checked it
    notes = _endless(tokenizer, end_ids(tokenizer, model.generation_config))
    return Models(
        tokenizer=tokenizer,
        rollout=trainers,
        sampling_ahead=ahead,
        actor=actor,
        base=base,
        ref=ref,
        capabilities=capabilities,
        critic=critic,
        data_ranks=data_ranks,
        notes=notes,
    )


def _rounded(model: Any, spec: RunSpec) -> Any:
    """The model in the engine's precision: a copy if it was loaded in another one."""
    if all(parameter.dtype == DTYPES[spec.engine.dtype] for parameter in model.parameters()):
        return model
    rounded = copy.deepcopy(model)
    into_precision(rounded, spec.engine.dtype)
    return rounded


def _endless(tokenizer: Any, ends: list[int]) -> list[str]:
    audit = Findings()
    token = unknown_end(tokenizer, ends)
    if token:
        audit.add("end_of_turn", token=token)
    return [f"warning: {finding.what}; {finding.fix}" for finding in audit.findings]


def _training(spec: RunSpec, of: ActorSpec | CriticSpec) -> Settings:
    return Settings(
        zero_stage=spec.engine.zero_stage,
        dtype=DTYPES[spec.engine.dtype],
        weight_decay=of.weight_decay,
        betas=of.betas,
        grad_clip=of.grad_clip,
        gradient_checkpointing=spec.model.enable_gradient_checkpointing,
        compile_backend=INDUCTOR if spec.model.compile_layers else None,
        offload=spec.engine.offload,
        shard_size=spec.engine.shard_size,
        more_config=spec.engine.deepspeed,
    )


def policy_tokenizer(spec: RunSpec, model_path: str) -> Any:
    """The tokenizer that `build_models` loads with the policy."""
    return load_tokenizer(model_path, revision=spec.model.revision, **loading_arguments(spec))
