"""`rlctl train --dry-run`: prints the resolved spec and its consequences without starting the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.text import Text

from rlctl.cli import dry_run_summary as summary
from rlctl.cli.command import as_json, run_path
from rlctl.cli.dry_run_document import plan_document
from rlctl.cli.dry_run_summary import count_of, print_title
from rlctl.cli.output import print_indented, unwrapped, write_out
from rlctl.errors import Problem, UsageError
from rlctl.files import lines_of
from rlctl.registry import ADVANTAGE_ESTIMATORS, GRADERS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.check_rollout import slow_on_a_gpu
from rlctl.run_spec.explain import BatchArithmetic, bands, notes
from rlctl.run_spec.keys import known_leaves, value_of
from rlctl.run_spec.load import LoadedSpec
from rlctl.run_spec.machine import gib, machine_of
from rlctl.run_spec.memory import MemoryPart, memory_total
from rlctl.run_spec.model_size import model_size
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.run_spec import RunSpec
from rlctl.terminal import Console
from rlctl.text_table import print_table
from rlctl.track.jsonl import METRICS_FILE, decode_line
from rlctl.train.first_row import check_first_row
from rlctl.train.preflight import check_disk, check_inputs, check_trackers, count_rows, has_errors
from rlctl.user_code import is_file_function

#: Metric of a mean response, and number of last steps over which it is averaged.
_MEAN_LENGTH, _LAST_STEPS = "response_length/mean", 20


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `rlctl train --dry-run`."""

    show_all: bool = False  # add all bands of ρ, the memory by its parts and every value with its origin
    machine: str | None = None  # name of the machine to plan for; None: this one
    mean_response: str | None = None  # mean tokens of a response, or a run that has it; None: not known
    resumed: Path | None = None  # directory of the run that would continue; None: a new one
    #: `json`: problems, memory, stages and suggestions as one object
    output_format: Literal["text", "json"] = "text"


def print_dry_run(loaded: LoadedSpec, options: PlanOptions) -> int:
    """Print to stdout what the run would do: errors, memory and time, what was inferred and checked.

    Returns:
        The exit code: 2 if a file that the run needs is missing or cannot be used, or a resource of the
        machine does not suffice; 4 if only a tracker's package is missing; else 0.

    Raises:
        UsageError: no machine of this name is known; the mean response is longer than the longest, or its run
            has none.
    """
    spec = loaded.spec
    console = unwrapped()
    machine = options.machine
    most = spec.data.max_response_length
    mean_response = None if options.mean_response is None else _mean_response(options.mean_response, most)
    placement = Placement(spec, model_size(spec.model), machine_of(machine), mean_response)
    unusable = check_inputs(spec)
    row = check_first_row(spec, unusable, starts=False)
    unusable = [_as_example(problem, loaded) for problem in [*unusable, *row.problems]]
    unusable += placement.problems()
    missing: list[Problem] = []
    if machine is None:  # free disk space may change, so it becomes an error only at the start of the run
        unusable += [replace(problem, severity="warning") for problem in check_disk(spec)]
        missing = check_trackers(spec)
    elif placement.machine.gpus:  # the warnings of the spec are about this machine
        known = {problem.what for problem in loaded.warnings}
        unusable += [problem for problem in slow_on_a_gpu(spec) if problem.what not in known]
    exit_code = 0
    if has_errors(unusable):
        exit_code = 2
    elif missing:
        exit_code = 4
    if options.output_format == "json":
        write_out(as_json(plan_document(placement, [*loaded.warnings, *unusable, *missing])), None)
        return exit_code
    used = summary.print_result([*loaded.warnings, *unusable, *missing], placement, console)
    sections = [summary.inferred(loaded), summary.checked(row), summary.so_far(spec, options.resumed)]
    if not options.show_all:
        sections += [summary.correction(spec), summary.values(loaded)]
    # the last two lines say that nothing was started
    summary.print_sections(sections, console, None if options.show_all else summary.MOST_LINES - used - 2)
    if options.show_all:
        for print_about in (_print_correction, _print_parts, _print_reward, _print_batch):
            print_about(spec, console)
        _print_servers(placement, console)
        _print_memory(placement, console)
        _print_host(placement, console)
        _print_stages(placement, console)
        _print_values(loaded, console)
    more = "" if options.show_all else " --all: memory by its parts, stages, every value and its origin."
    console.print(f"\nDry run. Nothing was started.{more}")
    return exit_code


