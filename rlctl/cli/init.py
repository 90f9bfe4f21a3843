"""`rlctl init`: prompts for model, data and GPUs, and writes a commented spec file."""

from __future__ import annotations

import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rlctl.cli.command import echo

if TYPE_CHECKING:
    from rlctl.spec.load import LoadedSpec

#: (minimum GPU memory in GiB, preset for one such GPU), in descending order.
_ONE_GPU = ((130, "1xh200"), (75, "1gpu-80gb"), (44, "1gpu-lora"), (0, "1gpu-24gb"))
_WIDTH = 100

Answer = TypeVar("Answer", str, int)


def init(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The spec file to write.")] = Path("run.yaml"),
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model directory or hub id; `embedded`: the built-in one."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training Parquet, as prepare-data writes it.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of this machine; 0: CPU.")] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", "-p", metavar="NAME", help="The algorithm.", show_default="rloo-seq-is"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented spec file. On a terminal, prompts for values without an option; otherwise uses
    defaults.

    rlctl init

    rlctl init my.yaml --model Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k/train.parquet --gpus 1
    """
    from rlctl.cli.output import check_new, write_file
    from rlctl.spec.load import load_spec
    from rlctl.spec.machine import GIB, gpu_memory
    from rlctl.spec.machine import gpus as cards
    from rlctl.spec.model import EMBEDDED
    from rlctl.spec.sources import all_presets

    check_new(out, force=force)
    memory = [(gpu_memory(card) or 80 * GIB) / GIB for card in cards()]
    model = model or _ask("Model (directory, hub id, or embedded)", EMBEDDED)
    if model != EMBEDDED:
        data = data or _ask("Training data (Parquet of `rlctl prepare-data parquet`)", "data/train.parquet")
        gpus = _ask("GPUs on this machine", len(memory)) if gpus is None else gpus
    algorithms = [each.name for each in all_presets().values() if each.kind == "algorithms"]
    preset = preset or _ask(f"Algorithm ({', '.join(algorithms)})", "rloo-seq-is")
    presets, values = [preset], [f"model.path={model}"]
    if gpus:
        presets.insert(0, _hardware(gpus, min(memory, default=80)))
        values.append(f"trainer.n_gpus_per_node={gpus}")
    if data:
        values.append(f"data.train_files={data}")
    write_file(out, _commented(load_spec(presets, overrides=values), presets))
    echo(f"{out} written. Check it: rlctl train {out} --dry-run")


def _ask(question: str, default: Answer) -> Answer:
    """The user's answer, of the type of the default, which applies if standard input is no terminal."""
    if not (sys.stdin and sys.stdin.isatty()):
        return default
    answer: Answer = typer.prompt(question, default=default)
    return answer


def _hardware(gpus: int, gib: float) -> str:
    if gpus > 1:
        return "8gpu"
    return next(name for least, name in _ONE_GPU if gib >= least)


def _commented(loaded: LoadedSpec, presets: list[str]) -> str:
    """YAML of the keys that are not defaults, each with its meaning as a comment."""
    import textwrap

    from rlctl.spec.key_table import key_rows
    from rlctl.spec.load import dump_value

    lines = [
        f"# Written by `rlctl init` from {', '.join(presets)}. Other keys have their default values.",
        "# All keys: rlctl explain --format markdown. One key: rlctl explain KEY.",
    ]
    values: Any = loaded.spec.model_dump(mode="json")
    open_sections: list[str] = []
    for row in key_rows():
        origin = loaded.origins[row.key]
        if origin.layer in {"default", "embedded"}:
            continue
        *sections, name = row.key.split(".")
        for depth, section in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines += ["", f"{section}:"] if depth == 0 else [f"{'  ' * depth}{section}:"]
                open_sections = sections[: depth + 1]
        indent = "  " * len(sections)
        meaning = row.meaning.split(". ")[0].rstrip(".")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(f"{indent}{name}: {dump_value(reduce(getitem, row.key.split('.'), values))}")
    return "\n".join(lines) + "\n"
