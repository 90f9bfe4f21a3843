"""The training engine on DeepSpeed (this module alone imports it).

Normalisation is ours. DeepSpeed divides losses by its accumulation steps and averages gradients
over ranks; losses that reach `backward` here are shares that must be *summed*. So accumulation is
set to 1 with boundaries given by hand, and the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.batch import TrainBatch
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.protocol import PolicyOutput, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure

_STATE = "engine"
_NEVER = 1 << 62


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that can be told to let a step pass, and never applies a non-finite gradient.

    DeepSpeed has no way to throw accumulated gradients away; letting its step run with an inner
    optimizer that does nothing clears every buffer of every ZeRO stage the supported way.
    """

    skip = False
    withheld = False
    clip_norm: float | None = None
    grad_norm: float = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One AdamW step, unless `skip` is set or a gradient is not finite."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.clip_norm is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            self.grad_norm = torch.nn.utils.clip_grad_norm_(params, self.clip_norm or _NEVER).item()
        self.withheld = self.skip or not all(bool(grad.isfinite().all()) for grad in grads)
        if not self.withheld:
            super().step()
        return None


class DeepSpeedEngine:
    """A causal language model under DeepSpeed; see `TrainEngine`.

    Args:
        model: Hugging Face causal language model, in any dtype.
        ranks: the processes of the run.
        zero_stage: 0–3.
        dtype: arithmetic of forward and backward; optimizer states are float32.
        temperature: sampling temperature, at which log-probs are taken.
        weight_decay, betas: AdamW.
        grad_clip: largest global gradient norm, 0 for none.

    Attributes:
        zero_stage: the one in effect, by which checkpoints are cut up.
    """

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        temperature: float,
        weight_decay: float,
        betas: tuple[float, float],
        grad_clip: float,
    ) -> None:
        self.ranks = ranks
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        # Under ZeRO-3 every call of the body is a collective: ranks must make the same number of them.
        self._policy = policy = PolicyModule(
            model.to(device=ranks.device, dtype=dtype), temperature, share_prompts=zero_stage < 3
        )
        self._optimizer = GuardedAdamW(policy.parameters(), lr=0.0, betas=betas, weight_decay=weight_decay)
        # DeepSpeed's bf16 path without ZeRO drifts from its ZeRO paths; stage 1 keeps the float32
        # master weights the same way and differs from stage 0 only in where they lie.
        stage = max(zero_stage, 1) if dtype == torch.bfloat16 else zero_stage
        self.zero_stage = stage
        plain = stage == 0
        if plain:  # DeepSpeed's plain path clips but does not report the norm.
            self._optimizer.clip_norm = grad_clip
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0 if plain else grad_clip,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "steps_per_print": None,
        }
        with _quiet():
            deepspeed = _import_deepspeed()
            self._engine, *_ = deepspeed.initialize(model=policy, optimizer=self._optimizer, config=config)
        _restore_buffers(model, buffers)
        self._deepspeed = deepspeed
        # Dropout would make π_θ another policy than the one that samples, and each pass another one.
        self._engine.eval()

    def policy(
        self, batch: TrainBatch, *, entropy_grad: bool = False, sum_pi_squared: bool = False
    ) -> PolicyOutput:
        """Log-probs and entropy of the batch's responses, without computing shared padding."""
        prompt, horizon = _used_columns(batch)
        width = batch.responses.shape[1]
        start, end = batch.input_ids.shape[1] - width - prompt, batch.input_ids.shape[1] - width + horizon
        found = self._engine(
            input_ids=batch.input_ids[:, start:end],
            attention_mask=batch.attention_mask[:, start:end],
            position_ids=batch.position_ids[:, start:end],
            responses=batch.responses[:, :horizon],
            response_mask=batch.response_mask[:, :horizon],
            num_chunks=self._num_chunks(batch),
            entropy_grad=entropy_grad,
            sum_pi_squared=sum_pi_squared,
        )
        pad = (0, width - horizon)
        return PolicyOutput(*(torch.nn.functional.pad(values, pad) for values in found))

    def _num_chunks(self, batch: TrainBatch) -> int:
        num_tokens = int(batch.response_mask.sum())
        if self.zero_stage == 3:  # each call of the head is a collective: ranks must agree on their number
            num_tokens = int(self.ranks.max(num_tokens))
        return self._policy.chunks_needed(num_tokens)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one share of the mini-batch loss."""
        self._engine.set_gradient_accumulation_boundary(last)
        # Ranks' gradients are averaged by DeepSpeed and must be summed: undo its division here.
        self._engine.backward(loss * self.ranks.world_size, scale_wrt_gas=False)

    def step(self, *, lr: float, skip: bool = False) -> StepResult:
        """Apply or discard what was accumulated.

        Raises:
            RunFailure: only some ranks saw a non-finite gradient, so their weights now differ.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.skip = skip
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

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full; under ZeRO-3 gathered one at a time (a collective: all ranks iterate)."""
        for name, parameter in self._engine.module.model.named_parameters():
            if self.zero_stage == 3:
                with self._deepspeed.zero.GatheredParameters([parameter]):
                    yield name, parameter.data
            else:
                yield name, parameter.data

    def export(self, directory: Path) -> None:
        """Write config and weights as a plain Hugging Face directory (all ranks; rank 0 writes)."""
        # Gathering is a collective even for the ranks that keep nothing.
        full = {name: tensor.cpu() for name, tensor in self.weights() if self.ranks.is_main}
        if self.ranks.is_main:
            self._policy.model.save_pretrained(directory, state_dict=full)

    def save(self, directory: Path) -> None:
        """Write weights, optimizer states and counters (all ranks)."""
        with _quiet():
            self._engine.save_checkpoint(str(directory), tag=_STATE, save_latest=False)

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


def _restore_buffers(model: Any, buffers: dict[str, Tensor]) -> None:
    """Give buffers their own precision back.

    Casting a module rounds its rotary frequencies to bf16 as well, which is another model than the
    one a rollout engine loads: a mismatch at every position, growing with the length.
    """
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)


def _used_columns(batch: TrainBatch) -> tuple[int, int]:
    """Widest prompt and widest response of the batch: columns beyond are padding on every row."""
    width = batch.responses.shape[1]
    prompt_mask = batch.attention_mask[:, :-width]
    return max(int(prompt_mask.any(0).sum()), 1), max(_last_used(batch.response_mask), 1)


def _last_used(mask: Tensor) -> int:
    used = mask.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _import_deepspeed() -> Any:
    import deepspeed
    from deepspeed import ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Ranks on one CPU host may talk through a shared-memory operator that is compiled with a
        # C++ compiler at first use; gloo does the same job here without either.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints to stdout what belongs in a log; keep the display clean."""
    captured = io.StringIO()
    with contextlib.redirect_stdout(captured):
        yield
    for line in captured.getvalue().splitlines():
        logging.getLogger(__name__).debug(line)
