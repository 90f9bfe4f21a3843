"""Training on vLLM's rollouts, for real: in the trainer's processes, and in servers that die."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from rlctl.rollout.server_access import KEY
from tests import hooks, runs
from tests.forked_python import run_in
from tests.listeners import accepting, assert_on_loopback
from tests.processes import TIMEOUT_S, Job
from tests.triton_on_cpu import run_on_v2

pytestmark = [
    pytest.mark.usefixtures("embedded"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
VLLM = (
    "--preset",
    "rloo-seq-is",
    "rollout.name=vllm",
    "actor.ppo_mini_batch_size=8",  # one update per batch: both sides score with the same weights
    "trainer.rollouts_per_step=0",
)


def check_log_probs(run_dir: Path, steps: int) -> None:
    """Every batch was sampled from the weights of its time, and only then trained on."""
    lines = [line for line in runs.metrics(run_dir) if line["step"] > 0]  # 0: a validation before training
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line["rollout/sync_gap"] < 1e-5
        assert 0 < line["training/rollout_probs_diff_mean"] < 1e-5
        assert line["rollout_corr/rollout_is_raw_eff_sample_size"] > 0.9999


#: Trained parameters, which are sent to the engine.
ALL_WEIGHTS = ()
ADAPTER = ("model.lora_rank=3", "model.lora_alpha=6", "actor.lr=5e-3")
#: One engine over both ranks; each asks as often as its share of validation and of each round needs.
SHARED = (
    "rollout.tensor_model_parallel_size=2",
    "algorithm.filter_groups.enable=true",
    "trainer.test_freq=2",
)
TRAINED = {
    "all-weights": ALL_WEIGHTS,
    "tensor-parallel": SHARED,
    "tensor-parallel-adapter": (*ADAPTER, *SHARED),
}
#: On one rank.
ON_V2 = {"all-weights": ALL_WEIGHTS, "adapter": ADAPTER}
STEPS = 2


def train_each(directory: str) -> int:
    """One run on two ranks for each of `TRAINED`, in the launcher's process, which has vLLM imported."""
    from rlctl.cli.app import run

    two_ranks = ("trainer.n_gpus_per_node=2", "engine.zero_stage=3", f"trainer.total_training_steps={STEPS}")
    for name, trained in TRAINED.items():
        where = f"trainer.run_dir={directory}/{name}"
        if code := run(["train", where, *runs.SMALL, *VLLM, *trained, *two_ranks]):
            print(f"{name} ended with {code}")
            return code
    return 0


