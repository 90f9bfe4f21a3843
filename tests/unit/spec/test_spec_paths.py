"""What a dry run says of files and directories that are not here."""

from __future__ import annotations

from pathlib import Path

from rlctl.spec.load import load_spec
from rlctl.spec.paths import missing_paths


def missing(*overrides: str) -> set[str]:
    return {problem.key for problem in missing_paths(load_spec([], [], list(overrides)).spec)}


def test_only_what_is_not_here(tmp_path: Path) -> None:
    here = tmp_path / "rows.parquet"
    here.touch()
    model = ["model.path=org/name", "trainer.test_freq=5"]
    assert missing() == set()
    assert missing(*model, f"data.train_files={here}", f"data.val_files={tmp_path}") == set()
    assert missing(*model, f"data.train_files=[{here},gone.parquet]", f"data.val_files={here}") == {
        "data.train_files"
    }


def test_models_and_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    files = f"data.train_files={tmp_path}"
    assert missing("model.path=./gone", files) == {"model.path"}
    assert missing(f"model.path={tmp_path}", files) == set()
    assert missing("algorithm.adv_estimator=gae", "critic.path=/gone/critic") == {"critic.path"}
    assert missing("actor.use_kl_loss=true", "ref.path=~/gone/ref") == {"ref.path"}
    assert missing(f"reward.name={tmp_path}/mine.py:f") == set()
    assert missing("reward.terms=[{name: exact}, {name: 'gone.py:f'}]") == {"reward.terms"}
