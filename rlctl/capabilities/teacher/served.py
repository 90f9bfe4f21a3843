"""A teacher behind a server: a completions endpoint that gives log-probs of prompts, as vLLM's does."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import httpx
import torch
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json
from torch import Tensor

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError, in_words

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs

_KEY = "algorithm.teacher.path"
#: Environment variable with the server's key.
KEY_VARIABLE = "OPENAI_API_KEY"
_TRIES, _PAUSE_S, _TIMEOUT_S = 3, 5.0, 600.0
_PROBED = 128
#: Least mass of the tokens that are not listed: the sum of the listed ones is rounded like a float32.
_LEAST_TAIL = 1e-7
#: A log-prob, and the sum of probabilities of a list, may be above 0 and 1 by rounding.
_ROUNDING = 1e-3
#: Longest answer in bytes: of any request, and per token that it lists.
_ANSWER_BYTES = 1 << 20
_ENTRY_BYTES = 1 << 10


class _Entry(BaseModel):
    logprob: Annotated[float, Field(strict=True, allow_inf_nan=False, le=_ROUNDING)]
    decoded_token: str | None = None


class _Choice(BaseModel):
    index: int
    prompt_logprobs: list[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], _Entry] | None] | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


_Kind = TypeVar("_Kind", bound=BaseModel)


class ServedTeacher:
    """A `ListingPolicy` whose model runs in a server; its log-probs are those at temperature 1.

    Args:
        url: of the API, as `http://localhost:8000/v1`.
        tokenizer: the policy's; the server's must give the same tokens the same ids.

    Raises:
        EnvironmentFailure: the server cannot be reached, or refuses the request.
        UsageError: its tokens are not the policy's.
    """

    def __init__(self, url: str, tokenizer: Any, device: torch.device, *, max_length: int) -> None:
        self._url = url.rstrip("/")
        self._device = device
        is_local = httpx.URL(url).host in {"localhost", "127.0.0.1", "::1"}
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT_S,
            trust_env=not is_local,  # no proxy for a local server
        )
        try:
            self._model = self._ask(_Models, "GET", "models").data[0].id
            self._compare_tokens(tokenizer, min(_PROBED, max_length))
        except RunFailure as failure:
            fix = "start it, or correct the address (most end with /v1)"
            raise EnvironmentFailure(failure.what, where=f"{_KEY}={url}", fix=fix) from failure

    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`."""
        own = [entries[token].logprob for token, entries in self._scored(inputs, 0)]
        return torch.tensor(own, dtype=torch.float32, device=self._device)

    def top_k(self, inputs: ModelInputs, count: int, vocabulary: int) -> Tensor:
        """See `ListingPolicy.top_k`; the mass of the others is 1 minus that of the listed, at least 1e-7."""
        rows = []
        for token, entries in self._scored(inputs, count):
            ranked = sorted(entries.items(), key=lambda pair: -pair[1].logprob)[:count]
            listed = [entry.logprob for _, entry in ranked]
            ids = [int(other) for other, _ in ranked]
            if len(ids) < count or max(ids) >= vocabulary:
                message = (
                    f"the server lists {len(ids)} tokens up to {max(ids)}, not {count} below {vocabulary}"
                )
                raise RunFailure(message, where=f"{_KEY}={self._url}", fix="lower algorithm.teacher.top_k")
            rows.append([entries[token].logprob, *listed, *ids])
        found = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2 * count + 1)
        own, listed_log_probs, listed_ids = torch.split(found, [1, count, count], 1)
        tail = (1.0 - listed_log_probs.exp().sum(1, keepdim=True)).clamp(min=_LEAST_TAIL).log()
        return torch.cat([own, listed_log_probs, tail, listed_ids], 1).float().to(self._device)

    def _scored(self, inputs: ModelInputs, count: int) -> list[tuple[str, dict[str, _Entry]]]:
        """Of each scored token: its id, and log-probs of it and the `count` most likely ones, by id."""
        if not bool(inputs.scored.any()):
            return []
        ids = inputs.token_ids.cpu()
        prompts = [prompt.tolist() for prompt in torch.split(ids, inputs.lengths.tolist())]
        entries = [entry for prompt in self._prompts(prompts, count) for entry in prompt]
        places = zip(ids.tolist(), inputs.scored.tolist(), entries, strict=True)
        return [(str(token), entry) for token, is_scored, entry in places if is_scored and entry]

    def _prompts(self, prompts: Sequence[list[int]], count: int) -> list[list[dict[str, _Entry] | None]]:
        """Of each prompt and position: token id → log-prob and text, the prompt's own among them; None: the
        first position.

        Raises:
            RunFailure: the server gives none, or what cannot be log-probs of these prompts.
        """
        where = f"{_KEY}={self._url}"
        body = {"model": self._model, "prompt": prompts, "max_tokens": 1, "prompt_logprobs": count}
        num_entries = sum(map(len, prompts)) * (count + 1)
        choices = self._ask(_Answer, "POST", "completions", body, num_entries).choices
        if sorted(choice.index for choice in choices) != list(range(len(prompts))):
            raise RunFailure(f"the server answers {len(choices)} of {len(prompts)} prompts", where=where)
        scored = [choice.prompt_logprobs or [] for choice in sorted(choices, key=lambda each: each.index)]
        if not all(scored):
            message = "the server gives no log-probs of prompts"
            fix = "use one that does, such as vLLM"
            raise RunFailure(message, where=where, fix=fix)
        for prompt, entries in zip(prompts, scored, strict=True):
            if len(entries) != len(prompt):
                message = f"the server gives log-probs of {len(entries)} tokens for a prompt of {len(prompt)}"
                raise RunFailure(message, where=where)
            for token, listed in list(zip(prompt, entries, strict=True))[1:]:
                if listed is None or str(token) not in listed:
                    raise RunFailure(
                        f"the server gives no log-prob of token {token} of a prompt", where=where
                    )
                mass = sum(math.exp(entry.logprob) for entry in listed.values())
                if mass > 1.0 + _ROUNDING:
                    raise RunFailure(f"the server's probabilities of a token sum to {mass:.4g}", where=where)
        return scored

    def _compare_tokens(self, tokenizer: Any, count: int) -> None:
        """Compares the texts of tokens that are spread over the vocabulary."""
        ids = list(range(0, len(tokenizer), -(-len(tokenizer) // count)))
        [entries] = self._prompts([ids], 0)
        for number, entry in list(zip(ids, entries, strict=True))[1:]:
            own = tokenizer.decode([number])
            theirs = entry[str(number)].decoded_token if entry else None
            is_plain = number not in tokenizer.all_special_ids and "\ufffd" not in f"{own}{theirs}"
            if is_plain and theirs is not None and own != theirs:
                differs = f"{number} is {theirs!r}, and {own!r} in the policy's"
                message = f"its tokenizer is not the policy's: {differs}"
                fix = "name a model with the policy's tokenizer"
                raise UsageError(message, where=f"{_KEY}={self._url}", fix=fix)

    def _ask(
        self, kind: type[_Kind], method: str, path: str, body: Any = None, num_entries: int = 0
    ) -> _Kind:
        """The server's answer; after a failure of the connection or the server it is asked again.

        Raises:
            RunFailure: it fails repeatedly, refuses the request, or answers something else.
        """
        limit = _ANSWER_BYTES + _ENTRY_BYTES * num_entries
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            try:
                status, content = self._answer(method, f"{self._url}/{path}", body, limit)
            except (httpx.TransportError, httpx.DecodingError) as error:
                problem = f"the server does not answer: {error}"
                continue
            if len(content) > limit:
                problem = f"the server answers with more than {limit >> 20} MiB"
                break
            if httpx.codes.is_success(status):
                try:
                    return kind.model_validate(from_json(content))
                except ValidationError as error:
                    at = ".".join(map(str, error.errors()[0]["loc"]))
                    problem = f"the server's answer is wrong at {at}: {in_words(error.errors()[0])}"
                except ValueError as error:
                    problem = f"the server's answer is no JSON: {error}"
                break
            words = " ".join(content[:1000].decode(errors="replace").split())[:300]
            problem = f"the server answers HTTP {status}, {words}"
            if status < 500:
                break
        raise RunFailure(problem, where=f"{_KEY}={self._url}")

    def _answer(self, method: str, url: str, body: Any, limit: int) -> tuple[int, bytes]:
        """Status and content of an answer, not read beyond `limit` bytes, unpacked."""
        content = bytearray()
        with self._client.stream(method, url, json=body) as answer:
            for chunk in answer.iter_bytes(1 << 16):
                content += chunk
                if len(content) > limit:
                    break
            return answer.status_code, bytes(content)
