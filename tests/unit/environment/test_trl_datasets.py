"""Data sets as TRL's examples make them for `environment_factory`, in the forms that `datasets` stores.

Of their kinds: one prompt for all rows and no other column, a column that `reset` chooses by, a column of
tasks, conversations with a system message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.app import run
from rlctl.data.prompts import messages_of
from rlctl.prepare.data_files import read_any
from rlctl.run_spec.environment import EnvironmentSpec, environments_without_reward
from tests.scripted import asked, one_after_the_other, played

datasets = pytest.importorskip("datasets")
CLASSES = Path(__file__).with_name("trl_classes.py")


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


#: Class → columns.
SETS: dict[str, dict[str, list[Any]]] = {
    "EchoToolEnv": {"prompt": [user("Echo it.")] * 12},
    "WordEnv": {"prompt": [user("Guess.")] * 12, "word": ["crane", "slate"] * 6},
    "BothEnv": {
        "prompt": [[{"role": "system", "content": "You play."}, *user("Words.")]] * 6 + [user("Catch.")] * 6,
        "env": ["words"] * 6 + ["catch"] * 6,
        "word": ["crane"] * 6 + [None] * 6,
        "column": [None] * 6 + [2] * 6,
    },
    "SandboxEnv": {"prompt": [user("Use bash.")] * 12, "task": [f"count {i}" for i in range(12)]},
}


def stored(columns: dict[str, list[Any]], form: str, folder: Path) -> str:
    rows = datasets.Dataset.from_dict(columns)
    if form == "directory":
        rows.save_to_disk(str(folder / "set"))
        return str(folder / "set")
    path = folder / f"set.{form}"
    rows.to_json(str(path)) if form == "jsonl" else rows.to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "directory"])
@pytest.mark.parametrize("name", SETS)
def test_every_row_reaches_reset_with_its_columns(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    columns = SETS[name]
    rows = read_any([stored(columns, form, tmp_path)])
    assert len(rows) == 12
    assert [list(messages_of(row)) for row in rows] == columns["prompt"]
    for column in columns.keys() - {"prompt"}:
        assert [row.extra.get(column) for row in rows] == columns[column]


@pytest.mark.parametrize("name", SETS)
def test_the_first_and_the_last_row_are_played(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    rows = read_any([stored(SETS[name], "jsonl", tmp_path)])
    tasks = [asked(group, extra_info=dict(row.extra)) for group, row in enumerate((rows[0], rows[-1]))]
    episodes, engine = played(tmp_path, CLASSES.read_text(), one_after_the_other("done"), tasks, name=name)
    assert [episode.stop_reason for episode in episodes] == ["completed"] * 2, [e.error for e in episodes]
    if "task" in SETS[name]:
        assert ["count 0" in engine.read[0], "count 11" in "".join(engine.read)] == [True, True]


def test_the_dry_run_takes_the_data_with_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    data = stored(SETS["BothEnv"], "parquet", tmp_path)
    given = ["-p", "smollm2-135m", f"data.train_files={data}", f"environment.name={CLASSES}:BothEnv"]
    small = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "reward.terms=[]"]
    assert run(["train", *given, *small, "--dry-run"]) == 0, "".join(capsys.readouterr())
    shown = " ".join(capsys.readouterr().out.split())
    assert "a class with its own reward; tools:" in shown, shown


@pytest.mark.parametrize(
    ("name", "has_one"),
    [("EchoToolEnv", True), ("BothEnv", True), ("DriveEnv", True), ("JudgedEnv", True), ("BlocksEnv", True),
     ("IncrementEnv", False), ("CoinEnv", False)],
)  # fmt: skip
def test_a_class_that_sets_reward_gives_one(name: str, has_one: bool) -> None:
    silent = environments_without_reward(EnvironmentSpec(name=f"{CLASSES}:{name}"))
    assert silent == ([] if has_one else [f"{CLASSES}:{name}"])
