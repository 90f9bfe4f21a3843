"""Which experts compute a token in a mixture of experts: recorded, replayed, and balanced by a loss.

A router chooses the k experts with the highest scores by `topk`. While a `Routing` is active, this call
returns the given experts with their scores, so that weights and gradients are those of the router, whatever
the architecture computes from them. Example, scores 0.1, 0.7, 0.4 of three experts, two of which compute a
token: `topk` returns the experts 1, 2 with 0.7, 0.4; if the sampler has used 0, 1, it returns 0, 1 with 0.1,
0.7. Source of the replay: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370.

The auxiliary loss: Fedus et al. 2022, "Switch Transformers", equations 4 to 6. It is E · Σ_i f_i · P_i for E
experts, f_i being the share of the tokens that goes to expert i, a constant, and P_i the mean of the router's
probability. With several experts per token and several layers, both are means over layers, as in
transformers.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlctl.errors import RunFailure, UsageError

AUX_LOSS = "actor.router_aux_loss_coef"
REPLAY = "actor.routing_replay"
_ACTIVE = threading.local()


@dataclass(frozen=True, slots=True)
class Mixture:
    """The routers of a model: their layers, of all decoder layers; E experts, k of which compute a token."""

    layers: tuple[int, ...]
    num_layers: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(cls, body: Any, key: str) -> Mixture:
        """The routers of a model's body, which a spec key needs.

        Raises:
            UsageError: it has none, or they differ from layer to layer.
        """
        config = body.config.get_text_config()
        layers: list[int] = []
        counts: set[int] = set()  # numbers of experts
        for name, module in body.named_modules():
            experts = module._modules.get("experts")
            numbers = re.findall(r"\d+", name)
            if experts is not None and numbers:
                layers.append(int(numbers[0]))
                counts.add(getattr(experts, "num_experts", None) or len(getattr(experts, "_modules", ())))
        chosen = getattr(config, "num_experts_per_tok", None)
        if len(counts) != 1 or len(set(layers)) < len(layers) or chosen is None:
            raise _refused(body, key)
        return cls(tuple(layers), config.num_hidden_layers, counts.pop(), chosen)

    def of_routers(self, experts: Tensor) -> Tensor:
        """(…, layers, k) experts in all decoder layers, or in those with a router → those of the routers.

        Raises:
            RunFailure: they are of another model.
        """
        if experts.shape[-2] == self.num_layers:
            experts = experts[..., list(self.layers), :]
        fits = experts.shape[-2:] == (len(self.layers), self.experts_per_token)
        if not fits or (experts.numel() and int(experts.max()) >= self.num_experts):
            raise RunFailure(
                f"the rollout engine reports {tuple(experts.shape[-2:])} experts per token, the highest "
                f"{int(experts.max())}; the model chooses {self.experts_per_token} of {self.num_experts} in "
                f"{len(self.layers)} layers",
                where=REPLAY,
            )
        return experts


class Routing(TorchFunctionMode):
    """Records the experts that passes of a model choose while it is active, and may replace them.

    Args:
        mixture: the routers.
        experts: (n, routers, k) integers, of the n tokens of a pass; −1: the router chooses. None: always.
        first: number of choices before, when part of a pass is recomputed.

    Attributes:
        chosen: for each router of each pass, (n, k) int64 experts.
    """

    def __init__(self, mixture: Mixture, experts: Tensor | None = None, *, first: int = 0) -> None:
        super().__init__()
        self._mixture = mixture
        self._experts = experts
        self._first = first
        self.chosen: list[Tensor] = []
        self._outer: Routing | None = None

    def __enter__(self) -> Routing:
        self._outer, _ACTIVE.routing = _active(), self
        self.chosen = []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.routing = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """torch calls this in place of each function that the model calls, its routers' `topk` among them."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if not self._is_of_router(scores, result.indices):
            return result
        if self._experts is not None:
            ranks = _ranks()
            if ranks is not None:
                ranks.add(self._router, scores, self._experts)
            else:
                experts = self._replayed(self._experts, result.indices)
                result = torch.return_types.topk((scores.gather(-1, experts), experts))
        self.chosen.append(result.indices)
        return result

    @property
    def _router(self) -> int:
        """Number of the router whose turn it is."""
        return (self._first + len(self.chosen)) % len(self._mixture.layers)

    def _is_of_router(self, scores: Tensor, chosen: Tensor) -> bool:
        """Whether k of E were chosen; models also choose groups of experts, for example."""
        wanted = self._mixture.num_experts, self._mixture.experts_per_token
        return (scores.shape[-1], chosen.shape[-1]) == wanted

    def _replayed(self, of_routers: Tensor, chosen: Tensor) -> Tensor:
        """(…, k): the experts of the router whose turn it is; those that it chose where none are known.

        Args:
            of_routers: (n, routers, k), −1: not known.
        """
        experts = of_routers[:, self._router].view(chosen.shape).to(chosen)
        return torch.where(experts >= 0, experts, chosen)

    def again(self) -> Routing:
        """The same for a recomputation of what comes next."""
        return Routing(self._mixture, self._experts, first=self._first + len(self.chosen))

    def check(self, body: Any, num_passes: int) -> None:
        """Checks that every router has chosen once in each pass.

        Raises:
            UsageError: the model does not choose its experts once per layer by `topk`.
        """
        if len(self.chosen) != num_passes * len(self._mixture.layers):
            message = f"{type(body).__name__} does not choose the experts of a layer once, by `topk`"
            raise UsageError(message, where=REPLAY, fix="leave it out")

    def passes(self, body: Any, count: int) -> list[Tensor]:
        """For each of `count` passes, (n, routers, k) int64; raises as `check`."""
        self.check(body, count)
        routers = len(self._mixture.layers)
        of_tokens = [choice.flatten(0, -2) for choice in self.chosen]
        return [torch.stack(of_tokens[at : at + routers], 1) for at in range(0, len(of_tokens), routers)]


