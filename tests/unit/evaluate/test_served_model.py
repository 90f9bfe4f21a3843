"""A model behind an OpenAI-compatible server: a stub that fails, limits, hangs and talks nonsense."""

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.evaluate import served_model
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.questions import load_questions
from rlctl.evaluate.request import EvaluateRequest

KEY = "sk-do-not-store-me"


class Server(ThreadingHTTPServer):
    """Answers `N+N?` rightly in even samples; `trouble` is answered first, one entry per request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = [{"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}]
        self.asked, self.headers_seen = [], []
        self.trouble = []
        self.refused = {}  # words of a prompt → (code, body)
        self.open = self.most_open = 0
        self.delay = 0.0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.server.models is None:
            self.answer(404, {"detail": "Not Found"})
        else:
            self.answer(200, {"object": "list", "data": self.server.models})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(body)
            server.headers_seen.append(dict(self.headers))
            server.open += 1
            server.most_open = max(server.most_open, server.open)
            trouble = server.trouble.pop(0) if server.trouble else None
        try:
            time.sleep(server.delay)
            self.respond(body, trouble)
        finally:
            with server.lock:
                server.open -= 1

    def respond(self, body, trouble):
        if callable(trouble):
            return trouble(self)
        if isinstance(trouble, tuple):
            return self.answer(*trouble)
        question = body["messages"][-1]["content"]
        for words, (code, said) in self.server.refused.items():
            if words in question:
                return self.answer(code, said)
        number = int(question.split("+")[0])
        text = f"#### {2 * number}" if body["seed"] % 2 else "#### 0"
        return self.answer(200, completion(text, length=body.get("max_tokens") == 3))

    def answer(self, code, body, **headers):
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def completion(text, *, length=False, **changes):
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    choice |= {"finish_reason": "length" if length else "stop"}
    return {"choices": [choice | changes], "usage": {"completion_tokens": len(text)}}


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def hang(handler):
    time.sleep(10.0)


def limited(**headers):
    return lambda handler: handler.answer(429, {"error": "slow down"}, **headers)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(served_model, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(served_model, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.delenv(served_model.KEY_VARIABLE, raising=False)


@pytest.fixture
def request_for(server, tmp_path):
    data = tmp_path / "sums.jsonl"
    lines = [{"question": f"{number}+{number}?", "answer": f"#### {2 * number}"} for number in range(1, 9)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make(**changes):
        own = {"engine": "openai", "base_url": server.url, "n": 2, "concurrency": 4}
        return EvaluateRequest(None, [str(data)], **(own | changes))

    return make


def quiet(doing, done, total):
    del doing, done, total


def ask(request):
    """The served model, and its responses to every question, ungraded and not stored."""
    model = served_model.ServedModel(request, load_questions(request.data).rows)
    found = {}
    for batch in model.sample([(q, i) for q in range(len(model.rows)) for i in range(request.n)]):
        found |= batch
    return model, found


def samples_of(out):
    return pq.read_table(out / "samples.parquet").to_pylist()


def test_the_figures_are_those_of_what_the_server_said(server, request_for, tmp_path, monkeypatch):
    monkeypatch.setenv(served_model.KEY_VARIABLE, KEY)
    server.delay = 0.05
    out, found = evaluate(request_for(out=tmp_path / "out", temperature=0.7, top_p=0.9), quiet)
    samples = samples_of(out)
    assert [(row["question_index"], row["sample_index"]) for row in samples] == [
        (question, sample) for question in range(8) for sample in range(2)
    ]
    for row in samples:
        assert row["reward"] == float(row["response"] != "#### 0")
        assert row["num_tokens"] == len(row["response"])
        assert row["messages"] == json.dumps([{"role": "user", "content": row["prompt"]}])
    assert found.scores[0].figures["avg"].value == pytest.approx(sum(row["reward"] for row in samples) / 16)
    assert 0.0 < found.scores[0].figures["avg"].value < 1.0
    assert found.scores[0].truncated_fraction.value == 0.0
    assert 1 < server.most_open <= 4
    assert len({body["seed"] for body in server.asked}) == 16
    body = server.asked[0]
    assert {"model": "tiny", "temperature": 0.7, "top_p": 0.9, "max_tokens": 512}.items() <= body.items()
    assert {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}.items() <= body.items()
    assert {headers["Authorization"] for headers in server.headers_seen} == {f"Bearer {KEY}"}
    for file in [*tmp_path.rglob("*")]:
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    results = json.loads((out / "results.json").read_text())
    assert results["model"]["base_url"] == server.url
    assert results["model"]["path"] == "tiny"


def test_an_answer_cut_off_at_the_limit_is_truncated(request_for, tmp_path):
    _, found = evaluate(request_for(out=tmp_path / "out", max_response_length=3), quiet)
    assert found.scores[0].truncated_fraction.value == 1.0


@pytest.mark.parametrize(
    "trouble",
    [
        (500, {"error": "broken"}),
        (503, b"<html>busy</html>"),
        limited(),
        (200, b'{"choices": [{"mess'),
        (200, {"choices": []}),
        (200, {"error": "not a completion"}),
        (200, completion("#### 0", finish_reason="abort")),
        (200, completion("#### 0") | {"usage": None}),
        hang_up,
        hang,
    ],
    ids=["500", "503", "limited", "cut off", "no choices", "error", "aborted", "no usage", "hang up", "hang"],
)
def test_what_passes_is_tried_again(server, request_for, trouble):
    server.trouble = [trouble, trouble]
    _, found = ask(request_for(timeout=2.0 if trouble is hang else 60.0))
    assert len(server.asked) == 16 + 2
    assert {pair: response.text for pair, response in found.items()} == {
        (q, i): response.text for (q, i), response in ask(request_for())[1].items()
    }
    assert len(found) == 16


def test_tries_are_bounded_and_what_was_sampled_stays(server, request_for, tmp_path, monkeypatch):
    monkeypatch.setenv(served_model.KEY_VARIABLE, KEY)
    server.refused = {"5+5": (500, {"error": f"no memory for {KEY}"})}
    with pytest.raises(RunFailure, match=rf"failed {served_model.TRIES} times in a row.*no memory") as told:
        evaluate(request_for(concurrency=1, out=tmp_path / "out"), quiet)
    assert KEY not in str(told.value)
    assert not (tmp_path / "out").exists()
    assert len(server.asked) == 2 * 4 + served_model.TRIES
    server.refused = {}
    server.asked.clear()
    _, found = evaluate(request_for(concurrency=3, out=tmp_path / "out"), quiet)
    assert found.num_stored == 8
    assert len(server.asked) == 8


def test_stored_responses_are_those_of_the_same_server_model_sampling_and_seed(server, request_for, tmp_path):
    first = request_for(out=tmp_path / "first")
    evaluate(first, quiet)
    assert evaluate(replace(first, out=tmp_path / "again", concurrency=1), quiet)[1].num_stored == 16
    assert evaluate(replace(first, out=tmp_path / "more", n=3), quiet)[1].num_stored == 16
    assert evaluate(replace(first, out=tmp_path / "seed", seed=2), quiet)[1].num_stored == 0
    assert evaluate(replace(first, out=tmp_path / "warm", temperature=0.5), quiet)[1].num_stored == 0
    server.models[0]["root"] = "/models/other"
    assert evaluate(replace(first, out=tmp_path / "other"), quiet)[1].num_stored == 0


def test_a_pause_the_server_asks_for_is_kept(server, request_for, monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(served_model.asyncio, "sleep", sleep)
    server.trouble = [limited(Retry_After="7"), limited(Retry_After="Wed, 21 Oct 2015 07:28:00 GMT")]
    ask(request_for(concurrency=1))
    assert pauses[0] == 7.0
    assert pauses[1] < 2.0  # no time is read from a date
    server.trouble = [limited(Retry_After="86400")]
    with pytest.raises(RunFailure, match="requests a pause of 86400 seconds"):
        ask(request_for(seed=3))


def test_a_refusal_ends_the_evaluation_at_once(server, request_for):
    server.trouble = [(400, {"error": "logit_bias is wrong"})]
    with pytest.raises(RunFailure, match=r"HTTP 400.*logit_bias is wrong"):
        ask(request_for(concurrency=1))
    assert len(server.asked) == 1


def test_a_server_of_standard_parameters_is_asked_without_the_others(server, request_for):
    server.trouble = [(400, {"error": "Unrecognized request argument supplied: top_k"})]
    model, found = ask(request_for(concurrency=1))
    assert len(found) == 16
    assert all("top_k" not in body for body in server.asked[1:])
    assert "its own defaults" in model.notes[0]


def test_responses_that_are_all_reasoning_are_reported(server, request_for):
    """A reasoning parser moves the text to another field; cut off within the reasoning is not unusual."""
    message = {"role": "assistant", "content": None, "reasoning_content": "#### 2"}
    server.trouble = [
        (200, completion("#### 2", message=message)),
        (200, completion("#### 2", message=message, length=True)),
    ]
    model, found = ask(request_for(concurrency=1))
    assert [found[0, i].text for i in range(2)] == ["", ""]
    [note] = model.notes
    assert note.startswith("1 response ended without content")


def test_content_in_parts_is_one_text(server, request_for):
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "is it 1?"}]},
        {"type": "text", "text": "#### "},
        {"type": "text", "text": "2"},
    ]
    server.trouble = [
        (200, completion("#### 2", message={"role": "assistant", "content": parts})),
        (200, completion("#### 2", message={"role": "assistant", "reasoning": "#### 1"})),
    ]
    _, found = ask(request_for(concurrency=1))
    assert [found[0, i].text for i in range(2)] == ["#### 2", ""]


def test_a_server_that_names_the_length_limit_otherwise(server, request_for):
    said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    server.trouble = [(400, {"error": {"message": said}})]
    _, found = ask(request_for(concurrency=1, max_response_length=7))
    assert len(found) == 16
    assert [body.get("max_completion_tokens") for body in server.asked] == [None] + [7] * 16
    assert all("max_tokens" not in body for body in server.asked[1:])


def test_questions_beyond_the_context_are_left_out_and_counted(server, request_for, tmp_path):
    said = {"error": {"message": "This model's maximum context length is 2048 tokens. However, …"}}
    server.refused = {"3+3": (400, said)}
    out, found = evaluate(request_for(out=tmp_path / "out"), quiet)
    assert found.about["data"]["num_overlong_prompts"] == 1
    assert found.scores[0].num_questions == 7
    assert {row["question_index"] for row in samples_of(out)} == set(range(8)) - {2}
    server.refused = {"?": (400, said)}
    with pytest.raises(UsageError, match="no question remains"):
        evaluate(request_for(seed=2), quiet)


@pytest.mark.parametrize(
    ("models", "name", "error", "words"),
    [
        ([{"id": "a"}, {"id": "b"}], None, UsageError, "several models: a, b"),
        ([{"id": "a"}], "c", UsageError, "no model `c`"),
        ([], None, UsageError, "lists no models"),
        (None, None, UsageError, "lists no models"),
    ],
)
def test_the_model_is_named_or_the_only_one(server, request_for, models, name, error, words):
    server.models = models
    with pytest.raises(error, match=words):
        evaluate(replace(request_for(), model_or_run=name), quiet)


def test_a_server_that_lists_nothing_is_asked_by_name(server, request_for):
    server.models = None
    ask(replace(request_for(), model_or_run="mine"))
    assert {body["model"] for body in server.asked} == {"mine"}


def test_a_server_that_is_not_there_is_an_environment_failure(server, request_for):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EnvironmentFailure, match="does not answer"):
        evaluate(request_for(base_url=url), quiet)


def test_it_works_where_an_event_loop_is_running_as_in_a_notebook(request_for):
    async def cell():
        return ask(request_for())[1]

    assert len(asyncio.run(cell())) == 16


def test_an_interruption_keeps_what_was_sampled(request_for, tmp_path):
    def interrupt(doing, done, total):
        if done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(request_for(out=tmp_path / "out", concurrency=1), interrupt)
    assert not (tmp_path / "out").exists()
    assert evaluate(request_for(out=tmp_path / "out"), quiet)[1].num_stored >= 5


@pytest.mark.parametrize(
    ("code", "fix"), [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "--base-url")]
)
def test_a_refusal_says_what_to_do(server, request_for, code, fix):
    server.trouble = [(code, {"error": "no"})]
    with pytest.raises(RunFailure, match=f"HTTP {code}") as caught:
        ask(request_for(concurrency=1))
    assert fix in caught.value.fix


def test_an_answer_that_cannot_be_read_is_shown(server, request_for):
    server.trouble = [(200, {"error": {"message": "model is loading"}})] * served_model.TRIES
    with pytest.raises(RunFailure, match="model is loading"):
        ask(request_for(concurrency=1))


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}é"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(server, request_for, monkeypatch, key):
    monkeypatch.setenv(served_model.KEY_VARIABLE, key)
    with pytest.raises(UsageError, match="not valid in an HTTP header") as caught:
        ask(request_for())
    assert KEY not in str(caught.value)


def test_a_server_that_repeats_the_key_does_not_get_it_stored(server, request_for, monkeypatch):
    monkeypatch.setenv(served_model.KEY_VARIABLE, KEY)
    server.trouble = [(200, completion(f"Bearer {KEY}: 4"))]
    _, found = ask(request_for(concurrency=1))
    assert "Bearer ***: 4" in {response.text for response in found.values()}


def test_a_server_that_fails_to_list_its_models_is_quoted(server, request_for, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.answer(500, {"detail": "out of memory"}))
    with pytest.raises(EnvironmentFailure, match=r"HTTP 500.*out of memory"):
        ask(request_for())
