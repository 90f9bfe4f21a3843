"""The training engines on DeepSpeed (this module alone imports it).

Normalisation is ours. DeepSpeed divides losses by its accumulation steps and averages gradients
over ranks; losses that reach `backward` here are shares that must be *summed*. So accumulation is
set to 1 with boundaries given by hand, and the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict, Unpack, cast

import torch
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
from rlctl.errors import RunFailure, UsageError
from rlctl.spec.memory import REDUCE_BUCKET
from rlctl.spec.passthrough import merged

_STATE = "engine"
#: Of DeepSpeed's optimizer for stage 1 in bf16: float32 sums of the micro-batches' gradients.
_SUMS = "fp32_groups_gradients_flat"

Offload = Literal["none", "optimizer", "all"]


class Settings(TypedDict):
    """How a module is trained.

    Attributes:
        zero_stage: 0–3.
        dtype: arithmetic of forward and backward; optimizer states are float32.
        weight_decay, betas: AdamW.
        grad_clip: largest global gradient norm, 0 for none.
        gradient_checkpointing: run layers again in the backward pass instead of keeping activations.
        offload: what lies in the host's memory, see `_config`.
        more_config: merged into DeepSpeed's configuration.
        sequence: ranks that run each row together; of a policy.
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
    """Any module under DeepSpeed: what policy and critic have in common; see `protocol.Trained`.

    Args:
        model: Hugging Face causal language model, in any dtype; only what requires gradient is trained.
        wrap: makes the module to train of the model, once that is in place.
        ranks: the processes of the run.
        settings: see `Settings`.

    Attributes:
        zero_stage: the one in effect, by which checkpoints are cut up.
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
        with keeping_buffers(model), _quiet():
            module = wrap(model.to(device=ranks.device, dtype=dtype))
            if stage == 3:
                _ready_for_stage_3(module, dtype)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._optimizer = GuardedAdamW(
                trained, lr=0.0, betas=settings["betas"], weight_decay=settings["weight_decay"], fused=True
            )  # fused: the step makes no copies of the moments, 8 bytes per parameter
            if plain:  # DeepSpeed's plain path clips but does not report the norm.
                self._optimizer.clip_norm = grad_clip
            with _refusals(settings):
                self._engine, *_ = self._deepspeed.initialize(
                    model=module, optimizer=self._optimizer, config=config
                )
        ways = (_SUMS, "override_loss_scale")
        self.scales_gradients = plain or any(hasattr(self._engine.optimizer, way) for way in ways)
        # Dropout would make π_θ another policy than the one that samples, and each pass another one.
        self._engine.eval()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one share of the mini-batch loss."""
        self._engine.set_gradient_accumulation_boundary(last)
        # Ranks' gradients are averaged by DeepSpeed and must be summed: undo its division here.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """Apply, multiplied by `grad_scale`, or discard what was accumulated.

        Raises:
            RunFailure: only some ranks saw a non-finite gradient, so their weights now differ.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.skip = skip
        with self._scaling(grad_scale):
            self._engine.step()
        # ZeRO throws a non-finite gradient away by itself, on every rank, before it reaches the optimizer.
        withheld = self._optimizer.withheld or not self._engine.was_step_applied()
        if self.ranks.max(float(withheld)) + self.ranks.max(float(not withheld)) > 1.0:
            raise RunFailure(
                "a gradient was not finite on some ranks only, their weights no longer agree",
                fix="resume from the last checkpoint; set actor.grad_clip above 0, which makes ranks agree",
            )
        if self._optimizer.clip_norm is not None:
            norm = self._optimizer.grad_norm
        else:
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        return StepResult(grad_norm=norm, applied=not withheld)

    @contextlib.contextmanager
    def _scaling(self, grad_scale: float) -> Iterator[None]:
        """Gradients, and their norm, are multiplied before they are clipped. ZeRO divides them by a loss
        scale, which may be set from outside; losses were not multiplied by it."""
        if grad_scale == 1.0:
            yield
        elif self.zero_stage == 0:
            self._optimizer.multiply_by = grad_scale
            yield
            self._optimizer.multiply_by = 1.0
        elif hasattr(self._engine.optimizer, _SUMS):  # stage 1 in bf16 divides by no loss scale
            for total in getattr(self._engine.optimizer, _SUMS):
                total.mul_(grad_scale)
            yield
        else:
            self._engine.optimizer.override_loss_scale(1.0 / grad_scale)
            yield
            self._engine.optimizer.custom_loss_scaler = False

    def save(self, directory: Path) -> dict[str, str]:
        """Write weights, optimizer states and counters (all ranks).

        Returns:
            Of the files that this rank has written, below `directory`: the SHA-256.
        """
        digests: dict[str, str] = {}

        def save(state_dict: Any, path: str) -> None:  # DeepSpeed names its arguments
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
        """Restore what `save` wrote (all ranks).

        Raises:
            RunFailure: there is nothing to load, or it does not fit this engine.
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
        """In full while the context lasts (under ZeRO-3 a collective)."""
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(parameters)
        return context


class DeepSpeedEngine(_Engine):
    """A causal language model under DeepSpeed; see `TrainEngine`.

    Args:
        model: Hugging Face causal language model, in any dtype; only what requires gradient is trained.
        ranks: the processes of the run.
        temperature: sampling temperature, at which log-probs are taken.
        settings: see `Settings`.

    Attributes:
        zero_stage: the one in effect, by which checkpoints are cut up.
    """

    def __init__(self, model: Any, ranks: Ranks, *, temperature: float, **settings: Unpack[Settings]) -> None:
        how, sequence = _may_do(settings), settings.get("sequence")

        def wrap(placed: Any) -> PolicyModule:
            return PolicyModule(placed, temperature, sequence=sequence, **how)

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
        """See `TrainEngine.adapter` (under ZeRO-3 a collective); nothing but A and B is gathered."""
        parameters = adapter_parameters(self._policy.model)
        with self._gathered(list(parameters.values())):
            tensors = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
        return Adapter.of(self._policy.model, tensors)

    def export(self, directory: Path) -> None:
        """Write config and weights as a plain Hugging Face directory (all ranks; rank 0 writes)."""
        # Gathering is a collective even for the ranks that keep nothing.
        full = {name: tensor.cpu() for name, tensor in self.weights() if self.ranks.is_main}
        if self.ranks.is_main:
            self._policy.model.save_pretrained(directory, state_dict=full)
            for name, content in getattr(self._policy.model, "processor_files", {}).items():
                (directory / name).write_bytes(content)


class DeepSpeedCritic(_Engine):
    """A value model under DeepSpeed; see `CriticEngine`.

    Args:
        model: Hugging Face causal language model, whose body is trained under a new value head.
        ranks: the processes of the run.
        settings: see `Settings`.

    Attributes:
        zero_stage: the one in effect, by which checkpoints are cut up.

    Raises:
        UsageError: the model has no body apart from its output head.
    """

    def __init__(self, model: Any, ranks: Ranks, **settings: Unpack[Settings]) -> None:
        how = _may_do(settings)
        super().__init__(model, lambda placed: ValueModule(placed, **how), ranks, **settings)

    def values(self, inputs: ModelInputs) -> Tensor:
        """See `CriticEngine.values`."""
        return widened(self._engine(**arguments_of(used_columns(inputs))), inputs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, `body.…` and `head.weight` (under ZeRO-3 a collective)."""
        return self._in_full(self._engine.module)


