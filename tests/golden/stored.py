"""A rollout engine that answers every prompt with stored responses: `rollout.name=…/stored.py:engine`.

    python -m tests.golden.stored      # writes stored.json anew; all golden figures change with it

One entry per prompt: `prompt` (token ids), `responses`, and `greedy`, the response to a greedy request. A
response has one entry per sampled token in every list, and no padding. `log_probs` are those of a sampler
that differs from the policy by noise of its logits; a few tokens differ much. `listed` are its most likely
tokens, `listed_log_probs` theirs. `lag`: updates by which the weights that sampled the response are older
than the engine's.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts, TokenLists
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.assemble import assemble
from rlctl.rollout.engines import EngineCapabilities, EngineContext
from rlctl.rollout.protocol import Policy, Sampled, Sampling

FILE = Path(__file__).with_suffix(".json")
PROMPTS, SIBLINGS, LONGEST, LISTED, LETTERS, END = 24, 4, 12, 8, range(2, 23), 1
#: Log-probs at the second token of the responses of these places, if the engine is told to damage some.
DAMAGE = {3: math.nan, 17: -math.inf, 30: -45.0}


class Params(BaseModel, extra="forbid"):
    """Faults: responses that the engine aborts, log-probs that are damaged, versions that lag behind."""

    fault: Literal["none", "abort", "damage", "lag"] = "none"


class Stored:
    """Ignores the policy's weights, but writes how they change to `change.jsonl` in the run directory."""

    def __init__(self, context: EngineContext) -> None:
        self.context, self.version = context, 0
        self.of_prompt = {tuple(entry["prompt"]): entry for entry in json.loads(FILE.read_text())}
        self.weights = {name: tensor.detach().clone() for name, tensor in context.model.state_dict().items()}

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """The stored responses, whatever the seed."""
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        entries = [self.of_prompt[tuple(ids[mask].tolist())] for ids, mask in pairs]
        kind = "greedy" if sampling.greedy else "responses"
        found = [response for entry in entries for response in entry[kind][:n]]
        places = [group * n + i for group in prompts.group_ids.tolist() for i in range(n)]
        fault = "none" if sampling.greedy else self.context.params.fault
        rollouts = assemble(
            prompts,
            _sampled(found, sampling),
            n=n,
            tokenizer=self.context.tokenizer,
            policy_version=self.version,
        )
        if fault == "lag":
            lags = torch.tensor([response["lag"] for response in found])
            return replace(rollouts, policy_version=rollouts.policy_version - lags)
        if fault == "abort":
            finish = rollouts.finish_reason.clone()
            finish[torch.tensor(places) % 7 == 5] = FINISH_REASONS.index("abort")
            return replace(rollouts, finish_reason=finish)
        for row, place in enumerate(places if fault == "damage" else ()):
            rollouts.rollout_log_probs[row, 1] = DAMAGE.get(place, rollouts.rollout_log_probs[row, 1])
        return rollouts

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Writes the norm of the change since the last sync, and three projections on random signs."""
        self.version, sums = policy_version, torch.zeros(4, dtype=torch.float64)
        for name, tensor in policy.weights():
            new = tensor.detach().float().clone()
            change = (new - self.weights[name].float()).double().flatten()
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            signs = torch.randint(2, (3, len(change)), generator=draw) * 2.0 - 1.0
            sums += torch.cat([change.square().sum()[None], signs.double() @ change])
            self.weights[name] = new
        if self.context.rank == 0:
            line = json.dumps([math.sqrt(sums[0]), *sums[1:].tolist()])
            with (self.context.run_dir / "change.jsonl").open("a") as file:
                file.write(line + "\n")

    def close(self) -> None:
        """Nothing is open."""


@ROLLOUT_ENGINES.register(
    label="Stored responses",
    params=Params,
    capabilities=EngineCapabilities(starts_with_policy=True, checks_syncs=False, reports_kept="always"),
)
def engine(context: EngineContext) -> Stored:
    """The engine of the golden runs."""
    return Stored(context)


def _sampled(found: list[dict[str, Any]], sampling: Sampling) -> Sampled:
    """The responses padded, with the lists that are asked for."""
    lengths = torch.tensor([len(response["tokens"]) for response in found])

    def padded(name: str, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(response[name], dtype=dtype) for response in found]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def lists(count: int, shift: bool) -> TokenLists:
        ids = [ids[:count] for response in found for ids in response["listed"]]
        log_probs = torch.tensor([p[:count] for response in found for p in response["listed_log_probs"]])
        log_probs -= log_probs.logsumexp(-1, keepdim=True) if shift else 0.0
        counts = (torch.arange(int(lengths.max())) < lengths[:, None]).int() * count
        return TokenLists(counts, torch.tensor(ids).flatten().int(), log_probs.flatten())

    log_probs = padded("log_probs", torch.float32)
    kept = None
    if sampling.with_kept:
        totals = [torch.tensor(response["listed_log_probs"]).logsumexp(-1) for response in found]
        log_probs = log_probs - torch.nn.utils.rnn.pad_sequence(totals, batch_first=True)
        kept = replace(lists(LISTED, shift=False), log_probs=None)
    most_likely = lists(sampling.num_most_likely, sampling.with_kept) if sampling.num_most_likely else None
    reasons = torch.tensor([FINISH_REASONS.index(response["finish"]) for response in found], dtype=torch.int8)
    return Sampled(padded("tokens", torch.int64), log_probs, lengths, reasons, kept, most_likely)


@torch.no_grad()
def _response(model: Any, prompt: list[int], draw: torch.Generator, greedy: bool) -> dict[str, Any]:
    """Samples from the most likely tokens of a policy with noise; the last token is often the end."""
    length, lag = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((3, 15), (0, 4)))
    tokens: list[int] = []
    lists: list[list[int]] = []
    log_probs, listed_log_probs = [], []
    while len(tokens) < min(length, LONGEST):
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
        logits = (logits + 0.1 * torch.randn(len(logits), generator=draw)).log_softmax(-1)
        ids = [token for token in logits.argsort(descending=True).tolist() if token in LETTERS][:LISTED]
        place = 0 if greedy else int(torch.multinomial(logits[ids].exp(), 1, generator=draw))
        if len(tokens) + 1 == length:
            ids[-1], place = END, LISTED - 1
        outlier = 0.9 * (float(torch.rand((), generator=draw)) < 0.03) * (-1) ** len(tokens)
        log_probs.append(round(min(float(logits[ids[place]]) + outlier, -0.05), 4))
        tokens.append(ids[place])
        lists.append(ids)
        listed_log_probs.append([round(value, 4) for value in logits[ids].tolist()])
    return {
        "tokens": tokens,
        "log_probs": log_probs,
        "finish": "stop" if tokens[-1] == END else "length",
        "lag": lag,
        "listed": lists,
        "listed_log_probs": listed_log_probs,
    }


def _entries() -> list[dict[str, Any]]:
    from tests.models import tiny_model

    model, draw, found = tiny_model(), torch.Generator().manual_seed(7), []
    for number in range(PROMPTS):
        prompt = [2 + number % 21, *torch.randint(2, 23, (1 + number % 5,), generator=draw).tolist()]
        responses = [_response(model, prompt, draw, greedy=False) for _ in range(SIBLINGS)]
        greedy = [_response(model, prompt, draw, greedy=True)]
        found.append({"prompt": prompt, "responses": responses, "greedy": greedy})
    return found


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in _entries()) + "\n]\n")
    print(f"wrote {FILE}")
