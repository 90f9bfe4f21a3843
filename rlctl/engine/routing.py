"""The routing of tokens in a mixture of experts, for its auxiliary loss.

Source: Fedus et al. 2022, "Switch Transformers", equations 4 to 6: the loss is E · Σ_i f_i · P_i for E
experts, f_i being the share of the tokens that goes to expert i, a constant, and P_i the mean of the router's
probability. With several experts per token and several layers, both are means over layers, as in
transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlctl.errors import UsageError

_KEY = "actor.router_aux_loss_coef"


class RoutedBody:
    """A model's body whose states are followed by the routing of their token, in float32: (…, H + 2·E).

    Raises:
        UsageError: in the first pass, if the model has no router.
    """

    def __init__(self, body: Any) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def __call__(self, **inputs: Any) -> Any:
        """The output of the body, reduced to states and cache."""
        output = self._body(**inputs, output_router_logits=True)
        layers = [layer for layer in getattr(output, "router_logits", None) or () if layer is not None]
        count = getattr(self._body.config.get_text_config(), "num_experts_per_tok", None)
        if not layers or count is None:
            what = f"{type(self._body).__name__} reports no routing of its tokens to experts"
            raise UsageError(what, where=_KEY, fix="set it to 0")
        routing = torch.stack([_routing(layer, count) for layer in layers]).mean(0)
        states, cache = output.last_hidden_state, getattr(output, "past_key_values", None)
        joined = torch.cat([states.float(), routing.view(*states.shape[:-1], -1)], -1)
        return SimpleNamespace(last_hidden_state=joined, past_key_values=cache)


def _routing(logits: Tensor, experts_per_token: int) -> Tensor:
    """(N, 2·E): the router's probabilities of one layer, and 1 at the chosen experts (without gradient)."""
    probabilities = logits.float().softmax(-1)
    chosen = functional.one_hot(probabilities.topk(experts_per_token).indices, logits.shape[-1]).sum(-2)
    return torch.cat([probabilities, chosen.float()], -1)


def balance_loss(routing: Tensor, shares: Tensor, num_tokens: float) -> Tensor:
    """() the part of the mini-batch's auxiliary loss that some of its tokens have, with gradient.

    Args:
        routing: (m, 2·E) of these tokens, as in `PolicyOutput.routing`.
        shares: (E,) f, of all tokens of the mini-batch.
        num_tokens: their number.
    """
    probabilities = routing[:, : len(shares)].sum(0) / max(num_tokens, 1.0)
    return len(shares) * (probabilities @ shares.to(probabilities))
