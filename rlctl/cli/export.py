"""`rlctl export`: writes the model of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlctl.cli.command import RunDirectory, echo, output_option
from rlctl.errors import UsageError


def export(
    run: RunDirectory,
    out: Annotated[Path, output_option(metavar="DIR", help="Directory to write, new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint.", show_default="the newest")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16"] | None, typer.Option(help="Convert the weights.", show_default="as they are")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run: the adapter alone, in PEFT's format.")
    ] = False,
) -> None:
    """Write a checkpoint's model as a plain Hugging Face directory.

    The checkpoint's checksums are verified first.

    `AutoModelForCausalLM.from_pretrained(OUT)` loads the result, as does vLLM. For a LoRA run, the
    adapter is merged into the model; `PeftModel.from_pretrained(BASE, OUT)` loads the output of `--adapter`.

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --output my-model --dtype bf16

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
        if dtype is not None:
            _convert(stage, dtype)
        apply_umask(stage)
    what = "adapter" if adapter else "model"
    echo(f"{out}: the {what} of step {checkpoint.state.step}" + (f", {dtype}" if dtype else ""))


def _convert(model_dir: Path, dtype: Literal["fp32", "bf16"]) -> None:
    """Cast the weights in place, one file in memory at a time, and update the dtype in the config.

    `from_pretrained` is not used, because it would run code that comes with the model.
    """
    import torch
    from safetensors.torch import load_file, save_file

    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    total_size = 0
    for file in sorted(model_dir.glob("*.safetensors")):
        tensors = {
            name: tensor.to(wanted) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content.setdefault("metadata", {})["total_size"] = total_size
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = model_dir / "config.json"
    if not config.exists():  # an adapter's config names no dtype
        return
    named = _with_dtype(json.loads(config.read_text(encoding="utf-8")), str(wanted).removeprefix("torch."))
    config.write_text(json.dumps(named, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of the config, including nested configs, with every dtype replaced."""
    return {
        key: _with_dtype(value, name)
        if isinstance(value, dict)
        else (name if key in {"dtype", "torch_dtype"} else value)
        for key, value in config.items()
    }
