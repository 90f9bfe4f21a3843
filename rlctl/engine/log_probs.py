"""Log-probs of sampled tokens without a (B, T, V) tensor in float32.

The model's body runs once, over packed rows (a prompt that several responses share is computed once). Its
output head, and what the architecture does to logits after it, such as scaling or soft-capping, run over the
scored tokens only, in chunks: the float32 logits of a chunk are freed before the next one, and recomputed in
the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.batch import ModelInputs, TokenLists
from rlctl.engine.inputs import (
    can_pack,
    reads_past_only,
    same_values,
    scored_states,
    used_columns,
    widened,
)
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.routing import RoutedBody
from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.errors import UsageError
from rlctl.prefix import UNSUPPORTED, base_name, body_of, can_share_prefix, evaluating
from rlctl.spec.memory import logits_at_once

#: Numbers per sketch of a gradient.
SKETCH_SIZE = 1024


class PolicyModule(nn.Module):
    """A causal language model that returns log-probs of given responses.

    Args:
        temperature: logits are divided by it, as when sampling.
        share_prompts: if rows cannot be packed, compute a prompt that adjacent rows share once, if the model
            supports this.
        probe: test now what the model supports; False: in the first pass, because until then its weights are
            partitioned among the ranks. Then `share_prompts` must be False.
        sequence: this rank's sequence-parallel group; None: each rank processes its own rows.

    Attributes:
        head: applies the output head to scored states.

    Raises:
        UsageError: log-probs of the model cannot be computed in this way, or it does not support sequence
            parallelism; with `probe` False in the first pass.
    """

    def __init__(
        self,
        model: Any,
        temperature: float,
        *,
        share_prompts: bool = True,
        probe: bool = True,
        sequence: SequenceParallel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.head = ChunkedHead(model, temperature)
        self.shares_prompts = share_prompts and can_share_prefix(model)
        self.sequence = sequence
        self._is_probed = False
        self.packs = False
        if probe:
            self._probe()

    def forward(
        self,
        inputs: ModelInputs,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        sketch: bool = False,
        routing: bool = False,
    ) -> tuple[Tensor, ...]:
        """Log-probs and entropy of the responses; on request Σ_v π(v)² and sketches of ∇ log π.

        Args:
            inputs: any number of rows. Distributions are restricted to their sets in `kept` and renormalised;
                log-probs of the tokens in `most_likely` are returned too.
            entropy_grad: compute the entropy with gradient.
            sum_pi_squared: also return the collision probability of the next-token distribution.
            sketch: also return a sketch of the gradient of each log-prob with respect to the output head.
            routing: also return the routing of the scored tokens to experts, last.

        Raises:
            UsageError: a sketch is requested for a model without a separate output head.

        Returns:
            Two or three (B, T) float32, 0.0 where not scored: log-probs (with gradient), entropy (with
            gradient only with `entropy_grad`) and on request Σ_v π(v)² (without gradient). Then, for the N
            scored tokens in row order, the (N, M) log-probs of `most_likely` (with gradient), if there are
            any, and (N, K) sketches, if requested.
        """
        if not self._is_probed:
            self._probe()
        scored = inputs.scored
        body = body_of(self.model)
        states, own = scored_states(
            RoutedBody(body) if routing else body,
            inputs,
            packs=self.packs,
            share_prompts=self.shares_prompts,
            split=self.sequence.own_tokens if self.sequence else None,
        )
        routes: list[Tensor] = []
        if routing:
            width = self.model.config.get_text_config().hidden_size
            states, routes = states[:, :width].to(self.model.dtype), [states[:, width:]]
        tokens = inputs.responses[scored]
        listed = inputs.most_likely
        most_likely_ids = None if listed is None else listed.padded(scored)[0]
        kept = None
        if inputs.kept is not None:
            counts, ids = inputs.kept.at(scored)
            kept = TokenLists(counts[:, None], ids)
        if own is not None:
            tokens, kept = tokens[own], kept and kept[own]
            most_likely_ids = None if most_likely_ids is None else most_likely_ids[own]
        given = (states, tokens, most_likely_ids, *((kept.counts[:, 0], kept.ids) if kept else ()))
        if sketch and not self.head.is_linear:
            what = f"{type(self.model).__name__} does not compute its logits with its output head alone"
            key = "algorithm.rollout_correction.measure_grad_error"
            raise UsageError(what, where=key, fix="set it, and rollout_correction.auto, to false")
        figures = self.head(*given, entropy_grad=entropy_grad, sum_pi_squared=sum_pi_squared, sketch=sketch)
        if own is not None and self.sequence:
            figures = self.sequence.of_all(figures, own, int(scored.sum()))
        num_most_likely = 0 if most_likely_ids is None else most_likely_ids.shape[1]
        per_token, more = figures.tensor_split([3 if sum_pi_squared else 2])
        most_likely, sketches = more.tensor_split([num_most_likely])
        chosen, entropy, *squared = per_token
        found = (chosen, entropy if entropy_grad else entropy.detach(), *(part.detach() for part in squared))
        empty = torch.zeros(scored.shape, dtype=torch.float32, device=scored.device)
        tensors = [empty.masked_scatter(scored, values) for values in found]
        tensors += [] if most_likely_ids is None else [most_likely.T]
        return (*tensors, *([sketches.detach().T] if sketch else []), *routes)

    def _probe(self) -> None:
        self.head.is_linear = _head_is_linear(self.model)
        self.packs = can_pack(body_of(self.model))
        self._is_probed = True
        if not self.packs and not reads_past_only(self.model):
            what = f"{type(self.model).__name__} reads padding, or tokens after those that it predicts"
            raise UsageError(what, where="model.path", fix="name a model of another architecture")
        if self.sequence:
            if not self.packs:
                what = f"{type(self.model).__name__} does not support packed rows, so ranks cannot share them"
                raise UsageError(what, where="engine.sequence_parallel", fix="set it to 1")
            self.sequence.install(self.model)


class ChunkedHead(nn.Module):
    """Statistics of next-token distributions, computed in chunks.

    A separate module, so that partitioned weights of the head are gathered once for all chunks of a pass:
    chunks do not call the head's hooks.

    Args:
        model: the causal language model; its head is not registered here a second time.

    Attributes:
        temperature: logits are divided by it.
        is_linear: logits are the head's output; otherwise the architecture changes them afterwards.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.is_linear = True
        self.temperature = temperature
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._unregistered = [model]

    def forward(
        self,
        states: Tensor,
        tokens: Tensor,
        most_likely_ids: Tensor | None = None,
        kept_counts: Tensor | None = None,
        kept_ids: Tensor | None = None,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        sketch: bool = False,
    ) -> Tensor:
        """(2 or more, N) float32: log-probs, entropies; on request Σ_v π(v)², further log-probs, sketches.

        Args:
            states: (N, H), of the model's body.
            tokens: (N,) int64, the tokens chosen.
            most_likely_ids: (N, M) int64, tokens whose log-probs are computed too.
            kept_counts, kept_ids: the sets to which the distributions are restricted, see `TokenLists.at`.
            entropy_grad, sum_pi_squared, sketch: as in `PolicyModule.forward`.
        """
        [model] = self._unregistered
        head = model.get_output_embeddings().forward if self.is_linear else logits_after_body(model)

        def token_outputs(
            states: Tensor,
            tokens: Tensor,
            most_likely: Tensor | None,
            counts: Tensor | None = None,
            ids: Tensor | None = None,
        ) -> Tensor:
            logits = head(states).float() / self.temperature
            if counts is not None and ids is not None:
                logits.masked_fill_(_dropped(counts, ids, logits), torch.finfo(logits.dtype).min)
            log_total = torch.logsumexp(logits, -1)
            chosen = logits.gather(-1, tokens[:, None]).squeeze(-1) - log_total
            with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                probs = torch.exp(logits - log_total[:, None])
                entropy = log_total - torch.linalg.vecdot(probs, logits)
            probs = probs.detach()
            squares = [torch.linalg.vecdot(probs, probs)] if sum_pi_squared else []
            found = torch.stack([chosen, entropy, *squares])
            if most_likely is not None:
                found = torch.cat([found, (logits.gather(-1, most_likely) - log_total[:, None]).T])
            if not sketch:
                return found
            with torch.no_grad():  # ∇ log π(y) = (e_y − π) ⊗ state, up to the constant 1 / temperature
                of_token = (-probs).scatter_add(1, tokens[:, None], torch.ones_like(probs[:, :1]))
                outer = OuterSketch.of(probs.shape[1], states.shape[1], states.device)
                sketches = outer(of_token, states).T
            return torch.cat([found, sketches])

        gpu = torch.cuda.get_device_properties(states.device) if states.is_cuda else None
        most = logits_at_once(gpu.total_memory if gpu else None)
        num_chunks = max(1, -(-len(states) * self._vocabulary // most))
        if num_chunks == 1:
            return token_outputs(states, tokens, most_likely_ids, kept_counts, kept_ids)
        lists = [None] * num_chunks if most_likely_ids is None else most_likely_ids.tensor_split(num_chunks)
        given = [states.tensor_split(num_chunks), tokens.tensor_split(num_chunks), lists]
        if kept_counts is not None and kept_ids is not None:
            counts = kept_counts.tensor_split(num_chunks)
            sizes: list[int] = torch.stack([part.sum() for part in counts]).tolist()
            given += [counts, torch.split(kept_ids, sizes)]
        parts = [checkpoint(token_outputs, *chunk, use_reentrant=False) for chunk in zip(*given, strict=True)]
        return torch.cat(parts, dim=1)


def policy_output(
    policy: Callable[..., tuple[Tensor, ...]], inputs: ModelInputs, **asked: bool
) -> PolicyOutput:
    """The policy's output for the scored tokens, computed over the columns that at least one row uses.

    Args:
        policy: a `PolicyModule`, or the engine that wraps it.
        asked: `entropy_grad`, `sum_pi_squared`, `sketch`, see `PolicyModule.forward`.
    """
    found = list(policy(inputs=used_columns(inputs), **asked))
    routing = found.pop() if asked.get("routing") else None
    sketch = found.pop() if asked.get("sketch") else None
    most_likely = None if inputs.most_likely is None else found.pop()
    log_probs, entropy, *more = (widened(values, inputs) for values in found)
    return PolicyOutput(log_probs, entropy, more[0] if more else None, sketch, most_likely, routing)


def _dropped(counts: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
    """(N, V) bool: tokens outside each set; all False for an empty set, which stands for the vocabulary."""
    rows = torch.arange(len(counts), device=counts.device)
    dropped = (counts > 0)[:, None].expand_as(logits).clone()
    dropped[rows.repeat_interleave(counts.long()), ids.long()] = False
    return dropped


class _GivenBody(nn.Module):
    """Stands for a model's body: its output is the embeddings that it is given. Otherwise it is the body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["_body"] = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _BodyOutput(inputs_embeds)


@dataclass(frozen=True, slots=True)
class _BodyOutput:
    """Output of a body, which architectures read by name or as a tuple; what they pass on besides is None."""

    last_hidden_state: Tensor

    def __getitem__(self, _: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


def logits_after_body(model: Any) -> Callable[[Tensor], Tensor]:
    """The part of a model after its body: (N, H) states → (N, V) logits.

    It is the model's own forward pass with another body, so that it scales or soft-caps logits as the
    architecture does.
    """
    name, shell = base_name(model) or "", copy.copy(model)
    shell._modules = model._modules | {name: _GivenBody(getattr(model, name))}
    return lambda states: type(model).forward(shell, inputs_embeds=states[None]).logits[0]


@torch.no_grad()
def _head_is_linear(model: Any) -> bool:
    """Whether the logits are the output of the head, even if they are large.

    Instead of a list of architectures, this compares both computations with the whole model on a short probe,
    and with each other on states 1000 times as large.

    Raises:
        UsageError: neither computation gives the model's logits.
    """
    body, head = body_of(model), model.get_output_embeddings()
    if body is not None and head is not None:
        probe = torch.arange(4, device=next(model.parameters()).device)[None]
        probe = probe % model.config.get_text_config().vocab_size
        after = logits_after_body(model)
        with evaluating(model):
            whole = model(input_ids=probe, use_cache=False).logits[0]
            states = body(input_ids=probe, use_cache=False).last_hidden_state[0]
            if _computes(after, states, whole):
                return _computes(head, 1000 * states, after(1000 * states))
            if _computes(head, states, whole):
                return True
    what = f"{type(model).__name__} has no output head that can be run separately"
    raise UsageError(what, where="model.path", fix="name a model of another architecture")


def _computes(function: Callable[[Tensor], Tensor], states: Tensor, wanted: Tensor) -> bool:
    try:
        return same_values(function(states), wanted)
    except UNSUPPORTED:  # states of another shape, for example
        return False


@dataclass(frozen=True, slots=True)
class OuterSketch:
    """Sketches of outer products: K numbers that preserve inner products.

    The gradient of log π(y) with respect to the output head's weight is (e_y − π) ⊗ h / temperature:
    vocabulary × hidden numbers per token. TensorSketch (Pham and Pagh 2013) reduces it to K numbers without
    forming it, as the convolution of the count sketches of both factors. E[s(a) · s(b)] = a · b, with a
    variance of at most 11/K |a|² |b|² (Avron, Nguyen and Woodruff 2014, lemma 6).

    Attributes, for each factor (D,): the index (of K) to which an entry is added, and its sign.
    """

    rows: Tensor
    row_signs: Tensor
    columns: Tensor
    column_signs: Tensor

    @staticmethod
    @lru_cache(maxsize=2)
    def of(num_rows: int, num_columns: int, device: torch.device) -> OuterSketch:
        """Returns the same sketch on every rank and in every step."""
        draw = torch.Generator().manual_seed(0)
        found = []
        for size in (num_rows, num_columns):
            found.append(torch.randint(SKETCH_SIZE, (size,), generator=draw).to(device))
            found.append((torch.randint(2, (size,), generator=draw) * 2.0 - 1.0).to(device))
        return OuterSketch(*found)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """(N, K) float32 sketches of (N, rows) ⊗ (N, columns)."""
        left = _counted(left.float(), self.rows, self.row_signs)
        right = _counted(right.float(), self.columns, self.column_signs)
        product: Tensor = torch.fft.irfft(torch.fft.rfft(left) * torch.fft.rfft(right), n=SKETCH_SIZE)
        return product


def _counted(values: Tensor, places: Tensor, signs: Tensor) -> Tensor:
    empty = torch.zeros(len(values), SKETCH_SIZE, device=values.device)
    return empty.index_add_(1, places, values * signs)
