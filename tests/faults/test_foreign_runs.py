"""A directory that someone else has written runs nothing without the user's permission."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from rlctl.cli.app import run
from rlctl.errors import UsageError
from rlctl.processes import SERVER_KEY, TRUST_KEY
from rlctl.run_spec.load import recorded_spec
from rlctl.track.trust import require_permission, sign, values_of
from tests import runs

pytestmark = pytest.mark.usefixtures("embedded")
OPTIONS = ("trainer.total_training_steps=2", "trainer.save_freq=1")
#: Key of a spec → a value that names code.
NAMED = {
    "reward.name": "{evil}:f",
    "environment.name": "{evil}:f",
    "rollout.name": "{evil}:f",
    "engine.name": "{evil}:f",
    "algorithm.rollout_correction.loss_type": "{evil}:f",
    "algorithm.rollout_correction.rollout_is": "{evil}:f",
    "algorithm.rollout_correction.rollout_rs": "{evil}:f",
    "algorithm.adv_estimator": "{evil}:f",
    "actor.kl_loss_type": "{evil}:f",
    "trainer.logger": ["console", "{evil}:f"],
    "reward.terms": [{"name": "{evil}:f", "weight": 1.0, "params": {}}],
    "environment.others": ["{evil}:f"],
}
#: Commands that a user tries on a directory; `{run}`, `{out}` and `{data}` are replaced.
COMMANDS = {
    "train --resume": "train --resume {run}",
    "train --resume --dry-run": "train --resume {run} --dry-run",
    "train --resume --print-command": "train --resume {run} --print-command",
    "evaluate": "evaluate {run} -n 1 --limit 2",
    "mismatch": "diagnose mismatch --model {run}",
    "diagnose": "diagnose {run}",
    "diagnose --fix": "diagnose {run} --fix {out}.yaml",
    "what-if": "diagnose {run} --what-if",
    "who-sampled": "diagnose {run} --who-sampled",
    "plan": "diagnose {run} --plan",
    "sampler-test": "diagnose {run} --sampler-test",
    "export": "export {run} --output {out}",
    "samples": "samples {run}",
    "report": "report {run} --out {out}.html",
    "runs": "runs {run}",
    "reward": "reward {run} --data {data}",
    "environment test": "environment test {run} --episodes 4",
}


#: What a spec can do besides naming a file of code → its values.
OTHERWISE: dict[str, dict[str, object]] = {
    "sends a variable that it names": {
        "reward.name": "judge",
        "reward.judge.url": "http://203.0.113.5/v1",
        "reward.judge.model": "m",
        "reward.judge.key_variable": "KEY_OF_A_SERVICE",
    },
    "sends a variable to another program here": {
        "reward.name": "judge",
        "reward.judge.url": "http://127.0.0.1:9/v1",
        "reward.judge.model": "m",
        "reward.judge.key_variable": "KEY_OF_A_SERVICE",
    },
    "sends responses to another machine": {
        "reward.name": "judge",
        "reward.judge.url": "http://203.0.113.5/v1",
        "reward.judge.model": "m",
    },
    "has a teacher elsewhere": {"algorithm.teacher.path": "http://203.0.113.5/v1"},
    "samples elsewhere": {"rollout.server.urls": ["HTTP://203.0.113.5:8000"]},
    "imports a package for some rows": {"environment.others": ["verifiers"]},
    "shortens an option of vLLM": {"rollout.engine_kwargs": {"trust-remote": True}},
    "has an option of vLLM that is a number": {"rollout.engine_kwargs": {"speculative_config": {"trust": 1}}},
    "lets vLLM open a port": {"rollout.engine_kwargs": {"data_parallel_size": 2}},
    "has a text where vLLM expects a number": {"rollout.engine_kwargs": {"block_size": "evil.module"}},
    "has an option of DeepSpeed that is no text": {"engine.deepspeed": {"nebula": {"enabled": True}}},
}


@pytest.fixture(scope="module")
def own(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose spec names no code."""
    run_dir = tmp_path_factory.mktemp("own") / "run"
    return runs.train(run_dir, *OPTIONS, env={"RLCTL_CACHE": str(embedded_cache)})


