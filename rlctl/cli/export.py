"""`rlctl export`: writes the model of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import RunDirectory, Step, echo, output_option
from rlctl.errors import UsageError

#: What to do with the directory; a GGUF file holds weights and tokenizer of one model, quantised or not.
NEXT = """\
The directory is a plain Hugging Face model: vLLM serves it and the hub takes it as it is. llama.cpp,
Ollama and LM Studio read one GGUF file; llama.cpp's converter writes it from the directory, in bf16 or
smaller (--outtype q8_0). Of a LoRA run, convert the merged model, not the output of --adapter.

vLLM:       vllm serve my-model
llama.cpp:  python llama.cpp/convert_hf_to_gguf.py my-model --outfile my-model.gguf --outtype bf16
hub:        hf upload USER/my-model my-model
"""


def _print_next(value: bool) -> None:
    if value:
        echo(NEXT, nl=False)
        raise typer.Exit


def export(
    run: RunDirectory,
    out: Annotated[Path, output_option(metavar="DIR", help="Directory to write, new or empty.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a LoRA run: the adapter alone, in PEFT's format.")
    ] = False,
    gguf_help: Annotated[
        bool,
        typer.Option(
            "--gguf-help",
            is_eager=True,
            callback=_print_next,
            help="How to serve or upload the result, or convert it to GGUF.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint's model as a plain Hugging Face directory.

    The checkpoint's checksums are verified first.

    `AutoModelForCausalLM.from_pretrained(OUT)` loads the result, as does vLLM. For a LoRA run, the
    adapter is merged into the model; `PeftModel.from_pretrained(BASE, OUT)` loads the output of `--adapter`.

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --output my-model

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --output adapter --adapter

      rlctl export runs/rlctl/rloo-seq-is-20260101-120000 --step best --output best
    """
    from rlctl.engine.checkpoint import checkpoint_of_run
    from rlctl.files import apply_umask, check_vacant, clear_leftovers, staged_directory
    from rlctl.run_spec.load import spec_file_of
    from rlctl.track.open_run import chosen_step

    check_vacant(out)
    spec_file_of(run)  # it is a run
    checkpoint, notes = checkpoint_of_run(run, chosen_step(run, step))
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
    kind = "adapter" if adapter else "model"
    echo(f"{out}: the {kind} of step {checkpoint.state.step}")
