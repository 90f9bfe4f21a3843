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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel

from rlctl.batch import TokenLists, Turn
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.engines import EngineCapabilities, EngineContext
from rlctl.rollout.protocol import Policy, Request, Sampling
from rlctl.rollout.seeds import step_seed, turn_seed

FILE = Path(__file__).with_suffix(".json")
STEPS = 4
PROMPTS, SIBLINGS, LONGEST, LISTED, LETTERS, END = 24, 4, 12, 8, range(2, 23), 1
#: Log-probs at the second token of the responses of these places, if the engine is told to damage some.
DAMAGE = {3: math.nan, 17: -math.inf, 30: -45.0}


class Params(BaseModel, extra="forbid"):
    """Faults: responses that the engine aborts, log-probs that are damaged, versions that lag behind."""

    fault: Literal["none", "abort", "damage", "lag"] = "none"


class Stored:
    """Ignores the policy's weights, but writes how they change to `change.jsonl` in the run directory.

    Attributes:
        places: seed of a request → index of its response in the batch over all ranks.
    """

    def __init__(self, context: EngineContext) -> None:
        self.context, self.version = context, 0
        spec = context.spec
        self.places = {
            turn_seed(step_seed(spec.trainer.seed, step), group, member): group * spec.rollout.n + member
            for step in range(1, 1 + STEPS)
            for group in range(spec.data.train_batch_size)
            for member in range(spec.rollout.n)
        }
        self.of_prompt = {tuple(entry["prompt"]): entry for entry in json.loads(FILE.read_text())}
        self.weights = {name: tensor.detach().clone() for name, tensor in context.model.state_dict().items()}

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """Request number k with a prompt gets stored response number k, for any seed."""
        kind, asked = "greedy" if sampling.greedy else "responses", Counter[tuple[int, ...]]()
        turns = []
        for request in requests:
            prompt = tuple(request.token_ids)
            response = self.of_prompt[prompt][kind][asked[prompt]]
            asked[prompt] += 1
            turns.append(_turn(response, sampling, self.version))
            if not sampling.greedy and self.context.params.fault != "none":
                turns[-1] = self._faulty(turns[-1], response, request.seed)
        return turns

    def _faulty(self, turn: Turn, response: dict[str, Any], seed: int) -> Turn:
        fault, place = self.context.params.fault, self.places[seed]
        if fault == "lag":
            return replace(turn, versions=turn.versions - response["lag"])
        if fault == "abort":
            return replace(turn, finish_reason="abort" if place % 7 == 5 else turn.finish_reason)
        turn.log_probs[1] = DAMAGE.get(place, turn.log_probs[1])
        return turn

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Writes the norm of the change since the last sync, and three projections on random signs.

        Without the biases of keys: attention does not depend on them, so their gradient is rounding, and
        AdamW steps as far for it as for any other.
        """
        self.version, sums = policy_version, torch.zeros(4, dtype=torch.float64)
        for name, tensor in policy.weights():
            if name.endswith("k_proj.bias"):
                continue
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


def _turn(response: dict[str, Any], sampling: Sampling, version: int) -> Turn:
    """A response, with the lists that are asked for."""
    tokens, log_probs = torch.tensor(response["tokens"]), torch.tensor(response["log_probs"])
    ids = torch.tensor(response["listed"], dtype=torch.int32)
    listed = torch.tensor(response["listed_log_probs"])
    kept = most_likely = None
    if sampling.with_kept:
        log_probs = log_probs - listed.logsumexp(-1)
        kept = TokenLists(torch.full_like(tokens, LISTED, dtype=torch.int32), ids.flatten())
    if count := sampling.num_most_likely:
        ids, listed = ids[:, :count], listed[:, :count]
        listed = listed - listed.logsumexp(-1, keepdim=True) if sampling.with_kept else listed
        counts = torch.full_like(tokens, count, dtype=torch.int32)
        most_likely = TokenLists(counts, ids.flatten(), listed.flatten())
    versions = torch.full_like(tokens, version)
    return Turn(tokens, log_probs, versions, response["finish"], kept, most_likely)


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
