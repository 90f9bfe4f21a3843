"""The training engines on DeepSpeed (this module alone imports it).

rlctl normalises losses itself. DeepSpeed divides losses by its accumulation steps and averages
gradients over ranks; the losses passed to `backward` here are shares that must be *summed*. Therefore
accumulation is set to 1 with explicit boundaries, and the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.engine.deepspeed_setup import (
    Settings,
    deepspeed_config,
    expert_blocks,
    frozen_settings,
    keeping_buffers,
    module_options,
    unrounded_weights,
    zero_stage_of,
)
from rlctl.engine.layout import idle_inputs
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.plain_state import only_plain_data
from rlctl.engine.policy_engine import Engine, FrozenModule, PolicyEngine, ValueEngine
from rlctl.engine.protocol import StepResult
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.engine.state_files import StateFiles
from rlctl.errors import RunFailure, UsageError, in_words
from rlctl.lean_imports import lean_import
from rlctl.processes import environment_without_ranks, import_path
from rlctl.run_files import remove

_STATE = "engine"
#: Directory beside the checkpoints in which a state is converted for another number of ranks.
_UNIVERSAL = ".universal"
#: Attribute of DeepSpeed's stage-1 optimizer in bf16: float32 sums of the micro-batches' gradients.
_SUMS = "fp32_groups_gradients_flat"
#: Environment variable with which transformers reads weights in sequence, without prefetching.
_IN_SEQUENCE = "HF_DEACTIVATE_ASYNC_LOAD"


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that can skip a step, and never applies a non-finite gradient.

    DeepSpeed cannot discard accumulated gradients. Its step with an inner optimizer that does nothing
    clears all buffers of every ZeRO stage in a supported way.
    """

    skip = False
    multiply_by = 1.0
    withheld = False
    clip_norm: float | None = None
    _global_grad_norm: float | None = None  # before clipping; DeepSpeed reads it

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One AdamW step, unless `skip` is set or a gradient is not finite."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.multiply_by != 1.0 and grads:
            torch._foreach_mul_(grads, self.multiply_by)
        if self.clip_norm is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(params, self.clip_norm or math.inf)
            self._global_grad_norm = norm.item()
        self.withheld = self.skip or not all(map(_is_finite, grads))
        if not self.withheld:
            super().step()
        return None


def _is_finite(gradient: Tensor) -> bool:
    """Whether minimum and maximum are finite; NaN propagates to both.

    `isfinite` would need 7 more bytes per element; on a CPU, `vector_norm(·, inf)` is ten times slower.
    """
    if not gradient.numel():
        return True
    low, high = torch.aminmax(gradient)
    return bool(low.isfinite() & high.isfinite())