def _mean_response(given: str, most: int) -> float:
    """Mean tokens of a response: a number, or what the last steps of a run have logged.

    Raises:
        UsageError: it is not in (0, most], or there is no such run or log.
    """
    try:
        mean = float(given)
    except ValueError:
        mean = _logged_mean(run_path(given))
    if not 0 < mean <= most:
        message = f"{mean:g} tokens, but a response has at most {most} (data.max_response_length)"
        fix = f"give a number above 0, at most {most}, or a run with such responses"
        raise UsageError(message, where="--mean-response", fix=fix)
    return mean


def _logged_mean(run: Path) -> float:
    path = run / METRICS_FILE
    try:
        rows = [decode_line(line) for line in lines_of(path)]
    except (OSError, ValueError) as error:
        message = f"the log of this run cannot be read: {error}"
        raise UsageError(message, where=str(path), fix="give a number of tokens") from error
    means = [row[_MEAN_LENGTH] for row in rows if isinstance(row.get(_MEAN_LENGTH), float | int)]
    if not means:
        message = f"no step of this run has logged {_MEAN_LENGTH}"
        raise UsageError(message, where=str(path), fix="give a number of tokens")
    last = means[-_LAST_STEPS:]
    return float(sum(last) / len(last))


def _as_example(problem: Problem, loaded: LoadedSpec) -> Problem:
    """Turns a problem with a path that a preset sets, which is an example, into a warning."""
    origin = loaded.origins.get(problem.key)
    if not origin or origin.layer != "preset":
        return problem
    fix = f"an example's path; see `rlctl presets show {origin.name}`, or write {problem.key}=FILE"
    return replace(problem, severity="warning", fix=fix)


def _print_values(loaded: LoadedSpec, console: Console) -> None:
    """Prints all values and their origins by section, defaults dimmed."""
    print_title("Spec: every value, and where it comes from", console)
    section = ""
    for key in known_leaves():
        parent, _, name = key.rpartition(".")
        if parent != section:
            section = parent
            console.print(Text(f"  {section}", "bold"))
        origin = loaded.origins[key]
        style = "dim" if origin.layer == "default" else ""
        value = summary.show(value_of(loaded.spec, key))
        text = f"{value:<22} {origin}"
        if console.is_terminal and 4 + 30 + len(text) > console.width:  # print the origin below its value
            text = f"{value}\n{origin}"
        print_indented(Text(text, style), 4, console, head=Text(f"{name:<30}", style))


def _print_parts(spec: RunSpec, console: Console) -> None:
    print_title("Algorithm", console)
    algorithm = spec.algorithm
    actor = spec.actor
    used = [
        (ADVANTAGE_ESTIMATORS, algorithm.adv_estimator),
        (POLICY_LOSSES, algorithm.rollout_correction.loss_type),
    ]
    used += [(KL_ESTIMATORS, actor.kl_loss_type)] if actor.use_kl_loss else []
    used += [(KL_ESTIMATORS, algorithm.kl_penalty)] if algorithm.use_kl_in_reward else []
    for registry, name in used:
        registered = registry.part(name)
        print_indented(Text.assemble((name, "bold"), f", {registry.kind}: {registered.title}"), 2, console)
        details = "; ".join(filter(None, (registered.formula, registered.source)))
        if details:
            print_indented(Text(details, "dim"), 6, console)


def _print_correction(spec: RunSpec, console: Console) -> None:
    print_title("Rollout correction: what each threshold means for ρ = π_train / π_rollout", console)
    for band in bands(spec):
        print_indented(Text.assemble((band.name, "bold"), f": {band.interval}"), 2, console)
        said = "ρ here: " if band.symbol == "ρ" else ""
        print_indented(Text(f"{said}{band.bounds}; outside: {band.outside}", "dim"), 6, console)
    for note in notes(spec):
        print_indented(Text(note), 2, console)


def _print_reward(spec: RunSpec, console: Console) -> None:
    print_title("Reward", console)
    if spec.environment.name != "single_turn":
        print_indented(Text.assemble((spec.environment.name, "bold"), "  its own reward, if any"), 2, console)
    for term in spec.reward.all_terms:
        shown = "your function"
        if not is_file_function(term.name):
            grader = GRADERS.part(term.name)
            needs = f"; needs {', '.join(sorted(grader.needs))}" if grader.needs else ""
            shown = f"{grader.label}: {grader.formula}{needs}"
        weight = "" if spec.reward.terms is None else f" × {term.weight:g}"
        print_indented(Text.assemble((term.name + weight, "bold"), f"  {shown}"), 2, console)


