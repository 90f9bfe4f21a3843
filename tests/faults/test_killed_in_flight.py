"""A trainer that is killed while vLLM servers sample in flight, and what the resumed run trains on."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
import signal
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.engine.checkpoint import verify
from rlctl.rollout import server_process
from rlctl.rollout.build_vllm import build_vllm
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.server_access import KEY
from rlctl.tiny.embedded import ensure_embedded
from tests import hooks, runs
from tests.processes import wait_until_ended, writers_to
from tests.unit.rollout.stub_server import context_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEPS, PROMPTS, N = 8, 8, 4
#: Of the moments at which the trainer is killed.
SEED = 7
#: An episode is beyond this age if two updates followed the one whose weights sampled its first token.
LIMIT = 1
IN_FLIGHT = (
    "--preset",
    "rloo-seq-is",
    "rollout.name=vllm",
    "rollout.mode=server",
    "rollout.in_flight=true",
    "rollout.max_staleness=2",
    f"rollout.max_age_updates={LIMIT}",
    "rollout.max_num_seqs=4",  # so that an update meets requests that are open or wait
    f"data.train_batch_size={PROMPTS}",
    f"actor.ppo_mini_batch_size={PROMPTS}",  # one update per step, so that each version has a checkpoint
    f"rollout.n={N}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=null",
)


@pytest.fixture(scope="module")
def whole(embedded_cache: Path, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    run = tmp_path_factory.mktemp("whole") / "run"
    before = partial(hooks.kill_at_answer, str(forked_vllm / "python"))
    job = runs.start_train(run, *IN_FLIGHT, before=before, env={"RLCTL_CACHE": str(embedded_cache)})
    assert job.wait() == 0, job.output[-4000:]
    return run


@pytest.fixture(scope="module")
def killed(embedded_cache: Path, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed three times, and every time continued at once."""
    run = tmp_path_factory.mktemp("killed") / "run"
    weights, engines, drawn = run.with_name("weights"), run / "engines", random.Random(SEED)
    start = partial(hooks.kill_at_answer, str(forked_vllm / "python"), servers=str(engines))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(embedded_cache))
        for number, after_saving in enumerate((True, False, True)):
            # At most two steps are sampled ahead, so that the run always gets this many answers.
            kill = {"number": drawn.randrange(1, 31), "after_saving": after_saving}
            before = partial(start, is_real=number == 0, **kill)
            if number == 0:
                given = f"rollout.server.weights_dir={weights}"
                job = runs.start_train(run, *IN_FLIGHT, given, before=before)
            else:
                job = runs.resume(run, before=before)
            assert job.wait() == -signal.SIGKILL, job.output[-4000:]
            assert job.orphans() == []
        job = runs.resume(run, before=start)
        assert job.wait() == 0, job.output[-4000:]
    started = [line.split() for line in (run / "pids").read_text().splitlines()]
    assert len(started) == 3
    assert all(started)
    assert wait_until_ended(writers_to(engines), timeout=60) == []
    assert list(weights.iterdir()) == []
    return run