class _Engine(Engine):
    """A module under DeepSpeed: the common part of policy and critic; see `protocol.TrainedModule`.

    Attributes:
        zero_stage: the stage in effect.
        scales_gradients: see `protocol.TrainedModule`.
    """

    def __init__(self, model: Any, ranks: Ranks, **settings: Unpack[Settings]) -> None:
        super().__init__(model, ranks, **settings)
        dtype = settings["dtype"]
        self._deepspeed = _import_deepspeed()
        self.zero_stage = stage = zero_stage_of(settings)
        plain = stage == 0
        config = deepspeed_config(settings)
        unrounded = unrounded_weights(model, dtype)
        with keeping_buffers(model), _quiet():
            placed = model.to(device=ranks.device, dtype=dtype)
            module = self._wrapped(placed, ranks=ranks, **module_options(settings))
            if stage == 3:
                _ready_for_stage_3(module, dtype)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._optimizer = GuardedAdamW(
                trained, lr=0.0, betas=settings["betas"], weight_decay=settings["weight_decay"], fused=True
            )  # fused: the step does not copy the moments, 8 bytes per parameter
            if plain:  # DeepSpeed's plain path clips but does not report the norm.
                self._optimizer.clip_norm = settings["grad_clip"]
            with _refusals(settings):
                self._engine, *_ = self._deepspeed.initialize(
                    model=module, optimizer=self._optimizer, config=config
                )
        self._start_from(unrounded, model, trained)
        ways = (_SUMS, "override_loss_scale")
        self.scales_gradients = plain or any(hasattr(self._engine.optimizer, way) for way in ways)
        # No dropout: with it, π_θ would differ from the sampling policy, and from one pass to the next.
        self._engine.eval()
        self._module = self._engine
        self._model = getattr(module, "model", module)

    def _start_from(self, unrounded: dict[str, Tensor], model: Any, trained: list[nn.Parameter]) -> None:
        """Sets DeepSpeed's float32 copies of the trained weights to these, and empties `unrounded`.

        The copies start from the rounded weights. A step is often smaller than half of the distance between
        two bf16 numbers: from there, many steps in one direction would change nothing.
        """
        ids_of_trained = {id(parameter) for parameter in trained}
        for name in list(unrounded):
            weight = unrounded.pop(name)
            parameter = model.get_parameter(name)
            if id(parameter) not in ids_of_trained:  # a critic has no output layer
                continue
            weight = weight.to(self.ranks.device).float()
            if self.zero_stage < 3:
                self._deepspeed.utils.safe_set_full_fp32_param(parameter, weight)
                continue
            # DeepSpeed's parts of a weight have one size, the last one with padding.
            size = parameter.ds_tensor.numel()
            padding = size * self.ranks.world_size - weight.numel()
            padded = functional.pad(weight.flatten(), (0, padding))
            own_part = padded.narrow(0, size * self.ranks.rank, size)
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, own_part)

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """See `TrainedModule.plan`; under ZeRO-3 the first pass finds out what the model supports."""
        if self._module.reader.packs is None:
            with torch.no_grad():
                self._engine(inputs=idle_inputs(self.ranks.device))
        return super().plan(passes)

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
        self._end_of_mini_batch()
        # ZeRO discards a non-finite gradient on every rank before it reaches the optimizer.
        withheld = self._optimizer.withheld or not self._engine.was_step_applied()
        if self.ranks.max(float(withheld)) + self.ranks.max(float(not withheld)) > 1.0:
            raise RunFailure(
                "a gradient was not finite on some ranks only, so the weights of the ranks differ",
                fix="resume from the last checkpoint; set actor.grad_clip above 0, which makes ranks agree",
            )
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

    @property
    def holds_state(self) -> bool:
        """See `TrainedModule.holds_state`."""
        return type(self._engine.checkpoint_engine) is (
            self._deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine
        )

    def save(self, directory: Path, files: StateFiles | None = None) -> None:
        """Writes weights, optimizer states and counters (all ranks); see `TrainedModule.save`."""
        files = files or StateFiles()

        def save(state_dict: Any, path: str) -> None:  # DeepSpeed passes keyword arguments
            with files.open(Path(path)) as file:
                torch.save(state_dict, file)

        with _quiet():
            if self.holds_state:
                self._engine.checkpoint_engine.save = save
            self._engine.save_checkpoint(str(directory), tag=_STATE, save_latest=False)

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote, on any number of ranks (all ranks).

        Raises:
            RunFailure: there is no state, or it does not fit this engine.
        """
        count = len(list((directory / _STATE).glob("*_optim_states.pt")))  # one per rank; none at stage 0
        is_universal = count not in {0, self.ranks.world_size}
        if is_universal:
            state = directory / _STATE
            directory = directory.parents[1] / _UNIVERSAL
            problem = self.ranks.first(
                _convert(state, directory / _STATE, count) if self.ranks.is_main else ""
            )
            if problem:
                raise RunFailure(f"DeepSpeed cannot convert its state: {problem}", where=str(state))
        self._engine._config.load_universal_checkpoint = is_universal
        try:
            with _quiet(), only_plain_data():
                path, _ = self._engine.load_checkpoint(str(directory), tag=_STATE)
        except Exception as error:
            raise RunFailure(f"DeepSpeed cannot load its state: {error}", where=str(directory)) from error
        self.ranks.barrier()
        if is_universal and self.ranks.is_main:
            remove(directory)
        if path is None:
            raise RunFailure("there is no DeepSpeed state here", where=str(directory / _STATE))

    @contextlib.contextmanager
    def _gathered(self, parts: Sequence[Tensor], *, changed: bool = False) -> Iterator[Sequence[Tensor]]:
        """See `Engine._gathered` (under ZeRO-3 a collective); a change must be alike on every rank."""
        with self._deepspeed.zero.GatheredParameters(
            parts, 0 if changed else None, enabled=self.zero_stage == 3
        ):
            yield parts


class DeepSpeedEngine(PolicyEngine, _Engine):
    """A causal language model under DeepSpeed; see `TrainEngine`."""


class DeepSpeedCritic(ValueEngine, _Engine):
    """A value model under DeepSpeed: the body of a model with a new value head; see `CriticEngine`."""


class FrozenPolicy(FrozenModule):
    """A `ListingPolicy` with separate weights: a model that computes log-probs and is never trained.

    Under ZeRO-3 its weights are partitioned among the ranks like the actor's; otherwise every rank holds
    all of them.

    Args:
        model: Hugging Face causal language model, modified in place; under ZeRO-3 it may come from
            `load_partitioned`.
        dtype: dtype of the forward pass.
        temperature: sampling temperature, at which log-probs are computed.
        shard_size: see `Settings`.
    """

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        temperature: float,
        shard_size: int | None = None,
        sequence: SequenceParallel | None = None,
    ) -> None:
        is_whole = zero_stage < 3
        model.requires_grad_(False).eval()
        with keeping_buffers(model), _quiet():
            placed = model.to(device=ranks.device, dtype=dtype)
            policy: Any = PolicyModule(
                placed, temperature, share_prompts=is_whole, probe=is_whole, sequence=sequence, ranks=ranks
            )
            if not is_whole:
                _ready_for_stage_3(policy, dtype)
                config = deepspeed_config(frozen_settings(dtype, shard_size))
                policy, *_ = _import_deepspeed().initialize(model=policy, config=config)
        policy.eval()
        self._module = policy


def load_partitioned(settings: Settings, read: Callable[[], Any], config: Any) -> Any:
    """Loads a model by `read` with partitioned parameters and whole buffers (all ranks).

    No rank holds a whole model: every rank reads every weight from the model's files, in the same order, and
    keeps its part.

    Args:
        settings: of the engine that receives the model, at ZeRO stage 3.
        config: Hugging Face config of the model.

    Raises:
        UsageError: DeepSpeed refuses its configuration.
    """
    first: Any = nn.Linear(1, 1, bias=False, dtype=settings["dtype"])
    with _quiet(), _refusals(settings):
        _import_deepspeed().zero.Init(module=first, config_dict_or_path=deepspeed_config(settings))

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
    before = os.environ.get(_IN_SEQUENCE)
    os.environ[_IN_SEQUENCE] = "1"
    try:
        model = read()
    finally:
        hook.remove()
        os.environ.pop(_IN_SEQUENCE)
        if before is not None:
            os.environ[_IN_SEQUENCE] = before
    for parameter in model.parameters():
        if not hasattr(parameter, "ds_id"):
            partition(parameter)
    return model


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
            refusals = [(".".join(map(str, one["loc"])), in_words(one)) for one in error.errors()]
            words = "; ".join(f"{name}: {what}" for name, what in refusals)
        message = f"DeepSpeed refuses its configuration: {words}"
        fix = "correct or remove these options; deepspeed.ai/docs/config-json lists all"
        raise UsageError(message, where="engine.deepspeed", fix=fix) from error


def _convert(state: Path, universal: Path, count: int) -> str:
    """Converts a state of `count` ranks to one for any number (a "universal checkpoint"); returns an error.

    Conversion takes processes that have not used a GPU.
    """
    remove(universal.parent, ignore_errors=True)
    workers = str(min(count, max(1, (os.cpu_count() or 1) // 2)))
    command = [sys.executable, "-P", "-m", "rlctl.engine.plain_state"]
    command += ["deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(state), "--output_folder", str(universal)]
    command += ["--num_extract_workers", workers, "--num_merge_workers", workers]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment_without_ranks() | {"PYTHONPATH": import_path()},
        check=False,
    )
    return (
        done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}" if done.returncode else ""
    )


def _import_deepspeed() -> Any:
    lean_import("deepspeed", "deepspeed.ops.triton_ops")  # engines import the latter
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
