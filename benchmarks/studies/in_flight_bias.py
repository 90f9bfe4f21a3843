"""The exact bias of sampling in flight, by enumeration: no response is drawn.

    python benchmarks/studies/in_flight_bias.py [--worlds 20] [--lr 0.01]

A random transformer with a key-value cache (vocabulary 3) samples responses of at most `LENGTH` tokens,
which end at token 0. Its weights change inside the response: versions 0, 1, 2 are exact steps of gradient
ascent on the expected reward, and `VERSIONS` says which one samples each token. Trained is version `TRAINED`.
The probability of every response there is, is computed as the sampler would compute it: with the cache of
older weights (`keep`), or with all earlier tokens read again by the new weights (`recompute`). The expected
gradient under a correction, with RLOO's baseline of a large group, is compared with the gradient of the
expected reward. Prints Markdown: |E ĝ − g| / |g|, mean over the worlds with the largest in brackets, and the
mean cosine of E ĝ and g; before it the distance of sampler and trained policy, and the largest |Δ log μ| of a
token between the caches.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlctl.algos.correction import correct
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Units

VOCABULARY, PROMPT, LENGTH, END = 3, (1, 2), 4, 0
#: Version of the weights that sample each token of a response, and version that is trained on them.
VERSIONS, TRAINED = (0, 0, 1, 2), 3
CACHES = ("recompute", "keep")


def _unbounded(level: str | None) -> CorrectionRules:
    return CorrectionRules(WeightRule(level, "truncate", upper=1e9))


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        loss: policy loss.
        old: π_old: the `sampler` (bypass mode), or the `trained` policy before its first update (decoupled).
        long: factor of responses of more than two tokens: as `rollout.max_age_updates` drops (0) or
            down-weights those that took longer and are therefore older.
    """

    rules: CorrectionRules
    loss: str = "reinforce"
    old: str = "sampler"
    long: float = 1.0


#: Correction → its rules.
SETTINGS = {
    "none": Setting(_unbounded(None)),
    "token weights": Setting(_unbounded("token")),
    "token weights, at most 2": Setting(CorrectionRules(WeightRule("token", "truncate", upper=2.0))),
    "geometric weights": Setting(_unbounded("geometric")),
    "sequence weights": Setting(_unbounded("sequence")),
    "sequence weights, at most 2": Setting(CorrectionRules(WeightRule("sequence", "truncate", upper=2.0))),
    "sequence weights in [0.5, 2], else rejected": Setting(
        CorrectionRules(
            WeightRule("sequence", "truncate", upper=1e9),
            (RejectRule("sequence", "ratio", "sum", 0.5, 2.0, "sequence"),),
        )
    ),
    "bypass mode, `ppo_clip`": Setting(_unbounded(None), "ppo_clip"),
    "decoupled, `ppo_clip`, token weights": Setting(_unbounded("token"), "ppo_clip", "trained"),
    "decoupled, `ppo_clip`, sequence weights": Setting(_unbounded("sequence"), "ppo_clip", "trained"),
    "sequence weights, long responses dropped": Setting(_unbounded("sequence"), long=0.0),
    "sequence weights, long responses × ½": Setting(_unbounded("sequence"), long=0.5),
}
#: Settings whose expected gradient is that of the expected reward, whatever the versions and the cache.
EXACT = ("sequence weights", "decoupled, `ppo_clip`, sequence weights")


@dataclass(frozen=True)
class Bias:
    """An expected gradient against that of the expected reward."""

    error: float  # |E ĝ − g| / |g|
    cosine: float


