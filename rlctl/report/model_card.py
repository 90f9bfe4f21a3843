"""Model card for a checkpoint of a run: data, metrics, findings, spec, versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.errors import UsageError
from rlctl.markup import block, plain, table
from rlctl.report.run_page import validation_rows
from rlctl.spec.load import RUN_SPEC_FILE
from rlctl.spec.rollout import DataSpec
from rlctl.track.open_run import open_run, read_state
from rlctl.train.preflight import known_inputs

_FIGURES = {
    "critic/score/mean": "mean reward of a batch",
    "rollout_corr/rollout_is_raw_eff_sample_size": "effective sample size, raw",
    "rollout_corr/kl": "KL of training policy to rollout policy, nats per token",
    "response_length/mean": "response length, tokens",
}


def model_card(run_dir: Path, step: int) -> str:
    """The card of the model after `step`, as `README.md` of the hub; metrics are those up to that step.

    Raises:
        UsageError: not a run directory.
    """
    record = open_run(run_dir)
    spec, state, environment = record.spec, read_state(run_dir), record.environment
    rows = [row for row in record.rows() if row["step"] <= step]
    base = spec.model.path if re.fullmatch(r"[\w.-]+/[\w.-]+", spec.model.path) else None
    about = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlctl", "reinforcement-learning", spec.algorithm.adv_estimator],
    } | ({"base_model": base} if base else {})
    packages = environment.get("packages") or {}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    trained = f"{step} of {state.total_steps or '?'} batches"
    parts = [
        f"---\n{yaml.safe_dump(about, sort_keys=False)}---",
        f"# {plain(base or Path(spec.model.path).name)}, trained by reinforcement learning",
        f"Trained with rlctl for {trained}: preset "
        f"{plain(state.preset or 'none')}, advantages {spec.algorithm.adv_estimator}, "
        f"learning rate {spec.actor.lr:g}, seed {spec.trainer.seed}.",
        "## Data",
        _data(run_dir, spec.data),
        "## Figures",
        "\n".join(table(["", "first batch", "last batch"], _figures(rows))),
    ]
    if validation := validation_rows(rows):
        parts += [
            "Validation:",
            "\n".join(table(["", "first", "best", "last"], [(plain(k), *cells) for k, cells in validation])),
        ]
    text = (run_dir / RUN_SPEC_FILE).read_text(encoding="utf-8")
    details = f"<details><summary>spec.yaml</summary>\n\n{block(text, 'yaml')}\n\n</details>"
    parts += ["## Findings", _findings(run_dir), "## Spec", details, "## Versions", plain(versions)]
    return "\n\n".join(parts) + "\n"


def _figures(rows: Sequence[dict[str, object]]) -> list[list[str]]:
    found = []
    for key, name in _FIGURES.items():
        values = [float(str(row[key])) for row in rows if key in row]
        if values:
            found.append([name, f"{values[0]:.4g}", f"{values[-1]:.4g}"])
    return found


def _data(run_dir: Path, data: DataSpec) -> str:
    """File names without directories, and hashes of the rows."""
    prints = known_inputs(run_dir, "rows") or {}
    lines = []
    for what, name in (("training", "train_files"), ("validation", "val_files")):
        key, files = f"data.{name}", getattr(data, name)
        names = ", ".join(Path(file).name for file in files) or "the built-in task, or none"
        rows = f", rows SHA-256 `{prints[key]}`" if key in prints else ""
        lines.append(f"- {what}: {plain(names)}{rows}")
    return "\n".join(lines)


def _findings(run_dir: Path) -> str:
    """Findings of `rlctl diagnose` over the whole run, as Markdown."""
    try:
        found = examine(read_run(run_dir, metrics_read())).findings
    except UsageError as error:
        return f"The log was not examined: {plain(error.what)}."
    lines = [
        f"- {one.severity}: {plain(one.what)}{one.because_of and f' (because of {one.because_of})'}"
        for one in found
    ]
    return "\n".join(lines) or "`rlctl diagnose` finds nothing."
