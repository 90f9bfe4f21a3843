"""The training engines on DeepSpeed (this module alone imports it).

rlctl normalises losses itself. DeepSpeed divides losses by its accumulation steps and averages
gradients over ranks; the losses passed to `backward` here are shares that must be *summed*. Therefore
accumulation is set to 1 with explicit boundaries, and the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict, Unpack, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rlctl.batch import ModelInputs
from rlctl.engine.adamw import GuardedAdamW
from rlctl.engine.checkpoint import HashedFile
from rlctl.engine.inputs import arguments_of, used_columns, widened
from rlctl.engine.log_probs import PolicyModule, policy_output
from rlctl.engine.lora import Adapter, adapter_parameters, plain_weights
from rlctl.engine.protocol import PolicyOutput, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.engine.recompute import recompute_layers
from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.engine.values import ValueModule
from rlctl.errors import RunFailure, UsageError, in_words
from rlctl.spec.memory import REDUCE_BUCKET

_STATE = "engine"
#: Attribute of DeepSpeed's stage-1 optimizer in bf16: float32 sums of the micro-batches' gradients.
_SUMS = "fp32_groups_gradients_flat"

Offload = Literal["none", "optimizer", "all"]


class Settings(TypedDict):
    """Training settings of a module.

    Attributes:
        zero_stage: 0–3.
        dtype: dtype of forward and backward pass; optimizer states are float32.
        weight_decay, betas: of AdamW.
        grad_clip: maximum global gradient norm; 0: no clipping.
        gradient_checkpointing: recompute layers in the backward pass instead of storing activations.
        offload: what is kept in host memory, see `_config`.
        more_config: merged into DeepSpeed's configuration.
        sequence: sequence-parallel group; policy only.
    """

    zero_stage: int
    dtype: torch.dtype
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    gradient_checkpointing: NotRequired[bool]
    offload: NotRequired[Offload]
    more_config: NotRequired[Mapping[str, Any]]
    sequence: NotRequired[SequenceParallel | None]


class _Engine:
    """A module under DeepSpeed: the common part of policy and critic; see `protocol.Trained`.

    Args:
        model: Hugging Face causal language model, in any dtype; parameters that require gradient are trained.
        wrap: creates the module to train from the model, after the model is on its device.
        ranks: the processes of the run.
        settings: see `Settings`.

    Attributes:
        zero_stage: the stage in effect, by which checkpoints are partitioned.
        scales_gradients: see `protocol.Trained`.
    """

    def __init__(
        self,
        model: Any,
        wrap: Callable[[Any], nn.Module],
        ranks: Ranks,
        **settings: Unpack[Settings],
    ) -> None:
        self.ranks = ranks
        dtype, grad_clip = settings["dtype"], settings["grad_clip"]
        self._deepspeed = _import_deepspeed()
        self.zero_stage = stage = _stage(settings)
        plain = stage == 0
        if settings.get("gradient_checkpointing"):
            recompute_layers(model)
        config = _config(settings)
        unrounded = _unrounded(model, dtype)
        with keeping_buffers(model), _quiet():
            module = wrap(model.to(device=ranks.device, dtype=dtype))
            if stage == 3:
                _ready_for_stage_3(module, dtype)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._optimizer = GuardedAdamW(
                trained, lr=0.0, betas=settings["betas"], weight_decay=settings["weight_decay"], fused=True
            )  # fused: the step does not copy the moments, 8 bytes per parameter
            if plain:  # DeepSpeed's plain path clips but does not report the norm.
                self._optimizer.clip_norm = grad_clip
            with _refusals(settings):
                self._engine, *_ = self._deepspeed.initialize(
                    model=module, optimizer=self._optimizer, config=config
                )
        # DeepSpeed's float32 copies start from the rounded weights. A step is often smaller than half of the
        # distance between two bf16 numbers: from there, many steps in one direction would change nothing.
        for name in list(unrounded):
            weight = unrounded.pop(name).to(ranks.device).float()
            self._deepspeed.utils.safe_set_full_fp32_param(model.get_parameter(name), weight)
        ways = (_SUMS, "override_loss_scale")
        self.scales_gradients = plain or any(hasattr(self._engine.optimizer, way) for way in ways)
        # No dropout: with it, π_θ would differ from the sampling policy, and from one pass to the next.
        self._engine.eval()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of one share of the mini-batch loss."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks, but they must be summed: undo its division.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """Applies the accumulated gradient, multiplied by `grad_scale`, or discards it.

        Raises:
            RunFailure: only some ranks had a non-finite gradient, so their weights now differ.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.skip = skip
        with self._scaling(grad_scale):
            self._engine.step()
        # ZeRO discards a non-finite gradient on every rank before it reaches the optimizer.
        withheld = self._optimizer.withheld or not self._engine.was_step_applied()
        if self.ranks.max(float(withheld)) + self.ranks.max(float(not withheld)) > 1.0:
            raise RunFailure(
                "a gradient was not finite on some ranks only, so the weights of the ranks differ",
                fix="resume from the last checkpoint; set actor.grad_clip above 0, which makes ranks agree",
            )
        if self._optimizer.clip_norm is not None:
            norm = self._optimizer.grad_norm
        else:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        return StepResult(grad_norm=norm, applied=not withheld)

    @contextlib.contextmanager
    def _scaling(self, grad_scale: float) -> Iterator[None]:
        """Scales gradients, and their norm, before clipping.

        ZeRO divides gradients by a loss scale, which can be overridden; losses are not multiplied by it.
        """
        if grad_scale == 1.0:
            yield
        elif self.zero_stage == 0:
            self._optimizer.multiply_by = grad_scale
            yield
            self._optimizer.multiply_by = 1.0
        elif hasattr(self._engine.optimizer, _SUMS):  # stage 1 in bf16 has no loss scale
            for total in getattr(self._engine.optimizer, _SUMS):
                total.mul_(grad_scale)
            yield
        else:
            self._engine.optimizer.override_loss_scale(1.0 / grad_scale)
            yield
            self._engine.optimizer.custom_loss_scaler = False

    def save(self, directory: Path) -> dict[str, str]:
        """Writes weights, optimizer states and counters (all ranks).

        Returns:
            File below `directory` → its SHA-256, for the files that this rank wrote.
        """
        digests: dict[str, str] = {}

        def save(state_dict: Any, path: str) -> None:  # DeepSpeed passes keyword arguments
            file = HashedFile(Path(path))
            torch.save(state_dict, cast(IO[bytes], file))
            digests[os.path.relpath(path, directory)] = file.close()

        with _quiet():
            files = self._engine.checkpoint_engine
            if type(files) is self._deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine:
                files.save = save
            self._engine.save_checkpoint(str(directory), tag=_STATE, save_latest=False)
        return digests

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote (all ranks).

        Raises:
            RunFailure: there is no state, or it does not fit this engine.
        """
        try:
            with _quiet():
                path, _ = self._engine.load_checkpoint(str(directory), tag=_STATE)
        except Exception as error:
            raise RunFailure(f"DeepSpeed cannot load its state: {error}", where=str(directory)) from error
        if path is None:
            raise RunFailure("there is no DeepSpeed state here", where=str(directory / _STATE))

    def _in_full(self, module: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Plain weights by name; under ZeRO-3 gathered one at a time (a collective: all ranks iterate)."""
        for weight in plain_weights(module, merged=merged):
            with self._gathered(weight.parts):
                yield weight.name, weight.value()

    def _gathered(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Context in which `parameters` are available in full (under ZeRO-3 a collective)."""
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(parameters)
        return context


class DeepSpeedEngine(_Engine):
    """A causal language model under DeepSpeed; see `TrainEngine`.

    Args:
        model: Hugging Face causal language model, in any dtype; parameters that require gradient are trained.
        ranks: the processes of the run.
        temperature: sampling temperature, at which log-probs are computed.
        settings: see `Settings`.
    """

    def __init__(self, model: Any, ranks: Ranks, *, temperature: float, **settings: Unpack[Settings]) -> None:
        sequence = settings.get("sequence")
        wrap = partial(PolicyModule, temperature=temperature, sequence=sequence, **_may_do(settings))
        super().__init__(model, wrap, ranks, **settings)
        self._policy: PolicyModule = self._engine.module

    def policy(
        self,
        inputs: ModelInputs,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        sketch: bool = False,
    ) -> PolicyOutput:
        """See `TrainEngine.policy`."""
        asked = {"entropy_grad": entropy_grad, "sum_pi_squared": sum_pi_squared, "sketch": sketch}
        return policy_output(self._engine, inputs, **asked)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights` (under ZeRO-3 a collective: all ranks iterate)."""
        return self._in_full(self._policy.model, merged=merged)

    def adapter(self) -> Adapter:
        """See `TrainEngine.adapter` (under ZeRO-3 a collective); gathers only A and B."""
        parameters = adapter_parameters(self._policy.model)
        with self._gathered(list(parameters.values())):
            tensors = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
        return Adapter.of(self._policy.model, tensors)

    def export(self, directory: Path) -> None:
        """Writes config and weights as a plain Hugging Face directory (all ranks; rank 0 writes)."""
        # Gathering is a collective: all ranks iterate, although only rank 0 keeps the weights.
        full = {name: tensor.cpu() for name, tensor in self.weights() if self.ranks.is_main}
        if self.ranks.is_main:
            self._policy.model.save_pretrained(directory, state_dict=full)
            for name, content in getattr(self._policy.model, "processor_files", {}).items():
                (directory / name).write_bytes(content)


class DeepSpeedCritic(_Engine):
    """A value model under DeepSpeed; see `CriticEngine`.

    Args:
        model: Hugging Face causal language model; its body is trained with a new value head.
        ranks: the processes of the run.
        settings: see `Settings`.

    Raises:
        UsageError: the model has no body separate from its output head.
    """

    def __init__(self, model: Any, ranks: Ranks, **settings: Unpack[Settings]) -> None:
        super().__init__(model, partial(ValueModule, **_may_do(settings)), ranks, **settings)

    def values(self, inputs: ModelInputs) -> Tensor:
        """See `CriticEngine.values`."""
        return widened(self._engine(**arguments_of(used_columns(inputs))), inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, `body.…` and `head.weight` (under ZeRO-3 a collective)."""
        return self._in_full(self._engine.module)


class PartitionedLoading:
    """Loads models without any rank holding a whole one: each weight is partitioned as it is read.

    Every rank reads every weight from the model's files, in the same order, and keeps its part.

    Args:
        settings: of the engine that receives the model, at ZeRO stage 3; `frozen_settings` for `sharded`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, read: Callable[[], Any], config: Any) -> Any:
        """Loads a model with partitioned parameters and whole buffers (all ranks).

        Args:
            read: loads the model by `from_pretrained`; called once.
            config: config of the model.

        Raises:
            UsageError: DeepSpeed refuses its configuration.
        """
        first: Any = nn.Linear(1, 1, bias=False, dtype=self._settings["dtype"])
        with _quiet(), _refusals(self._settings):
            _import_deepspeed().zero.Init(module=first, config_dict_or_path=_config(self._settings))

        def partition(parameter: nn.Parameter) -> None:
            """Partitions a parameter: each rank keeps its part of rank 0's values."""
            if not parameter.is_cuda:  # a memory-mapped file, into which ranks would write
                parameter.data = parameter.data.clone()
            first.weight.convert_to_zero_parameters(param_list=[parameter])

        # Tied weights are compared after all weights are read, so they stay whole until then.
        tied = (getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
        late = config.get_text_config().vocab_size if any(tied) else None

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is None or parameter.is_meta or hasattr(parameter, "ds_id"):
                return
            is_read = getattr(parameter, "_is_hf_initialized", False)  # False: in no file, initialised last
            if is_read and late not in parameter.shape[:1]:
                partition(parameter)

        hook = nn.modules.module.register_module_parameter_registration_hook(registered)
        try:
            with _environment(HF_DEACTIVATE_ASYNC_LOAD="1"):  # weights in sequence, without prefetching
                model = read()
        finally:
            hook.remove()
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_id"):
                partition(parameter)
        return model


def sharded(module: PolicyModule, dtype: torch.dtype) -> Callable[..., Any]:
    """`module`, which is never trained, with its weights partitioned among the ranks as under ZeRO-3."""
    with _quiet():
        deepspeed = _import_deepspeed()
        _ready_for_stage_3(module, dtype)
        engine, *_ = deepspeed.initialize(model=module, config=_config(frozen_settings(dtype)))
    engine.eval()
    call: Callable[..., Any] = engine
    return call


def _unrounded(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name → weight as loaded, of the trained parameters that `dtype` rounds; empty in float32."""
    if dtype == torch.float32:
        return {}
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype != dtype and not hasattr(parameter, "ds_id")
    }


def frozen_settings(dtype: torch.dtype) -> Settings:
    """Settings of a module that is never trained."""
    return Settings(zero_stage=3, dtype=dtype, weight_decay=0.0, betas=(0.9, 0.999), grad_clip=0.0)


def _ready_for_stage_3(module: nn.Module, dtype: torch.dtype) -> None:
    """Prepares a module for ZeRO-3: registers the parts whose weights must be gathered together."""
    module.to(dtype=dtype)  # partitioned models must have a single dtype
    deepspeed = _import_deepspeed()
    if isinstance(module, PolicyModule):
        head = module.model.get_output_embeddings()
        for parameter in head.parameters() if head is not None else ():
            deepspeed.zero.register_external_parameter(module.head, parameter)
    for block in expert_blocks(module):
        deepspeed.utils.set_z3_leaf_module(block, True)


def expert_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules that run a data-dependent selection from a list of experts.

    Ranks select different experts, but gathering an expert's weights is a collective: all experts of a block
    must be gathered together. Experts stored in one tensor need no treatment. A list of experts is identified
    by its length, because the config contains it, whatever the architecture calls the list.
    """
    modules: list[Any] = list(module.modules())
    configs = [part.config.get_text_config() for part in modules if hasattr(part, "config")]
    counts = {
        value
        for config in configs
        for key, value in config.to_dict().items()
        if "expert" in key and "per_tok" not in key and isinstance(value, int) and value > 1
    }
    found: list[nn.Module] = []
    for block in modules:
        for name, child in block.named_children():
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) in counts
            # The list of layers may have the same length; the module that contains it has a config.
            if is_list and ("expert" in name or not hasattr(block, "config")):
                found.append(block)
    return found


def _may_do(settings: Settings) -> dict[str, bool]:
    """Options of a module: whether it may share prompts, and be probed before DeepSpeed wraps it.

    Under ZeRO-3 every call of the body is a collective, so ranks must make the same number of calls, and the
    body can run only after DeepSpeed has wrapped it. With gradient checkpointing, a recomputed layer would
    append to the keys and values of the shared prompt a second time.
    """
    whole = settings["zero_stage"] < 3
    return {"share_prompts": whole and not settings.get("gradient_checkpointing"), "probe": whole}


@contextlib.contextmanager
def _refusals(settings: Settings) -> Iterator[None]:
    """Turns an error of DeepSpeed into a `UsageError` if the user changed its configuration."""
    try:
        yield
    except Exception as error:
        if not settings.get("more_config"):
            raise
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            found = [(".".join(map(str, one["loc"])), in_words(one)) for one in error.errors()]
            words = "; ".join(f"{name}: {what}" for name, what in found)
        what = f"DeepSpeed refuses its configuration: {words}"
        fix = "correct or remove these options; deepspeed.ai/docs/config-json lists all"
        raise UsageError(what, where="engine.deepspeed", fix=fix) from error


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def keeping_buffers(model: Any) -> Iterator[None]:
    """Restores the values and dtypes of all buffers after the model was cast inside.

    Casting a module also rounds its rotary frequencies to bf16. The model would then differ from the one
    that a rollout engine loads: a mismatch at every position, growing with the length.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)


def _stage(settings: Settings) -> int:
    """The ZeRO stage that DeepSpeed uses: in bf16 at least 1.

    DeepSpeed's bf16 path without ZeRO drifts from its ZeRO paths. Stage 1 keeps the float32 master weights in
    the same way and differs from stage 0 only in where they are stored.
    """
    return max(settings["zero_stage"], 1) if settings["dtype"] == torch.bfloat16 else settings["zero_stage"]


def _config(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's configuration.

    `offload` moves float32 weights, moments and the step itself to the host ("optimizer", from stage 1 on),
    and between their uses the parameters too ("all", stage 3).
    """
    dtype, offload, stage = settings["dtype"], settings.get("offload", "none"), _stage(settings)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": REDUCE_BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    # Stage 1 reduces the ranks' float32 sums once per step: in float32 too. Stages 2 and 3 reduce the bf16
    # gradient of every micro-batch before it is added to the float32 sum.
    reduced = {"communication_data_type": "fp32"} if stage <= 1 else {}
    own = reduced | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings["grad_clip"] if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # At stage 1 each gradient is added to the float32 sum and freed as soon as it is computed.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        # Dtype of the sum over micro-batches: bf16 would lose terms below 1/256 of the sum.
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    return merged(own, settings.get("more_config", {}))


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` updated with `more`; nested mappings are merged recursively."""
    result = dict(base)
    for key, value in more.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def _import_deepspeed() -> Any:
    import deepspeed
    from deepspeed import ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)\.")
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # On one CPU host, DeepSpeed can communicate through a shared-memory operator that it compiles
        # with a C++ compiler at first use; gloo needs neither. Reading the dictionary would run the
        # compiler for every operator: set only this entry.
        vars(ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Sends what DeepSpeed prints to stdout to the log instead, at level debug."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        yield
    for line in captured.getvalue().splitlines():
        logging.getLogger(__name__).debug(line)