def tokens_of(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Version and log-prob of each sampled token."""
    columns = zip(row["sampled"], row["versions"], row["rollout_log_probs"], strict=True)
    return [(version, log_prob) for sampled, version, log_prob in columns if sampled]


def prompts_of(run: Path) -> Counter[str]:
    """How often each prompt was used, in a run whose steps are complete."""
    rows = runs.rollouts(run)
    members = Counter((row["step"], row["group_id"], row["member"]) for row in rows)
    assert members == Counter(itertools.product(range(1, STEPS + 1), range(PROMPTS), range(N)))
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, STEPS + 1))
    return Counter(row["prompt"] for row in rows)


def versions_of(run: Path) -> list[int]:
    """Version of the weights after each step, from step 0 on; a step that drops all episodes adds none."""
    found = [verify(run / f"checkpoints/step_{step:06d}")[1] for step in range(1, STEPS + 1)]
    return [0, *(checkpoint.state.policy_version for checkpoint in found)]


@torch.no_grad()
def assert_sampled_by_their_versions(run: Path, cache: Path) -> None:
    """Scores every token with the checkpoint of its version, and with the one before, which must differ."""
    rows, known, scores = runs.rollouts(run), versions_of(run), {}
    ids = [torch.tensor(row["token_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    for step, version in enumerate(known):
        at = run / f"checkpoints/step_{step:06d}/model" if step else ensure_embedded(1, cache).model_dir
        model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
        log_probs = model(padded[:, :-1]).logits.log_softmax(-1)
        scores[version] = log_probs.gather(2, padded[:, 1:, None]).squeeze(2)
    right, others = [], []
    for number, row in enumerate(rows):
        places = [place - 1 for place, sampled in enumerate(row["sampled"]) if sampled]
        for place, (version, log_prob) in zip(places, tokens_of(row), strict=True):
            assert 0 <= version <= known[row["step"] - 1]
            right.append(abs(scores[version][number, place] - log_prob))
            others += [abs(scores[version - 1][number, place] - log_prob)] if version else []
    assert max(right) < 1e-4
    assert sorted(others)[len(others) // 2] > 1e-3


def test_every_prompt_is_used_as_often_as_without_a_kill(killed: Path, whole: Path) -> None:
    assert prompts_of(killed) == prompts_of(whole)


def test_every_token_was_sampled_by_the_weights_of_its_version(
    killed: Path, whole: Path, embedded_cache: Path
) -> None:
    """Also those that waited in a checkpoint, and those that a later trainer sampled with its own servers."""
    for run in (killed, whole):
        assert_sampled_by_their_versions(run, embedded_cache)


def test_what_is_logged_is_what_was_trained_on(killed: Path, whole: Path) -> None:
    for run in (killed, whole):
        rows, versions = runs.rollouts(run), versions_of(run)
        for line, trained in zip(runs.metrics(run), versions, strict=False):
            of_step = [tokens_of(row) for row in rows if row["step"] == line["step"]]
            ages = [[trained - version for version, _ in row] for row in of_step]
            tokens = [age for row in ages for age in row]
            older, mixed = [max(row) > LIMIT for row in ages], [len(set(row)) > 1 for row in ages]
            assert line["age/token_mean"] == pytest.approx(sum(tokens) / len(tokens))
            assert line["age/mixed_episodes"] == pytest.approx(sum(mixed) / len(mixed))
            assert line["age/older_episodes"] == sum(older)
            assert line["training/staleness_max"] == max(tokens)
            assert line["rollout_corr/stale_cache_fraction"] == 0.0
            dropped = [not any(row["keep_mask"]) for row in rows if row["step"] == line["step"]]
            assert dropped == older
            assert line["rollout/sync_gap"] < 1e-5
            assert line["rollout/restarted_episodes"] % N == 0
    assert sum(line["rollout/restarted_episodes"] for line in runs.metrics(whole)) == 0
    fixed = ("training/global_step", "training/epoch", "actor/lr")
    ours, theirs = ([[line[key] for key in fixed] for line in runs.metrics(run)] for run in (killed, whole))
    assert ours == theirs
    ours, theirs = (sum(line["prompt_length/mean"] for line in runs.metrics(run)) for run in (killed, whole))
    assert ours == pytest.approx(theirs)


def test_a_server_that_outlives_its_trainer_samples_on_with_the_weights_of_the_next_one(
    tmp_path: Path, embedded: Path, forked_vllm: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is killed when it has paused the server, which the user started, for newer weights."""
    python, run = str(forked_vllm / "python"), tmp_path / "run"
    monkeypatch.setenv(KEY, "a key")
    monkeypatch.setattr(server_process, "subprocess", subprocess)
    hooks.servers_are_forks(python)
    model = AutoModelForCausalLM.from_pretrained(ensure_embedded(1, embedded).model_dir)
    context = context_of(model, *(setting for setting in IN_FLIGHT if "=" in setting))
    object.__setattr__(context, "run_dir", tmp_path)
    with contextlib.closing(build_vllm(context)) as server:
        server.sync_weights(PlainWeights(model.state_dict().items()), policy_version=0)  # it starts now
        given = f"rollout.server.urls={server._urls}", f"rollout.server.weights_dir={tmp_path / 'weights'}"
        kill = partial(hooks.kill_at_answer, python, 1, path="/pause", after_saving=True)
        job = runs.start_train(run, *IN_FLIGHT, *given, before=kill)
        assert job.wait() == -signal.SIGKILL, job.output[-4000:]
        processes = writers_to(tmp_path / "engines")
        assert processes
        job = runs.resume(run)
        assert job.wait() == 0, job.output[-4000:]
        assert writers_to(tmp_path / "engines") == processes
    assert prompts_of(run) == prompts_of(whole)
    assert_sampled_by_their_versions(run, embedded)
