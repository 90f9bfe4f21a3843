"""A teacher behind a server gives what the same model gives here; the server answers as vLLM does."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from rlctl.capabilities.sections import other_models
from rlctl.capabilities.teacher import served
from rlctl.capabilities.teacher.served import ServedTeacher
from rlctl.engine.deepspeed import FrozenPolicy
from rlctl.engine.layout import idle_inputs
from rlctl.engine.ranks import Ranks
from rlctl.errors import EnvironmentFailure, RunFailure, SpecError, UsageError
from rlctl.run_spec.load import load_spec
from tests.models import VOCABULARY, tiny_batch, tiny_model

CPU = torch.device("cpu")


class Tokenizer:
    """Token n is the text of n; `texts` has others."""

    all_special_ids = (0, 1)

    def __init__(self, **texts: str) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: list[int]) -> str:
        return self.texts.get(f"t{ids[0]}", str(ids[0]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """Its attributes can be changed; `seen` has the requests."""
    monkeypatch.setattr(served, "_PAUSE_S", 0.0)
    state = SimpleNamespace(
        model=tiny_model(seed=1), seen=[], failures=0, most=20, key="", knows_prompts=True, lie=None
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "teacher"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.seen.append(body)
            if state.failures:
                state.failures -= 1
                self.answer({"error": "busy"}, 503)
            elif body["prompt_logprobs"] > state.most:
                self.answer({"error": f"Requested prompt logprobs of {body['prompt_logprobs']}"}, 400)
            else:
                choices = [
                    {"index": place, "prompt_logprobs": listed(state, ids, body["prompt_logprobs"])}
                    for place, ids in enumerate(body["prompt"])
                ]
                self.answer({"choices": choices[::-1]})

        def answer(self, content: object, status: int = 200) -> None:
            if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
                content, status = {"error": "Unauthorized"}, 401
            raw = json.dumps(content).encode()
            if state.lie and self.command == "POST":
                raw = state.lie(content)
            self.send_response(status)
            if raw[:2] == b"\x1f\x8b":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield state
    http.shutdown()
    http.server_close()


def listed(state: SimpleNamespace, ids: list[int], count: int) -> list[dict[str, object] | None] | None:
    """By position: the most likely tokens, and the prompt's own, which may be one of them."""
    if not state.knows_prompts:
        return None
    with torch.no_grad():
        log_probs = state.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    found: list[dict[str, object] | None] = [None]
    for row, token in zip(log_probs[:-1], ids[1:], strict=True):
        order = row.argsort(descending=True).tolist()
        found.append(
            {
                str(other): {
                    "logprob": row[other].item(),
                    "rank": order.index(other) + 1,
                    "decoded_token": str(other),
                }
                for other in {token, *order[:count]}
            }
        )
    return found


