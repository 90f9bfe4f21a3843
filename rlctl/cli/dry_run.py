"""`rlctl train --dry-run`: prints the resolved spec and its consequences without starting the run."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel
from rich.text import Text

from rlctl.cli.output import print_indented, print_problems, unwrapped
from rlctl.errors import Problem
from rlctl.registry import ADVANTAGE_ESTIMATORS, GRADERS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.check_rollout import slow_on_a_gpu
from rlctl.spec.explain import BatchArithmetic, bands, notes
from rlctl.spec.keys import known_leaves, value_of
from rlctl.spec.load import LoadedSpec
from rlctl.spec.machine import gib, machine_of
from rlctl.spec.memory import MemoryPart, memory_total
from rlctl.spec.model_size import model_size
from rlctl.spec.placement import Placement
from rlctl.spec.run_spec import RunSpec
from rlctl.terminal import Console
from rlctl.text_table import print_table
from rlctl.train.preflight import check_disk, check_functions, check_inputs, check_trackers, count_rows
from rlctl.user_code import is_file_function


def print_dry_run(loaded: LoadedSpec, *, show_all: bool, machine: str | None = None) -> int:
    """Print bands, batch arithmetic, memory, warnings and the values of the spec to stdout.

    `show_all` adds values that are defaults. `machine` names the machine to plan for; None: this one.

    Returns:
        The exit code: 2 if a file that the run needs is missing or cannot be used, or a resource of the
        machine does not suffice; 4 if only a tracker's package is missing; else 0.

    Raises:
        UsageError: no machine of this name is known.
    """
    spec, console = loaded.spec, unwrapped()
    placement = Placement(spec, model_size(spec.model), machine_of(machine))
    for print_about in (_print_parts, _print_correction, _print_reward, _print_batch):
        print_about(spec, console)
    _print_servers(placement, console)
    _print_memory(placement, console)
    if machine or placement.machine.gpus:
        _print_host(placement, console)
        _print_stages(placement, console)
    _print_values(loaded, console, show_all=show_all)
    unusable = [_as_example(problem, loaded) for problem in check_inputs(spec)]
    unusable += [*check_functions(spec), *placement.problems()]
    missing: list[Problem] = []
    if machine is None:  # free disk space may change, so it becomes an error only at the start of the run
        unusable += [replace(problem, severity="warning") for problem in check_disk(spec)]
        missing = check_trackers(spec)
    elif placement.machine.gpus:  # the warnings of the spec are about this machine
        known = {problem.what for problem in loaded.warnings}
        unusable += [problem for problem in slow_on_a_gpu(spec) if problem.what not in known]
    if problems := [*loaded.warnings, *unusable, *missing]:
        _print_title("Before you start", console)
        print_problems(problems, console)
    console.print("\nDry run. Nothing was started.")
    return 2 if any(problem.severity == "error" for problem in unusable) else 4 if missing else 0


def _as_example(problem: Problem, loaded: LoadedSpec) -> Problem:
    """Turns a problem with a path that a preset sets, which is an example, into a warning."""
    origin = loaded.origins.get(problem.key)
    if not origin or origin.layer != "preset":
        return problem
    fix = f"an example's path; see `rlctl presets show {origin.name}`, or write {problem.key}=FILE"
    return replace(problem, severity="warning", fix=fix)


def show(value: object) -> str:
    """Formats a value as in YAML."""
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


def _print_values(loaded: LoadedSpec, console: Console, *, show_all: bool) -> None:
    """Prints values and their origins by section; defaults only with `show_all`, dimmed."""
    defaults = [key for key in known_leaves() if loaded.origins[key].layer == "default"]
    title = "every value" if show_all else "values that are not defaults"
    _print_title(f"Spec: {title}, and where they come from", console)
    section = ""
    for key in known_leaves():
        if key in defaults and not show_all:
            continue
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            console.print(Text(f"  {section}", "bold"))
        style, value = "dim" if key in defaults else "", show(value_of(loaded.spec, key))
        text = f"{value:<22} {loaded.origins[key]}"
        if console.is_terminal and 4 + 30 + len(text) > console.width:  # print the origin below its value
            text = f"{value}\n{loaded.origins[key]}"
        print_indented(Text(text, style), 4, console, head=Text(f"{name:<30}", style))
    if not show_all:
        print_indented(
            Text(f"{len(defaults)} more keys have their default values: --all shows them", "dim"), 2, console
        )


def _print_parts(spec: RunSpec, console: Console) -> None:
    _print_title("Algorithm", console)
    algorithm, actor = spec.algorithm, spec.actor
    used = [
        (ADVANTAGE_ESTIMATORS, algorithm.adv_estimator),
        (POLICY_LOSSES, algorithm.rollout_correction.loss_type),
    ]
    used += [(KL_ESTIMATORS, actor.kl_loss_type)] if actor.use_kl_loss else []
    used += [(KL_ESTIMATORS, algorithm.kl_penalty)] if algorithm.use_kl_in_reward else []
    for registry, name in used:
        part = registry.part(name)
        print_indented(Text.assemble((name, "bold"), f", {registry.kind}: {part.title}"), 2, console)
        if details := "; ".join(filter(None, (part.formula, part.source))):
            print_indented(Text(details, "dim"), 6, console)


def _print_correction(spec: RunSpec, console: Console) -> None:
    _print_title("Rollout correction: what each threshold means for ρ = π_train / π_rollout", console)
    for band in bands(spec):
        print_indented(Text.assemble((band.name, "bold"), f": {band.interval}"), 2, console)
        said = "ρ here: " if band.symbol == "ρ" else ""
        print_indented(Text(f"{said}{band.bounds}; outside: {band.outside}", "dim"), 6, console)
    for note in notes(spec):
        print_indented(Text(note), 2, console)


def _print_reward(spec: RunSpec, console: Console) -> None:
    _print_title("Reward", console)
    if spec.environment.name != "single_turn":
        print_indented(Text.assemble((spec.environment.name, "bold"), "  its own reward, if any"), 2, console)
    for term in spec.reward.all_terms:
        shown = "your function"
        if not is_file_function(term.name):
            part = GRADERS.part(term.name)
            needs = f"; needs {', '.join(sorted(part.needs))}" if part.needs else ""
            shown = f"{part.label}: {part.formula}{needs}"
        weight = "" if spec.reward.terms is None else f" × {term.weight:g}"
        print_indented(Text.assemble((term.name + weight, "bold"), f"  {shown}"), 2, console)


def _print_batch(spec: RunSpec, console: Console) -> None:
    _print_title("Batch", console)
    batch = BatchArithmetic(spec, count_rows(spec.data.train_files))
    ranks, shared = _count(spec.world_size, "rank"), spec.engine.sequence_parallel
    if shared > 1:
        ranks += f" in groups of {shared}, which run each row together"
    if batch.micro_batches_per_rank is None:
        micro = f"micro-batches of at most {batch.micro_batch_tokens:,} tokens"
    else:
        micro = _count(batch.micro_batches_per_rank, "micro-batch", "es")
        micro += f" of at most {batch.micro_batch_size}"
    steps = _count(batch.steps_per_batch, "optimizer step")
    lines = [
        f"{spec.data.train_batch_size} prompts × {spec.rollout.n} responses = {batch.samples} samples",
        f"{_count(batch.mini_batches, 'mini-batch', 'es')} of {batch.samples_per_mini_batch} samples",
        f"each over {ranks}: {batch.samples_per_rank} samples in {micro}",
        f"{batch.mini_batches} × {_count(spec.actor.ppo_epochs, 'epoch')} over the batch = {steps}",
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
        print_indented(Text(line), 2, console)


def _print_servers(placement: Placement, console: Console) -> None:
    spec = placement.spec
    if not spec.has_rollout_servers:
        return
    _print_title("Rollout servers", console)
    server = spec.rollout.server
    engines = _count(server.replicas, "engine")
    if server.urls:
        where = ", ".join(server.urls)
    elif server.is_placed_by_ray:
        where = f"{engines}, on nodes of the Ray cluster with free GPUs or CPUs"
    elif spec.trainer.nnodes > 1:
        where = f"{engines} on {'each' if placement.broadcasts_weights else 'the first'} node of the run"
    else:
        where = f"{engines} on this machine"
    console.print(Text(f"  {where}"))
    if spec.syncs_adapter:
        words = "files: the base model once, then only the adapter"
    elif placement.broadcasts_weights:
        words = f"broadcast over {'NCCL' if placement.machine.gpus else 'gloo'}"
        if server.weight_transfer == "auto":
            words += "; files, with a warning, if the broadcast group cannot be formed"
    else:
        words = f"files in {server.weights_dir or 'shared memory'}"
    console.print(Text(f"  new weights: {words}"))


def _print_memory(placement: Placement, console: Console) -> None:
    _print_title("Memory per GPU (an estimate: no fragmentation, no framework overhead)", console)
    size = placement.size
    parameters = "unknown" if size.num_parameters is None else f"{size.num_parameters:,}"
    console.print(Text(f"  parameters: {parameters} ({size.source})"))
    words = "parts in memory in every phase, and the largest phase [in brackets]"
    _print_parts_of_memory(placement.gpu_parts, words, console)


def _print_host(placement: Placement, console: Console) -> None:
    machine = placement.machine
    _print_title(f"Host memory per node ({machine.name}: {gib(machine.host_bytes)})", console)
    _print_parts_of_memory(placement.host_parts, "", console)


def _print_parts_of_memory(parts: list[MemoryPart], of_peak: str, console: Console) -> None:
    rows: list[tuple[str | Text, ...]] = []
    for part in parts:
        shown = ", ".join([*part.phases, *(["/dev/shm"] if part.is_shared else [])])
        words = " ".join(filter(None, [part.note, f"[{shown}]" if shown else ""]))
        amount = "unknown" if part.num_bytes is None else gib(part.num_bytes)
        rows.append((part.name, amount, Text(words, "dim")))
    known = [part for part in parts if part.num_bytes is not None]
    more_than = "" if len(known) == len(parts) else "over "
    total = more_than + gib(memory_total(known)) if known else "unknown"
    rows.append((Text("peak", "bold"), Text(total, "bold"), Text(of_peak, "dim")))
    print_table(console, ("", "", ""), rows, right=(1,), indent=2)


def _print_stages(placement: Placement, console: Console) -> None:
    machine = placement.machine
    of = f"{placement.spec.trainer.nnodes} × {machine.gpus} × {machine.gpu}"
    _print_title(f"Stages on {machine.name} ({of}); seconds of a step within a factor of two", console)
    rows: list[tuple[str | Text, ...]] = []
    for stage in placement.stages():
        seconds = "" if stage.seconds is None else f"{stage.seconds:,.1f}"
        moved = ", ".join(f"{gib(num_bytes)} {link}" for link, num_bytes in stage.moved.items())
        rows.append((stage.name, gib(stage.gpu), gib(stage.host), seconds, Text(moved, "dim")))
    headings = ("stage", "GPU", "host", "seconds", "moved")
    print_table(console, headings, rows, right=range(1, 4), indent=2)
    if total := placement.seconds().get("whole step"):
        tokens = placement.tokens() * placement.spec.world_size
        words = f"one step: {total:,.0f} s, {tokens / total:,.0f} tokens per second on all GPUs together"
        print_indented(Text(words, "bold"), 2, console)
    for words in placement.suggestions():
        print_indented(Text(f"free memory: {words}"), 2, console)


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _print_title(title: str, console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold cyan"))
