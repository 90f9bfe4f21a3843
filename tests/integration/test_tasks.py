"""What people ask for in public threads, each done with the command line alone; the table says where.

One run with adapters serves most of them. Memory before renting is only planned, never trained.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.cli.app import run
from tests import runs
from tests.own_model import save_tiny_qwen2

TESTS = Path(__file__).parents[1]
HERE = "integration/test_tasks.py"

#: Task → the test that does it: file below `tests`, name.
TASKS = {
    "own reward on a CSV": (HERE, "test_own_rewards_read_a_csv_and_its_columns"),
    "reward that reads another column": (HERE, "test_own_rewards_read_a_csv_and_its_columns"),
    "two weighted rewards": (HERE, "test_own_rewards_read_a_csv_and_its_columns"),
    "reward per data set": ("unit/reward/test_by_source.py", "test_sources_by_their_names_and_files"),
    "async judge": (HERE, "test_a_reward_by_its_command"),
    "group judge": (HERE, "test_a_reward_by_its_command"),
    "text to SQL": (HERE, "test_a_reward_by_its_command"),
    "tools": (
        "unit/environment/test_trl_classes.py",
        "test_an_episode_of_a_class_has_its_observations_and_its_reward",
    ),
    "own environment": ("unit/train/test_first_row.py", "test_an_environment_is_described"),
    "agent of the openai package": (
        "unit/environment/test_agent_function.py",
        "test_an_agent_returns_a_score_or_leaves_it_to_the_graders",
    ),
    "rows of verifiers": (
        "unit/environment/test_verifiers_taskset.py",
        "test_a_conversation_is_one_sequence_with_the_rewards_of_verifiers",
    ),
    "text game": ("unit/environment/test_example_environments.py", "test_a_game_of_textarena"),
    "evaluate every N steps and keep the best": (HERE, "test_every_step_is_validated_and_the_best_is_kept"),
    "early stop": (
        "integration/test_early_stop_run.py",
        "test_a_run_ends_early_and_its_best_step_has_a_name",
    ),
    "weighted mix": (HERE, "test_a_mix_and_an_order"),
    "curriculum": (HERE, "test_a_mix_and_an_order"),
    "completions table": ("unit/track/test_tracker.py", "test_wandb_offline_for_real"),
    "resume": (HERE, "test_a_run_is_resumed"),
    "SFT adapter as start": (HERE, "test_an_adapter_is_exported_and_trained_on"),
    "LoRA export": (HERE, "test_an_adapter_is_exported_and_trained_on"),
    "GGUF lines": (HERE, "test_an_adapter_is_exported_and_trained_on"),
    "overlong penalty": (HERE, "test_penalties_and_kl_are_logged"),
    "KL or none": (HERE, "test_penalties_and_kl_are_logged"),
    "thinking model": (HERE, "test_thoughts_are_switched_off_with_the_default_attention"),
    "memory before renting": (HERE, "test_memory_is_planned_for_another_machine"),
    "Slurm": ("integration/test_nodes.py", "test_slurm"),
    "import verl": ("unit/convert/test_import.py", "test_the_spec_of_a_verl_script_is_accepted"),
    "import TRL with three rewards": (
        "unit/convert/test_trl_rewards.py",
        "test_functions_that_an_import_gives_keep_names_and_weights",
    ),
    "flat reward explained": (HERE, "test_a_flat_reward_is_explained"),
    "compare two runs": (HERE, "test_a_sweep_is_a_loop_of_the_shell"),
    "sweep by a shell loop of three flags": (HERE, "test_a_sweep_is_a_loop_of_the_shell"),
}

REWARDS = """
import asyncio
import sqlite3


def close(response, ground_truth):
    return 1.0 / (1 + abs(len(response) - len(ground_truth)))


def hardness(completions, answer, difficulty, **kwargs):
    return [float(a in c) + (2.0 if d == "hard" else 1.0) for c, a, d in zip(completions, answer, difficulty)]


async def judge(response, ground_truth):
    await asyncio.sleep(0.001)
    return float(ground_truth in response)


