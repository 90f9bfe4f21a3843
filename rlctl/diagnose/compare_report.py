"""A comparison in sentences and on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlctl.diagnose.wording import run_name, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlctl.diagnose.compare import Comparison, MetricChange

_NAMED = 3


def sentences(found: Comparison) -> Iterator[str]:
    """What matters most, plainly."""
    if found.shared is None:
        yield "The runs have no step in common: nothing can be compared."
        return
    last = found.shared[1]
    if found.identical_until == last:
        yield f"Every figure of the training is the same to the last digit, up to step {last}."
        return
    if found.identical_until is not None:
        yield f"The same to the last digit up to step {found.identical_until}."
    lasting = [change for change in found.metrics if change.lasts]
    if not found.metrics:
        yield f"No metric differs by more than the runs' own noise, up to step {last}."
    elif not lasting:
        yield f"No difference lasts until step {last}; some came and went."
    if lasting:
        since = min(change.first_step for change in lasting)
        start = f"The same before step {since}; from there" if since > found.shared[0] else "From the start"
        first = max((c for c in lasting if c.first_step == since), key=lambda change: change.sigmas)
        yield f"{start} {first}."
        for change in [c for c in lasting if c is not first][:_NAMED]:
            yield f"Since step {change.first_step} {change}."
    for name, findings in (("A", found.findings_a), ("B", found.findings_b)):
        for finding in findings:
            if finding.severity != "info":
                yield f"Only in {name}: {finding.what} ({finding.severity}, {finding.rule})."


def print_comparison(console: Console, found: Comparison) -> None:
    """Sentences first, then specs, metrics by size, and what cannot be compared."""
    from rich.text import Text

    for name, diagnosis in (("A", found.a), ("B", found.b)):
        steps = diagnosis.run.table.steps
        amount = f": steps {steps[0]}–{steps[-1]}"
        console.print(Text.assemble((f"{name}  ", "bold"), run_name(diagnosis.run), amount), soft_wrap=True)
    console.print()
    for sentence in sentences(found):
        console.print(Text(visible(sentence), style="bold"), soft_wrap=True)
    console.print()
    console.print(_specs(found) if found.spec else "The specs do not differ, as far as they are known.")
    if found.metrics:
        console.print()
        console.print(_metrics(found.metrics))
    if found.same:
        console.print(Text(f"{len(found.same)} metrics: no lasting difference", style="dim"))
    for name, keys in (("A", found.only_a), ("B", found.only_b)):
        if keys:
            line = f"only in {name}: {', '.join(keys)}"
            console.print(Text(visible(line), style="dim"), soft_wrap=True)


def _specs(found: Comparison) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("spec", "A", "B"):
        table.add_column(heading, overflow="fold")
    for change in found.spec:
        table.add_row(change.key, Text(shown(change.a)), Text(shown(change.b)))
    return table


def _metrics(changes: tuple[MetricChange, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric", overflow="fold")
    for heading in ("A", "B", "sigmas"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("steps", no_wrap=True)
    for change in changes:
        figures = (f"{change.a:.3g}", f"{change.b:.3g}", f"{change.sigmas:.1f}")
        table.add_row(Text(visible(change.key)), *figures, when(change))
    return table


def when(change: MetricChange) -> str:
    """`since 40`, or `12–38`."""
    return f"since {change.first_step}" if change.lasts else f"{change.first_step}–{change.last_step}"


def shown(value: Any) -> str:
    """A spec's value as YAML has it; `—` for unknown and null."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return str(value).lower()
    return visible(str(value))
