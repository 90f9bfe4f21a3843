"""A comparison of two evaluations: rows of text for the terminal, and a page that needs nothing else."""

from __future__ import annotations

from rlctl.evaluate.compare import CompareReport, Comparison
from rlctl.evaluate.page.tables import TableRow, drawn, render_page, stderr_text

DIFFERENCE_HEADINGS = ("A", "stderr", "B", "stderr", "B − A", "stderr", "95 % interval", "p")


def difference_rows(comparison: Comparison) -> list[TableRow]:
    """The figures of both evaluations and their differences."""
    rows = []
    for figure in comparison.figures:
        found = figure.difference
        has_interval = found.low is not None and found.high is not None
        cells = (
            f"{figure.a:.3f}",
            stderr_text(figure.a_stderr),
            f"{figure.b:.3f}",
            stderr_text(figure.b_stderr),
            f"{found.value:+.3f}",
            stderr_text(found.stderr),
            f"{found.low:+.3f} to {found.high:+.3f}" if has_interval else "—",
            "—" if found.p_value is None else f"{found.p_value:.2g}",
        )
        rows.append(TableRow(figure.name, cells, (found.value, found.low, found.high)))
    return rows


def shared_questions(comparison: Comparison) -> str:
    """`512 shared questions (3 only in A)`."""
    counts = (("A", comparison.num_only_a), ("B", comparison.num_only_b))
    only = ", ".join(f"{count:,} only in {side}" for side, count in counts if count)
    return f"{comparison.num_shared:,} shared questions" + (f" ({only})" if only else "")


def comparison_page(report: CompareReport) -> str:
    """A comparison of two evaluations as HTML."""
    tables = []
    for comparison in report.comparisons:
        found = difference_rows(comparison)
        ends = [abs(end) for row in found for end in row.range or () if end is not None]
        reach = max([0.01, *ends])
        rows = [drawn(row, left=100.0, scale=96.0 / reach, zero=True) for row in found]
        about = {"name": comparison.data_source, "amount": shared_questions(comparison)}
        axis = (f"−{reach:.2g}", "B − A", f"+{reach:.2g}")
        tables.append(about | {"axis": axis, "rows": rows, "verdict": comparison.verdict})
    return render_page(
        "base.html.j2",
        title="Is B better than A?",
        about=[f"A  {report.a}", f"B  {report.b}"],
        notes=report.warnings,
        headings=DIFFERENCE_HEADINGS,
        tables=tables,
    )
