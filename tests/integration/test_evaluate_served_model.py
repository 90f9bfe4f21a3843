"""Evaluation of a model behind a real vLLM server on the CPU."""

import importlib.util
import subprocess

import pyarrow.parquet as pq
import pytest

from rlctl.evaluate import local_model
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.request import KEY_VARIABLE, EvaluateRequest
from rlctl.rollout import server_process
from rlctl.rollout.completions import vllm_options
from rlctl.rollout.replicas import Replicas, ReplicaSettings
from rlctl.rollout.server_access import KEY, MODEL_NAME
from tests import hooks
from tests.unit.evaluate.runs import QUICK, quick_task

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
LENGTH = 6


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    return quick_task(tmp_path / "task")


@pytest.fixture
def url(task, tmp_path, forked_vllm, monkeypatch):
    """Of a server of the embedded model whose chat template is the message alone, as without a template."""
    monkeypatch.setattr(server_process, "subprocess", subprocess)  # taken back after the test
    for name in (KEY, KEY_VARIABLE):
        monkeypatch.setenv(name, "a key")
    hooks.servers_are_forks(str(forked_vllm / "python"))
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    options = vllm_options("fp32", QUICK.max_position_embeddings, max_num_seqs=8)
    options["chat_template"] = str(template)
    servers = Replicas(1, ReplicaSettings(options), lambda: task.model_dir, tmp_path / "logs")
    servers.start()
    yield f"{servers.urls[0]}/v1"
    servers.close()


def samples_of(request):
    out, _ = evaluate(request, lambda *_: None)
    return pq.read_table(out / "samples.parquet").to_pylist()


def test_a_server_answers_as_the_model_on_this_machine(task, url, tmp_path, monkeypatch):
    monkeypatch.setattr(local_model, "native_dtype", lambda: ("fp32", "as the server"))
    data = [str(task.val_file)]
    greedy = {"n": 1, "temperature": 0.0, "limit": 20, "max_response_length": LENGTH}
    here = samples_of(EvaluateRequest(str(task.model_dir), data, out=tmp_path / "here", **greedy))
    served = {"engine": "openai", "base_url": url, "concurrency": 4}
    there = samples_of(EvaluateRequest(None, data, out=tmp_path / "there", **greedy, **served))
    for key in ("prompt", "response", "truncated", "num_tokens", "reward", "ground_truth", "messages"):
        assert [row[key] for row in there] == [row[key] for row in here], key
    assert {row["truncated"] for row in there} <= {True, False}

    options = {"n": 8, "limit": 2, "max_response_length": LENGTH, **served}
    samples = samples_of(EvaluateRequest(MODEL_NAME, data, out=tmp_path / "drawn", **options))
    assert all(1 <= row["num_tokens"] <= LENGTH for row in samples)
    assert len({row["response"] for row in samples[:8]}) > 1
    _, again = evaluate(EvaluateRequest(None, data, out=tmp_path / "again", **options), lambda *_: None)
    assert again.num_stored == 16
