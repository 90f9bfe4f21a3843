"""The critic: the body of a causal language model with a value head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.engine.layout import BodyReader
from rlctl.errors import UsageError
from rlctl.prefix import body_of


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
    """V(tokens so far) before every scored token.

    Args:
        model: a Hugging Face causal language model; its body is used, its output head is not.
        probe, options: as in `PolicyModule`.

    Raises:
        UsageError: the model has no body separate from its output head.
    """

    def __init__(self, model: Any, *, probe: bool = True, **options: Any) -> None:
        super().__init__()
        body = body_of(model)
        if body is None:
            message = f"{type(model).__name__} does not expose hidden states, so a value head cannot be added"
            raise UsageError(message, where="critic.path", fix="name a model of another architecture")
        self.reader = BodyReader(model, **options)
        if probe:
            self.reader.probe()
        self.body = body
        config = model.config.get_text_config()
        width = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT projects its states
        self.head = ValueHead(width, next(body.parameters()).device)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """(M,) float32 with gradient: value of the state before each scored token, which predicts it."""
        if self.reader.packs is None:
            self.reader.probe()
        states, _ = self.reader.states(inputs)
        values: Tensor = self.head(states)
        return values
