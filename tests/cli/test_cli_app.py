"""User-visible behaviour of the command line: exit codes, messages, no traceback, no import of torch."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rlctl
from rlctl.cli import app as app_module
from rlctl.cli.app import run
from rlctl.cli.train import _print_summary
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.run_spec.sources import all_presets
from tests.cli.test_documented_commands import APP, below

ROOT = Path(rlctl.__file__).parent.parent
RC = "algorithm.rollout_correction."


@pytest.fixture(autouse=True)
def _wide_plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    """A Parquet file with rows that can be trained on."""
    row = {"data_source": "t", "prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    path = tmp_path_factory.mktemp("prompts") / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist([row] * 1024), path)
    return path


@pytest.mark.parametrize("name", list(all_presets()))
def test_every_preset_dry_runs(name, capsys, prompts):
    of_a_model = all_presets()[name].kind == "models" and name != "embedded"
    given = [f"data.train_files={prompts}"] if of_a_model else []
    assert run(["train", "--preset", name, "--dry-run", "--all", *given]) == 0
    out = capsys.readouterr().out
    assert f"preset {name}:" in out
    assert "Memory per GPU" in out
    assert "Dry run." in out


def test_dry_run_prints_origins_bands_and_arithmetic(capsys, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("rollout:\n  n: 4\n")
    code = run(["train", "-p", "grpo-rs-only", "-s", str(file), "--dry-run", "--all", "trainer.seed=5"])
    lines = capsys.readouterr().out.splitlines()

    def row(name: str) -> list[str]:
        """The first key of that name; sections of sections come after their parent's own keys."""
        found = [line for line in lines if line.split()[:1] == [name] and line.startswith("    ")]
        return found[0].split(maxsplit=2)

    assert code == 0
    assert row("seed") == ["seed", "5", "command line"]
    assert row("n") == ["n", "4", f"{file}:2"]
    assert row("adv_estimator") == ["adv_estimator", "grpo", "preset grpo-rs-only:11"]
    assert row("train_batch_size") == ["train_batch_size", "128", "embedded model"]
    assert row("enable_gradient_checkpointing")[1:] == ["false", "default"]  # the longest key
    assert row("temperature") == ["temperature", "1.0", "default"]
    assert "  token_k1: 0.7 ≤ ρ ≤ 1.4" in lines
    assert "  128 prompts × 4 responses = 512 samples" in lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.name=mine.py:grade"], ""),
        (["reward.name=mine.py:grade", "reward.params.scale=2"], "mine.py:grade takes no parameters"),
        (["reward.name=mine.py:absent"], "define `def absent"),
    ],
)
def test_dry_run_loads_graders_from_files(overrides, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def grade(response, ground_truth):\n    return 1.0\n")
    assert run(["train", "-p", "rloo-seq-is", "--dry-run", *overrides]) == (2 if message else 0)
    assert message in capsys.readouterr().out


def test_dry_run_knows_the_critic(capsys):
    assert run(["train", "-p", "ppo-seq-is-token-rs", "--dry-run", "--all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no errors: the run can start\n")
    assert "critic's weights" in out
    assert "2 × 4 epochs over the batch = 8 optimizer steps" in out


def test_a_critic_nobody_reads_is_refused(capsys):
    assert run(["train", "-p", "rloo-seq-is", "critic.enable=true", "trainer.critic_warmup=2"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "critic.enable" in err
    assert "trainer.critic_warmup" in err
    assert "leave it out, or set algorithm.adv_estimator: gae" in err


@pytest.mark.parametrize(
    ("old", "new"),
    [("schema --section=x", "explain --format schema"), ("reward test nothing --data x", "reward")],
)
def test_a_renamed_command_runs_under_its_new_name(old: str, new: str, capsys) -> None:
    run(old.split())
    note, *error = capsys.readouterr().err.splitlines()
    assert note.endswith(f" is now `rlctl {new}`")
    assert any(f"rlctl {new.split(maxsplit=1)[0]}" in line or "neither a spec" in line for line in error)


def test_help_lists_every_command_in_a_group(capsys) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    groups = ["Train", "Look at runs", "Use the model", "Look things up"]
    assert re.findall(r"^(\w[\w ]+):$", out, re.MULTILINE) == groups
    assert {line.split()[0] for line in out.splitlines() if re.match(r"  [a-z]", line)} >= set(below(APP))


def test_help_fits_one_screen(capsys, monkeypatch) -> None:
    """A command is a line of it; what to try first comes first."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 28
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if re.match(r"  [a-z-]+ {2,}", line)]
    assert listed[:3] == ["train", "reward", "environment"]
    assert sorted(listed) == sorted(APP.commands)
    for option in ("--version", "--help", "--install-completion"):
        assert option in "\n".join(lines)


def test_the_help_of_every_command_has_an_example() -> None:
    def leaves(command, name):
        if hasattr(command, "commands"):
            for below_it, one in command.commands.items():
                yield from leaves(one, f"{name} {below_it}")
            return
        yield command, name
        yield from ((one, f"{name} {below_it}") for below_it, one in below(command).items())

    without = [
        name
        for command, name in leaves(APP, "rlctl")
        if not re.search(rf"^ *{name}\b", command.help, re.MULTILINE)
    ]
    assert without == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "3"], "did you mean `actor.lr=3`?"),
        (["--lr=3e-6"], "did you mean `actor.lr=3e-6`?"),
        (["--learning-rate", "1"], "use `actor.lr=1`"),
        (["--actor.lr", "1"], "`actor.lr=1`"),
        (["--seed"], "`trainer.seed=VALUE`"),
        (["--lr", "--dry-run"], "`actor.lr=VALUE`"),
        (["--presets"], "--preset"),
        (["--nonsense"], "No such option: --nonsense"),
        (["--preset"], "'--preset' requires an argument"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_key(words: list[str], message: str, capsys) -> None:
    assert run(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_removed_command_says_what_to_do_instead(capsys) -> None:
    assert run(["sweep", "actor.lr=1e-6,3e-6"]) == 2
    assert "docs/how-to/runs.md" in capsys.readouterr().err
    assert run(["diagnose", "compare", "a", "b"]) == 2
    assert "draws both runs in each plot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "runs/first", "--out", "model", "--dtype=bf16"], "save_pretrained"),
        (["reward", "maths", "--responses", "samples.parquet"], "rlctl evaluate DIR --regrade"),
        (["prepare-data", "parquet", "a.csv", "--placeholders", "keep"], "are never written"),
    ],
)
def test_a_removed_option_says_what_to_do_instead(arguments, words, capsys):
    assert run(arguments) == 2
    shown = capsys.readouterr().err
    assert "no longer exists" in shown
    assert words in shown


def test_a_directory_is_called_one(tmp_path, capsys) -> None:
    assert run(["train", str(tmp_path)]) == 2
    assert "this is a directory: name a spec file in it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run(["train", str(tmp_path)]) == 2
    assert f"for a model write model.path={tmp_path}" in capsys.readouterr().err


def test_all_mistakes_at_once_with_places(capsys, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("actor:\n  lr: fast\nalgorithm:\n  lr: 1\n")
    assert (
        run(["train", "-s", str(file), "rollout.nn=3", "actor_rollout_ref.actor.optim.lr=1", "--dry-run"])
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    for words in (
        "the spec has 4 problems",
        f"{file}:2",
        f"{file}:4",
        "did you mean `actor.lr`?",
        "did you mean `rollout.n`?",
        "command line",
    ):
        assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["train", "--dryrun"],
        ["train", "--preset"],
        ["train", "-p", "nonsense"],
        ["train", "-s", "no-such.yaml"],
        ["train", "seed"],
        ["train", "--resume", "no-such-run"],
        ["explain", "nonsense", "--format", "schema"],
        ["presets", "show", "nonsense"],
    ],
)
def test_wrong_usage_exits_2_without_traceback(arguments, capsys):
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert err.strip()
    assert "Traceback" not in err


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A directory with the spec of a run."""
    spec = load_spec(overrides=["trainer.seed=3"]).spec
    (tmp_path / "spec.yaml").write_text(dump_spec(spec), encoding="utf-8")
    return tmp_path


def test_resume_refuses_presets(run_dir, capsys):
    assert run(["train", "--resume", str(run_dir), "-p", "rloo-seq-is"]) == 2
    capsys.readouterr()
    assert run(["train", "--resume", str(run_dir), "--model", "a/b"]) == 2
    assert "leave --model, --data and --reward out" in capsys.readouterr().err
    assert run(["train", "--resume", str(run_dir), "--dry-run", "--all"]) == 0
    assert f"{run_dir / 'spec.yaml'}:2" in capsys.readouterr().out


def test_a_dry_run_refuses_what_a_resumed_run_cannot_change(run_dir, capsys):
    given = ["train", "--resume", str(run_dir), "--dry-run"]
    assert run([*given, "trainer.save_freq=7"]) == 0
    assert run([*given, "actor.lr=1e-3"]) == 2
    assert "actor.lr: was" in capsys.readouterr().err


def test_a_bug_is_two_lines_and_a_file(monkeypatch, capsys):
    def explode(**_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(app_module, "app", explode)
    assert run([]) == 1
    err = capsys.readouterr().err
    path = Path(err.split()[-1])
    assert "ZeroDivisionError: boom" in err
    assert "explode" in path.read_text()
    path.unlink()


def test_the_hub_prints_no_retries():
    """Its library logs each retry as a warning; the error at the end says what failed."""
    program = """
from rlctl.cli import app

def level(_words):
    from huggingface_hub.utils import logging
    return logging.get_verbosity()

app.run = level
app.main()
"""
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, env=env)
    assert done.returncode == logging.ERROR


def test_closed_streams_are_no_bug():
    """A dry run needs none of them; and no file it opens may take their number."""
    command = f"'{sys.executable}' -m rlctl train --dry-run <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_full_disk_is_no_bug(monkeypatch, capsys):
    def write(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app_module, "app", write)
    assert run(["explain"]) == 4
    assert capsys.readouterr().err == "error: No space left on device\n"


def test_a_place_that_cannot_be_written_is_no_bug(tmp_path, monkeypatch, capsys):
    (tmp_path / "3").touch()
    monkeypatch.setattr(app_module, "app", lambda **_: (tmp_path / "3").mkdir())
    assert run(["explain"]) == 4
    err = capsys.readouterr().err
    assert "File exists" in err
    assert "bug" not in err


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (MemoryError(), "host"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
            "host",
        ),
        (OSError(12, "Cannot allocate memory"), "host"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "GPU"),
    ],
)
def test_too_little_memory_is_no_bug(error, where, monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    assert run(["explain"]) == 1
    err = capsys.readouterr().err
    assert f"out of memory ({where})" in err
    assert "ppo_micro_batch_size_per_gpu" in err
    assert "bug" not in err


def test_an_endless_number_is_one_clear_error(tmp_path, capsys):
    file = tmp_path / "a.yaml"
    file.write_text(f"trainer:\n  seed: {'9' * 5000}\n")
    for given in (["-s", str(file)], [f"trainer.seed={'9' * 5000}"]):
        assert run(["train", "--dry-run", *given]) == 2
        err = capsys.readouterr().err
        assert "trainer.seed: " in err
        assert "integer" in err
        assert len(err) < 1000


def test_the_dry_run_counts_the_rows_as_the_run_does(capsys, prompts):
    """Of a pattern too; a run of less than one batch, which would be refused, is not announced."""
    rows = pq.read_metadata(prompts).num_rows
    given = [
        "train",
        "--dry-run",
        "--all",
        "model.path=nobody/nothing",
        f"data.train_files={prompts.parent}/*.parquet",
    ]
    assert run([*given, f"data.train_batch_size={rows}"]) == 0
    assert f"training rows: {rows:,}\n" in capsys.readouterr().out
    assert run([*given, f"data.train_batch_size={rows + 1}"]) == 2
    assert f"a batch takes {rows + 1} prompts, the data has {rows}" in capsys.readouterr().out
    warm = [*given, f"data.train_batch_size={rows}", "algorithm.adv_estimator=gae"]
    assert run([*warm, "trainer.total_epochs=3", "trainer.critic_warmup=3"]) == 2
    out = capsys.readouterr().out
    assert "batches in the run: 3 (0 optimizer steps)" in out
    assert "trainer.critic_warmup: all 3 batches of the run would train the critic alone" in out
    assert run([*warm, "trainer.total_epochs=4", "trainer.critic_warmup=3"]) == 0
    assert "batches in the run: 4 (1 optimizer steps)" in capsys.readouterr().out


def test_the_memory_of_an_unknown_model_is_unknown(capsys, prompts):
    assert (
        run(["train", "model.path=nobody/nothing", f"data.train_files={prompts}", "--dry-run", "--all"]) == 0
    )
    peak = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.split()[:1] == ["peak"] and "memory" not in line
    )
    assert peak.split()[1] == "unknown"


def test_a_dry_run_shows_changed_keys_and_all_on_request(capsys):
    assert run(["train", "actor.lr=2e-3", "--dry-run"]) == 0
    changed = capsys.readouterr().out
    assert run(["train", "actor.lr=2e-3", "--dry-run", "--all"]) == 0
    every = capsys.readouterr().out
    assert re.search(r"^ +lr +0\.002 +command line$", every, re.MULTILINE)
    assert re.search(r"^  actor  .*\blr=0\.002 ", changed, re.MULTILINE)
    assert "tau_neg" in every
    assert "tau_neg" not in changed


#: Overrides, and messages of the refusal.
UNUSABLE = [
    (
        ["model.path=./gone", "data.train_files={prompts}"],
        ["model.path: not a Hugging Face model directory"],
    ),
    (["model.path={tmp}", "data.train_files={prompts}"], ["it has no config.json"]),
    (["model.path={tmp}/broken", "data.train_files={prompts}"], ["config.json cannot be read"]),
    (["model.path={tmp}/bare", "data.train_files={prompts}"], ["holds no weights"]),
    (["model.path={tmp}/mute", "data.train_files={prompts}"], ["holds no tokenizer"]),
    (["model.path=a/b", "data.train_files=[no.parquet,{prompts}]"], ["no such file or directory"]),
    (["model.path=a/b", "data.train_files={tmp}/empty.parquet"], ["the file has no rows"]),
    (
        ["model.path=a/b", "data.train_files={tmp}/other.parquet"],
        ["asks for an answer (ground_truth), and no row has one"],
    ),
    (["model.path=a/b", "data.train_files={tmp}/torn.parquet"], ["cannot be read as Parquet"]),
    (["reward.terms=[{{name: exact}},{{name: 'gone.py:f'}}]"], ["reward.terms: no such file: gone.py"]),
    (["algorithm.adv_estimator=gae", "critic.path=/gone/c"], ["critic.path: not a Hugging Face model"]),
    (["actor.use_kl_loss=true", "ref.path=~/gone/r"], ["ref.path: not a Hugging Face model"]),
    (
        [
            "model.path=./gone",
            "data.train_files=x.parquet",
            "data.val_files=y.parquet",
            "trainer.test_freq=5",
        ],
        ["model.path: ", "data.train_files: ", "data.val_files: ", "3 problems"],
    ),
]
#: Each command's exit code, output, and whether torch is imported by then.
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
import rlctl.cli.app as app
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = app.run(words)
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def unusable(prompts, tmp_path_factory):
    """Directory of the files, and what a process that has not imported torch says of each case."""
    where = tmp_path_factory.mktemp("unusable")
    for name, files in {"broken": ["w.bin"], "bare": [], "mute": ["model.safetensors"]}.items():
        (where / name).mkdir()
        (where / name / "config.json").write_text("{" if name == "broken" else "{}")
        for file in files:
            (where / name / file).touch()
    table = pq.read_table(prompts)
    pq.write_table(table.slice(0, 0), where / "empty.parquet")
    pq.write_table(table.select(["prompt"]), where / "other.parquet")
    (where / "torn.parquet").write_bytes(prompts.read_bytes()[:-9])
    commands = [
        ["train", *(each.format(prompts=prompts, tmp=where) for each in case)] for case, _ in UNUSABLE
    ]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return commands, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("case", range(len(UNUSABLE)), ids=[messages[0] for _, messages in UNUSABLE])
def test_missing_and_unusable_files_are_refused_before_torch(case, unusable, capsys):
    commands, answers = unusable
    messages, (code, said, has_torch) = UNUSABLE[case][1], answers[case]
    assert (code, has_torch) == (2, False)
    assert [message for message in messages if message not in said] == []
    assert run(["train", "--dry-run", *commands[case][1:]]) == 2
    out = capsys.readouterr().out
    assert [message for message in messages if message not in out and "problems" not in message] == []


def test_schema_describes_every_section(capsys):
    assert run(["explain", "--format", "schema"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["properties"]) >= {"model", "data", "rollout", "algorithm", "actor", "trainer"}
    assert run(["explain", "algorithm.rollout_correction", "--format", "schema"]) == 0
    section = json.loads(capsys.readouterr().out)
    names, aliases = section["properties"]["dialect"]["anyOf"]
    assert (names["enum"], aliases["enum"]) == (["rlctl", "verl"], ["guide"])
    assert all("description" in field for field in section["properties"].values())


def test_presets_are_listed_shown_and_copied(capsys, tmp_path):
    assert run(["presets", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in all_presets())
    assert run(["presets", "show", "rloo-seq-is"]) == 0
    assert capsys.readouterr().out.strip() == all_presets()["rloo-seq-is"].path.read_text().strip()
    copied = tmp_path / "rloo-seq-is.yaml"
    assert run(["presets", "show", "rloo-seq-is", "-o", str(copied)]) == 0
    assert run(["presets", "show", "rloo-seq-is", "-o", str(tmp_path / "no" / "x.yaml")]) == 2
    assert run(["train", "--spec", str(copied), "--dry-run"]) == 0


#: Commands, those that import least first, and what they and those before them do not import.
LIGHT = [
    (["--help"], ("pydantic", "yaml", "rich")),
    (["--version"], ("pydantic", "yaml", "rich")),
    (["train", "--help"], ("yaml", "pyarrow", "rich")),
    (["train", "--preset", "rloo-seq-is", "--dry-run"], ("pyarrow",)),
    (["train", "no.such=1"], ("pyarrow",)),
    (["explain", "--format", "schema"], ("pyarrow",)),
    (["presets", "list"], ("pyarrow",)),
    (["doctor", "--quick"], ("pyarrow", "wandb")),
]


@pytest.fixture(scope="module")
def imported_after():
    """Modules of one process after each of the commands, which it runs one after the other."""
    program = (
        "import sys, json, rlctl.cli.app as a\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    a.run(words)\n"
        "    print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps([words for words, _ in LIGHT])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]


@pytest.mark.parametrize("place", range(len(LIGHT)), ids=[" ".join(words) for words, _ in LIGHT])
def test_light_commands_import_nothing_heavy(place, imported_after):
    assert len(imported_after) == len(LIGHT)
    forbidden = {"torch", "transformers", "deepspeed", "numpy", *LIGHT[place][1]}
    assert not forbidden.intersection(imported_after[place])


def test_the_table_of_keys_has_one_section_on_request(capsys):
    assert run(["explain", "actor", "--format", "markdown"]) == 0
    assert "| `actor.lr` | number ≥ 0 | `1e-06` |" in capsys.readouterr().out


def test_the_summary_of_a_run_names_its_validation_as_data_do(tmp_path, capsys) -> None:
    """Validation may be sampled at any temperature, and a data source may have any name."""
    rewards = ({"val/my[bold]\x1b/reward_mean": reward} for reward in (0.25, 0.5))
    summary = {"step": 2, "total_steps": 2, "num_updates": 2, "seconds": 3.0, "interrupted": False}
    summary |= {"first": {"critic/score/mean": 0.1}, "last": {"critic/score/mean": 0.2}, "model": "none"}
    summary |= dict(zip(("validation_first", "validation_last"), rewards, strict=True))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    _print_summary(tmp_path)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "reward", "0.100", "0.200"] in shown
    assert ["validation", "(my[bold]\\x1b)", "0.250", "0.500"] in shown


def test_a_metric_that_one_end_of_the_run_lacks_is_left_blank_there(tmp_path, capsys) -> None:
    """Steps whose update was withheld have no effective sample size."""
    ess, masked = "rollout_corr/rollout_is_raw_eff_sample_size", "rollout_corr/rollout_rs_masked_fraction"
    summary = {"step": 2, "total_steps": 2, "num_updates": 1, "seconds": 3.0, "interrupted": False}
    summary |= {"first": {ess: 0.5}, "last": {masked: 0.75}}
    summary |= {"validation_first": {}, "validation_last": {}, "model": "none"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    _print_summary(tmp_path)
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in shown if "first steps" in line)
    ends = {line.split("  ")[0].strip(): line for line in shown}
    assert ends["ESS, raw"].split()[-1] == "0.500"
    assert len(ends["ESS, raw"]) < header.index("last steps")
    assert ends["masked fraction"].split() == ["masked", "fraction", "0.750"]
    assert len(ends["masked fraction"]) > header.index("last steps")


@pytest.mark.parametrize(
    ("changes", "following"),
    [
        ({}, "report"),
        ({"interrupted": True}, "train --resume"),
        ({"interrupted": True, "early_stop": "no longer improves"}, "report"),
        ({"interrupted": True, "guardrails": {"stopped_because": "KL"}}, "diagnose"),
    ],
)
def test_a_run_ends_with_its_result_its_model_and_the_next_command(changes, following, tmp_path, capsys):
    summary = {"step": 2, "total_steps": 2, "num_updates": 2, "seconds": 3.0, "interrupted": False}
    summary |= {"first": {"critic/score/mean": 0.1}, "last": {"critic/score/mean": 0.2}, "model": "m"}
    summary |= {"validation_first": {"val/a/reward_mean": 0.5}, "validation_last": {"val/a/reward_mean": 0.5}}
    (tmp_path / "m").mkdir()
    (tmp_path / "summary.json").write_text(json.dumps(summary | changes))
    _print_summary(tmp_path)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "result  reward 0.100 → 0.200, validation 0.500",
        f"model   {tmp_path / 'm'}",
        f"next    rlctl {following} {tmp_path}",
    ]
