"""What a spec names that is not here: a dry run warns of it, a start would trip over it."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import Problem
from rlctl.spec.run import RunSpec


def missing_paths(spec: RunSpec) -> list[Problem]:
    """One warning for every local path of `spec` that does not exist; hub ids are not looked up."""
    models = {
        "model.path": None if spec.is_embedded else spec.model.path,
        "critic.path": spec.critic.path,
        "ref.path": spec.ref.path,
        "reward.model.path": spec.reward.model.path,
    }
    found = [
        Problem(
            "warning", key, f"{path} is not a directory here", "create it, or mend the path, before you start"
        )
        for key, path in models.items()
        if path is not None and _looks_local(path) and not Path(path).expanduser().is_dir()
    ]
    files = {"data.train_files": spec.data.train_files, "data.val_files": spec.data.val_files}
    functions = [term.name.rpartition(":")[0] for term in spec.reward.all_terms if ":" in term.name]
    files["reward.terms" if spec.reward.terms else "reward.name"] = functions
    found += [
        Problem("warning", key, f"{path} is not here", "create it, or mend the path, before you start")
        for key, paths in files.items()
        for path in paths
        if not Path(path).expanduser().exists()
    ]
    return found


def _looks_local(path: str) -> bool:
    """Not `owner/name`, which is a hub id unless a directory of that name is here."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
