"""The short dry run, at most 40 lines: whether the run can start, what was inferred and checked, the
correction, the values.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from rlctl.cli.output import print_indented, print_problems
from rlctl.errors import UsageError, visible
from rlctl.extras import TRAINING, first_missing
from rlctl.registry import POLICY_LOSSES
from rlctl.run_spec.explain import BatchArithmetic, bands
from rlctl.run_spec.keys import known_leaves, value_of
from rlctl.run_spec.machine import gib
from rlctl.run_spec.memory import memory_total
from rlctl.run_spec.resolve import correction_rules, loss_rule
from rlctl.run_spec.step_time import Seconds
from rlctl.track.open_run import open_run
from rlctl.train.preflight import count_rows

if TYPE_CHECKING:
    from pathlib import Path

    from rlctl.errors import Problem
    from rlctl.run_spec.load import LoadedSpec
    from rlctl.run_spec.placement import Placement
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.terminal import Console
    from rlctl.train.first_row import FirstRow

#: Title and lines.
Section = tuple[str, list[Text]]

#: Lines in all, and least of a section that is shown.
MOST_LINES, _LEAST_LINES = 40, 3
#: Lines of a prompt, and characters of each.
_PROMPT_LINES, _PROMPT_CHARS = 8, 100


def print_result(problems: Sequence[Problem], placement: Placement, console: Console) -> int:
    """Prints whether the run can start, all errors and warnings, peak memory and time.

    Returns:
        The number of lines.
    """
    console.print(_first_line(problems))
    print_problems(problems, console)
    num_lines = 1
    for problem in problems:
        num_lines += 1 + bool(problem.where) + bool(problem.fix)
    for name, text in _figures(placement):
        print_indented(Text(text), 2, console, head=Text(f"{name:<15}", "bold"))
        num_lines += 1
    return num_lines


def _first_line(problems: Sequence[Problem]) -> Text:
    """E.g. `1 error, 2 warnings: the run cannot start`."""
    counts = Counter(problem.severity for problem in problems)
    words = [count_of(counts[name], name) for name in ("error", "warning") if counts[name]]
    before = ", ".join(words) or "no errors"
    if counts["error"]:
        return Text(f"{before}: the run cannot start", "bold red")
    missing = first_missing(*TRAINING)
    after = f" after {missing.fix}" if missing else ""
    return Text(f"{before}: the run can start{after}", "bold green")


def _figures(placement: Placement) -> list[tuple[str, str]]:
    """Peak memory, time of a step, length of the run."""
    spec = placement.spec
    machine = placement.machine
    known = [item for item in placement.gpu_parts if item.num_bytes is not None]
    more_than = "" if len(known) == len(placement.gpu_parts) else "over "
    peak = f"{more_than}{gib(memory_total(known))}" if known else "unknown"
    of = f"a GPU of {gib(machine.gpu_bytes)}" if machine.gpus else f"{gib(machine.host_bytes)}, on the CPU"
    figures = [("peak memory", f"{peak} of {of} (estimate)")]
    peak_of_host = memory_total(placement.host_parts)
    if machine.gpus and peak_of_host:
        figures.append(
            ("host memory", f"{gib(peak_of_host)} of {gib(machine.host_bytes)} per node (estimate)")
        )
    if machine.gpus and (seconds := placement.intervals.get("whole step")):
        figures.append(
            ("one step", f"{seconds} s, {speed_of(placement)} tokens per second in all (estimate)")
        )
        figures += [("not known", words) for words in list(placement.not_known())[:1]]
    elif machine.gpus and not machine.knows_speed:
        figures.append(("one step", f"unknown: the speed of {machine.gpu} is not in the table of GPUs"))
    elif machine.gpus and placement.size.shape:
        figures.append(("one step", "unknown: the run does not fit"))
    elif machine.gpus:
        figures.append(("one step", "unknown: the model's dimensions are not known here (download it first)"))
    else:
        figures.append(("one step", "its time is estimated for GPUs: --machine plans for one"))
    batch = BatchArithmetic(spec, count_rows(spec))
    sampled = f"{spec.data.train_batch_size} prompts × {spec.rollout.n} responses"
    updates = count_of(batch.steps_per_batch, "optimizer step")
    number = (
        "batches as the rows give"
        if batch.num_batches is None
        else count_of(batch.num_batches, "batch", "es")
    )
    figures.append(("the run", f"{number} of {sampled}, {updates} each"))
    return figures


def speed_of(placement: Placement) -> Seconds:
    """Tokens of prompts and responses per second, on all GPUs together: the two ends."""
    seconds = placement.intervals["whole step"]
    tokens = placement.tokens() * placement.spec.world_size
    return Seconds(tokens / seconds.high, tokens / seconds.low)


def count_of(number: int, name: str, plural: str = "s") -> str:
    """E.g. `1 batch`, `2,000 batches`."""
    return f"{number:,} {name}{'' if number == 1 else plural}"


def print_sections(sections: Sequence[Section], console: Console, most: int | None) -> None:
    """Prints those that have lines; `most` lines in all, titles and empty lines included."""
    for title, lines in sections:
        left = len(lines) if most is None else most - 2  # below the title and the empty line before it
        if not lines or left < min(_LEAST_LINES, len(lines)):
            continue
        shown = lines
        if len(lines) > left:
            shown = [*lines[: left - 1], Text("… the rest: --all", "dim")]
        print_title(title, console)
        for line in shown:
            print_indented(line, 2, console)
        most = None if most is None else most - 2 - len(shown)


def print_title(title: str, console: Console) -> None:
    """Prints the title of a section after an empty line."""
    console.print(Text(f"\n{title}", style="bold cyan"))


def inferred(loaded: LoadedSpec) -> Section:
    """Values that nobody set and that are not defaults."""
    keys = [key for key in known_leaves() if loaded.origins[key].layer == "inferred"]
    values = [f"{key}={show(value_of(loaded.spec, key))}" for key in keys]
    width = max(map(len, values), default=0)
    lines = [
        Text.assemble((f"{value:<{width}}", "bold"), f"  {loaded.origins[key].name}")
        for key, value in zip(keys, values, strict=True)
    ]
    return "Inferred; each can be set", lines


def checked(row: FirstRow) -> Section:
    """What was checked, what was not, and the first prompt."""
    lines = [Text(f"✓ {visible(text)}") for text in row.checked]
    lines += [Text(f"not checked: {visible(text)}", "yellow") for text in row.unchecked]
    if row.prompt:
        prompt = row.prompt.rstrip("\n").split("\n")
        cut = [line if len(line) <= _PROMPT_CHARS else f"{line[:_PROMPT_CHARS]}…" for line in prompt]
        if len(cut) > _PROMPT_LINES:
            cut = [cut[0], f"… {len(cut) - _PROMPT_LINES + 1} lines …", *cut[2 - _PROMPT_LINES :]]
        lines += [Text(f"│ {visible(line)}", "dim") for line in cut]
    return "Checked, with the first row", lines


#: Steps whose median is compared.
_LAST_STEPS = 20


def so_far(spec: RunSpec, resumed: Path | None) -> Section:
    """With weights of sequences: up to which length they are useful, from the log of a run that continues."""
    title = "Measured so far"
    if resumed is None or spec.algorithm.rollout_correction.rollout_is != "sequence":
        return title, []
    try:
        rows = open_run(resumed).rows()
    except UsageError:
        return title, []
    pairs = [(row.get("rollout_corr/chi2_token"), row.get("response_length/mean")) for row in rows]
    known = [pair for pair in pairs if all(isinstance(x, int | float) for x in pair)][-_LAST_STEPS:]
    if not known:
        return title, []
    from rlctl.algos.usable_length import UsableLength, usable_length

    chi2, length = (statistics.median(column) for column in zip(*known, strict=True))
    measured = UsableLength(usable_length(chi2), (), round(length))
    return title, [Text(measured.text, "yellow" if measured.is_exceeded else "")]


def correction(spec: RunSpec) -> Section:
    """Intervals of ρ; no lines where nothing is corrected."""
    settings = spec.algorithm.rollout_correction
    rules = correction_rules(settings)
    corrects_by_ratio = settings.bypass_mode and POLICY_LOSSES.part(loss_rule(spec).name).clip is not None
    is_on = rules.weight.level is not None or bool(rules.reject) or corrects_by_ratio
    found = bands(spec) if is_on or settings.score_centering else []
    lines = [Text.assemble((band.name, "bold"), f": {band.interval}  {band.outside}") for band in found]
    return "Rollout correction, ρ = π_train / π_rollout", lines


def values(loaded: LoadedSpec) -> Section:
    """Values that are neither defaults nor inferred, a line per section."""
    sections: dict[str, list[str]] = {}
    for key in known_leaves():
        if loaded.origins[key].layer in {"default", "inferred"}:
            continue
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name}={show(value_of(loaded.spec, key))}")
    lines = [Text.assemble((section, "bold"), f"  {' '.join(pairs)}") for section, pairs in sections.items()]
    return "Values of presets, files and arguments", lines


def show(value: object) -> str:
    """Formats a value as in YAML."""
    from pydantic import BaseModel

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