@pytest.fixture(scope="module")
def rewarded(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this user with a reward of their own, in a file beside the run."""
    directory = tmp_path_factory.mktemp("rewarded")
    (directory / "helper.py").write_text("SCALE = 1.0\n")
    (directory / "mine.py").write_text(
        "from helper import SCALE\n\n\ndef score(response, path=None):\n    return SCALE * len(response)\n"
    )
    named = f"reward.name={directory}/mine.py:score"
    return runs.train(directory / "run", *OPTIONS, named, env={"RLCTL_CACHE": str(embedded_cache)})


def changed(run_dir: Path, target: Path, **values: object) -> Path:
    """A copy of a run, with values of its spec changed; `__` stands for a dot."""
    shutil.copytree(run_dir, target, symlinks=True)
    spec = yaml.safe_load((target / "spec.yaml").read_text())
    for name, value in values.items():
        *sections, key = name.split("__")
        section = spec
        for each in sections:
            section = section[each]
        section[key] = value
    (target / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return target


def evil_file(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    file, marker = directory / "evil.py", directory / "executed"
    file.write_text(f"open({str(marker)!r}, 'w')\n\n\ndef f(*args, **options):\n    return 0.0\n")
    return file


def filled(value: object, evil: Path) -> object:
    return json.loads(json.dumps(value).replace("{evil}", str(evil)))


def argv(command: str, run_dir: Path, tmp_path: Path, cache: Path) -> list[str]:
    data = next(cache.rglob("*val*.parquet"))
    return command.format(run=run_dir, out=tmp_path / "out", data=data).split()


@pytest.mark.parametrize("key", NAMED)
def test_a_strangers_spec_is_read_without_running_it(own, tmp_path, embedded, capsys, key: str) -> None:
    commands = (
        "train --resume --dry-run",
        "diagnose",
        "what-if",
        "sampler-test",
        "reward",
        "environment test",
    )
    try_out(own, tmp_path, embedded, capsys, key, commands)


@pytest.mark.parametrize("key", ["reward.name", "trainer.logger"])
def test_no_command_runs_what_a_strangers_spec_names(own, tmp_path, embedded, capsys, key: str) -> None:
    try_out(own, tmp_path, embedded, capsys, key, COMMANDS)


def try_out(own: Path, tmp_path: Path, embedded: Path, capsys, key: str, commands: Iterable[str]) -> None:
    """Tries commands on a run whose value at `key` names code of someone else."""
    evil = evil_file(tmp_path / "theirs")
    run_dir = changed(own, tmp_path / "run", **{key.replace(".", "__"): filled(NAMED[key], evil)})
    for name in commands:
        code = run(argv(COMMANDS[name], run_dir, tmp_path, embedded))
        said = " ".join("".join(capsys.readouterr()).split())
        assert not (tmp_path / "theirs/executed").exists(), name
        if name.startswith("train"):
            assert code == 2, (name, said)
            assert str(evil) in said
            assert "--trust" in said


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_a_strangers_spec_can_do_without_a_file(own, tmp_path, monkeypatch, capsys, what: str) -> None:
    values = {key.replace(".", "__"): value for key, value in OTHERWISE[what].items()}
    run_dir = changed(own, tmp_path / "run", **values)
    monkeypatch.setenv("KEY_OF_A_SERVICE", "pl41n")
    for name in ("OPENAI_API_KEY", SERVER_KEY):
        monkeypatch.delenv(name, raising=False)
    assert run(["train", "--resume", str(run_dir), "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no run of yours has written this directory" in said
    assert next(key for key, value in OTHERWISE[what].items() if "name" not in key) in said
    assert "--trust" in said
    assert "pl41n" not in said


#: Values of a stranger's reward that still count after another grader was named → the grader.
LEFT_OF_A_REWARD = {
    "auto": {"reward__by_source": {"embedded": "{evil}:f", "addition": "{evil}:f", "x": "{evil}:f"}},
    "judge": {
        "reward__judge": {
            "url": "http://127.0.0.1:9/v1",
            "model": "m",
            "key_variable": "KEY_OF_A_SERVICE",
            "retries": 0,
        }
    },
    "model": {"reward__model": {"path": "{theirs}", "trust_remote_code": True}},
}


@pytest.mark.parametrize("grader", LEFT_OF_A_REWARD)
def test_a_named_grader_allows_nothing_else_of_a_strangers_reward(
    own, tmp_path, embedded, monkeypatch, capsys, grader: str
) -> None:
    """`--reward auto` names a grader of ours, which reads `reward.by_source` of the spec."""
    monkeypatch.setenv("KEY_OF_A_SERVICE", "pl41n")
    evil = evil_file(tmp_path / "theirs")
    values = json.loads(json.dumps(LEFT_OF_A_REWARD[grader]).replace("{theirs}", str(evil.parent)))
    run_dir = changed(own, tmp_path / "run", **{key: filled(value, evil) for key, value in values.items()})
    evaluation = tmp_path / "evaluation"
    command = ["evaluate", str(own), "-n", "1", "--limit", "1", "--out", str(evaluation)]
    assert run(command) == 0, capsys.readouterr()
    record = json.loads((evaluation / "results.json").read_text())
    record["reward"] |= yaml.safe_load((run_dir / "spec.yaml").read_text())["reward"]
    (evaluation / "results.json").write_text(json.dumps(record))
    capsys.readouterr()
    for command in (
        ["evaluate", str(run_dir), "-n", "1", "--limit", "1", "--reward", grader],
        ["evaluate", str(evaluation), "--regrade", "--reward", grader],
    ):
        assert run(command) == 2, (command, capsys.readouterr())
        assert "--trust" in capsys.readouterr().err, command
    assert not (tmp_path / "theirs/executed").exists()
    for command in (
        ["evaluate", str(run_dir), "-n", "1", "--limit", "1", "--reward", "exact"],
        ["evaluate", str(evaluation), "--regrade", "--reward", "exact"],
    ):
        assert run(command) == 0, (command, capsys.readouterr())


def test_a_strangers_run_without_code_is_usable(own, tmp_path, embedded, capsys, monkeypatch) -> None:
    run_dir = changed(own, tmp_path / "run")
    assert not (run_dir / "code.json").exists()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")  # a node without a home
    for command in ("train --resume {run} --dry-run", "export {run} --output {out}", "samples {run}"):
        assert run(argv(command, run_dir, tmp_path, embedded)) == 0, capsys.readouterr()


def test_ones_own_run_with_a_reward_needs_no_flag(rewarded: Path, tmp_path: Path, embedded, capsys) -> None:
    assert run(["train", "--resume", str(rewarded), "--dry-run"]) == 0, capsys.readouterr()
    assert run(["evaluate", str(rewarded), "-n", "1", "--limit", "2", "--out", str(tmp_path / "e")]) == 0
    assert run(["evaluate", str(tmp_path / "e"), "--regrade"]) == 0, capsys.readouterr()


def test_another_user_is_asked(rewarded: Path, tmp_path: Path, embedded, monkeypatch, capsys) -> None:
    out = tmp_path / "evaluation"
    assert run(["evaluate", str(rewarded), "-n", "1", "--limit", "2", "--out", str(out)]) == 0
    monkeypatch.setenv(TRUST_KEY, "that of another user")
    commands = (
        ["train", "--resume", str(rewarded), "--dry-run"],
        ["evaluate", str(rewarded), "-n", "1", "--limit", "2"],
        ["evaluate", str(out), "--regrade"],
        ["reward", str(rewarded), "--data", str(next(embedded.rglob("*val*.parquet"))), "-n", "2"],
    )
    for command in commands:
        assert run(command) == 2, command
        said = capsys.readouterr().err
        assert "reward.name" in said
        assert "--trust" in said
        assert run([*command, "--trust"]) == 0, (command, capsys.readouterr())
    assert run(["evaluate", str(rewarded), "-n", "1", "--limit", "2", "--reward", "exact"]) == 0


@pytest.mark.parametrize("file", ["mine.py", "helper.py"])
def test_ones_own_edited_file_is_shown_as_changed(rewarded, embedded, capsys, file: str) -> None:
    path = rewarded.parent / file
    before = path.read_text()
    path.write_text(before + "\n# edited\n")
    try:
        for command in (["train", "--resume", str(rewarded), "--dry-run"], ["evaluate", str(rewarded)]):
            assert run(command) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert "changed since your run" in said
            assert file in said
            assert "no run of yours" not in said
        accepted = ["train", "--resume", str(rewarded), "--dry-run", "trainer.accept_changed_inputs=true"]
        assert run(accepted) == 0, capsys.readouterr()
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [("reward__params", {"path": "/etc/passwd"}), ("reward__name", "{other}"), ("environment__max_turns", 9)],
)
def test_a_signature_covers_parameters(rewarded, tmp_path, embedded, capsys, key: str, value: object) -> None:
    """A stranger may return a run with the record of its code, but other parameters."""
    named = filled(value, tmp_path)
    named = f"{rewarded.parent}/mine.py:other" if named == "{other}" else named
    run_dir = changed(rewarded, tmp_path / "run", **{key: named})
    assert run(["train", "--resume", str(run_dir), "--dry-run"]) == 2
    assert key.replace("__", ".") in capsys.readouterr().err


def test_a_record_cannot_be_written_by_others(rewarded: Path, tmp_path: Path, embedded, capsys) -> None:
    run_dir = changed(rewarded, tmp_path / "run")
    record = json.loads((run_dir / "code.json").read_text())
    (rewarded.parent / "mine.py").touch()
    for forged in ({**record, "files": {}}, {**record, "signature": ""}, {**record, "signature": None}, []):
        (run_dir / "code.json").write_text(json.dumps(forged))
        assert run(["train", "--resume", str(run_dir), "--dry-run"]) == 2, forged
        assert "no run of yours" in " ".join(capsys.readouterr().err.split())


def test_the_printed_command_of_a_cluster_carries_the_permission(rewarded: Path, own: Path, capsys) -> None:
    for run_dir, is_asked in ((rewarded, True), (own, False)):
        assert run(["train", "--resume", str(run_dir), "--print-command"]) == 0
        assert ("--trust" in capsys.readouterr().out) == is_asked


def test_code_that_a_model_ships(own: Path, tmp_path: Path, embedded, capsys) -> None:
    run_dir = changed(own, tmp_path / "run", model__trust_remote_code=True)
    for command in ("evaluate", "mismatch", "who-sampled", "train --resume"):
        assert run(argv(COMMANDS[command], run_dir, tmp_path, embedded)) == 2, command
        assert "model.trust_remote_code" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["ref__path", "critic__path", "algorithm__teacher__path"])
def test_code_that_another_model_ships(own: Path, tmp_path: Path, embedded, capsys, key: str) -> None:
    """`model.trust_remote_code` holds for all models: others are as much a part of what was allowed."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "modeling.py").write_text(f"A = '{name}'")
    allowed = {"model__trust_remote_code": True, "model__path": str(tmp_path / "first")}
    run_dir = changed(own, tmp_path / "run", **allowed, **{key: str(tmp_path / "second")})
    assert sign(run_dir, values_of(recorded_spec(run_dir / "spec.yaml"))) == ""
    require_permission(run_dir, values_of(recorded_spec(run_dir / "spec.yaml")))
    (tmp_path / "second/modeling.py").write_text("A = 'third'")
    with pytest.raises(UsageError, match=r"changed since your run used it: .*second/modeling\.py"):
        require_permission(run_dir, values_of(recorded_spec(run_dir / "spec.yaml")))
    shutil.copy(run_dir / "code.json", tmp_path)
    theirs = changed(own, tmp_path / "other", **allowed, **{key: str(tmp_path / "first")})
    shutil.copy(tmp_path / "code.json", theirs)
    with pytest.raises(UsageError, match="the spec has changed"):
        require_permission(theirs, values_of(recorded_spec(theirs / "spec.yaml")))


def test_code_that_is_planted_in_a_checkpoint(own: Path, tmp_path: Path, embedded, capsys) -> None:
    """The run is this user's, as is its model's code; a checkpoint has that code and some more."""
    run_dir = changed(
        own, tmp_path / "run", model__trust_remote_code=True, model__path=str(tmp_path / "first")
    )
    (tmp_path / "first").mkdir()
    (tmp_path / "first/modeling.py").write_text("A = 1")
    assert sign(run_dir, values_of(recorded_spec(run_dir / "spec.yaml"))) == ""
    [model_dir] = (run_dir / "checkpoints").glob("step_000002/model")
    (model_dir / "modeling.py").write_text("A = 1")
    values = values_of(recorded_spec(run_dir / "spec.yaml"))
    require_permission(run_dir, values, model_dir=model_dir)
    (model_dir / "more.py").write_text("A = 2")
    data = str(next(embedded.rglob("*val*.parquet")))
    for command in (["evaluate", str(run_dir), "-n", "1"], ["diagnose", "mismatch", "--model", str(run_dir)]):
        assert run([*command, "--data", data]) == 2, command
        assert "more.py" in capsys.readouterr().err


def test_the_key_is_refused_if_others_can_read_it(tmp_path, monkeypatch, rewarded, embedded, capsys) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run(["train", "--resume", str(rewarded), "--dry-run"]) == 2
    assert "no run of yours" in " ".join(capsys.readouterr().err.split())
    key = tmp_path / "rlctl" / "key"
    assert key.stat().st_mode & 0o077 == 0
    key.chmod(0o644)
    assert run(["train", "--resume", str(rewarded), "--dry-run"]) == 2
    assert "others can read" in capsys.readouterr().err
