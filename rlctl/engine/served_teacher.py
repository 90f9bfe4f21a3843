"""A teacher behind a server: a completions endpoint that gives log-probs of prompts, as vLLM's does."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import httpx
import torch
from torch import Tensor

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs

_KEY = "algorithm.teacher.path"
#: Environment variable with the server's key.
KEY_VARIABLE = "OPENAI_API_KEY"
_TRIES, _PAUSE_S, _TIMEOUT_S = 3, 5.0, 600.0
_PROBED = 128
#: Least mass of the tokens that are not listed: the sum of the listed ones is rounded like a float32.
_LEAST_TAIL = 1e-7


class ServedTeacher:
    """A `Teacher` whose model runs in a server; its log-probs are those at temperature 1.

    Args:
        url: of the API, as `http://localhost:8000/v1`.
        tokenizer: the policy's; the server's must give the same tokens the same ids.

    Raises:
        EnvironmentFailure: the server cannot be reached, or refuses the request.
        UsageError: its tokens are not the policy's.
    """

    def __init__(self, url: str, tokenizer: Any, device: torch.device, *, max_length: int) -> None:
        self._url, self._device = url.rstrip("/"), device
        is_local = httpx.URL(url).host in {"localhost", "127.0.0.1", "::1"}
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT_S,
            trust_env=not is_local,  # no proxy for a local server
        )
        try:
            self._model = self._ask("GET", "models")["data"][0]["id"]
            self._compare_tokens(tokenizer, min(_PROBED, max_length))
        except RunFailure as failure:
            fix = "start it, or correct the address (most end with /v1)"
            raise EnvironmentFailure(failure.what, where=f"{_KEY}={url}", fix=fix) from failure

    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`."""
        found = [entries[token]["logprob"] for token, entries in self._scored(inputs, 0)]
        return torch.tensor(found, dtype=torch.float32, device=self._device)

    def top_k(self, inputs: ModelInputs, count: int, vocabulary: int) -> Tensor:
        """See `Teacher.top_k`; the others' mass is one minus that of the listed tokens, at least 1e-7."""
        rows = []
        for token, entries in self._scored(inputs, count):
            ranked = sorted(entries.items(), key=lambda pair: -pair[1]["logprob"])[:count]
            listed, ids = [entry["logprob"] for _, entry in ranked], [int(other) for other, _ in ranked]
            if len(ids) < count or max(ids) >= vocabulary:
                what = f"the server lists {len(ids)} tokens up to {max(ids)}, not {count} below {vocabulary}"
                raise RunFailure(what, where=f"{_KEY}={self._url}", fix="lower algorithm.teacher.top_k")
            rows.append([entries[token]["logprob"], *listed, *ids])
        found = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2 * count + 1)
        own, listed_log_probs, listed_ids = torch.split(found, [1, count, count], 1)
        tail = (1.0 - listed_log_probs.exp().sum(1, keepdim=True)).clamp(min=_LEAST_TAIL).log()
        return torch.cat([own, listed_log_probs, tail, listed_ids], 1).float().to(self._device)

    def _scored(self, inputs: ModelInputs, count: int) -> list[tuple[str, dict[str, Any]]]:
        """Of each scored token: its id, and log-probs of it and the `count` most likely ones, by id."""
        if not bool(inputs.scored.any()):
            return []
        ids = inputs.token_ids.cpu()
        prompts = [prompt.tolist() for prompt in torch.split(ids, inputs.lengths.tolist())]
        entries = [entry for prompt in self._prompts(prompts, count) for entry in prompt]
        places = zip(ids.tolist(), inputs.scored.tolist(), entries, strict=True)
        return [(str(token), entry) for token, is_scored, entry in places if is_scored]

    def _prompts(self, prompts: Sequence[list[int]], count: int) -> list[list[dict[str, Any]]]:
        """Of each prompt and position: token id → log-prob and text."""
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "prompt_logprobs": count}
        choices = sorted(self._ask("POST", "completions", body)["choices"], key=lambda one: one["index"])
        if any(not choice.get("prompt_logprobs") for choice in choices):
            what, fix = "the server gives no log-probs of prompts", "use one that does, such as vLLM"
            raise RunFailure(what, where=f"{_KEY}={self._url}", fix=fix)
        return [choice["prompt_logprobs"] for choice in choices]

    def _compare_tokens(self, tokenizer: Any, count: int) -> None:
        """Compares the texts of tokens that are spread over the vocabulary."""
        ids = list(range(0, len(tokenizer), -(-len(tokenizer) // count)))
        [entries] = self._prompts([ids], 0)
        for number, entry in list(zip(ids, entries, strict=True))[1:]:
            own, theirs = tokenizer.decode([number]), entry[str(number)].get("decoded_token")
            is_plain = number not in tokenizer.all_special_ids and "\ufffd" not in f"{own}{theirs}"
            if is_plain and theirs is not None and own != theirs:
                differs = f"{number} is {theirs!r}, and {own!r} in the policy's"
                what = f"its tokenizer is not the policy's: {differs}"
                fix = "name a model with the policy's tokenizer"
                raise UsageError(what, where=f"{_KEY}={self._url}", fix=fix)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """The server's answer; after a failure of the connection or the server it is asked again.

        Raises:
            RunFailure: it fails repeatedly, or refuses the request.
        """
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            try:
                answer = self._client.request(method, f"{self._url}/{path}", json=body)
            except httpx.TransportError as error:
                problem = f"the server does not answer: {error}"
                continue
            if answer.is_success:
                return answer.json()
            problem = f"the server answers HTTP {answer.status_code}, {' '.join(answer.text.split())[:300]}"
            if answer.status_code < 500:
                break
        raise RunFailure(problem, where=f"{_KEY}={self._url}")