def _print_batch(spec: RunSpec, console: Console) -> None:
    print_title("Batch", console)
    batch = BatchArithmetic(spec, count_rows(spec))
    ranks = count_of(spec.world_size, "rank")
    shared = spec.engine.sequence_parallel
    if shared > 1:
        ranks += f" in groups of {shared}, which run each row together"
    if batch.micro_batches_per_rank is None:
        micro = f"micro-batches of at most {batch.micro_batch_tokens:,} tokens"
    else:
        micro = count_of(batch.micro_batches_per_rank, "micro-batch", "es")
        micro += f" of at most {batch.micro_batch_size}"
    steps = count_of(batch.steps_per_batch, "optimizer step")
    lines = [
        f"{spec.data.train_batch_size} prompts × {spec.rollout.n} responses = {batch.samples} samples",
        f"{count_of(batch.mini_batches, 'mini-batch', 'es')} of {batch.samples_per_mini_batch} samples",
        f"each over {ranks}: {batch.samples_per_rank} samples in {micro}",
        f"{batch.mini_batches} × {count_of(spec.actor.ppo_epochs, 'epoch')} over the batch = {steps}",
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
    print_title("Rollout servers", console)
    server = spec.rollout.server
    engines = count_of(server.replicas, "engine")
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
    print_title("Memory per GPU (an estimate: no fragmentation)", console)
    size = placement.size
    parameters = "unknown" if size.num_parameters is None else f"{size.num_parameters:,}"
    console.print(Text(f"  parameters: {parameters} ({size.source})"))
    words = "parts in memory in every phase, and the largest phase [in brackets]"
    _print_parts_of_memory(placement.gpu_parts, words, console)


def _print_host(placement: Placement, console: Console) -> None:
    machine = placement.machine
    print_title(f"Host memory per node ({machine.name}: {gib(machine.host_bytes)})", console)
    _print_parts_of_memory(placement.host_parts, "", console)


def _print_parts_of_memory(parts: list[MemoryPart], of_peak: str, console: Console) -> None:
    rows: list[tuple[str | Text, ...]] = []
    for item in parts:
        shown = ", ".join([*item.phases, *(["/dev/shm"] if item.is_shared else [])])
        words = " ".join(filter(None, [item.note, f"[{shown}]" if shown else ""]))
        amount = "unknown" if item.num_bytes is None else gib(item.num_bytes)
        rows.append((item.name, amount, Text(words, "dim")))
    known = [part for part in parts if part.num_bytes is not None]
    more_than = "" if len(known) == len(parts) else "over "
    total = more_than + gib(memory_total(known)) if known else "unknown"
    rows.append((Text("peak", "bold"), Text(total, "bold"), Text(of_peak, "dim")))
    print_table(console, ("", "", ""), rows, right=(1,), indent=2)


def _print_stages(placement: Placement, console: Console) -> None:
    machine = placement.machine
    of = f"{placement.spec.trainer.nnodes} × {machine.gpus} × {machine.gpu}"
    print_title(f"Stages on {machine.name} ({of}); seconds of a step, low–high", console)
    rows: list[tuple[str | Text, ...]] = []
    for stage in placement.stages():
        seconds = "" if stage.seconds is None else str(stage.seconds)
        moved = ", ".join(f"{gib(num_bytes)} {link}" for link, num_bytes in stage.moved.items())
        rows.append((stage.name, gib(stage.gpu), gib(stage.host), seconds, Text(moved, "dim")))
    headings = ("stage", "GPU", "host", "seconds", "moved")
    print_table(console, headings, rows, right=range(1, 4), indent=2)
    total = placement.intervals.get("whole step")
    if total:
        speed = summary.speed_of(placement)
        words = f"one step: {total} s, {speed} tokens per second on all GPUs together"
        print_indented(Text(words, "bold"), 2, console)
    for own in placement.own_design():
        words = f"as other software counts, {own.seconds_with} s: here {own.what}"
        print_indented(Text(words), 2, console)
    for words in placement.not_known():
        print_indented(Text(f"not known: {words}", "dim"), 2, console)
    says = "faster" if placement.fits() else "does not fit; does with"
    for each in placement.suggestions():
        print_indented(Text(f"{says}: {each.setting}, {each.seconds} s: {each.why}"), 2, console)
