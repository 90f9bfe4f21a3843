"""`rlctl train --dry-run`: print what would run."""

from __future__ import annotations

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from rlctl.cli.messages import print_problems
from rlctl.spec.explain import BatchArithmetic, bands, notes
from rlctl.spec.keys import known_leaves, value_of
from rlctl.spec.load import LoadedSpec
from rlctl.spec.memory import memory_parts, memory_total
from rlctl.spec.model_size import model_size
from rlctl.spec.paths import missing_paths
from rlctl.spec.run_spec import RunSpec


def print_dry_run(loaded: LoadedSpec) -> None:
    """Print the resolved spec with origins, bands, batch arithmetic, memory and warnings to stdout."""
    console = Console(soft_wrap=True, highlight=False)
    _print_values(loaded, console)
    _print_correction(loaded.spec, console)
    _print_batch(loaded.spec, console)
    _print_memory(loaded.spec, console)
    if problems := [*loaded.warnings, *missing_paths(loaded.spec)]:
        _print_title("Before you start", console)
        print_problems(problems, console)
    console.print("\nDry run. Nothing was started.")


def show(value: object) -> str:
    """A value as it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, BaseModel | dict):
        items = value.items() if isinstance(value, dict) else value
        return f"{{{', '.join(f'{name}: {show(item)}' for name, item in items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    return str(value)


def show_bytes(num_bytes: float | None) -> str:
    """`1.5 GiB`, `20.0 MiB`; `unknown` for None."""
    if num_bytes is None:
        return "unknown"
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:,.1f} MiB"


def _print_values(loaded: LoadedSpec, console: Console) -> None:
    """Every value and its origin, by section; defaults are dimmed."""
    _print_title("Spec: every value, and where it comes from", console)
    section = ""
    for key in known_leaves():
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            console.print(Text(f"  {section}", "bold"))
        origin = loaded.origins[key]
        value = show(value_of(loaded.spec, key))
        style = "dim" if origin.layer == "default" else ""
        console.print(Text(f"    {name:<30}{value:<22} {origin}", style))


def _print_correction(spec: RunSpec, console: Console) -> None:
    """Thresholds as intervals of ρ."""
    _print_title("Rollout correction: what each threshold means for ρ = π_train / π_rollout", console)
    for band in bands(spec):
        console.print(Text.assemble("  ", (band.name, "bold"), f": {band.interval}"))
        console.print(Text(f"      ρ here: {band.bounds}; outside: {band.outside}", "dim"))
    for note in notes(spec):
        console.print(Text(f"  {note}"))


def _print_batch(spec: RunSpec, console: Console) -> None:
    """From prompts to optimizer steps, one line per cut."""
    _print_title("Batch", console)
    batch = BatchArithmetic(spec)
    ranks = _count(batch.ranks, "rank")
    if batch.micro_batches_per_rank is None:
        micro = f"micro-batches of at most {batch.micro_batch_tokens:,} tokens"
    else:
        micro = _count(batch.micro_batches_per_rank, "micro-batch", "es")
        micro += f" of at most {batch.micro_batch_size}"
    steps = _count(batch.steps_per_batch, "optimizer step")
    lines = [
        f"{batch.prompts} prompts × {batch.responses_per_prompt} responses = {batch.samples} samples",
        f"{_count(batch.mini_batches, 'mini-batch', 'es')} of {batch.samples_per_mini_batch} samples",
        f"each over {ranks}: {batch.samples_per_rank} samples in {micro}",
        f"{batch.mini_batches} × {_count(batch.epochs, 'epoch')} over the batch = {steps}",
    ]
    if batch.num_rows is not None:
        lines.append(f"training rows: {batch.num_rows:,}")
    elif not spec.is_embedded:
        lines.append("training rows: counted at the start (the files cannot be read here)")
    if batch.num_batches is None:
        lines.append("batches in the run: known after the rows are counted")
    else:
        lines.append(f"batches in the run: {batch.num_batches:,} ({batch.total_steps:,} optimizer steps)")
    for line in lines:
        console.print(Text(f"  {line}"))


def _print_memory(spec: RunSpec, console: Console) -> None:
    """The estimate, part by part."""
    _print_title("Memory per GPU (an estimate: no fragmentation, no framework overhead)", console)
    size = model_size(spec.model)
    parameters = "unknown" if size.num_parameters is None else f"{size.num_parameters:,}"
    console.print(Text(f"  parameters: {parameters} ({size.source})"))
    parts = memory_parts(spec, size)
    for part in parts:
        phase = f" [{', '.join(part.phases)}]" if part.phases else ""
        amount = f"  {part.name:<31}{show_bytes(part.num_bytes):>12}   "
        console.print(Text.assemble(amount, (f"{part.formula}{phase}", "dim")))
    known = [part for part in parts if part.num_bytes is not None]
    more_than = "" if len(known) == len(parts) else "over "
    total = more_than + show_bytes(memory_total(known)) if known else "unknown"
    peak = f"  {'peak':<31}{total:>12}   "
    words = "parts held always, and the largest phase [in brackets]"
    console.print(Text.assemble((peak, "bold"), (words, "dim")))


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _print_title(title: str, console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold cyan"))
