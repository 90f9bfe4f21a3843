"""Servers that answer with garbage, slowly or not at all, while they sample and while weights are updated.

Whatever comes, tokens that were trained on are those of a good answer, or the run ends and names the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.rollout import server_client, vllm_server, weight_sync
from rlctl.rollout.completions import Completion
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.vllm_server import GENERATE
from tests.unit.rollout.stub_server import Handler, Server, engine_on, sample

#: No answers of vLLM, at whatever path.
GARBAGE = (
    *("", "null", "[]", "{}", "7", '"text"', "<html>Bad gateway</html>", '{"choices": [', "\0\0\0"),
    *('{"choices": []}', '{"choices": null}', '{"choices": [7]}', '{"choices": [{}, {}]}', "[" * 5000),
    '{"error": {"message": "no"}}',
)
#: Changes of a good choice of `/v1/completions`.
CHANGES: dict[str, dict[str, Any]] = {
    "no tokens": {"token_ids": None},
    "texts as tokens": {"token_ids": ["a", "b"]},
    "a token too many": {"token_ids": [3] * 50},
    "negative tokens": {"token_ids": [-1]},
    "huge tokens": {"token_ids": [10**30]},
    "nested tokens": {"token_ids": [[1], [2]]},
    "no log-probs": {"logprobs": None},
    "log-probs are texts": {"logprobs": {"token_logprobs": ["a"], "top_logprobs": None}},
    "too few log-probs": {"logprobs": {"token_logprobs": [], "top_logprobs": None}},
    "probabilities for log-probs": {"token_ids": [3], "logprobs": {"token_logprobs": [0.9]}},
}


class Faulty(Handler):
    """Answers some requests with garbage: those to `paths`, as long as `texts` has some."""

    paths: tuple[str, ...] = ()
    texts: ClassVar[list[str]] = []
    changes: ClassVar[list[dict[str, Any]]] = []

    def answer(self, code: int, body: dict[str, Any] | str) -> None:
        path = self.path.partition("?")[0]
        if code == 200 and path in Faulty.paths:
            if Faulty.texts:
                body = Faulty.texts.pop()
            elif Faulty.changes and isinstance(body, dict):
                body["choices"][0] |= Faulty.changes.pop()
        super().answer(code, body)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server_client, weight_sync):
        monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("tests.unit.rollout.stub_server.Handler", Faulty)
    found = Server()
    Faulty.paths, Faulty.texts, Faulty.changes = (), [], []
    found.RequestHandlerClass = Faulty
    yield found
    found.shutdown()
    found.server_close()


#: What would pass for tokens, or log-probs, of a turn of `n` tokens if only their number were looked at.
OF_ANY_LENGTH: dict[str, Callable[[int], dict[str, Any]]] = {
    "nested tokens": lambda n: {"token_ids": [[3]] * n},
    "tokens as texts": lambda n: {"token_ids": ["3"] * n},
    "tokens with decimals": lambda n: {"token_ids": [3.7] * n},
    "true tokens": lambda n: {"token_ids": [True] * n},
    "nested log-probs": lambda n: {"logprobs": {"token_logprobs": [[-1.0]] * n, "top_logprobs": None}},
    "lists of another turn": lambda n: {
        "logprobs": {"token_logprobs": [-1.0] * n, "top_logprobs": [{"token_id:3": -1.0}] * (n + 1)}
    },
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_what_has_the_right_number_is_no_answer_either(name: str, n: int) -> None:
    good = {"token_ids": [3] * n, "logprobs": {"token_logprobs": [-1.0] * n, "top_logprobs": None}}
    assert read(good).token_ids.tolist() == [3] * n
    with pytest.raises(ValueError, match="tokens"):
        read(good | OF_ANY_LENGTH[name](n))


def read(choice: dict[str, Any]) -> Completion:
    """The checked completion of an answer with one choice."""
    completion = vllm_server.completion_of(json.dumps({"choices": [choice]}).encode(), has_lists=True)
    vllm_server._check(completion, limit=10)
    return completion


def as_tuples(turns: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [(turn.token_ids.tolist(), turn.log_probs.tolist()) for turn in turns]


def test_garbage_while_sampling_is_asked_again(server: Server, tmp_path: Path) -> None:
    engine, model = engine_on([server], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    good = as_tuples(sample(engine))
    Faulty.paths = ("/v1/completions",)
    for text in GARBAGE:
        Faulty.texts = [text]
        assert as_tuples(sample(engine)) == good, text
        assert not Faulty.texts
    for name, change in CHANGES.items():
        Faulty.changes = [change]
        assert as_tuples(sample(engine)) == good, name
        assert not Faulty.changes
    engine.close()


def test_garbage_without_end_names_the_server(server: Server, tmp_path: Path) -> None:
    engine, model = engine_on([server], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    Faulty.paths, Faulty.texts = ("/v1/completions",), ["<html>"] * 1000
    with pytest.raises(RunFailure, match="something else than vLLM does") as caught:
        sample(engine)
    assert caught.value.where == server.url
    engine.close()


def test_garbage_in_a_weight_update_is_repeated(server: Server, tmp_path: Path) -> None:
    """The next tokens have the version of the update, whatever was answered in between."""
    engine, model = engine_on([server], tmp_path)
    version = 0
    for path in ("/reset_prefix_cache", "/weight_info"):
        for text in GARBAGE:
            if path == "/reset_prefix_cache" and (not text or text.startswith("{")):
                continue  # as of older versions
            version += 1
            Faulty.paths, Faulty.texts = (path,), [text]
            engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=version)
            turns = sample(engine, n=1)
            assert {v for turn in turns for v in turn.versions.tolist()} == {version}
    assert torch.isfinite(turns[0].log_probs).all()
    engine.close()


def test_garbage_in_flight_is_asked_again(server: Server, tmp_path: Path) -> None:
    engine, model = engine_on([server], tmp_path, "rollout.in_flight=true", "rollout.max_staleness=1")
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    good = as_tuples(sample(engine))
    Faulty.paths = (GENERATE,)
    for text in GARBAGE:
        Faulty.texts = [text]
        try:
            assert as_tuples(sample(engine)) == good, text
        except RunFailure as failure:
            assert "does not report which weights" in failure.what, text  # noqa: PT017
    engine.close()
