"""`rlctl export`: the model of a checkpoint as a directory of its own."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.engine.checkpoint import Checkpoint


class Dtype(StrEnum):
    """Of the exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write, new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint.", show_default="the newest")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Convert the weights.", show_default="as they are")
    ] = None,
) -> None:
    """Write a checkpoint's model as a plain Hugging Face directory.

    The checkpoint's checksums are verified first. `AutoModelForCausalLM.from_pretrained(OUT)` loads the
    result, as does vLLM.

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --out my-model --dtype bf16
    """
    from rlctl.data.write import check_vacant, clear_leftovers, staged_directory

    check_vacant(out)
    checkpoint = _checkpoint(run, step)
    clear_leftovers(out)
    with staged_directory(out) as stage:
        if dtype is None:
            shutil.copytree(checkpoint.model_dir, stage, dirs_exist_ok=True)
        else:
            _convert(checkpoint, stage, dtype)
    typer.echo(f"{out}: the model of step {checkpoint.state.step}" + (f", {dtype.value}" if dtype else ""))


def _checkpoint(run: Path, step: int | None) -> Checkpoint:
    """A checkpoint whose every byte is as it was written.

    Raises:
        UsageError: not a run, no such step, or damaged.
    """
    from rlctl.engine.checkpoint import CHECKPOINTS, newest_intact
    from rlctl.spec.load import RUN_SPEC_FILE

    if not (run / RUN_SPEC_FILE).is_file():
        fix = "name a directory such as runs/rlctl/run-…"
        raise UsageError(f"not a run directory: it holds no {RUN_SPEC_FILE}", where=str(run), fix=fix)
    root = run / CHECKPOINTS
    checkpoint, notes = newest_intact(root, step)
    if checkpoint is None:
        which = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        there = ", ".join(path.name for path in sorted(root.glob("step_*"))) or "none"
        problem = f" ({notes[0]})" if notes else ""
        raise UsageError(f"there is no {which}{problem}", where=str(root), fix=f"checkpoints here: {there}")
    for note in notes:
        typer.echo(f"warning: {note}; the one before is exported", err=True)
    return checkpoint


def _convert(checkpoint: Checkpoint, destination: Path, dtype: Dtype) -> None:
    """Load, cast and save; the config names the new dtype."""
    import torch

    from rlctl.engine.model import load_policy

    model, tokenizer = load_policy(
        str(checkpoint.model_dir),
        revision=None,
        trust_remote_code=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16 if dtype is Dtype.BF16 else torch.float32,
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
