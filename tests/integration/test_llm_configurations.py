"""Every way to train, on a real language model: `make test-llm`, about a quarter of an hour on two cores.

`test_llm.py` is the part that `make test` runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import sums
from rlctl.data.schema import write_rows
from rlctl.errors import EnvironmentFailure
from rlctl.model_files import model_directory
from tests import hooks, runs
from tests.processes import Job

pytestmark = [
    pytest.mark.llm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("RLCTL_LLM"), reason="many minutes: make test-llm"),
]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TIMEOUT_S = 1200.0
STEPS = 3
WEIGHTS = f"checkpoints/step_{STEPS:06d}/model/model.safetensors"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        model_directory("smollm2-135m")
    except EnvironmentFailure as error:
        pytest.skip(f"no real language model here: {error.what}")
    out = tmp_path_factory.mktemp("sums")
    for name, pairs in zip(("train", "held_out"), sums.split(), strict=True):
        write_rows(out / f"{name}.parquet", name, sums.rows(pairs))
    return out


def job(data: Path, run_dir: Path, *overrides: str, before: Callable[[], None] | None = None) -> Job:
    """A small run: four prompts with four responses, one update per batch."""
    return runs.start(
        "train",
        *("-p", "smollm2-135m-sums"),
        f"data.train_files={data / 'train.parquet'}",
        "data.train_batch_size=4",
        "data.max_response_length=8",
        "rollout.n=4",
        "actor.ppo_micro_batch_size_per_gpu=8",
        "actor.entropy_coeff=0.01",  # all of a small group may be wrong: without it there is no gradient
        "engine.dtype=fp32",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.rollouts_per_step=-1",
        f"trainer.run_dir={run_dir}",
        *overrides,
        log=run_dir.with_suffix(".log"),
        before=before,
    )


def train(data: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Its metrics; the run must end well."""
    started = job(data, run_dir, *overrides)
    assert started.wait(TIMEOUT_S) == 0, started.output[-4000:]
    lines = runs.metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return lines


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, no fault."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(data, run_dir, "trainer.save_freq=1")
    return run_dir


def test_killed_and_resumed_it_is_the_same_run(data: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = job(data, run, "trainer.save_freq=1", before=partial(hooks.kill_after_logging, 2))
    assert killed.wait(TIMEOUT_S) == -signal.SIGKILL, killed.output[-4000:]
    again = runs.resume(run)
    assert again.wait(TIMEOUT_S) == 0, again.output[-4000:]
    assert "resuming after step 1" in again.output
    assert runs.reproducible(run) == runs.reproducible(whole)
    assert runs.rollouts(run) == runs.rollouts(whole)
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_with_sharded_states_train_alike(
    data: Path, whole: Path, tmp_path: Path, stage: int
) -> None:
    """Rounding may change a later sample, so the first step is compared."""
    run = tmp_path / "run"
    train(data, run, "trainer.n_gpus_per_node=2", f"engine.zero_stage={stage}")
    ours, theirs = runs.reproducible(run)[0], runs.reproducible(whole)[0]
    for key in ("critic/score/mean", "response_length/mean", "actor/grad_norm", "actor/entropy"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key
    sampled, all_sampled = (
        [(row["prompt"], row["response"]) for row in runs.rollouts(one) if row["step"] == 1]
        for one in (run, whole)
    )
    assert sampled == all_sampled[:8]  # the main rank saves its share, half of the batch


def test_a_critic_from_the_same_checkpoint(data: Path, tmp_path: Path) -> None:
    for line in train(data, tmp_path / "run", "algorithm.adv_estimator=gae", "critic.lr=1e-5"):
        assert line["critic/grad_norm"] > 0
        assert line["critic/vf_loss"] >= 0
        assert line["actor/grad_norm"] > 0


@needs_vllm
def test_asynchronous_with_a_server(data: Path, tmp_path: Path) -> None:
    lines = train(
        data,
        tmp_path / "run",
        "rollout.name=vllm",
        "rollout.mode=server",
        "rollout.max_staleness=1",
        f"rollout.server.weights_dir={tmp_path / 'weights'}",
    )
    assert max(line["training/staleness_max"] for line in lines) == 1
    for line in lines:
        assert line["rollout_corr/rollout_is_raw_eff_sample_size"] > 0.9
        assert abs(line["rollout_corr/kl"]) < 1e-2


@pytest.fixture(scope="module")
def exported(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    done = runs.start("export", str(whole), "--out", str(out), log=out.with_suffix(".log"))
    assert done.wait(TIMEOUT_S) == 0, done.output[-4000:]
    return out


def test_transformers_loads_the_export(exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5? Reply with the number only."}],
        add_generation_prompt=True,
        tokenize=False,
    )
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()).strip().isdigit()


@needs_vllm
def test_vllm_loads_the_export(data: Path, exported: Path) -> None:
    """Greedy answers of vLLM and transformers; rounding in bf16 may decide between two likely tokens."""
    responses = {}
    for engine in ("vllm", "hf"):
        out = exported.parent / engine
        done = runs.start(
            *("evaluate", str(exported), "--engine", engine, "--data", str(data / "held_out.parquet")),
            *(
                "--n",
                "1",
                "--limit",
                "8",
                "--temperature",
                "0",
                "--max-response-length",
                "8",
                "--reward",
                "maths",
            ),
            *("--out", str(out)),
            log=exported.parent / f"{engine}.log",
        )
        assert done.wait(TIMEOUT_S) == 0, done.output[-4000:]
        rows = pq.read_table(out / "samples.parquet").to_pylist()
        responses[engine] = [(row["prompt"], row["response"]) for row in rows]
    assert len(responses["hf"]) == 8
    same = [ours == theirs for ours, theirs in zip(responses["vllm"], responses["hf"], strict=True)]
    assert sum(same) >= 6
