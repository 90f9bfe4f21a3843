"""Log-probs of sampled tokens without a (B, T, V) tensor in float32.

The model's body runs once, over packed rows (a prompt that siblings share: once for all of them); its
output head runs over the scored tokens only, a chunk at a time, each chunk's float32 logits being dropped
(and, under gradient, recomputed) before the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.engine.inputs import (
    arguments_of,
    body_inputs,
    body_of,
    kept_arguments,
    scored_states,
    used_columns,
    widened,
)
from rlctl.engine.packing import can_pack
from rlctl.engine.protocol import PolicyOutput
from rlctl.prefix import can_share_prefix
from rlctl.spec.memory import MAX_LOGITS

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs
    from rlctl.engine.ranks import Ranks

log = logging.getLogger(__name__)


class PolicyModule(nn.Module):
    """A causal language model that answers with log-probs of given responses.

    Args:
        model: any Hugging Face causal language model.
        temperature: logits are divided by it, as when sampling.
        share_prompts: where rows cannot be packed, run a prompt that adjacent rows share once, if the model
            is able to.
    """

    def __init__(self, model: Any, temperature: float, *, share_prompts: bool = True) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.shares_prompts = share_prompts and can_share_prefix(model)
        self.split_head = _head_is_all(model)
        self.packs = self.split_head and can_pack(model)
        if not self.split_head:
            log.warning(
                "%s does more to its logits than its output head; the whole model is run for them, "
                "which takes more memory",
                type(model).__name__,
            )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        scored: Tensor,
        num_chunks: int = 1,
        *,
        kept_counts: Tensor | None = None,
        kept_ids: Tensor | None = None,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropy of the responses, on request Σ_v π(v)².

        Args:
            input_ids, attention_mask, position_ids, scored: as of `ModelInputs`.
            num_chunks: pieces the output head is run in, see `chunks_needed`.
            kept_counts, kept_ids: of the N scored tokens in row order, what their distribution is restricted
                to and renormalised over, see `KeptTokens.at`; None: nothing.
            entropy_grad: let gradient through the entropy too.
            sum_pi_squared: also give the collision probability of the next-token distribution.

        Returns:
            Two or three (B, T) float32, 0.0 where not scored: log-probs (with gradient), entropy (with
            gradient only if asked) and, if asked for, Σ_v π(v)² (never).
        """
        horizon = scored.shape[1]
        responses = input_ids[:, -horizon:]
        body = body_of(self.model)
        columns = (input_ids, attention_mask, position_ids)
        if self.split_head:
            states = scored_states(
                body, *columns, scored, packs=self.packs, share_prompts=self.shares_prompts
            )
            head = self.model.get_output_embeddings()
        else:
            inputs = body_inputs(body, *columns, horizon=horizon, share_prompts=self.shares_prompts)
            states = self.model(**inputs, logits_to_keep=horizon).logits[scored]
            head = _identity
        look = partial(
            _look_at_tokens,
            head=head,
            temperature=self.temperature,
            entropy_grad=entropy_grad,
            sum_pi_squared=sum_pi_squared,
        )
        kept = () if kept_counts is None or kept_ids is None else (kept_counts, kept_ids)
        found = _walk(look, states, responses[scored], num_chunks, *kept)
        empty = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        return tuple(empty.masked_scatter(scored, values) for values in found)

    def chunks_needed(self, num_tokens: int) -> int:
        """Pieces the head must be run in to hold at most `MAX_LOGITS` float32 logits at once."""
        vocabulary: int = self.model.config.get_text_config().vocab_size
        return max(1, -(-num_tokens * vocabulary // MAX_LOGITS))


def policy_output(
    policy: PolicyModule,
    run: Callable[..., tuple[Tensor, ...]],
    inputs: ModelInputs,
    in_step_with: Ranks | None,
    **asked: bool,
) -> PolicyOutput:
    """What a policy says of the scored tokens, computed over the columns that some row uses.

    Args:
        policy: the module asked.
        run: calls it: itself, or the engine around it.
        inputs: any number of rows.
        in_step_with: ranks that must run the head as often as this one, each call of it being a
            collective (ZeRO-3); None: ranks are free.
        asked: `entropy_grad`, `sum_pi_squared`, see `PolicyModule.forward`.
    """
    num_tokens = int(inputs.scored.sum())
    if in_step_with:
        num_tokens = int(in_step_with.max(num_tokens))
    used = used_columns(inputs)
    columns = arguments_of(used) | kept_arguments(used)
    found = run(**columns, num_chunks=policy.chunks_needed(num_tokens), **asked)
    return PolicyOutput(*(widened(values, inputs) for values in found))


def _walk(
    look: Callable[..., tuple[Tensor, ...]],
    states: Tensor,
    tokens: Tensor,
    num_chunks: int,
    kept_counts: Tensor | None = None,
    kept_ids: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`look` chunk by chunk over (N, H) states and (N,) tokens; its (N,) answers."""
    given = [states.tensor_split(num_chunks), tokens.tensor_split(num_chunks)]
    if kept_counts is not None and kept_ids is not None:
        counts = kept_counts.tensor_split(num_chunks)
        given += [counts, torch.split(kept_ids, [int(part.sum()) for part in counts])]
    if num_chunks == 1:
        return look(states, tokens, *(parts[0] for parts in given[2:]))
    parts = [checkpoint(look, *chunk, use_reentrant=False) for chunk in zip(*given, strict=True)]
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _look_at_tokens(
    states: Tensor,
    tokens: Tensor,
    kept_counts: Tensor | None = None,
    kept_ids: Tensor | None = None,
    *,
    head: Any,
    temperature: float,
    entropy_grad: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, ...]:
    logits = head(states).float() / temperature
    if kept_counts is not None and kept_ids is not None:
        logits.masked_fill_(_dropped(kept_counts, kept_ids, logits), torch.finfo(logits.dtype).min)
    log_total = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1) - log_total
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probs = torch.exp(logits - log_total[:, None])
        entropy = log_total - torch.linalg.vecdot(probs, logits)
    if not sum_pi_squared:
        return chosen, entropy
    probs = probs.detach()
    return chosen, entropy, torch.linalg.vecdot(probs, probs)


def _dropped(counts: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """(N, V) bool: tokens outside of each set; of an empty set, which stands for the vocabulary, none."""
    rows = torch.arange(len(counts), device=counts.device)
    dropped = (counts > 0)[:, None].expand_as(logits).clone()
    dropped[rows.repeat_interleave(counts.long()), ids.long()] = False
    return dropped


def _identity(states: Tensor) -> Tensor:
    return states


@torch.no_grad()
def _head_is_all(model: Any) -> bool:
    """Whether body + output head give the model's own logits.

    Some architectures scale or soft-cap logits after the head. Rather than know them all, try: a
    short probe through both ways.
    """
    body, head = body_of(model), model.get_output_embeddings()
    if body is None or head is None:
        return False
    was_training = model.training
    model.eval()
    probe = torch.arange(4, device=next(model.parameters()).device)[None]
    probe = probe % model.config.get_text_config().vocab_size
    whole = model(input_ids=probe, use_cache=False).logits.float()
    parts = head(body(input_ids=probe, use_cache=False).last_hidden_state).float()
    model.train(was_training)
    return bool(torch.allclose(whole, parts, rtol=1e-3, atol=1e-3))