class World:
    """A policy in several versions, and the reward of every response.

    Args:
        lr: step of gradient ascent between two versions.
    """

    def __init__(self, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.responses = _responses()
        self.rewards = torch.randn(len(self.responses), dtype=torch.float64)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
        config = Qwen2Config(**shape, **heads, initializer_range=0.3, max_position_embeddings=16)
        config._attn_implementation = "eager"
        model = Qwen2ForCausalLM(config).double().eval()
        self.models = [model]
        for _ in range(TRAINED):
            model = copy.deepcopy(model)
            for weight, step in zip(model.parameters(), self._ascent(model), strict=True):
                weight.data += lr * step
            self.models.append(model)

    @property
    def units(self) -> Units:
        return Units.of_responses(torch.tensor([len(response) for response in self.responses]))

    def log_probs(self, model: Qwen2ForCausalLM) -> Tensor:
        """(M,) log π of every token of every response, with gradient."""
        rows = [torch.tensor([*PROMPT, *response]) for response in self.responses]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)
        found = logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        first = len(PROMPT) - 1
        return torch.cat([found[i, first : first + len(r)] for i, r in enumerate(self.responses)])

    def _ascent(self, model: Qwen2ForCausalLM) -> list[Tensor]:
        chances = self.units.episode.sum(self.log_probs(model)).exp()
        return list(torch.autograd.grad(chances @ self.rewards, list(model.parameters())))

    @torch.no_grad()
    def sampled_with(self, cache: str) -> Tensor:
        """(M,) log μ of every token of every response, as the sampler computes it."""
        found: dict[tuple[int, ...], Tensor] = {}
        open_ones: list[tuple[tuple[int, ...], DynamicCache]] = [((), DynamicCache())]
        while open_ones:
            prefix, past = open_ones.pop()
            past = copy.deepcopy(past) if cache == "keep" else DynamicCache()
            given = [*PROMPT, *prefix][past.get_seq_length() :]
            model = self.models[VERSIONS[len(prefix)]]
            output = model(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            found[prefix] = output.logits[0, -1].log_softmax(-1)
            if len(prefix) + 1 < LENGTH:
                open_ones += [
                    ((*prefix, token), output.past_key_values) for token in range(VOCABULARY) if token != END
                ]
        return torch.stack([found[r[:i]][token] for r in self.responses for i, token in enumerate(r)])

    @cached_property
    def truth(self) -> Tensor:
        """(P,): gradient of the expected reward of the trained version."""
        return torch.cat([part.flatten() for part in self._ascent(self.models[TRAINED])])

    def bias(self, rollout_log_probs: Tensor, setting: Setting) -> Bias:
        """Of the expected gradient, if tokens are sampled with these log-probs (M,)."""
        model, unit = self.models[TRAINED], self.units.episode
        log_probs = self.log_probs(model)
        both = log_probs.detach(), rollout_log_probs
        done = correct(*(x.float() for x in both), self.units, setting.rules)
        old = both[0] if setting.old == "trained" else both[1]
        factors = torch.where(unit.lengths > 2, setting.long, 1.0).double()
        chances = unit.sum(rollout_log_probs).exp() * (factors if setting.long == 0.0 else 1.0)
        chances = chances / chances.sum()  # a dropped response is in no baseline either
        advantages = unit.spread(self.rewards - chances @ self.rewards)
        weights = done.weights if setting.rules.weight.level else done.keep
        rule = LossRule(setting.loss)
        losses = policy_loss(rule, log_probs, old, advantages, unit, weights.double()).values
        loss = -(unit.spread(chances * factors) * losses).sum()
        found = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        cosine = torch.nn.functional.cosine_similarity(found, self.truth, dim=0)
        return Bias(float((found - self.truth).norm() / self.truth.norm()), float(cosine))

    def biases(self, cache: str) -> dict[str, Bias]:
        """Row of the table → its bias."""
        rollout = self.sampled_with(cache)
        return {name: self.bias(rollout, setting) for name, setting in SETTINGS.items()}


def _responses() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    open_ones: list[tuple[int, ...]] = [()]
    while open_ones:
        prefix = open_ones.pop()
        for token in range(VOCABULARY):
            response = (*prefix, token)
            (found if token == END or len(response) == LENGTH else open_ones).append(response)
    return found


def _cell(values: list[float]) -> str:
    form = ".0e" if max(values) < 1e-3 else ".2f"
    return f"{statistics.fmean(values):{form}} [{max(values):{form}}]"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01, help="step of gradient ascent between versions")
    options = parser.parse_args()
    with torch.enable_grad():
        worlds = [World(seed, options.lr) for seed in range(options.worlds)]
        found = {cache: [world.biases(cache) for world in worlds] for cache in CACHES}
    gaps, distances = [], []
    for world in worlds:
        fresh, stale = (world.sampled_with(cache) for cache in CACHES)
        gaps.append(float((fresh - stale).abs().max()))
        log_ratio = world.units.episode.sum(fresh - world.log_probs(world.models[TRAINED]))
        distances.append(float(log_ratio @ world.units.episode.sum(fresh).exp()))
    print(f"KL(sampler, trained), nats per response: {_cell(distances)}")
    print(f"largest |Δ log μ| of a token between the caches: {_cell(gaps)}\n")
    print("| correction | " + " | ".join(f"`{cache}`: bias | cosine" for cache in CACHES) + " |")
    print("|---|" + "---|" * 2 * len(CACHES))
    for name in SETTINGS:
        cells = []
        for cache in CACHES:
            rows = [biases[name] for biases in found[cache]]
            cells += [
                _cell([row.error for row in rows]),
                f"{statistics.fmean(row.cosine for row in rows):.2f}",
            ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
