"""`rlctl diagnose RUN --what-if`, `--who-sampled` and `--plan`: questions about a run, besides its faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.diagnose.plan import RunPlan
    from rlctl.mismatch.sampler_report import SamplerReport
    from rlctl.mismatch.who_sampled import WhoSampled
    from rlctl.terminal import Console
    from rlctl.what_if.tradeoff import Tradeoff


def ask(
    option: str, paths: Sequence[Path], output_format: str, out: Path | None, *, trust: bool = False
) -> list[Any]:
    """Writes the answers of `option` about the runs at all paths, and returns them.

    Raises:
        UsageError: the format is neither text nor JSON, or the runs lack what is read.
    """
    from rich.text import Text

    from rlctl.cli.output import check_out, write_report
    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.terminal import Console

    if output_format not in {"text", "json"}:
        raise UsageError(f"{option} writes text or json", where=f"--format {output_format}")
    check_out(paths, out, is_page=False)
    answers: list[tuple[str, Any]] = []
    for path in paths:
        with Console(stderr=True).status(Text(f"examining {visible(str(path))}")):  # on terminals only
            answers += [(visible(str(run)), answer) for run, answer in _answers(option, path, trust)]

    def text(console: Console) -> None:
        for title, answer in answers:
            _PRINTED[option](console, title, answer)

    documents = [{"run": title, **answer.as_document()} for title, answer in answers]
    write_report(output_format, out, text, lambda: documents)
    return [answer for _, answer in answers]


def _answers(option: str, path: Path, trust: bool) -> list[tuple[Path, Any]]:
    """The answers about what is at a path, with the path of each run."""
    if option == "--plan":
        from rlctl.diagnose.plan import NEEDED, plan
        from rlctl.diagnose.readers.detect import read_runs

        return [(run.path, plan(run)) for run in read_runs(path, NEEDED)]
    if option == "--who-sampled":
        from rlctl.mismatch.who_sampled import who_sampled

        return [(path, who_sampled(path, trust=trust))]
    if option == "--sampler-test":
        from rlctl.mismatch.sampler_report import sampler_report

        return [(path, sampler_report(path))]
    from rlctl.what_if.what_if_run import what_if

    return [(path, what_if(path, trust=trust))]


def _print_what_if(console: Console, title: str, one: Tradeoff) -> None:
    from rlctl.what_if.what_if_report import print_tradeoff

    print_tradeoff(console, title, one)


def _print_who_sampled(console: Console, title: str, answer: WhoSampled) -> None:
    from rich.text import Text

    from rlctl.text_table import print_table

    console.print(Text(f"Who sampled — {title}", style="bold"))
    console.print(Text(answer.conclusion, style="yellow" if answer.fault else ""))
    if answer.fix:
        console.print(Text(f"  fix   {answer.fix}", style="cyan"))
    rows = [
        (
            str(step.step),
            str(step.recorded),
            step.likeliest if step.version is None else f"{step.version} ({step.likeliest})",
            "> 1e6 : 1" if step.odds > 1e6 else f"{step.odds:.3g} : 1",
            f"{step.gap:.2g}",
        )
        for step in answer.steps
    ]
    headings = ("step", "version recorded", "likeliest of the kept", "odds", "mean |r|, nats")
    print_table(console, headings, rows, right={0, 1, 3, 4})
    if answer.split:
        split = answer.split
        about = f"{split.num_tokens} tokens whose weights were kept, mean |log-ratio| {split.size:.2g} nats"
        console.print(Text(f"\nlog-ratio of the trained policy to the sampling one: {about}"))
        shares = [
            (p.name, f"{p.share:.0%}", f"{p.low:.0%} to {p.high:.0%}", f"{p.size:.2g}", f"{p.mean:.2g}")
            for p in split.parts
        ]
        print_table(console, ("part", "share", "95 %", "mean |part|", "mean"), shares, right=range(1, 5))
        console.print(Text(f"  fix   {split.fix}", style="cyan"))
    for note in answer.notes:
        console.print(Text(f"note  {note}", style="dim"))


def _print_sampler_test(console: Console, title: str, report: SamplerReport) -> None:
    from rich.text import Text

    from rlctl.text_table import print_table

    console.print(Text(f"Sampler test — {title}", style="bold"))
    style = {"critical": "red", "warning": "yellow", None: ""}[report.severity]
    console.print(Text(report.conclusion, style=style))
    z = "—" if report.z is None else f"{report.z:.3g}"
    console.print(
        f"{report.num_tokens:,} tokens of {report.num_steps:,} steps: largest log wealth "
        f"{report.largest_log_wealth:.3g} (alarm above 13.8), mean ρ {report.mean:.5g}, z {z}"
    )
    rows = [
        (
            line.kind,
            line.name,
            f"{line.num_tokens:,}",
            f"{line.mean:.5g}",
            "—" if line.z is None else f"{line.z:.3g}",
        )
        for line in report.lines
    ]
    print_table(console, ("by", "", "tokens", "mean ρ", "z"), rows, right={2, 3, 4})
    guarantee = [f"an alarm has no guarantee: {report.no_guarantee}"] if report.no_guarantee else []
    for note in (*guarantee, *report.notes):
        console.print(Text(f"note  {note}", style="dim"))


def _print_plan(console: Console, title: str, plan: RunPlan) -> None:
    from rich.text import Text

    from rlctl.diagnose.plan import REPLICAS
    from rlctl.text_table import print_table

    console.print(Text(f"Plan — {title}", style="bold"))
    console.print(
        f"{plan.num_steps} steps of {plan.measured:.3g} s, of which sampling {plan.sampling:.3g} s "
        f"({plan.by_longest:.0%} of it waits for the longest response). Seconds per step with …"
    )
    counts = [plan.replicas * factor for factor in REPLICAS]
    headings = ("", *(f"{count} replica{'s' * (count > 1)}" for count in counts), "settings")
    rows = [
        (mode.name, *(f"{seconds:.3g}" for seconds in mode.seconds), " ".join(mode.settings))
        for mode in plan.modes
    ]
    print_table(console, headings, rows, right=range(1, 1 + len(counts)), whole={0})
    for note in plan.notes:
        console.print(Text(f"note  {note}", style="dim"))


_PRINTED: dict[str, Callable[[Console, str, Any], None]] = {
    "--what-if": _print_what_if,
    "--who-sampled": _print_who_sampled,
    "--sampler-test": _print_sampler_test,
    "--plan": _print_plan,
}