def ranks(completions, **kwargs):
    order = sorted(range(len(completions)), key=lambda i: -len(completions[i]))
    return [order.index(i) / len(completions) for i in range(len(completions))]


def rows_of(query, context):
    connection = sqlite3.connect(":memory:")
    connection.executescript(context)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.Error:
        return None


def execution(response, ground_truth, extra_info):
    found = rows_of(response, extra_info["context"])
    return float(found is not None and found == rows_of(ground_truth, extra_info["context"]))
"""
SHORT = ("data.max_response_length=6", "data.train_batch_size=4", "rollout.n=2", "engine.dtype=fp32")


def test_every_task_has_a_test() -> None:
    assert len(TASKS) == 31
    for file, name in TASKS.values():
        assert f"\ndef {name}(" in (TESTS / file).read_text(encoding="utf-8"), (file, name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a model, rewards and data, in which the commands run."""
    where = tmp_path_factory.mktemp("tasks")
    save_tiny_qwen2(where / "model", context=512)
    (where / "rewards.py").write_text(REWARDS)
    for level, start in (("easy", 0), ("hard", 50)):
        sums = "".join(f"{level} {a} + 2?,{a + 2},{level}\n" for a in range(start, start + 8))
        (where / f"{level}.csv").write_text(f"question,answer,difficulty\n{sums}")
    schema = "CREATE TABLE t(a INT, b TEXT); INSERT INTO t VALUES(1,'x'),(2,'y');"
    queries = {"How many rows?": "SELECT COUNT(*) FROM t", "Which a has y?": "SELECT a FROM t WHERE b='y'"}
    asked = ({"question": q, "context": schema, "answer": sql} for q, sql in queries.items())
    (where / "sql.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(where / "cache"))
        patched.chdir(where)
        yield where


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """Two steps with adapters, two weighted rewards, a penalty, a KL, and a validation after each step."""
    return runs.train(
        place / "first",
        *("--model", "model", "--data", "easy.csv", "--data", "hard.csv", "-p", "grpo"),
        *("--reward", "rewards.py:close", "--reward", "rewards.py:hardness=0.5"),
        *SHORT,
        *("data.val_files=[hard.csv]", "data.shuffle=false"),
        *("data.chat_template_kwargs.enable_thinking=false", "model.lora_rank=2"),
        "actor.use_kl_loss=true",
        *("reward.overlong.buffer_length=4", "reward.overlong.penalty_factor=1.0"),
        *("trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1"),
        *("trainer.keep_best=true", "trainer.rollouts_per_step=-1"),
    )


def test_own_rewards_read_a_csv_and_its_columns(trained: Path) -> None:
    for line in runs.metrics(trained)[1:]:
        assert line["reward/num_errors"] == 0
        total = line["reward/close/mean"] + 0.5 * line["reward/hardness/mean"] + line["reward/overlong/mean"]
        assert line["critic/score/mean"] == pytest.approx(total, abs=1e-5)
        assert 1.0 <= line["reward/hardness/mean"] <= 2.0  # easy rows


@pytest.mark.parametrize(
    ("reward", "data"),
    [
        ("rewards.py:execution", "sql.jsonl"),
        ("rewards.py:judge", "easy.csv"),
        ("rewards.py:ranks", "easy.csv"),
    ],
)
def test_a_reward_by_its_command(reward: str, data: str, place: Path) -> None:
    assert run(["reward", reward, "--data", data, "--fail-on", "error"]) == 0


def test_every_step_is_validated_and_the_best_is_kept(trained: Path, tmp_path: Path) -> None:
    validated = [line for line in runs.metrics(trained) if any(key.startswith("val/") for key in line)]
    assert [line["step"] for line in validated] == [0, 1, 2]
    assert run(["export", str(trained), "--step", "best", "--out", str(tmp_path / "best")]) == 0
    assert (tmp_path / "best" / "config.json").is_file()


def test_a_mix_and_an_order(trained: Path, place: Path, capsys) -> None:
    """Easy rows before hard ones by the order of files; a mix by weight keeps its shares."""
    prompts = [str(row["prompt"]) for row in runs.rollouts(trained)]
    assert len(prompts) == 16
    assert all("easy" in prompt for prompt in prompts)
    mix = "data.train_files={easy.csv: 0.75, hard.csv: 0.25}"
    assert run(["train", "--model", "model", "--reward", "rewards.py:close", mix, *SHORT, "--dry-run"]) == 0
    assert "easy.csv" in capsys.readouterr().out


def test_a_run_is_resumed(trained: Path) -> None:
    job = runs.resume(trained, "trainer.total_training_steps=3")
    assert job.wait() == 0, job.output[-4000:]
    assert [line["step"] for line in runs.metrics(trained)] == [0, 1, 2, 3]
    # the third batch begins with the hard file
    last = [str(row["prompt"]) for row in runs.rollouts(trained)][16:]
    assert len(last) == 8
    assert all("hard" in prompt for prompt in last)


def test_an_adapter_is_exported_and_trained_on(trained: Path, place: Path, tmp_path: Path, capsys) -> None:
    adapter = tmp_path / "adapter"
    assert run(["export", "--gguf-help"]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("vllm serve", "convert_hf_to_gguf.py", "hf upload"))
    assert run(["export", str(trained), "--adapter", "--out", str(adapter)]) == 0
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in adapter.iterdir()}
    started = ("--model", "model", "--data", "easy.csv", "--reward", "rewards.py:close")
    again = runs.train(
        tmp_path / "again",
        *(*started, *SHORT, f"model.lora_adapter_path={adapter}", "model.lora_rank=2"),
        "trainer.total_training_steps=1",
    )
    assert runs.metrics(again)[-1]["step"] == 1