class PartitionedLoading:
    """Reads models such that nobody ever holds one whole: each weight is cut up when it is read.

    Every rank reads every weight from the model's files, in the same order, and keeps its part.

    Args:
        settings: of the engine that takes the model, at ZeRO stage 3; `frozen_settings` for `sharded`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, read: Callable[[], Any], config: Any) -> Any:
        """The model that `read` reads by `from_pretrained`, its parameters cut up, buffers whole (all ranks).

        Args:
            read: called once.
            config: of the model.

        Raises:
            UsageError: DeepSpeed refuses its configuration.
        """
        first: Any = nn.Linear(1, 1, bias=False, dtype=self._settings["dtype"])
        with _quiet(), _refusals(self._settings):
            _import_deepspeed().zero.Init(module=first, config_dict_or_path=_config(self._settings))

        def cut_up(parameter: nn.Parameter) -> None:
            """Each rank takes its part of rank 0's values."""
            if not parameter.is_cuda:  # a file that is mapped into memory: ranks would write into it
                parameter.data = parameter.data.clone()
            first.weight.convert_to_zero_parameters(param_list=[parameter])

        # Tied weights are compared when all are read: until then they are needed whole.
        tied = (getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
        late = config.get_text_config().vocab_size if any(tied) else None

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            is_read = getattr(parameter, "_is_hf_initialized", False)  # what no file has is drawn at the end
            is_new = parameter is not None and not parameter.is_meta and not hasattr(parameter, "ds_id")
            if is_read and is_new and parameter is not None and late not in parameter.shape[:1]:
                cut_up(parameter)

        hook = nn.modules.module.register_module_parameter_registration_hook(registered)
        try:
            with _environment(HF_DEACTIVATE_ASYNC_LOAD="1"):  # one weight after the other, none ahead
                model = read()
        finally:
            hook.remove()
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_id"):
                cut_up(parameter)
        return model


def sharded(module: PolicyModule, dtype: torch.dtype) -> Callable[..., Any]:
    """`module`, which is never trained, with its weights cut up among the ranks as under ZeRO-3."""
    with _quiet():
        deepspeed = _import_deepspeed()
        _ready_for_stage_3(module, dtype)
        engine, *_ = deepspeed.initialize(model=module, config=_config(frozen_settings(dtype)))
    engine.eval()
    call: Callable[..., Any] = engine
    return call


def frozen_settings(dtype: torch.dtype) -> Settings:
    """Of a module that is never trained."""
    return Settings(zero_stage=3, dtype=dtype, weight_decay=0.0, betas=(0.9, 0.999), grad_clip=0.0)


def _ready_for_stage_3(module: nn.Module, dtype: torch.dtype) -> None:
    """What DeepSpeed must be told of a module whose weights it gathers layer by layer."""
    module.to(dtype=dtype)  # it takes models that were read in parts in one dtype only
    deepspeed = _import_deepspeed()
    if isinstance(module, PolicyModule):
        head = module.model.get_output_embeddings()
        for parameter in head.parameters() if head is not None else ():
            deepspeed.zero.register_external_parameter(module.head, parameter)
    for block in expert_blocks(module):
        deepspeed.utils.set_z3_leaf_module(block, True)


def expert_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules that run some of a list of experts, chosen by the data.

    Ranks choose differently, but gathering an expert's weights is a collective: a block's must be gathered
    together. Experts whose weights are one tensor need nothing. A list of experts is known by its length:
    the model's config names that, whatever the architecture calls the list.
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
            # There may be as many layers as experts; their list belongs to what has a config.
            if is_list and ("expert" in name or not hasattr(block, "config")):
                found.append(block)
    return found


def _may_do(settings: Settings) -> dict[str, bool]:
    """How a module runs. Under ZeRO-3 every call of the body is a collective: ranks must make the same number
    of them; and it can run as soon as DeepSpeed has it, not before. A layer that runs again would add to the
    shared prompt's keys and values a second time."""
    whole = settings["zero_stage"] < 3
    return {"share_prompts": whole and not settings.get("gradient_checkpointing"), "probe": whole}


@contextlib.contextmanager
def _refusals(settings: Settings) -> Iterator[None]:
    """What DeepSpeed finds wrong with the user's own configuration, in one sentence."""
    try:
        yield
    except Exception as error:
        if not settings.get("more_config"):
            raise
        what = f"DeepSpeed refuses its configuration: {type(error).__name__}: {error}"
        raise UsageError(what, where="engine.deepspeed") from error


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
    """Buffers come out in their own precision, whatever happens to the model inside.

    Casting a module rounds its rotary frequencies to bf16 as well, which is another model than the
    one a rollout engine loads: a mismatch at every position, growing with the length.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)


def _stage(settings: Settings) -> int:
    """The ZeRO stage that DeepSpeed runs.

    Its bf16 path without ZeRO drifts from its ZeRO paths; stage 1 keeps the float32 master weights the same
    way and differs from stage 0 only in where they lie.
    """
    return max(settings["zero_stage"], 1) if settings["dtype"] == torch.bfloat16 else settings["zero_stage"]


def _config(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's configuration; `offload`: float32 weights, moments and the step itself go to the host
    ("optimizer", from stage 1 on), and between their uses the parameters too ("all", stage 3)."""
    dtype, offload, stage = settings["dtype"], settings.get("offload", "none"), _stage(settings)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": REDUCE_BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    # Stage 1 adds the ranks' sums up once per step: in float32 too. Stages 2 and 3 add up every micro-batch's
    # gradient, which is bf16, before it goes into the float32 sum.
    reduced = {"communication_data_type": "fp32"} if stage <= 1 else {}
    own = reduced | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings["grad_clip"] if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # At stage 1 each gradient is added to the float32 sum as soon as it is there, and freed.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        # The sum over micro-batches: in bf16 a share below 1/256 of it would be lost.
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    return merged(own, settings.get("more_config", {}))


def _import_deepspeed() -> Any:
    import deepspeed
    from deepspeed import ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)\.")
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Ranks on one CPU host may talk through a shared-memory operator that is compiled with a
        # C++ compiler at first use; gloo does the same job here without either. Reading the dictionary
        # would run the compiler for every operator: only this entry is needed.
        vars(ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints to stdout what belongs in a log; keep the display clean."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        yield
    for line in captured.getvalue().splitlines():
        logging.getLogger(__name__).debug(line)
