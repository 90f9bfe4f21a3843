"""Sequence parallelism: rows split among ranks (DeepSpeed-Ulysses: Jacobs et al. 2023, arXiv 2309.14509).

The ranks of a group have the same rows. Each runs all layers over its part of the tokens of a packed row.
Before attention, an all-to-all gives each rank all tokens for some heads; afterwards, another one gives it
its own tokens for all heads again.

    rank 0  tokens 0 … w−1    all heads  ⇄  all tokens, heads 0 … h/2 − 1
    rank 1  tokens w … 2w−1   all heads  ⇄  all tokens, heads h/2 … h − 1

DeepSpeed's own attention layers accept no mask, which packed rows need; its engine is used unchanged. Each
rank computes the loss of all rows, but only the gradient through its own tokens; gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rlctl.engine.layout import Rows, separations
from rlctl.errors import UsageError
from rlctl.run_spec.memory import has_no_mask

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks

_KEY = "engine.sequence_parallel"


class SequenceParallel:
    """A group of ranks that process each row together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def install(self, model: Any) -> None:
        """Makes the model's attention exchange tokens for heads.

        Raises:
            UsageError: its heads cannot be divided evenly, or its attention kernel is not supported.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = model.config.get_text_config()
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        if any(number % self.size for number in heads):
            message = (
                f"{heads[0]} attention heads and {heads[1]} of keys cannot be divided among {self.size} ranks"
            )
            raise UsageError(message, where=_KEY, fix="use a number that divides both")
        kernel = str(config._attn_implementation)
        if kernel != "sdpa" and not has_no_mask(kernel):
            message = f"attention {kernel} does not work on parts of a sequence"
            raise UsageError(message, where=_KEY, fix="set model.attn_implementation to sdpa or varlen")
        # Scatters along dimension 1 and gathers along dimension 2.
        to_heads: Callable[[Tensor, Any], Tensor] = _AllToAll.apply
        attend = ALL_ATTENTION_FUNCTIONS[kernel]
        name = f"{kernel}_sequence_parallel"

        def exchange_and_attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
        ) -> tuple[Tensor, None]:
            """(R, heads, w, D) of this rank's tokens → (R, w, heads, D)."""
            positions = options.pop("all_position_ids", None)
            if positions is not None:
                options["position_ids"] = positions
            of_heads = (to_heads(states, self._group) for states in (query, key, value))
            module.config._attn_implementation = kernel  # the name by which flash attention is loaded
            attended, _ = attend(module, *of_heads, mask, **options)
            module.config._attn_implementation = name
            return to_heads(attended, self._group), None

        AttentionInterface.register(name, exchange_and_attend)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
        for part in (model.config, config):
            part._attn_implementation = name

    def own_tokens(self, rows: Rows) -> Rows:
        """This rank's part of packed rows; all ranks of the group call it with the same rows."""
        inputs = rows.inputs
        width = rows.inputs["input_ids"].shape[1]
        more = -width % self.size
        share = (width + more) // self.size
        ids = functional.pad(inputs["input_ids"], (0, more))
        # Restarting positions: padding is a separate sequence for kernels that use positions.
        padding = torch.arange(more, device=ids.device).expand(len(ids), more)
        positions = torch.cat([inputs["position_ids"], padding], 1)
        mask = inputs["attention_mask"]
        if mask is not None and more:
            mask = functional.pad(mask, (0, more, 0, more))
            diagonal = torch.arange(width, width + more, device=ids.device)
            mask[..., diagonal, diagonal] = True  # a token that attends to nothing would be NaN
        mine = slice(self.rank * share, (self.rank + 1) * share)
        row = rows.states_at // width
        column = rows.states_at % width
        scored_at = ((column >= mine.start) & (column < mine.stop)).nonzero().squeeze(1)
        states_at = row[scored_at] * share + column[scored_at] - mine.start
        inputs_here = {"input_ids": ids[:, mine], "position_ids": positions[:, mine], "attention_mask": mask}
        if more and "cu_seq_lens_q" in inputs:
            inputs_here |= separations(
                functional.pad(inputs["cu_seq_lens_q"].diff().cpu(), (0, 1), value=more), ids.device
            )
        own = inputs | inputs_here | ({"all_position_ids": positions} if mask is None else {})
        experts = None
        if rows.experts is not None:
            experts = functional.pad(rows.experts, (0, 0, 0, 0, 0, more), value=-1)[:, mine]
        return Rows(own, states_at, scored_at, experts=experts)

    def of_all(self, values: Tensor, scored_at: Tensor, count: int) -> Tensor:
        """(F, M) of all scored tokens from each rank's (F, m); gradients reach only the rank's own tokens.

        Each rank computes the whole loss, so the gradient of its own tokens is complete.
        """
        own = values.new_zeros(len(values), count).index_copy(1, scored_at, values)
        total = own.detach().clone()
        dist.all_reduce(total, group=self._group)
        is_own = torch.zeros_like(total[0], dtype=torch.bool).index_fill(0, scored_at, True)
        return torch.where(is_own, own, total)


def share_rows(ranks: Ranks, size: int) -> tuple[SequenceParallel | None, Ranks]:
    """Forms groups of `size` ranks that process each row together (all ranks call it).

    Returns:
        This rank's group, None for a size of 1; and the ranks over which sums count each row once: one of
        every group.
    """
    if size == 1:
        return None, ranks
    groups = [list(range(first, first + size)) for first in range(0, ranks.world_size, size)]
    counting = [list(range(index, ranks.world_size, size)) for index in range(size)]
    own, ours = (
        {rank: group for ranks_of in sets for group in [dist.new_group(ranks_of)] for rank in ranks_of}
        for sets in (groups, counting)
    )
    data = replace(ranks, rank=ranks.rank // size, world_size=len(groups), group=ours[ranks.rank])
    return SequenceParallel(own[ranks.rank]), data


def _exchanged(states: Tensor, scatter: int, gather: int, group: Any) -> Tensor:
    parts = torch.stack(states.chunk(dist.get_world_size(group), scatter)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), gather)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(states, 1, 2, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], 2, 1, ctx.group), None