#: Score of a layer, see `RouteRanks`, from which its experts are not those of the router.
_FOREIGN = 0.5
#: Fewest experts of a layer that are judged.
_FEWEST_EXPERTS = 32


class RouteRanks:
    """How recorded experts rank among the scores of the model's own routers.

    While it is active, experts are ranked instead of replayed: replaying wrong ones in a layer would change
    what the routers after it read.

    The score of a layer is the mean of (rank − (k − 1)/2) / ((E − k)/2) over the recorded experts, rank 0
    being the router's highest score of E: 0 if the router would have chosen the same k experts, 1 on average
    if they have nothing to do with it, as after a shift of the layers, a permutation of the experts, or with
    the routes of a draft head. Every router is compared with the record of every layer, so that a shift has a
    name.

    Attributes:
        sums: (routers, layers, 2) float64: Σ of the above, and the number of experts; None: no pass yet.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def __enter__(self) -> RouteRanks:
        _ACTIVE.ranks = self
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.ranks = None

    def add(self, router: int, scores: Tensor, experts: Tensor) -> None:
        """Ranks the record of n tokens.

        Args:
            router: number of the router that computed the scores.
            scores: (…, E) of these tokens.
            experts: (n, routers, k); −1: not recorded.
        """
        (_, layers, k), scores = experts.shape, scores.detach().float().flatten(0, -2)
        count = scores.shape[-1]
        if count == k:  # every expert is chosen
            return
        if self.sums is None:
            self.sums = torch.zeros(layers, layers, 2, dtype=torch.float64)
        experts = experts.to(scores.device).long()
        ranks = scores.argsort(-1, descending=True).argsort(-1)
        places = ranks[:, None, :].expand(-1, layers, -1).gather(2, experts.clamp(min=0)).double()
        is_known = experts >= 0
        excess = ((places - (k - 1) / 2) / ((count - k) / 2)).where(is_known, 0.0)
        self.sums[router, :, 0] += excess.sum((0, 2)).cpu()
        self.sums[router, :, 1] += is_known.sum((0, 2)).cpu()


def foreign_routes(sums: Tensor) -> str:
    """What is wrong with recorded experts, in words; empty: they are those of the routers, or too few.

    Args:
        sums: (routers, layers, 2), as `RouteRanks.sums`, over all ranks.
    """
    counts = sums[..., 1]
    scores = sums[..., 0] / counts.clamp(min=1)
    own = scores.diagonal()
    judged = counts.diagonal() >= _FEWEST_EXPERTS
    foreign = (own > _FOREIGN) & judged
    if not foreign.any():
        return ""
    places = foreign.nonzero().squeeze(1)
    fitting = [place for place in places.tolist() if scores[place].min() < _FOREIGN / 2]
    shifts = Counter(int(scores[place].argmin()) - place for place in fitting).most_common(1)
    which = f"in {len(places)} of {int(judged.sum())} layers"
    worst = f"score up to {float(own[foreign].max()):.2f}; 0: the same, 1: unrelated"
    if shifts and 2 * shifts[0][1] >= len(places):
        shift = shifts[0][0]
        how = f"they are those of the layer {abs(shift)} {'later' if shift > 0 else 'earlier'}"
    else:
        how = "they fit no layer: experts in another order, or of another model, such as a draft head"
    return f"{which} the recorded experts are not those of the router ({worst}): {how}"


def _ranks() -> RouteRanks | None:
    return getattr(_ACTIVE, "ranks", None)


def recomputing() -> tuple[Any, Any]:
    """Contexts for an activation checkpoint: of the forward pass, and of its recomputation.

    The backward pass may run in another thread, and after the forward pass of another batch.
    """
    active = _active()
    return contextlib.nullcontext(), active.again() if active else contextlib.nullcontext()


def _active() -> Routing | None:
    return getattr(_ACTIVE, "routing", None)


def _refused(body: Any, key: str) -> UsageError:
    message = f"{type(body).__name__} reports no routing of its tokens to experts"
    return UsageError(message, where=key, fix="leave it out")


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
            raise _refused(self._body, AUX_LOSS)
        active = _active()
        chosen = active.chosen if active else [layer.topk(count).indices for layer in layers]
        routing = torch.stack(list(map(_routing, layers, chosen[-len(layers) :]))).mean(0)
        states = output.last_hidden_state
        cache = getattr(output, "past_key_values", None)
        joined = torch.cat([states.float(), routing.view(*states.shape[:-1], -1)], -1)
        return SimpleNamespace(last_hidden_state=joined, past_key_values=cache)


def _routing(logits: Tensor, chosen: Tensor) -> Tensor:
    """(N, 2·E): the router's probabilities of one layer, and 1 at the chosen experts (without gradient)."""
    counts = functional.one_hot(chosen.view(len(logits), -1), logits.shape[-1]).sum(-2)
    return torch.cat([logits.float().softmax(-1), counts.float()], -1)


def balance_loss(routing: Tensor, counts: Tensor, num_tokens: float) -> Tensor:
    """() the part of the mini-batch's auxiliary loss that some of its tokens have, with gradient.

    Args:
        routing: (m, 2·E) of these tokens, as in `PolicyOutput.routing`.
        counts: (E,) of all tokens of the mini-batch, number of those that go to each expert.
        num_tokens: their number.
    """
    n = max(num_tokens, 1.0)
    probabilities = routing[:, : len(counts)].sum(0) / n
    return len(counts) * (probabilities @ (counts / n).to(probabilities))
