"""A teacher behind a server gives what the same model gives here; the server answers as vLLM does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from rlctl.engine import served_teacher
from rlctl.engine.deepspeed import FrozenPolicy
from rlctl.engine.layout import idle_inputs
from rlctl.engine.ranks import Ranks
from rlctl.engine.served_teacher import ServedTeacher
from rlctl.errors import EnvironmentFailure, RunFailure, SpecError, UsageError
from rlctl.spec.load import load_spec
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
    monkeypatch.setattr(served_teacher, "_PAUSE_S", 0.0)
    state = SimpleNamespace(
        model=tiny_model(seed=1), seen=[], failures=0, most=20, key="", knows_prompts=True
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
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

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
    assert spec.other_models["algorithm.teacher.path"] is None
