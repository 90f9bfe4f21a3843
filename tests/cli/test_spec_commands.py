"""Commands that help to write a spec, completion, and help that fits the terminal."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rlctl.algos.rules import BASIC_STATISTICS
from rlctl.cli import explain_entries
from rlctl.cli.app import app, run
from rlctl.registry import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    Registry,
)
from rlctl.run_spec import sources
from rlctl.run_spec.keys import known_leaves, known_sections
from rlctl.run_spec.machine import GIB, gpu_memory
from rlctl.run_spec.sources import all_presets

Capture = pytest.CaptureFixture[str]


def test_the_memory_of_a_card() -> None:
    memory = gpu_memory("NVIDIA H100 80GB HBM3, 81559 MiB, 570.1")
    assert memory is not None
    assert memory / GIB == pytest.approx(79.6, abs=0.1)
    assert gpu_memory("NVIDIA GB10, [N/A], 580.1") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor.lr", {"name": "actor.lr", "default": "1e-06", "type": "number ≥ 0"}),
        ("rollout_corr/kl", {"name": "rollout_corr/kl", "unit": "nats"}),
        ("rollout_corr/rollout_rs_token_k1_mean", {"name": "rollout_corr/rollout_rs_token_k1_mean"}),
    ],
)
def test_explain_one(name: str, expected: dict[str, str], capsys: Capture) -> None:
    assert run(["explain", name, "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert expected.items() <= entry.items()
    assert entry["meaning"]
    assert run(["explain", name]) == 0
    assert entry["meaning"] in capsys.readouterr().out


def test_explain_knows_every_key_and_what_presets_set(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema and presets are read once, not once per key."""
    rows, paths = list(explain_entries.key_rows()), [preset.path for preset in all_presets().values()]
    presets = {path: sources.read_yaml_file(path, known_leaves()) for path in paths}
    monkeypatch.setattr(explain_entries, "key_rows", lambda: rows)
    monkeypatch.setattr(explain_entries, "read_yaml_file", lambda path, _: presets[path])
    for key in known_leaves():
        assert run(["explain", key, "--json"]) == 0
        [entry] = json.loads(capsys.readouterr().out)
        assert entry["name"] == key
        assert entry["meaning"], key
    assert run(["explain", "algorithm.adv_estimator"]) == 0
    assert "rloo-seq-is: rloo" in capsys.readouterr().out


def test_explain_knows_every_part(capsys: Capture) -> None:
    for registry in Registry.all:
        for part in registry.parts():
            if registry is not REJECTION_CRITERIA or part.name not in BASIC_STATISTICS:
                assert run(["explain", part.name, "--json"]) == 0
                found = json.loads(capsys.readouterr().out)
                [meaning] = [one["meaning"] for one in found if one["meaning"].startswith(registry.kind)]
                if registry is not REJECTION_CRITERIA:
                    assert ("(experimental)" in meaning) == part.experimental, part.name