def test_it_gives_what_the_model_gives(server) -> None:
    batch = tiny_batch(tiny_model(), 5)
    here = FrozenPolicy(
        tiny_model(seed=1), Ranks(0, 1, CPU), zero_stage=0, dtype=torch.float32, temperature=1.0
    )
    there = ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    server.failures = 2  # asked again
    torch.testing.assert_close(
        there.log_probs(batch.inputs), here.log_probs(batch.inputs), rtol=1e-5, atol=1e-5
    )
    ours, theirs = (one.top_k(batch.inputs, 4, VOCABULARY) for one in (here, there))
    torch.testing.assert_close(theirs[:, :5], ours[:, :5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs[:, 5].exp(), ours[:, 5].exp(), rtol=1e-4, atol=2e-7)
    assert torch.equal(theirs[:, 6:], ours[:, 6:])
    before = len(server.seen)
    assert there.top_k(idle_inputs(CPU), 4, VOCABULARY).shape[1] == 2 * 4 + 2
    assert len(server.seen) == before + bool(idle_inputs(CPU).scored.any())


def test_other_tokens_are_refused(server) -> None:
    ServedTeacher(server.url, Tokenizer(t0="a special one", t5="broken \ufffd"), CPU, max_length=64)
    with pytest.raises(UsageError, match="5 is '5', and 'five' in the policy's"):
        ServedTeacher(server.url, Tokenizer(t5="five"), CPU, max_length=64)


def test_a_server_that_cannot_score_is_refused_at_the_start(server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    with pytest.raises(EnvironmentFailure, match="HTTP 401"):
        ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    server.knows_prompts = False
    with pytest.raises(EnvironmentFailure, match="gives no log-probs of prompts"):
        ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    with pytest.raises(EnvironmentFailure, match="does not answer"):
        ServedTeacher("http://127.0.0.1:9/v1", Tokenizer(), CPU, max_length=64)


def test_a_list_longer_than_the_servers_is_refused(server) -> None:
    batch = tiny_batch(tiny_model(), 2)
    there = ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    with pytest.raises(RunFailure, match=r"HTTP 400.*prompt logprobs of 21"):
        there.top_k(batch.inputs, 21, VOCABULARY)
    with pytest.raises(RunFailure, match="not 4 below 3"):
        there.top_k(batch.inputs, 4, 3)


@pytest.mark.parametrize("setting", ["rollout.temperature=0.7", "rollout.exact_sampling=true"])
def test_what_a_server_cannot_score_is_refused(setting: str) -> None:
    given = ["algorithm.teacher.path=http://localhost:8000/v1", setting, "rollout.top_p=0.9"]
    with pytest.raises(SpecError) as caught:
        load_spec([], [], given)
    assert any("temperature 1" in problem.what for problem in caught.value.problems)
    spec = load_spec([], [], given[:1]).spec
    assert "algorithm.teacher.path" not in other_models(spec)


def changed(**places: object):
    """An answer whose values at some places are others; `__` stands for a dot."""

    def lie(content: dict) -> bytes:
        for place, value in places.items():
            *above, last = (int(part) if part.isdecimal() else part for part in place.split("__"))
            inner = content
            for part in above:
                inner = inner[part] if part != "first" else next(iter(inner.values()))
            inner[last] = value
        return json.dumps(content).encode()

    return lie


ENTRY = "choices__0__prompt_logprobs__3__first__logprob"
LIES = {
    "no JSON": lambda content: b"<html>",
    "nothing": lambda content: b"",
    "a list": lambda content: b"[]",
    "no choices": changed(choices=[]),
    "a prompt left out": lambda content: json.dumps({"choices": content["choices"][1:]}).encode(),
    "a prompt twice": changed(choices__0__index=0),
    "no number of the prompt": changed(choices__0__index="first"),
    "fewer positions": lambda content: changed(
        choices__0__prompt_logprobs=content["choices"][0]["prompt_logprobs"][:-1]
    )(content),
    "no entries": changed(choices__0__prompt_logprobs=[{}] * 9),
    "not of the own token": changed(choices__0__prompt_logprobs__3={"999": {"logprob": -1.0}}),
    "not of a position": changed(choices__0__prompt_logprobs__3=None),
    "NaN": changed(**{ENTRY: float("nan")}),
    "infinite": changed(**{ENTRY: float("-inf")}),
    "above 1": changed(**{ENTRY: 3.0}),
    "a text": changed(**{ENTRY: "-1.0"}),
    "a truth": changed(**{ENTRY: True}),
    "nothing at all": changed(**{ENTRY: None}),
    "an id that is none": changed(**{"choices__0__prompt_logprobs__3__x": {"logprob": -9.0}}),
    "probabilities above 1": lambda content: changed(
        choices__0__prompt_logprobs__3={
            token: {"logprob": -0.1} for token in content["choices"][0]["prompt_logprobs"][3]
        }
    )(content),
    "a compressed gigabyte": lambda content: gzip.compress(bytes(1 << 20)) * 64,
    "deep": lambda content: b"[" * 100_000,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_refused(server, lie: str) -> None:
    """Nothing of what it says is trained on, whatever it says."""
    batch = tiny_batch(tiny_model(), 3)
    there = ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
    server.lie = LIES[lie]
    with pytest.raises(RunFailure, match="the server"):
        there.top_k(batch.inputs, 4, VOCABULARY)
    if lie in {"a prompt twice", "probabilities above 1"}:  # one prompt, one token: no lie
        return
    with pytest.raises(RunFailure, match="the server"):
        there.log_probs(batch.inputs)
    with pytest.raises(EnvironmentFailure, match="the server"):
        ServedTeacher(server.url, Tokenizer(), CPU, max_length=64)
