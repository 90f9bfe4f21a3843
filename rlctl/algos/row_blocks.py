"""Fast implementation of rollout correction: blocks of rows, and masked operations that PyTorch does slowly.

Rows are corrected independently and sums are additive, so any division into blocks of rows gives the same
result. On a CPU, blocks that fit in a core's cache are several times faster than whole batches and need no
temporary tensors of the batch's size. Tested against the plain implementation on whole batches.

On a CPU `where`, `any`, broadcast bools and comparisons that write bools take 4 to 50 times as long as
arithmetic of the same size; the functions below compute the same with bytes, bits and floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from rlctl.algos.correction_records import LogRatio, RowSums
from rlctl.algos.rules import BASIC_STATISTICS, LOG_RATIO_CLAMP, CorrectionRules
from rlctl.registry import Registry, is_builtin

#: Elements per block: on a CPU 384 KiB of float32, which fit in a core's cache; GPUs need large kernels.
BLOCK_CPU = 3 << 15
BLOCK_CUDA = 1 << 24


@dataclass(frozen=True, slots=True)
class Extras:
    """Batch fields that only some rules read (`needs`); None: the batch does not have the field."""

    advantages: Tensor | None = None  # (B, T)
    age: Tensor | None = None  # (B,) optimizer updates since the weights that sampled the response

    def rows(self, which: slice) -> Extras:
        """The rows of a slice, as views."""
        return Extras(*(None if x is None else x[which] for x in (self.advantages, self.age)))


#: Weights (B, T) or None, rejection mask (B, T), and the sums of each row.
CorrectedRows = tuple[Tensor | None, Tensor, RowSums]
CorrectRows = Callable[[Tensor, Tensor, Tensor, Extras, CorrectionRules], CorrectedRows]


def clamped_exp(log_weight: Tensor) -> Tensor:
    """exp(clip(log w, ±20))."""
    return log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def zero_outside(mask: Tensor, *values: Tensor) -> list[Tensor]:
    """`torch.where(mask, x, 0.0)` of each x, even if NaN or infinite; all (B, T), of one float dtype."""
    integer = torch.int64 if values[0].dtype == torch.float64 else torch.int32
    bits = mask.view(torch.int8).to(integer).neg_()  # all bits set where True, none where False
    return [(bits & x.view(integer)).view(x.dtype) for x in values]


def as_float(mask: Tensor) -> Tensor:
    """1.0 and 0.0 for a bool mask, float32."""
    return mask.view(torch.uint8).float()


def all_true(*masks: Tensor) -> Tensor:
    """`&` of bool tensors (B, T) or (B, 1)."""
    return reduce(torch.bitwise_and, (mask.view(torch.uint8) for mask in masks)).view(torch.bool)


def beyond(values: Tensor, lower: float | None, upper: float | None, inside: Tensor) -> tuple[Tensor, Tensor]:
    """1.0 where `values > upper`, and where `values < lower`, else 0.0; 0.0 where the bound is None.

    `inside`: 1.0 and 0.0, of the shape of `values`; the result is 0.0 where it is.
    """

    def compared(operation: Callable[..., Tensor], edge: float | None) -> Tensor:
        if edge is None:
            return values.new_zeros((len(values), 1))
        return operation(values, edge, out=torch.empty_like(values)).mul_(inside)

    return compared(torch.gt, upper), compared(torch.lt, lower)


def count(mask: Tensor) -> Tensor:
    """(B, 1) int32: number of True values in each row."""
    return mask.sum(-1, keepdim=True, dtype=torch.int32)


def total(values: Tensor) -> Tensor:
    """(B,) float64: the sum of each row of (B, T)."""
    return values.sum(-1, dtype=torch.float64)


def in_row_blocks(
    correct_rows: CorrectRows,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    extras: Extras,
    rules: CorrectionRules,
) -> CorrectedRows:
    """Applies `correct_rows` to each block and joins the results; all tensors (B, T).

    Raises:
        ValueError: as `check_inputs`.
    """
    check_inputs(log_probs, rollout_log_probs, mask, extras, rules)
    batch, horizon = mask.shape
    if mask.device.type == "cpu":
        _keep_freed_memory()
    most = max(1, (BLOCK_CUDA if mask.is_cuda else BLOCK_CPU) // max(horizon, 1))
    step = math.ceil(batch / math.ceil(batch / most))  # blocks of equal size
    if step == batch:
        weights, keep, rows = correct_rows(log_probs, rollout_log_probs, mask, extras, rules)
        return weights, keep, RowSums.joined([rows])
    all_weights = None if rules.weight.level is None else torch.empty_like(log_probs, dtype=torch.float32)
    all_keep = torch.empty_like(mask)
    all_rows: list[RowSums] = []
    for start in range(0, batch, step):
        part = slice(start, start + step)
        given = extras.rows(part)
        weights, keep, rows = correct_rows(log_probs[part], rollout_log_probs[part], mask[part], given, rules)
        all_keep[part] = keep
        if all_weights is not None and weights is not None:
            all_weights[part] = weights
        all_rows.append(rows)
    return all_weights, all_keep, RowSums.joined(all_rows)


@cache
def _keep_freed_memory() -> None:
    """Once per process: lets glibc keep up to 32 MiB of freed memory for later tensors.

    It does so after a tensor of half that size was freed. Before, each block's tensors are returned to the
    system and come back by page faults, which can take as long as the arithmetic.
    """
    torch.empty(16 << 20, dtype=torch.uint8)


def check_inputs(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    extras: Extras,
    rules: CorrectionRules,
) -> None:
    """Checks that a batch can be corrected.

    Raises:
        ValueError: shapes or devices differ, the mask is not bool, log-probs are not float32 or float64, the
            batch is empty, or it lacks a field that a rule needs.
    """
    given = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs, "response_mask": mask}
    if len({value.shape for value in given.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items())
        raise ValueError(f"shapes differ: {shapes}")
    if mask.ndim != 2:
        raise ValueError(f"log-probs and mask must be (B, T), not of shape {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, not {mask.dtype}: give response_mask.bool()")
    for name in ("log_probs", "rollout_log_probs"):
        if given[name].dtype not in (torch.float32, torch.float64):
            what = f"{name} must be float32, not {given[name].dtype}: compute log_softmax in float32"
            raise ValueError(f"{what}; half precision is coarser than the mismatch")
    if mask.numel() == 0:
        raise ValueError("the batch is empty")
    for name, shape in (("advantages", tuple(mask.shape)), ("age", (len(mask),))):
        values: Tensor | None = getattr(extras, name)
        if values is None and name in rules.needs:
            raise ValueError(f"a rule of this correction needs `{name}`, and the batch has none")
        if values is not None and tuple(values.shape) != shape:
            fix = ": expand one number per response to all tokens" if name == "advantages" else ""
            raise ValueError(f"{name} must have shape {shape}, not {tuple(values.shape)}{fix}")
        given |= {} if values is None else {name: values}
    if len({value.device for value in given.values()}) > 1:
        devices = ", ".join(f"{name} {value.device}" for name, value in given.items())
        raise ValueError(f"devices differ: {devices}")


def evaluated(registry: Registry, name: str, log_ratio: LogRatio, params: Any) -> Tensor:
    """Values of a registered weight or criterion: (B, T), or (B, 1) float64.

    Except for the basic statistics, values outside the mask and in rows that are not finite are set to 0.0.

    Raises:
        RunFailure: the shape of the values does not match the registered `unit`.
    """
    part = registry.part(name)
    given = log_ratio if is_builtin(part.function) else log_ratio.copied()  # it may change its input
    values: Tensor = part.function(given, params)
    expected = log_ratio.mask.shape if part.unit == "token" else log_ratio.finite.shape
    registry.check_returned(f"{name} (unit={part.unit!r})", values, tuple(expected))
    if part.unit == "sequence":
        return torch.where(log_ratio.finite, values.double(), 0.0)
    if name in BASIC_STATISTICS or values is log_ratio.token:
        return values
    (inside,) = zero_outside(all_true(log_ratio.mask, log_ratio.finite), values.to(log_ratio.token.dtype))
    return inside
