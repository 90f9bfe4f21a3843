"""The critic: the body of a causal language model with a value head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.engine.inputs import can_pack, scored_states
from rlctl.errors import UsageError
from rlctl.prefix import body_of, can_share_prefix


class ValueHead(nn.Linear):
    """One value per state, computed in float32, because bf16 has fewer than three decimal digits.

    It starts at zero, so that every value is 0.0 at first: the first advantages depend on the rewards only,
    not on a random projection of the body's states.
    """

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__(hidden_size, 1, bias=False, device=device, dtype=torch.float32)
        nn.init.zeros_(self.weight)

    def forward(self, states: Tensor) -> Tensor:
        """(N, H) → (N,) float32."""
        return functional.linear(states.float(), self.weight.float()).squeeze(-1)


class ValueModule(nn.Module):
    """V(prompt, tokens so far) at every response position.

    Args:
        model: a Hugging Face causal language model; its body is used, its output head is not.
        share_prompts: if rows cannot be packed, compute a prompt that adjacent rows share once, if the model
            supports this.
        probe: as in `PolicyModule`.

    Raises:
        UsageError: the model has no body separate from its output head.
    """

    def __init__(self, model: Any, *, share_prompts: bool = True, probe: bool = True) -> None:
        super().__init__()
        body = body_of(model)
        if body is None:
            raise UsageError(
                f"{type(model).__name__} does not expose hidden states, so a value head cannot be added",
                where="critic.path",
                fix="name a model of another architecture",
            )
        self.packs: bool | None = can_pack(body) if probe else None
        self.shares_prompts = share_prompts and can_share_prefix(model)
        self.body = body
        config = model.config.get_text_config()
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT projects its states
        self.head = ValueHead(width, next(body.parameters()).device)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Values of the states before each response token.

        Returns:
            (B, T) float32 with gradient; index t is the value before token t is sampled, computed from the
            state that predicts it. 0.0 where not scored.
        """
        if self.packs is None:
            self.packs = can_pack(self.body)
        states, _ = scored_states(self.body, inputs, packs=self.packs, share_prompts=self.shares_prompts)
        values = self.head(states)
        empty = torch.zeros(inputs.scored.shape, dtype=torch.float32, device=values.device)
        return empty.masked_scatter(inputs.scored, values)
