"""A resumed run continues with its original inputs, or names those that changed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError
from rlctl.files import sha256_of
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train import resume
from rlctl.train.resume import check_files, compare_inputs, file_fingerprints
from tests.own_model import save_tiny_qwen2
from tests.unit.rollout.test_hf_rollout import TOKENIZER
from tests.unit.train.test_verified_together import Threads

TWO_NODES: dict[str, Any] = {"trainer": {"nnodes": 2, "n_gpus_per_node": 2}}
ROWS = [Row("s", (Message("user", f"{i}"),), str(i), extra={"a": i}) for i in range(3)]


def fingerprint(rows: list[Row], template: str = "{{ messages[0]['content'] }}") -> str:
    TOKENIZER.chat_template = template
    try:
        return PromptDataset(rows, TOKENIZER, max_prompt_length=9, filter_overlong=True).fingerprint
    finally:
        TOKENIZER.chat_template = None


@pytest.mark.parametrize(
    "changed",
    [
        ROWS[:2],
        ROWS[::-1],
        [*ROWS[:2], replace(ROWS[2], ground_truth="4")],
        [*ROWS[:2], replace(ROWS[2], data_source="t")],
        [*ROWS[:2], replace(ROWS[2], extra={"a": 5})],
        [*ROWS[:2], replace(ROWS[2], prompt=(Message("system", "2"),))],
    ],
)
def test_other_rows_have_another_fingerprint(changed: list[Row]) -> None:
    assert fingerprint(changed) != fingerprint(ROWS)


def test_rows_are_what_the_model_reads_wherever_they_are() -> None:
    assert fingerprint([replace(row, where="/elsewhere:1") for row in ROWS]) == fingerprint(ROWS)
    assert fingerprint(ROWS, "{{ messages[0]['content'] }}=") != fingerprint(ROWS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reference, a reward model, and a reward file that imports two others."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("policy", "reference", "scorer"):
        save_tiny_qwen2(folder / name)
    (folder / "mine").mkdir()
    (folder / "mine/reward.py").write_text("def score(**row):\n    import helper\n    return helper.one()\n")
    (folder / "mine/helper.py").write_text("from parts.number import one\n")
    (folder / "mine/parts").mkdir()
    (folder / "mine/parts/__init__.py").write_text("")
    (folder / "mine/parts/number.py").write_text("def one(): return 1.0\n")
    (folder / "mine/unused.py").write_text("")
    return folder


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(
            (lambda root, file=file, model=model: append(root / model / file), f"{key}: {file}")
            for model, key in (("policy", "model.path"), ("reference", "ref.path"), ("scorer", "model.path"))
            for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
        ),
        (lambda root: (root / "policy/chat_template.jinja").write_text("other"), "chat_template.jinja"),
        (lambda root: (root / "policy/generation_config.json").write_text("{}"), "generation_config.json"),
        (lambda root: (root / "scorer/model.safetensors").unlink(), "reward.model.path: model.safetensors"),
        (lambda root: append(root / "mine/reward.py"), "mine/reward.py"),
        (lambda root: append(root / "mine/helper.py"), "mine/helper.py"),
        (lambda root: append(root / "mine/parts/number.py"), "mine/parts/number.py"),
    ],
)  # fmt: skip
def test_a_changed_file_is_refused_by_name_or_accepted(
    inputs: Path, tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    root = Path(shutil.copytree(inputs, tmp_path / "inputs"))
    paths = {"model": "policy", "ref": "reference"}
    given: dict[str, Any] = {key: {"path": f"{root}/{name}"} for key, name in paths.items()}
    reward = {"name": f"{root}/mine/reward.py:score", "model": {"path": f"{root}/scorer"}}
    spec = RunSpec.model_validate(given | {"reward": reward})
    assert compare_inputs(tmp_path, "files", file_fingerprints(spec), accepts=False) == []
    append(root / "mine/unused.py")
    assert compare_inputs(tmp_path, "files", file_fingerprints(spec), accepts=False) == []
    change(root)
    now = file_fingerprints(spec)
    with pytest.raises(UsageError, match="not as at the start of the run") as caught:
        compare_inputs(tmp_path, "files", now, accepts=False)
    assert named in caught.value.what
    assert caught.value.what.count(",") == 0
    assert "trainer.accept_changed_inputs=true" in str(caught.value.fix)
    (line,) = compare_inputs(tmp_path, "files", now, accepts=True)
    assert named in line
    assert compare_inputs(tmp_path, "files", now, accepts=False) == []


def test_ranks_on_several_nodes_hash_the_weights_together(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(inputs, tmp_path / "inputs"))
    for name in ("one", "two", "three", "four"):
        (root / f"policy/{name}.safetensors").write_bytes(name.encode() * 1000)
    paths: dict[str, Any] = {"model": {"path": f"{root}/policy"}, "ref": {"path": f"{root}/reference"}}
    spec = RunSpec.model_validate(paths | {"reward": {"name": f"{root}/mine/reward.py:score"}, **TWO_NODES})
    monkeypatch.setattr(resume, "_SHARED_FROM", 2000)
    alone = file_fingerprints(spec)
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(str(path))
        return sha256_of(path)

    monkeypatch.setattr(resume, "sha256_of", counted)
    assert Threads(4).run(lambda ranks: check_files(spec, tmp_path, ranks)) == [[]] * 4
    assert len(hashed) == len(set(hashed)) == len(alone)
    assert json.loads((tmp_path / "inputs.json").read_text())["files"] == alone
    append(root / "policy/two.safetensors")
    failures = Threads(4).run(lambda ranks: check_files(spec, tmp_path, ranks))
    assert all("two.safetensors" in str(failure) for failure in failures), failures

    def unreadable(path: Path) -> str:
        if path.name == "three.safetensors":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return sha256_of(path)

    monkeypatch.setattr(resume, "sha256_of", unreadable)
    failures = Threads(4).run(lambda ranks: check_files(spec, tmp_path, ranks))
    words = "cannot read a file of a model: No such file"
    assert all(words in str(failure) for failure in failures), failures


def test_each_rank_reads_its_part_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        (tmp_path / f"model-{number}.safetensors").write_bytes(b"w" * 3000)
    (tmp_path / "config.json").write_text("{}")
    spec = RunSpec.model_validate({"model": {"path": str(tmp_path)}, **TWO_NODES})
    monkeypatch.setattr(resume, "_SHARED_FROM", 2000)
    given = []
    monkeypatch.setattr(resume, "_hashed", lambda files: given.append(len(files)) or dict.fromkeys(files, ""))
    Threads(4).run(lambda ranks: check_files(spec, tmp_path, ranks))
    assert sorted(given) == [1, 2, 2, 2, 2]  # the first is that of the main rank, the small file


def test_a_model_on_the_hub_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return f"/cache/snapshots/{len(asked)}/config.json"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    paths = {"model": {"path": "org/policy", "revision": "v1"}, "ref": {"path": "org/policy"}}
    spec = RunSpec.model_validate(paths | {"critic": {"path": "org/critic"}})
    found = file_fingerprints(spec)
    assert found == {"model.path: commit": "1", "critic.path: commit": "2", "ref.path: commit": "3"}
    expected = (("policy", "v1"), ("critic", None), ("policy", "v1"))
    assert asked == [(f"org/{name}", "config.json", revision) for name, revision in expected]
