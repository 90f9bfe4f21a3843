"""A stranger's run directory, entered with `cd`, full of files that a careless library would execute."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rlctl.cli.app import run
from tests import runs
from tests.faults.test_foreign_runs import COMMANDS, argv
from tests.hostile_files import Payload

pytestmark = pytest.mark.usefixtures("embedded")
#: Files that torch, transformers or PEFT would unpickle, for want of another one or beside it.
PICKLES = (
    *(
        "pytorch_model.bin",
        "adapter_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    ),
    *("model.pt", "state.pkl", ".metadata", "data.pkl", "tokenizer.pickle", "trainer_state.pt"),
)
#: Python that starts with an interpreter, a test run, an editor or an import.
MODULES = (
    *(
        "sitecustomize.py",
        "usercustomize.py",
        "conftest.py",
        "setup.py",
        "torch.py",
        "yaml.py",
        "modeling_evil.py",
    ),
    *(
        "tokenization_evil.py",
        "reward.py",
        "environment.py",
        "rlctl/__init__.py",
        "vllm/__init__.py",
        "wandb.py",
    ),
)
AUTO_MAP = {
    "auto_map": {
        "AutoConfig": "modeling_evil.Config",
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Tokenizer", "tokenization_evil.Tokenizer"],
    }
}
TEMPLATE = "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}{{ self.__init__.__globals__ }}"
ENTRY_POINTS = """
[vllm.general_plugins]
evil = sitecustomize:main
[vllm.platform_plugins]
evil = sitecustomize:main
[rlctl.parts]
evil = sitecustomize:main
[mlflow.tracking_store]
file = sitecustomize:main
[console_scripts]
rlctl = sitecustomize:main
"""


def planted(directory: Path, marker: Path) -> None:
    """Writes the files into a directory and each below it."""
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    saved = buffer.getvalue()
    touch = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    for folder in [directory, *filter(Path.is_dir, directory.rglob("*"))]:
        for name in PICKLES:
            if not (folder / name).exists():
                (folder / name).write_bytes(saved)
        for name in MODULES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(touch)
        (folder / "evil.pth").write_text(touch)
        (folder / "evil-1.dist-info").mkdir(exist_ok=True)
        (folder / "evil-1.dist-info/entry_points.txt").write_text(ENTRY_POINTS)
        (folder / "evil-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
        (folder / ".netrc").write_text("default login me password pl41n\n")
        (folder / "rollouts.pkl").write_bytes(pickle.dumps(Payload(marker)))
    for file in directory.rglob("*config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **AUTO_MAP}))
    for folder in directory.rglob("model"):
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARKER", str(marker)))
    (directory / ".git").mkdir()
    (directory / ".git/config").write_text(
        f'[core]\n\tfsmonitor = "touch {marker}"\n\tpager = "touch {marker}"\n'
    )
    (directory / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (directory / "presets").mkdir()
    (directory / "presets/rloo-seq-is.yaml").write_text(f"reward: {{name: '{directory}/reward.py:f'}}\n")


@pytest.fixture(scope="module")
def theirs(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names no code, with planted files; they create the file `executed` beside it."""
    run_dir = tmp_path_factory.mktemp("theirs") / "run"
    settings = ("trainer.total_training_steps=2", "trainer.save_freq=1")
    runs.train(run_dir, *settings, env={"RLCTL_CACHE": str(embedded_cache)})
    planted(run_dir, run_dir.with_name("executed"))
    return run_dir


MORE = {
    "train with a preset": "train -p rloo-seq-is --dry-run",
    "train the recorded spec": "train spec.yaml --dry-run",
    "watch": "watch {run} --plain",
    "compare": "evaluate compare {run} {run}",
    "who-sampled with a model": "diagnose {run} --who-sampled --model {run}/checkpoints/step_000001/model",
    "doctor": "--help",
    "explain": "explain rloo-seq-is",
    "prepare-data": "prepare-data check {run}/rollouts",
    "reward of rows": "reward maths --data {data}",
    "schema": "spec schema",
}


def test_no_command_executes_a_planted_file(theirs, tmp_path, embedded, monkeypatch, capsys) -> None:
    """Whether it succeeds or refuses; the directory is the working directory."""
    marker = theirs.with_name("executed")
    monkeypatch.setenv("GIT_PAGER", "")
    for name, command in (COMMANDS | MORE).items():
        copy = Path(shutil.copytree(theirs, tmp_path / name.replace(" ", "-"), symlinks=True))
        monkeypatch.chdir(copy)
        code = run(argv(command, copy, tmp_path / "none", embedded))
        said = "".join(capsys.readouterr())
        assert not marker.exists(), name
        assert "pl41n" not in said, name
        assert "bug in rlctl" not in said, (name, said)
        assert code in {0, 1, 2, 3, 4}, (name, code)
    assert os.getcwd() != str(theirs)  # noqa: PTH109


def test_the_files_would_execute(theirs: Path) -> None:
    """Each kind, in the hands of what reads it without care."""
    marker = theirs.with_name("executed")
    for file in (theirs / "pytorch_model.bin", theirs / "checkpoints/step_000002/optimizer.pt"):
        torch.load(file, weights_only=False)
        assert marker.exists()
        marker.unlink()
    exec((theirs / "sitecustomize.py").read_text())
    assert marker.exists()
    marker.unlink()


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch",
        "!!python/object/new:os.system",
        "!!python/name:os.system",
        "!!python/module:evil",
        "!include",
    ],
)
def test_a_tag_of_yaml_makes_no_object(theirs: Path, tmp_path: Path, capsys, tag: str) -> None:
    copy = Path(shutil.copytree(theirs, tmp_path / "run", symlinks=True))
    spec, marker = copy / "spec.yaml", tmp_path / "executed"
    spec.write_text(f"{spec.read_text()}\nmore: {tag} [{marker}]\n")
    for command in (
        "train --resume {run} --dry-run",
        "report {run}",
        "diagnose {run}",
        "evaluate {run} --limit 1",
    ):
        assert run(command.format(run=copy).split()) in {0, 1, 2, 3}, command
        assert not marker.exists()
        assert "bug in rlctl" not in "".join(capsys.readouterr())
