"""Models behind an API: what a server may do, and what becomes of it."""

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.evaluate import api_model
from rlctl.evaluate.compare import compare
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.request import EvaluateRequest
from rlctl.evaluate.store import ResponseStore
from tests.processes import Job

LIMIT = 50


def answered(content="7", finish_reason="stop", tokens=3, choices=1, **message):
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return 200, {"choices": [choice] * choices, "usage": {"completion_tokens": tokens}}


class Server(ThreadingHTTPServer):
    """Answers the k-th request by `script[k]`, later ones by the last; a function of the body is called."""

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.bodies, self.keys = script, [], []
        self.pieces = False  # whether an answer comes with pauses between its pieces
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            place = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
        answer = self.server.script[min(place, len(self.server.script) - 1)]
        status, content, *headers = answer(body) if callable(answer) else answer
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status if self.path == "/v1/chat/completions" else 404)
        for name, value in dict(*headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self._write(data)
        except OSError:  # nobody waits for it any more
            self.close_connection = True

    def _write(self, data):
        for place in range(0, len(data), 1 if self.server.pieces else len(data)):
            self.wfile.write(data[place : place + (1 if self.server.pieces else len(data))])
            if self.server.pieces:
                time.sleep(0.05)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(api_model, "RETRY_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    started = []

    def start(*script):
        server = Server(script)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def request_of(tmp_path):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": "7"}) + "\n" for i in range(3)))

    def make(server, name="out", **options):
        url = f"openai:http://127.0.0.1:{server.server_port}/v1"
        given = {"n": 2, "reward": "exact", "engine": url, "max_response_length": LIMIT, "batch_size": 2}
        return EvaluateRequest("some-model", [str(data)], out=tmp_path / name, **(given | options))

    return make


@pytest.fixture
def ask(request_of):
    def run(server, name="out", **options):
        out, evaluation = evaluate(request_of(server, name, **options), lambda *_: None)
        return evaluation, pq.read_table(out / "samples.parquet").to_pylist()

    return run


def test_each_response_is_a_request_of_its_own_seed(serve, ask):
    server = serve(answered())
    evaluation, samples = ask(server, temperature=0.5, top_p=0.9)
    assert evaluation.scores[0].figures["avg"].value == 1.0
    assert [sample["num_tokens"] for sample in samples] == [3] * 6
    first = server.bodies[0]
    assert {
        "model": "some-model",
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": LIMIT,
    }.items() <= first.items()
    assert len({body["seed"] for body in server.bodies}) == 6
    assert server.keys == [None] * 6
    assert evaluation.about["model"]["sha256"] is None
    assert any("the server" in note for note in evaluation.notes)


def test_a_server_that_ignores_n_gives_no_more_responses(serve, ask):
    server = serve(answered(choices=4))
    _, samples = ask(server)
    assert (len(samples), len(server.bodies)) == (6, 6)


@pytest.mark.parametrize(
    "busy",
    [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
        (429, "", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        (429, "too many", {"Retry-After": "soon"}),
        (500, "<html>"),
        (503, {"detail": "loading"}),
    ],
)
def test_a_busy_server_is_asked_again(serve, ask, busy):
    server = serve(busy, busy, answered())
    _, samples = ask(server, batch_size=1)
    assert (len(samples), len(server.bodies)) == (6, 8)


def test_a_server_that_stays_busy_is_said_and_what_it_sampled_is_kept(serve, ask):
    server = serve(answered(), answered(), (429, {"error": {"message": "quota is used up"}}))
    with pytest.raises(RunFailure, match=r"8 tries .* failed; the last: status 429: quota is used up"):
        ask(server, batch_size=1)
    server.script = [answered()]
    before = len(server.bodies)
    _, samples = ask(server)
    assert (len(samples), len(server.bodies) - before) == (6, 4)


def test_a_slow_answer_keeps_no_other_one_and_is_not_lost(serve, ask):
    others = threading.Event()

    def slow(body):
        assert others.wait(60)
        return answered("8", tokens=4)

    def last(body):
        if len(server.bodies) == 6:
            others.set()
        return answered()

    server = serve(slow, last)
    _, samples = ask(server)
    assert sorted(sample["num_tokens"] for sample in samples) == [3, 3, 3, 3, 3, 4]
    assert len(server.bodies) == 6


def test_an_answer_that_takes_too_long_is_asked_for_again(serve, ask, monkeypatch):
    monkeypatch.setattr(api_model, "TIMEOUT_S", 0.3)
    closing = threading.Event()

    def never(body):
        closing.wait(60)
        return answered("8")

    server = serve(never, answered())
    try:
        evaluation, samples = ask(server, batch_size=1)
    finally:
        closing.set()
    assert [sample["reward"] for sample in samples] == [1.0] * 6
    assert (evaluation.scores[0].figures["avg"].value, len(server.bodies)) == (1.0, 7)
    assert server.bodies[0] == server.bodies[1]  # the same seed


def test_an_answer_in_pieces_has_no_more_time(serve, ask, monkeypatch):
    monkeypatch.setattr(api_model, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(api_model, "TRIES", 2)
    server = serve(answered())
    server.pieces = True
    with pytest.raises(RunFailure, match=r"2 tries .* ReadTimeout: the answer is not complete after 0.2 s"):
        ask(server, batch_size=1)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ((401, {"error": {"message": "no key"}}), EnvironmentFailure, "no key"),
        ((404, {"error": {"message": "no such model"}}), UsageError, "no such model"),
        ((400, {"error": {"message": "maximum context length is 9"}}), UsageError, "maximum context length"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), UsageError, "302"),
        ((200, "<html>"), RunFailure, "not JSON"),
        ((200, {"choices": []}), RunFailure, "not of OpenAI's form"),
        ((200, {"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]}), RunFailure, "usage"),
        ((200, []), RunFailure, "not of OpenAI's form"),
    ],
)
def test_what_a_server_refuses_or_garbles_is_said(serve, ask, answer, kind, text):
    server = serve(answer)
    with pytest.raises(kind, match=text):
        ask(server, batch_size=1)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "reward", "truncated"),
    [
        (answered("7", reasoning_content="6 or 7?"), 1.0, False),
        (answered("7", reasoning="6 or 7?"), 1.0, False),
        (answered("8", reasoning_content="7"), 0.0, False),
        (answered("", reasoning_content="7"), 0.0, False),
        (answered(None, "length", LIMIT, reasoning_content="7"), 0.0, True),
        (answered("", "stop", LIMIT, reasoning_content="7"), 0.0, True),  # says another reason
        (answered("<think>7", "length", LIMIT), 0.0, True),
        (answered("7", "length", 3), 1.0, True),
        (answered("7", "stop", LIMIT), 1.0, True),
        (answered([{"type": "text", "text": "7"}]), 1.0, False),
        (answered("", "tool_calls", tool_calls=[{"id": "a"}]), 0.0, False),
        (answered("7", "eos"), 1.0, False),
    ],
)
def test_thoughts_and_responses_that_are_cut_off(serve, ask, answer, reward, truncated):
    evaluation, samples = ask(serve(answer), n=1)
    assert [(sample["reward"], sample["truncated"]) for sample in samples] == [(reward, truncated)] * 3
    assert evaluation.scores[0].truncated_fraction.value == float(truncated)


@pytest.mark.parametrize("reason", ["content_filter", "abort", None, "error"])
def test_what_the_server_ended_is_excluded_and_counted(serve, ask, reason):
    server = serve(answered("7", reason), answered())
    evaluation, samples = ask(server, batch_size=1)
    assert len(samples) == 5
    assert evaluation.about["data"]["num_aborted_responses"] == 1
    with pytest.raises(RunFailure, match="ended all"):
        ask(serve(answered("7", reason)), "other")


def test_newer_models_call_the_limit_otherwise(serve, ask):
    def refuse(body):
        wrong = "max_tokens" in body
        return (400, {"error": {"message": "use 'max_completion_tokens'"}}) if wrong else answered()

    server = serve(refuse)
    _, samples = ask(server, batch_size=1)
    assert (len(samples), len(server.bodies)) == (6, 7)


def test_the_key_is_sent_and_nowhere_stored(serve, ask, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-mine")
    server = serve(answered())
    ask(server)
    assert set(server.keys) == {"Bearer sk-secret-of-mine"}
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and b"secret-of-mine" in file.read_bytes()
    ]


def test_variables_of_the_template_are_part_of_what_is_asked(serve, ask, tmp_path):
    server = serve(answered())
    ask(server, "with", chat_template_kwargs={"enable_thinking": True})
    ask(server, "without", chat_template_kwargs={"enable_thinking": False})
    assert [body["chat_template_kwargs"]["enable_thinking"] for body in server.bodies] == [True] * 6 + [
        False
    ] * 6
    report = compare(tmp_path / "with", tmp_path / "without")
    assert any("chat_template_kwargs" in warning for warning in report.warnings)


def test_addresses_that_are_none(serve, ask):
    server = serve(answered())
    for url in ("", "127.0.0.1:8000", "ftp://host/v1", "http://user:password@host/v1", "http:///v1"):
        with pytest.raises(UsageError, match="not the address of an API"):
            ask(server, engine=f"openai:{url}")
    assert server.bodies == []


def evaluate_and_die(request, number):
    add = ResponseStore.add

    def dying(self, responses):
        nonlocal number
        add(self, responses)
        number -= len(responses)
        if number <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    ResponseStore.add = dying
    evaluate(request, lambda *_: None)
    return 0


def test_a_killed_evaluation_continues(serve, ask, request_of, tmp_path):
    server = serve(answered())
    job = Job(evaluate_and_die, request_of(server), 3, log=tmp_path / "log.txt")
    assert job.wait() == -signal.SIGKILL
    asked = len(server.bodies)
    _, samples = ask(server)
    assert len(samples) == 6
    assert len(server.bodies) - asked <= 3
