"""`rlctl export`: writes the model of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import RunDirectory, echo, output_option
from rlctl.errors import UsageError


def export(
    run: RunDirectory,
    out: Annotated[Path, output_option(metavar="DIR", help="Directory to write, new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint.", show_default="the newest")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run: the adapter alone, in PEFT's format.")
    ] = False,
) -> None:
    """Write a checkpoint's model as a plain Hugging Face directory.

    The checkpoint's checksums are verified first.

    `AutoModelForCausalLM.from_pretrained(OUT)` loads the result, as does vLLM. For a LoRA run, the
    adapter is merged into the model; `PeftModel.from_pretrained(BASE, OUT)` loads the output of `--adapter`.

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --output my-model

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --output adapter --adapter
    """
    from rlctl.engine.checkpoint import checkpoint_of_run
    from rlctl.files import apply_umask, check_vacant, clear_leftovers, staged_directory
    from rlctl.spec.load import spec_file_of

    check_vacant(out)
    spec_file_of(run)  # it is a run
    checkpoint, notes = checkpoint_of_run(run, step)
    for note in notes:
        echo(f"warning: {note}", err=True)
    if adapter and not (checkpoint.adapter_dir / "adapter_config.json").is_file():
        raise UsageError(
            "there is no adapter in this checkpoint: the run trained all weights, or an older rlctl saved it",
            where=str(checkpoint.path),
            fix="leave out --adapter to export the whole model",
        )
    clear_leftovers(out)
    with staged_directory(out) as stage:
        source = checkpoint.adapter_dir if adapter else checkpoint.model_dir
        shutil.copytree(source, stage, dirs_exist_ok=True)
        apply_umask(stage)
    what = "adapter" if adapter else "model"
    echo(f"{out}: the {what} of step {checkpoint.state.step}")
