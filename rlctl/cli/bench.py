"""`rlctl bench corrections`: effect of every correction on the gradient, by exact enumeration or sampling."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import HELP_NAMES, echo
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.bench.exact import BenchRule

app = typer.Typer(help="Measure parts of rlctl.", no_args_is_help=True, context_settings=HELP_NAMES)


@app.command()
def corrections(
    out: Annotated[
        Path, typer.Option("--out", help="Directory of the results; existing measurements are kept.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Worlds of each place.")] = 8,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Add a rule, as keys of algorithm.rollout_correction: `KEY=VALUE KEY=VALUE`."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A small grid that takes seconds.")] = False,
    only: Annotated[
        bool, typer.Option("--only", help="Only the rules of --rule, and no correction.")
    ] = False,
) -> None:
    """Measure bias, variance, angle and error of the gradient under every correction, on small problems.

    Up to six tokens, all responses are enumerated and results are exact. Learned policies of 16 to 64 tokens
    are sampled. After an interruption the same command continues. Writes results.jsonl, report.md, error.svg.

      rlctl bench corrections --out bench

      rlctl bench corrections --out bench --only --rule "rollout_is=my.py:tempered rollout_is_threshold=5"
    """
    from rlctl.bench import corrections as bench
    from rlctl.bench.bench_report import markdown, picture

    chosen = bench.rules(small=small)
    if only:
        chosen = {"no correction": chosen["no correction"]}
    chosen |= {text: _rule(text) for text in rule or []}
    where = bench.places(small=small)
    rows, num_new = [], 0
    total = len(chosen) * len(where) * seeds
    for row, is_new in bench.measured(out, chosen, where, seeds):
        rows.append(row)
        num_new += is_new
        if len(rows) % 500 == 0:
            echo(f"{len(rows)} of {total} measurements", err=True)
    report = markdown(rows)
    (out / "report.md").write_text(report + "\n", encoding="utf-8")
    (out / "error.svg").write_text(picture(rows), encoding="utf-8")
    for section in report.split("## "):
        if "what to use" in section.partition("\n")[0]:
            echo(section)
    echo(f"{total} measurements, {num_new} of them new; hash {bench.digest(rows)[:16]}")
    echo(f"All tables: {out / 'report.md'}")


def _rule(text: str) -> BenchRule:
    from rlctl.bench.exact import BenchRule
    from rlctl.spec.algorithm import CORRECTION
    from rlctl.spec.load import load_spec

    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = []
    if not words or not all("=" in word for word in words):
        fix = "for example --rule 'rollout_is=token rollout_is_threshold=2'"
        raise UsageError(f"`{text}` is not KEY=VALUE", where="--rule", fix=fix)
    given = ["rollout_is=null", "rollout_is_batch_normalize=false", *words]
    whole_batch = "actor.ppo_mini_batch_size=null"  # a bench has one update per batch
    spec = load_spec(overrides=[whole_batch, *(CORRECTION + word for word in given)]).spec
    return BenchRule(spec.algorithm.rollout_correction)
