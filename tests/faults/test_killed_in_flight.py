"""A trainer that is killed while vLLM servers sample in flight, and what the resumed run trains on."""

from __future__ import annotations

import importlib.util
import itertools
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.tiny.embedded import ensure_embedded
from tests import hooks, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
STEPS, PROMPTS, N = 6, 8, 4
#: Of the moments at which the trainer is killed.
SEED = 1
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
    f"actor.ppo_mini_batch_size={PROMPTS}",  # one update per step: checkpoint k has version k of the weights
    f"rollout.n={N}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=null",
)


def servers_of(run: Path) -> list[psutil.Process]:
    """The processes of the run's servers: their output goes to its files."""
    found = []
    for process in psutil.process_iter():
        try:
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
        except OSError:  # it has ended, or is another user's
            continue
        if output.parent == run / "engines":
            found.append(process)
    return found


@pytest.fixture(scope="module")
def whole(embedded_cache: Path, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a fault."""
    run = tmp_path_factory.mktemp("whole") / "run"
    before = partial(hooks.kill_at_answer, 0, str(forked_vllm / "python"))
    job = runs.start_train(run, *IN_FLIGHT, before=before, env={"RLCTL_CACHE": str(embedded_cache)})
    assert job.wait() == 0, job.output[-4000:]
    return run


@pytest.fixture(scope="module")
def killed(embedded_cache: Path, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed three times, and every time continued at once."""
    directory = tmp_path_factory.mktemp("killed")
    run, weights = directory / "run", directory / "weights"
    moments, servers = random.Random(SEED), list[psutil.Process]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(embedded_cache))
        for start in range(4):
            # No more than two steps are sampled ahead: so many answers are left after the first checkpoint.
            moment = moments.randrange(1, 31) if start < 3 else 0
            real = 1 if start == 0 else 0  # for the first server, the kernel's way of ending it counts
            before = partial(hooks.kill_at_answer, moment, str(forked_vllm / "python"), real)
            if start == 0:
                settings = (*IN_FLIGHT, f"rollout.server.weights_dir={weights}")
                job = runs.start_train(run, *settings, before=before)
            else:
                job = runs.resume(run, before=before)
            assert job.wait() == (-signal.SIGKILL if moment else 0), job.output[-4000:]
            servers += servers_of(run)
            assert job.orphans() == []
    assert psutil.wait_procs(servers, timeout=60)[1] == []
    assert list(weights.iterdir()) == []
    return run


def tokens_of(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Version and log-prob of each sampled token."""
    columns = zip(row["sampled"], row["versions"], row["rollout_log_probs"], strict=True)
    return [(version, log_prob) for sampled, version, log_prob in columns if sampled]


def test_every_prompt_is_used_as_often_as_without_a_kill(killed: Path, whole: Path) -> None:
    for run in (killed, whole):
        rows = runs.rollouts(run)
        members = Counter((row["step"], row["group_id"], row["member"]) for row in rows)
        assert members == Counter(itertools.product(range(1, STEPS + 1), range(PROMPTS), range(N)))
        assert [line["step"] for line in runs.metrics(run)] == list(range(1, STEPS + 1))
    used, wanted = (Counter(row["prompt"] for row in runs.rollouts(run)) for run in (killed, whole))
    assert used == wanted


@torch.no_grad()
def test_every_token_was_sampled_by_the_weights_of_its_version(
    killed: Path, whole: Path, embedded_cache: Path
) -> None:
    """Also those that waited in a checkpoint, and those that a later trainer sampled with its own servers."""
    start = ensure_embedded(1, embedded_cache).model_dir
    for run in (killed, whole):
        rows = runs.rollouts(run)
        ids = [torch.tensor(row["token_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        scores = []
        for version in range(STEPS):
            at = run / f"checkpoints/step_{version:06d}/model" if version else start
            model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).eval()
            log_probs = model(padded[:, :-1]).logits.log_softmax(-1)
            scores.append(log_probs.gather(2, padded[:, 1:, None]).squeeze(2))
        right, others, versions = [], [], set()
        for number, row in enumerate(rows):
            places = [place - 1 for place, sampled in enumerate(row["sampled"]) if sampled]
            for place, (version, log_prob) in zip(places, tokens_of(row), strict=True):
                assert 0 <= version < row["step"]
                versions.add(version)
                right.append(abs(scores[version][number, place] - log_prob))
                others.append(abs(scores[(version + 1) % STEPS][number, place] - log_prob))
        assert max(right) < 1e-4
        assert sorted(others)[len(others) // 2] > 1e-3  # so another version would show
        assert len(versions) > 2


def test_what_is_logged_is_what_was_trained_on(killed: Path, whole: Path) -> None:
    for run in (killed, whole):
        rows = runs.rollouts(run)
        for line in runs.metrics(run):
            of_step = [tokens_of(row) for row in rows if row["step"] == line["step"]]
            ages = [[line["step"] - 1 - version for version, _ in row] for row in of_step]
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
            assert line["rollout/repeated_requests"] == 0
            assert line["rollout/restarted_episodes"] % N == 0
    assert sum(line["rollout/restarted_episodes"] for line in runs.metrics(whole)) == 0
    fixed = ("training/global_step", "training/epoch", "actor/lr")
    ours, theirs = ([[line[key] for key in fixed] for line in runs.metrics(run)] for run in (killed, whole))
    assert ours == theirs
    ours, theirs = (sum(line["prompt_length/mean"] for line in runs.metrics(run)) for run in (killed, whole))
    assert ours == pytest.approx(theirs)