def test_penalties_and_kl_are_logged(trained: Path, place: Path, capsys) -> None:
    lines = runs.metrics(trained)[1:]
    assert all(line["reward/overlong/mean"] <= 0 and "actor/kl_loss" in line for line in lines)
    given = ["train", "--model", "model", "--data", "easy.csv", "--reward", "rewards.py:close", *SHORT]
    assert run([*given, "-p", "grpo", "actor.use_kl_loss=false", "--dry-run", "--all"]) == 0
    assert "reference" not in capsys.readouterr().out.split("Memory per GPU")[1].split("Spec:")[0]


def test_thoughts_are_switched_off_with_the_default_attention(trained: Path) -> None:
    assert all("<|assistant|></think>" in str(row["prompt"]) for row in runs.rollouts(trained))


def test_memory_is_planned_for_another_machine(place: Path, capsys) -> None:
    given = ["train", "-p", "qwen3-8b", "-p", "grpo", "data.train_files=easy.csv", "--reward", "maths"]
    code = run([*given, "--machine", "8xh100", "--dry-run"])
    shown = capsys.readouterr().out
    assert "peak" in shown, (code, shown)
    assert "GiB" in shown


def test_a_flat_reward_is_explained(place: Path, tmp_path: Path, capsys) -> None:
    given = ("--model", "model", "--data", "hard.csv", "--reward", "maths", *SHORT)
    flat = runs.train(tmp_path / "flat", *given, "trainer.total_training_steps=2")
    assert "all grades are equal" in flat.with_suffix(".log").read_text()
    run(["diagnose", str(flat)])
    assert "reward" in capsys.readouterr().out


SWEEP = """
for length in 3 5; do
  rlctl train --model model --data easy.csv --reward rewards.py:close data.max_response_length=$length \
    trainer.total_training_steps=1 trainer.run_dir=sweep/length-$length || exit 1
done
rlctl runs sweep
rlctl report sweep/length-3 sweep/length-5 --out both.html
"""


def test_a_sweep_is_a_loop_of_the_shell(place: Path, forked_commands: Path) -> None:
    environment = {**os.environ, "PATH": f"{forked_commands}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", SWEEP],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in ("length-3", "length-5"))
    page = (place / "both.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("length-3", "length-5"))
