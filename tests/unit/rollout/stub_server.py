"""A stub of vLLM's server interface, and a client of it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlctl.batch import Turn
from rlctl.rollout.protocol import EngineContext, Request, Sampling
from rlctl.rollout.reported_weights import WEIGHTS_HEADER
from rlctl.rollout.server_access import ONE_TOKEN
from rlctl.rollout.server_client import ServerClient
from rlctl.rollout.vllm_server import GENERATE, VLLMServerRollout
from rlctl.rollout.weight_sync import WeightSync
from rlctl.rollout.weights import PublishedWeights, VersionedDir
from rlctl.run_spec.load import load_spec
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model

SAMPLING = Sampling(max_response_length=5)


class Server(ThreadingHTTPServer):
    """Answers every prompt with `seed % 10` times its own last token, then ends; records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.is_asked, self.may_answer = threading.Event(), threading.Event()  # completions
        self.may_answer.set()
        self.answers_in_flight = threading.Event()
        self.answers_in_flight.set()
        self.is_awake = threading.Event()  # cleared: it listens, and answers nothing at all
        self.is_awake.set()
        self.engine_works = threading.Event()  # cleared: it answers what needs no engine, `/health` included
        self.engine_works.set()
        self.key = ""
        self.tokens = lambda: 0  # produced so far, in its metrics
        self.logprobs_mode: str | None = "processed_logprobs"  # None: development mode is off; "": it fails
        #: HTTP codes to answer the next completions with, the last first; 0: hang up; None: as usual
        self.trouble: list[int | None] = []
        self.fails_at: list[str] = []  # paths of the next requests that it fails to answer
        self.lora: dict[str, Any] | None = None  # settings of its start; None: it takes no adapters
        self.finish_reason: str | None = "stop"
        self.takes_new_adapters = True
        self.lists = True  # False: `logprobs` brings those of the sampled tokens alone
        self.mass = lambda index: 1.0  # `seed % 10` → below 1: a token that it was sampled from is not listed
        self.experts: tuple[int, int] | None = None  # layers and experts per token; None: not reported
        self.scales_out, self.scheduling_policy = True, "priority"  # as started for sampling in flight
        #: of the next answers, by span of tokens; None: as of an older vLLM, which reports none
        self.weight_versions: list[list[dict[str, Any]] | None] = []
        self.reports: list[str] = []  # headers of the next completions: weights at their start and end
        self.used_blocks = 0  # number of times that the cache cannot be reset
        self.adapters: list[str] = []
        self.weight_version = "default"
        self.workers = 1  # GPUs, in vLLM's terms
        self.loads: Callable[[str, dict[str, Any]], None] = lambda _path, _body: None
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.is_awake.wait(120)
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.answer(401, {})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": name} for name in ["policy", *self.server.adapters]]})
        elif self.path == "/weight_info":
            self.answer(200, {"weight_version": self.server.weight_version})
        elif self.path == "/get_world_size":
            self.answer(200, {"world_size": self.server.workers})
        elif self.path == "/metrics":
            self.answer(200, f"vllm:generation_tokens_total{{}} {self.server.tokens()}\n")
        elif not self.path.startswith("/server_info"):
            self.answer(200, {})
        elif mode := self.server.logprobs_mode:
            config = {"model_config": {"logprobs_mode": mode}, "lora_config": self.server.lora}
            config["scheduler_config"] = {"policy": self.server.scheduling_policy}
            environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.server.takes_new_adapters}
            self.answer(200, {"vllm_config": config, "vllm_env": environment})
        else:
            self.answer(404 if mode is None else 500, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if body == ONE_TOKEN:
            self.server.engine_works.wait(120)
            self.server.is_awake.wait(120)
            self.answer(200, {})
            return
        self.server.asked.append((self.path, body))
        self.server.is_awake.wait(120)
        if self.path in self.server.fails_at:
            self.server.fails_at.remove(self.path)
            self.answer(500, {})
        elif self.path.endswith("lora_adapter"):
            self.load_or_unload(body["lora_name"])
        elif self.path == "/update_weight_version":
            self.server.weight_version = body["new_version"]
            self.answer(200, {})
        elif self.path == "/reset_prefix_cache":
            self.server.used_blocks -= 1
            self.answer(200, {"success": self.server.used_blocks < 0})
        elif self.path not in {"/v1/completions", GENERATE}:
            try:
                self.server.loads(self.path, body)
            except Exception as error:
                self.answer(500, {"error": {"message": str(error)}})
            else:
                self.answer(200, {"results": []})
        elif self.path == GENERATE and not self.server.scales_out:
            self.answer(403, {"error": {"message": "Scale-out endpoints are disabled."}})
        elif not body:
            self.answer(400, {"error": {"message": "fields are missing"}})
        elif body["model"] not in ["policy", *self.server.adapters]:
            self.answer(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        elif self.server.trouble and (code := self.server.trouble.pop()) is not None:
            if code == 0:
                self.close_connection = True
                return
            self.answer(code, {"error": {"message": "the engine says why"}})
        else:
            self.server.is_asked.set()
            self.server.may_answer.wait(120)
            self.server.engine_works.wait(120)
            if self.path == GENERATE:
                if not body["priority"]:
                    self.server.answers_in_flight.wait(120)
                self.answer(200, {"choices": [self.generated(**body["sampling_params"], **body)]})
                return
            index, token, end = body["seed"] % 10, body["prompt"][-1], TOKENIZER.eos_token_id
            likely = math.log(0.75 * self.server.mass(index))
            top = {f"token_id:{token}": likely, f"token_id:{end}": math.log(0.25), "token_id:3": -9999.0}
            has_lists = body["logprobs"] and self.server.lists
            log_probs = {
                "token_logprobs": [-0.5 - index] * (index + 1),
                "top_logprobs": [top] * (index + 1) if has_lists else None,
            }
            choice = {
                "token_ids": [token] * index + [end],
                "logprobs": log_probs,
                "finish_reason": self.server.finish_reason,
            }
            if self.server.experts:
                given = np.full((len(body["prompt"]) + index, *self.server.experts), index, np.uint8)
                np.save(file := io.BytesIO(), given)
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            self.answer(200, {"choices": [choice]})

    def generated(self, seed: int, token_ids: list[int], logprobs: int, **_: Any) -> dict[str, Any]:
        """As of a completion; the tokens have the server's version, or the next of `weight_versions`."""
        ids = [token_ids[-1]] * (seed % 10) + [TOKENIZER.eos_token_id]
        spans = [{"version": self.server.weight_version, "start": 0, "end": len(ids)}]
        given = self.server.weight_versions
        others = [{"token_id": 3, "logprob": -9.0, "rank": 2}] * (logprobs > 1)
        content = [{"token_id": token, "logprob": -0.5 - seed % 10, "rank": 1} for token in ids]
        found = {
            "token_ids": ids,
            "logprobs": {"content": [one | {"top_logprobs": [one, *others]} for one in content]},
            "finish_reason": self.server.finish_reason,
        }
        spans = given.pop(0) if given else spans
        return found if spans is None else found | {"weight_versions": spans}

    def load_or_unload(self, name: str) -> None:
        known = self.server.adapters
        if self.server.lora is None:
            self.answer(500, {"error": {"message": "LoRA is not enabled. Use --enable-lora to enable LoRA."}})
        elif (name in known) == (self.path == "/v1/load_lora_adapter"):
            self.answer(400, {"error": {"message": "it is loaded already, or never was"}})
        else:
            (known.remove if name in known else known.append)(name)
            self.answer(200, {})

    def answer(self, code: int, body: dict[str, Any] | str) -> None:
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        if self.path == "/v1/completions" and self.server.reports:
            self.send_header(WEIGHTS_HEADER, self.server.reports.pop())
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def context_of(
    model: Any, *overrides: str, rank: int = 0, agree: Callable[[str], str] = str
) -> EngineContext:
    """Of an engine on servers, on one rank."""
    spec = load_spec([], [], ["rollout.name=vllm", "rollout.mode=server", *overrides]).spec
    device, nowhere = torch.device("cpu"), Path()
    return EngineContext(spec, "", model, TOKENIZER, device, rank, 1, agree, nowhere)


def engine_on(
    servers: list[Server], tmp_path: Path, *overrides: str, **options: Any
) -> tuple[VLLMServerRollout, Any]:
    """An engine on these servers, and its policy."""
    model = random_model(1)
    return rollout_on(servers, context_of(model, *overrides), tmp_path / "weights", **options), model


def rollout_on(
    servers: list[Server],
    context: EngineContext,
    directory: Path,
    *,
    has_adapters: bool = False,
    **options: Any,
) -> VLLMServerRollout:
    """As `build_vllm` constructs it, for servers that run already; only rank 0 writes weights."""
    client = ServerClient([server.url for server in servers], context.spec.rollout.server)
    held = contextlib.ExitStack()
    published = None
    if context.rank == 0:
        published = PublishedWeights(context.model, TOKENIZER, directory)
        held.callback(published.close)
    if has_adapters:
        options["adapters"] = VersionedDir(directory)
        held.callback(options["adapters"].close)
    weights = WeightSync(client, context, published=published, **options)
    return VLLMServerRollout(context, client, weights, held)


def sample(engine: Any, n: int = 3, sampling: Sampling = SAMPLING) -> list[Turn]:
    """n turns for each of two prompts."""
    prompts = TOKENIZER(["12+34=", "9="])["input_ids"]
    requests = [Request(ids, 70 + 10 * row + i) for row, ids in enumerate(prompts) for i in range(n)]
    return engine.sample(requests, sampling)


def versions_of(turns: list[Turn]) -> set[int]:
    return {version for turn in turns for version in turn.versions.tolist()}