@pytest.fixture(scope="module")
def in_process(embedded_cache: Path, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories of `TRAINED`."""
    directory = tmp_path_factory.mktemp("in-process")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(embedded_cache))
        run_in(forked_vllm, train_each, directory, log=directory / "log")
    return directory


@pytest.mark.parametrize("trained", TRAINED)
def test_in_the_trainers_processes_under_zero_3(in_process: Path, trained: str) -> None:
    check_log_probs(in_process / trained, STEPS)
    if trained.startswith("tensor-parallel"):
        before, *lines = runs.metrics(in_process / trained)
        assert sum(line["filter_groups/rounds"] for line in lines) > len(lines)
        assert all(any(key.startswith("val/") for key in line) for line in (before, lines[1]))


def train_one_after_the_other(directory: str) -> int:
    """Two runs on one rank in this process, as a notebook starts them; DeepSpeed keeps its process groups."""
    from rlctl.cli.app import run

    settings = (*runs.SMALL, *VLLM, "trainer.total_training_steps=2")
    for name, stage in (("first", 0), ("second", 3)):
        if code := run(
            ["train", f"trainer.run_dir={directory}/{name}", f"engine.zero_stage={stage}", *settings]
        ):
            return code
    return 0


def test_one_process_trains_one_run_after_the_other(tmp_path: Path, forked_vllm: Path) -> None:
    run_in(forked_vllm, train_one_after_the_other, tmp_path, log=tmp_path / "log")
    for name in ("first", "second"):
        check_log_probs(tmp_path / name, 2)


#: Interpreted, a kernel takes time in proportion to its rows.
FEW_ROWS = ("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2")


def train_on_v2(directory: str) -> int:
    from rlctl.cli.app import run

    where, trained = f"trainer.run_dir={directory}", ON_V2[Path(directory).name]
    steps = f"trainer.total_training_steps={STEPS}"
    return run(["train", where, *runs.SMALL, *VLLM, *trained, *FEW_ROWS, steps])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("trained", ON_V2)
def test_with_the_model_runner_of_gpus(tmp_path: Path, trained: str) -> None:
    """Model Runner V2, whose kernels Triton interprets: weights and adapters are loaded by other code."""
    run_on_v2(train_on_v2, tmp_path / trained, log=tmp_path / "log")
    check_log_probs(tmp_path / trained, STEPS)
    assert "model runner V2" in (tmp_path / trained / "environment.json").read_text()


def servers(job: Job) -> list[psutil.Process]:
    """Its vLLM servers, without the process that each forks to outlive it."""
    children = psutil.Process(job.pid).children(recursive=True)
    ours = [child for child in children if "rlctl.rollout.server_process" in child.cmdline()]
    return [child for child in ours if child.ppid() not in {each.pid for each in ours}]


def start_on_a_server(tmp_path: Path, *trained: str, before: Callable[[], None] | None = None) -> Job:
    return runs.start_train(
        tmp_path / "run",
        *VLLM,
        *trained,
        "rollout.mode=server",
        f"rollout.server.weights_dir={tmp_path / 'weights'}",
        "trainer.total_training_steps=3",
        env=dict(os.environ),
        before=before,
    )


def check_doors(job: Job) -> None:
    """The server serves only who has the key, whatever the path, and nothing listens beyond this machine."""
    assert_on_loopback(job)
    (server,) = servers(job)
    key = server.environ()[KEY]
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(key in word for words in commands for word in words)
    arguments = server.cmdline()
    port = arguments[arguments.index("--port") + 1]
    assert accepting(job) == [int(port)]  # also of other users of this machine
    url = f"http://127.0.0.1:{port}"
    known = {"Authorization": f"Bearer {key}"}
    strangers = ({"Authorization": "Bearer x"}, known | {"Origin": "null"}, known | {"Host": "a.example"})
    with httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) as client:
        paths = client.get("/openapi.json", headers=known).json()["paths"]
        assert {"/health", "/collective_rpc", "/pause", "/v1/completions"} <= paths.keys()
        asked = [(path, {}) for path in {*paths, "/metrics", "/docs", "/openapi.json", "/nothing"}]
        asked += [(path, headers) for path in ("/health", "/collective_rpc") for headers in strangers]
        for path, headers in asked:
            for method in ("GET", "POST", "OPTIONS"):
                assert client.request(method, path, headers=headers).status_code == 401, (method, path)
        assert client.get("/health", headers=known).is_success


def check_end(tmp_path: Path, job: Job) -> None:
    """It ended well, and left nothing behind."""
    assert job.wait() == 0, job.output[-4000:]
    check_log_probs(tmp_path / "run", 3)
    assert job.orphans() == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_server_that_is_killed_or_hangs_starts_again_with_the_newest_weights(
    tmp_path: Path, forked_vllm: Path
) -> None:
    """First its engine's process stops, while the server answers `/health`; then the server is killed."""
    before = partial(hooks.servers_are_forks, str(forked_vllm / "python"), after=1)
    job = start_on_a_server(tmp_path, *ALL_WEIGHTS, "rollout.server.answer_timeout=20", before=before)
    job.wait_for(lambda: len(runs.metrics(tmp_path / "run")) >= 1)
    job.signal(signal.SIGSTOP)
    check_doors(job)
    job.signal(signal.SIGCONT)
    (server,) = servers(job)
    (engine,) = (child for child in server.children() if "VLLM::Engine" in child.name())
    engine.send_signal(signal.SIGSTOP)
    job.wait_for(lambda: len(runs.metrics(tmp_path / "run")) >= 2)
    (restarted,) = servers(job)
    assert restarted.pid != server.pid
    restarted.send_signal(signal.SIGKILL)
    check_end(tmp_path, job)


@pytest.fixture
def forked(forked_vllm: Path) -> Callable[[], None]:
    return partial(hooks.servers_are_forks, str(forked_vllm / "python"))


def test_a_server_gets_weights_by_broadcast(tmp_path: Path, forked: Callable[[], None]) -> None:
    """vLLM's own endpoints and order of calls, over gloo; no file of weights is written."""
    job = start_on_a_server(tmp_path, "rollout.server.weight_transfer=broadcast", before=forked)
    job.wait_for(lambda: len(runs.metrics(tmp_path / "run")) >= 1)
    assert accepting(job) == []  # the server is a fork of another process
    assert not list((tmp_path / "weights").rglob("*.safetensors"))
    check_end(tmp_path, job)
    environment = (tmp_path / "run/environment.json").read_text()
    assert "1 vLLM servers, weights by broadcast" in environment


def test_a_server_applies_the_adapter(tmp_path: Path, forked: Callable[[], None]) -> None:
    check_end(tmp_path, start_on_a_server(tmp_path, *ADAPTER, before=forked))
