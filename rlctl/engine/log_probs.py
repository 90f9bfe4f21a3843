"""Log-probs of sampled tokens without an (N, V) tensor in float32.

The model's body runs over rows that `rlctl.engine.layout` makes. Its output head, and what the architecture
does to logits after it, such as scaling or soft-capping, run over the scored tokens only, in chunks: the
float32 logits of a chunk are freed before the next one, and recomputed in the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.batch import ModelInputs
from rlctl.engine.layout import BodyReader, reads_past_only, same_values
from rlctl.engine.protocol import PolicyOutput
from rlctl.errors import UsageError
from rlctl.prefix import UNSUPPORTED, base_name, body_of, evaluating
from rlctl.run_spec.memory import logits_at_once


class PolicyModule(nn.Module):
    """A causal language model that returns log-probs of given tokens.

    Args:
        temperature: logits are divided by it, as when sampling.
        probe: test now what the model supports; False: in the first pass, because until then its weights are
            partitioned among the ranks. Then `share_prompts` must be False.
        options: of `BodyReader`.

    Attributes:
        head: applies the output head to scored states.
        reader: runs the body.

    Raises:
        UsageError: log-probs of the model cannot be computed in this way, or it does not support sequence
            parallelism; with `probe` False in the first pass.
    """

    def __init__(self, model: Any, temperature: float, *, probe: bool = True, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.head = ChunkedHead(model, temperature)
        self.reader = BodyReader(model, **options)
        if probe:
            self._probe()

    def forward(
        self,
        inputs: ModelInputs,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        tail: bool = False,
        top_k: tuple[int, int] | None = None,
        routing: bool = False,
    ) -> PolicyOutput:
        """Log-probs and entropy of the M scored tokens; on request more.

        Args:
            inputs: any number of sequences. Distributions are restricted to their sets in `kept` and
                renormalised; log-probs of the tokens in `most_likely` are returned too.
            entropy_grad: compute the entropy with gradient.
            sum_pi_squared: also return the collision probability of the next-token distribution.
            tail: the log-probs of `most_likely` tokens end with that of all other tokens together.
            top_k: (K, V): list the K most likely of the first V tokens instead of `most_likely`: (M, 2K + 1),
                the K log-probs, that of all other tokens, and the K tokens themselves.
            routing: also return the routing of the scored tokens to experts.
        """
        if self.reader.packs is None:
            self._probe()
        states, own = self.reader.states(inputs, routing=routing)
        routes = None
        if routing:
            width = self.model.config.get_text_config().hidden_size
            states, routes = states[:, :width].to(self.model.dtype), states[:, width:]
        tokens = inputs.tokens
        kept = inputs.kept
        listed = None if inputs.most_likely is None else inputs.most_likely.padded()[0]
        if own is not None:
            tokens = tokens[own]
            kept = kept and kept[own]
            listed = None if listed is None else listed[own]
        given = (states, tokens, listed, *((kept.counts, kept.ids) if kept else ()))
        asked = {"entropy_grad": entropy_grad, "sum_pi_squared": sum_pi_squared, "tail": tail, "top_k": top_k}
        figures = self.head(*given, **asked)
        if own is not None and self.reader.sequence:
            figures = self.reader.sequence.of_all(figures, own, len(inputs.tokens))
        return PolicyOutput(
            log_probs=figures[0],
            entropy=figures[1] if entropy_grad else figures[1].detach(),
            sum_pi_squared=figures[2].detach() if sum_pi_squared else None,
            most_likely=None if listed is None and top_k is None else figures[2 + sum_pi_squared :].T,
            routing=routes,
        )

    @torch.no_grad()
    def logits(self, inputs: ModelInputs) -> Tensor:
        """(M, V) float32 logits that predict the scored tokens, before temperature."""
        states, _ = self.reader.states(inputs)
        return self.head.function()(states).float()

    def _probe(self) -> None:
        for name, weight in self.model.named_parameters():
            if not weight.detach().sum().isfinite():  # a sum needs no memory
                message = f"{name} contains NaN or infinite numbers"
                where = self.model.name_or_path
                raise UsageError(message, where=f"model.path={where}", fix="use another copy of the model")
        self.head.is_linear = _head_is_linear(self.model)
        reader = self.reader
        reader.probe()
        if not reader.packs and not reader.agree(reads_past_only(self.model)):
            message = f"{type(self.model).__name__} reads tokens after those that it predicts"
            raise UsageError(message, where="model.path", fix="name a model of another architecture")
        if reader.sequence:
            if not reader.packs:
                message = (
                    f"{type(self.model).__name__} does not support packed rows, so ranks cannot share them"
                )
                raise UsageError(message, where="engine.sequence_parallel", fix="set it to 1")
            reader.sequence.install(self.model)


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
        self._logits_at_once: int | None = None  # not known before the first pass

    def function(self) -> Callable[[Tensor], Tensor]:
        """From states (N, H) to logits (N, V)."""
        [model] = self._unregistered
        function: Callable[[Tensor], Tensor] = model.get_output_embeddings().forward
        return function if self.is_linear else logits_after_body(model)

    def forward(
        self,
        states: Tensor,
        tokens: Tensor,
        most_likely_ids: Tensor | None = None,
        *kept: Tensor,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        tail: bool = False,
        top_k: tuple[int, int] | None = None,
    ) -> Tensor:
        """(2 or more, N) float32: log-probs, entropies; on request Σ_v π(v)², further log-probs.

        Args:
            states: (N, H), of the model's body.
            tokens: (N,) int64, the tokens chosen.
            most_likely_ids: (N, K) int64, tokens whose log-probs are computed too.
            kept: counts and ids of the sets to which the distributions are restricted, see `TokenLists`.
            entropy_grad, sum_pi_squared, tail, top_k: as in `PolicyModule.forward`.
        """
        head = self.function()

        def token_outputs(
            states: Tensor, tokens: Tensor, most_likely: Tensor | None, *kept: Tensor
        ) -> Tensor:
            logits = head(states).float() / self.temperature
            if kept:
                logits.masked_fill_(_dropped(logits, *kept), torch.finfo(logits.dtype).min)
            log_total = torch.logsumexp(logits, -1)
            chosen = logits.gather(-1, tokens[:, None]).squeeze(-1) - log_total
            with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
                probs = torch.exp(logits - log_total[:, None])
                entropy = log_total - torch.linalg.vecdot(probs, logits)
            probs = probs.detach()
            squares = [torch.linalg.vecdot(probs, probs)] if sum_pi_squared else []
            values = torch.stack([chosen, entropy, *squares])
            if top_k is not None:
                most_likely = logits[:, : top_k[1]].topk(top_k[0]).indices
            if most_likely is None:
                return values
            listed = [(logits.gather(-1, most_likely) - log_total[:, None]).T]
            if tail or top_k:  # not 1 − the sum of the listed ones, which cancels
                others = logits.scatter(-1, most_likely, torch.finfo(logits.dtype).min)
                listed.append((others.logsumexp(-1) - log_total)[None])
            if top_k:  # float32 holds integers up to 2²⁴
                listed.append(most_likely.T.float())
            return torch.cat([values, *listed])

        if self._logits_at_once is None:
            gpu = torch.cuda.get_device_properties(states.device) if states.is_cuda else None
            self._logits_at_once = logits_at_once(gpu.total_memory if gpu else None)
        num_chunks = max(1, -(-len(states) * self._vocabulary // self._logits_at_once))
        if num_chunks == 1:
            return token_outputs(states, tokens, most_likely_ids, *kept)
        lists = [None] * num_chunks if most_likely_ids is None else most_likely_ids.tensor_split(num_chunks)
        chunks = [states.tensor_split(num_chunks), tokens.tensor_split(num_chunks), lists]
        if kept:
            counts = kept[0].tensor_split(num_chunks)
            sizes: list[int] = torch.stack([count.sum() for count in counts]).tolist()
            chunks += [counts, torch.split(kept[1], sizes)]
        parts = [
            checkpoint(token_outputs, *chunk, use_reentrant=False) for chunk in zip(*chunks, strict=True)
        ]
        return torch.cat(parts, dim=1)


def _dropped(logits: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
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
    name = base_name(model) or ""
    shell = copy.copy(model)
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
    body = body_of(model)
    head = model.get_output_embeddings()
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
    message = f"{type(model).__name__} has no output head that can be run separately"
    raise UsageError(message, where="model.path", fix="name a model of another architecture")


def _computes(function: Callable[[Tensor], Tensor], states: Tensor, wanted: Tensor) -> bool:
    try:
        return same_values(function(states), wanted)
    except UNSUPPORTED:  # states of another shape, for example
        return False
