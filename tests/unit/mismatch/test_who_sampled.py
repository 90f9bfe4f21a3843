"""Rollouts sampled by other weights than recorded are planted in dumped runs and must be named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rlctl.batch import Episode, Task, TokenBatch
from rlctl.cli.diagnose import diagnose
from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.environment.single_turn import sample_episodes
from rlctl.errors import UsageError
from rlctl.mismatch.dumped import kept_weights
from rlctl.mismatch.who_sampled import who_sampled
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.track.open_run import RunRecord
from rlctl.track.rollouts import RolloutWriter
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, random_model

#: Updates of a run: two per batch.
STEPS, PER_BATCH = 6, 2
app = typer.Typer()
app.command()(diagnose)


@pytest.fixture(scope="module")
def policies() -> list[Any]:
    """The policy after 0, 1, 2 … updates."""
    found = [random_model(1)]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS * PER_BATCH):
        model = copy.deepcopy(found[-1])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=draw))
        found.append(model)
    return found


def sampled(model: Any, version: int, seed: int, **options: Any) -> list[Episode]:
    engine = HFRollout(model, TOKENIZER, "cpu", dtype=options.pop("dtype", None))
    engine._policy_version = version
    tasks = [Task(TOKENIZER(text)["input_ids"], text, group) for group, text in enumerate(TEXTS[:4])]
    return sample_episodes(engine, tasks, 2, Sampling(max_response_length=8, **options), seed, TOKENIZER)


def run_of(
    where: Path,
    policies: list[Any],
    sampler: Callable[[int], int] = lambda version: version,
    *,
    kept: range = range(2, 13, 2),
    overrides: tuple[str, ...] = (),
    **options: Any,
) -> Path:
    """A run whose rollouts are recorded with the current version, and sampled by `sampler(current)`."""
    run_dir = where / "run"
    run_dir.mkdir()

    def save(model: Any, directory: Path) -> Path:
        model.save_pretrained(directory)
        TOKENIZER.save_pretrained(directory)
        return directory

    start = save(policies[0], where / "start")
    given = [f"model.path={start}", "engine.dtype=fp32", "data.train_files=[none.parquet]", *overrides]
    (run_dir / "spec.yaml").write_text(dump_spec(load_spec([], [], given).spec))
    writer = RolloutWriter(run_dir, -1, exact_sampling=options.get("with_kept", False))
    for step in range(1, STEPS + 1):
        version = (step - 1) * PER_BATCH
        episodes = sampled(policies[sampler(version)], version, step, **dict(options))
        batch = TokenBatch.of(episodes)
        columns = {
            "training_log_probs": batch.rollout_log_probs,
            "rollout_is_weights": torch.ones_like(batch.rollout_log_probs),
            "keep_mask": torch.ones_like(batch.rollout_log_probs),
        }
        writer.add(step, episodes, [1.0] * len(episodes), columns)
    writer.flush()
    for version in kept:
        partial = begin(run_dir / CHECKPOINTS, version)
        save(policies[version], partial / "model")
        publish(run_dir / CHECKPOINTS, partial, TrainerState(version, version, 1), keep=None)
    return run_dir


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, range(2, 13, 2)),
        ({}, range(4, 13, 4)),
        ({}, range(12, 13)),
        ({"dtype": "bf16"}, range(2, 13, 2)),
        ({"temperature": 0.7}, range(2, 13, 2)),
        ({"top_p": 0.9}, range(2, 13, 2)),
        ({"top_p": 0.9, "with_kept": True}, range(4, 13, 4)),
    ],
    ids=["all", "some", "last", "bf16", "cool", "top-p", "exact"],
)
def test_sound_runs_are_as_recorded(
    tmp_path: Path, policies: list[Any], options: dict[str, Any], kept: range
) -> None:
    overrides = [
        f"rollout.{name}={value}" for name, value in options.items() if name not in {"with_kept", "dtype"}
    ]
    overrides += ["rollout.exact_sampling=true"] if "with_kept" in options else []
    found = who_sampled(run_of(tmp_path, policies, kept=kept, overrides=tuple(overrides), **options))
    assert found.fault is None, found.conclusion
    assert found.conclusion.startswith("as recorded" if len(kept) > 1 else ("as recorded", "the kept"))
    for step in found.steps:
        if step.recorded in {0, *kept}:
            assert step.version == step.recorded
            assert step.odds > 20


@pytest.mark.parametrize(
    "kept", [range(2, 13, 2), range(4, 13, 4), range(12, 13)], ids=["all", "some", "last"]
)
def test_weights_that_were_never_delivered(tmp_path: Path, policies: list[Any], kept: range) -> None:
    found = who_sampled(run_of(tmp_path, policies, lambda version: 0, kept=kept))
    assert found.fault == "never delivered", found.conclusion
    assert "by the initial policy" in found.conclusion
    assert {step.version for step in found.steps} == {0}


@pytest.mark.parametrize("lag", [1, 2, 4, 5])
def test_weights_that_came_late(tmp_path: Path, policies: list[Any], lag: int) -> None:
    run = run_of(tmp_path, policies, lambda version: max(version - lag, 0), kept=range(1, 13))
    found = who_sampled(run)
    assert found.fault == "late", found.conclusion
    assert f"sampled {lag} updates later than recorded" in found.conclusion


def test_weights_that_came_late_between_sparse_checkpoints(tmp_path: Path, policies: list[Any]) -> None:
    found = who_sampled(run_of(tmp_path, policies, lambda version: max(version - 2, 0), kept=range(4, 13, 4)))
    assert found.fault == "late", found.conclusion
    assert "sampled 2 updates later" in found.conclusion


def test_a_sampler_without_the_adapter(tmp_path: Path, policies: list[Any]) -> None:
    """The initial policy of LoRA is the base; after another adapter it is not."""
    run = run_of(tmp_path, policies, lambda version: 0, overrides=("model.lora_rank=4",))
    assert "by the base model, without the adapter" in who_sampled(run).conclusion
    spec = (run / "spec.yaml").read_text()
    (run / "spec.yaml").write_text(spec.replace("lora_adapter_path: null", "lora_adapter_path: somewhere"))
    assert kept_weights(RunRecord(run))[0][-1].version is None
    found = who_sampled(run)
    assert found.fault == "base", found.conclusion


def test_other_weights_are_not_guessed(tmp_path: Path, policies: list[Any]) -> None:
    other = random_model(9)
    found = who_sampled(run_of(tmp_path, [*policies[:1], *[other] * 12, *policies], kept=range(2, 13, 2)))
    assert found.fault in {None, "unknown"}


def test_one_version_cannot_be_told_apart(tmp_path: Path, policies: list[Any]) -> None:
    with pytest.raises(UsageError, match="kept 1 versions of its weights"):
        who_sampled(run_of(tmp_path, policies, kept=range(0)))


def test_the_command_prints_every_step_and_fails_on_a_fault(tmp_path: Path, policies: list[Any]) -> None:
    run = run_of(tmp_path, policies, lambda version: 0)
    said = CliRunner().invoke(app, [str(run), "--who-sampled", "--fail-on", "critical"])
    assert said.exit_code == 3, said.output
    assert "new weights were never delivered" in said.stdout
    assert said.stdout.count("0 (the initial policy)") == STEPS
    [document] = json.loads(CliRunner().invoke(app, [str(run), "--who-sampled", "--format", "json"]).stdout)
    assert [step["version"] for step in document["steps"]] == [0] * STEPS
    refused = CliRunner().invoke(app, [str(run), "--who-sampled", "--format", "html"])
    assert "writes text or json" in str(refused.exception)