def test_the_dry_run_says_which_parts_are_experimental(capsys: Capture) -> None:
    loss = "algorithm.rollout_correction.loss_type=vespo"
    assert run(["train", "-p", "rloo-seq-is", loss, "--dry-run", "--all"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "vespo, policy loss" in line]
    assert line.endswith("(experimental)")


@pytest.mark.parametrize(
    ("name", "bands"),
    [
        (
            "seq_max_k2",
            {"rlctl": "2.5: ρ ≤ 2.5, the largest", "verl": "0.1: 0.6394 ≤ ρ ≤ 1.564, each"},
        ),
        ("token_k1", {"rlctl": "the whole response is rejected", "verl": "the token is rejected"}),
        ("geometric", {"rlctl": "0.5_2.0: 0.5 ≤ ρ ≤ 2, the geometric mean"}),
    ],
)
def test_explain_a_criterion_in_each_dialect(name: str, bands: dict[str, str], capsys: Capture) -> None:
    """In verl, k2 = ½ (log ρ)² ≤ 0.1 accepts ρ from e^−√0.2 = 0.6394 to e^√0.2 = 1.564."""
    assert run(["explain", name, "--json"]) == 0
    [entry] = [one for one in json.loads(capsys.readouterr().out) if "rlctl" in one]
    assert {"rlctl", "verl"} & entry.keys() == bands.keys()
    assert all(words in entry[dialect] for dialect, words in bands.items())


def test_explain_a_section_and_the_end_of_a_key(capsys: Capture) -> None:
    assert run(["explain", "trainer.guardrails", "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == {
        key for key in known_leaves() if key.startswith("trainer.guardrails.")
    }
    assert run(["explain", "lr", "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} == {"actor.lr", "critic.lr"}


@pytest.mark.parametrize(
    ("name", "near"),
    [("actor.lrr", "actor.lr"), ("rollout_cor/kl", "rollout_corr/kl"), ("ppo_clp", "ppo_clip")],
)
def test_explain_the_unknown(name: str, near: str, capsys: Capture) -> None:
    assert run(["explain", name]) == 2
    assert f"did you mean `{near}`?" in capsys.readouterr().err
    assert run(["explain", "xqzv"]) == 2
    assert "`rlctl explain --format markdown` lists every key" in capsys.readouterr().err


def test_explain_searches_and_lists_the_sections(capsys: Capture, tmp_path: Path) -> None:
    def names(*words: str) -> list[str]:
        assert run(["explain", *words, "--format", "json"]) == 0
        return [each["name"] for each in json.loads(capsys.readouterr().out)]

    assert names() == list(known_sections())
    found = names("lora")
    assert found[0] == "model.lora_rank"
    assert {"rollout.merge_lora", "engine.offload_base", "ref.path"} <= set(found)
    assert found.index("rollout.merge_lora") < found.index("engine.offload_base")
    assert names("adapter", "Directory") == ["model.lora_adapter_path"]
    assert "rollout_corr/rollout_rs_masked_fraction" in names("masked")
    assert "vespo" in names("vespo")
    assert "1gpu-lora" in found
    assert run(["explain", "lora", "-o", str(tmp_path / "x.txt")]) == 0
    assert "model.lora_rank" in (tmp_path / "x.txt").read_text()


def test_presets_as_json(capsys: Capture) -> None:
    assert run(["presets", "list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == list(all_presets())


def test_a_piped_list_is_not_wrapped(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["presets", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_presets()) + 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rlctl train -p rloo", {"rloo", "rloo-seq-is", "rloo-uncorrected"}),
        (
            "rlctl train actor.lr_",
            {"actor.lr_ess_scaling=", "actor.lr_scheduler_type=", "actor.lr_warmup_steps="},
        ),
        ("rlctl explain data.tra", {"data.train_files", "data.train_batch_size"}),
        ("rlctl presets show embed", {"embedded"}),
        ("rlctl watch runs/p/", {"runs/p/a"}),
    ],
)
def test_the_shell_completes(words: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "p" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "p" / "a" / "spec.yaml").touch()
    count = str(len(words.split()) - 1)
    asked = {"_RLCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    program = "from rlctl.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **asked, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == expected, done.stderr


def _commands() -> list[list[str]]:
    group = typer.main.get_command(app)
    found: list[list[str]] = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", {}) or getattr(command, "subcommands", {})
        found += [[name]] if hasattr(command, "subcommands") else []
        found += [[name, sub] for sub in below] or [[name]]
    return found


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_help_fits_the_terminal_and_its_examples_can_be_pasted(
    command: list[str], columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert run([*command, "--help"]) == 0
    assert capsys.readouterr().out == out  # the commands are built once
    assert max(map(len, out.splitlines())) <= min(columns, 100)
    assert not re.search("<(bool|str|list|path)", out)
    text = re.split("^(?:Arguments|Options):", out, maxsplit=1, flags=re.MULTILINE)[0]
    examples = re.findall(
        r"^    ((?:rlctl|kubectl) .*(?<!\\))$", text.replace(" \\\n        ", " "), re.MULTILINE
    )
    assert sum(line.startswith(f"rlctl {' '.join(command)}") for line in examples) >= 2, text
    written = {" ".join(line.split()) for line in (_help(command) or "").splitlines()}
    assert set(examples) <= written
    for line, following in itertools.pairwise(line.rstrip() for line in text.splitlines()):
        # wrapped where the terminal ends, not where the source does
        is_prose = line and following and not line.endswith("\\")
        assert not is_prose or len(f"{line} {following.split()[0]}") > min(columns, 102) - 3, line


def _help(words: list[str]) -> str | None:
    command = typer.main.get_command(app)
    for word in words:
        below = getattr(command, "commands", None)
        command = below[word] if below else command.subcommand(word)  # type: ignore[attr-defined]
    return command.help


def test_the_dry_run_describes_the_estimator_and_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = Path(__file__).parents[2] / "examples" / "custom_loss.py"
    loss = f"algorithm.rollout_correction.loss_type={file}:soft_ppo"
    assert run(["train", "--dry-run", "--all", f"trainer.run_dir={tmp_path}/run", loss]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (ADVANTAGE_ESTIMATORS.part("rloo"), POLICY_LOSSES.part(f"{file}:soft_ppo")):
        assert " ".join(part.formula.split()) in shown


@pytest.mark.parametrize(
    ("values", "gpus"),
    [
        (["trainer.n_gpus_per_node=8"], 8),
        (["trainer.n_gpus_per_node=1"], 1),
        (["trainer.n_gpus_per_node=8", "trainer.run_dir=runs/x y"], 8),
        (["-p", "8gpu"], 8),
        (
            [
                "trainer.n_gpus_per_node=4",
                "rollout.name=vllm",
                "rollout.mode=server",
                "rollout.server.replicas=4",
            ],
            8,
        ),
    ],
)
def test_one_machine_needs_no_launcher_and_no_run_directory(values, gpus, capsys: Capture) -> None:
    given = ["--preset", "rloo", *(word for word in values if word[0] != "-" and word != "8gpu")]
    given = ["--preset", "8gpu", *given] if "8gpu" in values else given
    assert run(["train", *given, "--print-command"]) == 0
    lines = capsys.readouterr().out.splitlines()
    plain, srun = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    assert plain[:2] == ["rlctl", "train"]
    assert sorted(plain[2:]) == sorted(given)
    assert srun[0] == "srun"
    assert srun[srun.index("--gpus-per-node") + 1] == str(gpus)
    assert srun[-len(plain) :] == plain


def test_printed_commands_keep_the_three_flags(capsys: Capture) -> None:
    flags = ["--model", "a/b", "--data", "my data.parquet", "--reward", "maths"]
    assert run(["train", *flags, "actor.lr=1e-5", "--print-command"]) == 0
    [plain, _] = [line for line in capsys.readouterr().out.splitlines() if line and line[0] != "#"]
    assert shlex.split(plain) == ["rlctl", "train", *flags, "actor.lr=1e-5"]


def test_presets_are_listed_by_kind_with_older_models_last(capsys: Capture) -> None:
    assert run(["presets", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = list(dict.fromkeys(preset["kind"] for preset in found))
    assert kinds == ["algorithms", "models", "hardware", "examples"]
    models = [preset["name"] for preset in found if preset["kind"] == "models"]
    assert models[-5:] == ["deepseek-7b", "gemma-7b", "llama3-8b", "mistral-7b", "qwen2-7b"]
    assert {"rloo", "grpo", "ppo", "dapo"} <= {preset["name"] for preset in found}
