"""Measures bias, variance, angle and error of the gradient under every correction, on small problems.

    python -m benchmarks.studies.gradients --out DIR
    python -m benchmarks.studies.gradients --out DIR --rule "rollout_is=my.py:mine rollout_is_threshold=5"

Up to six tokens, all responses are enumerated and results are exact. Learned policies of 16 to 64 tokens are
sampled. After an interruption the same command continues. Writes results.jsonl, report.md, error.svg.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks.studies.gradients.exact import BenchRule
from benchmarks.studies.gradients.measure import digest, measured, places, rules
from benchmarks.studies.gradients.report import markdown, picture
from rlctl.errors import RlctlError, UsageError
from rlctl.run_spec.algorithm import CORRECTION
from rlctl.run_spec.load import load_spec


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.gradients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory; measurements in it are kept")
    parser.add_argument("--seeds", type=int, default=8, help="worlds of each place (default: 8)")
    parser.add_argument(
        "--rule", action="append", default=[], help="add a rule: keys of algorithm.rollout_correction"
    )
    parser.add_argument("--small", action="store_true", help="a small grid that takes seconds")
    parser.add_argument("--only", action="store_true", help="only the rules of --rule, and no correction")
    options = parser.parse_args(arguments)
    try:
        _measure(options)
    except RlctlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measure(options: argparse.Namespace) -> None:
    chosen = rules(small=options.small)
    if options.only:
        chosen = {"no correction": chosen["no correction"]}
    chosen |= {text: rule_of(text) for text in options.rule}
    where = places(small=options.small)
    rows, num_new = [], 0
    total = len(chosen) * len(where) * options.seeds
    for row, is_new in measured(options.out, chosen, where, options.seeds):
        rows.append(row)
        num_new += is_new
        if len(rows) % 500 == 0:
            print(f"{len(rows)} of {total} measurements", file=sys.stderr)
    report = markdown(rows)
    (options.out / "report.md").write_text(report + "\n", encoding="utf-8")
    (options.out / "error.svg").write_text(picture(rows), encoding="utf-8")
    for section in report.split("## "):
        if "what to use" in section.partition("\n")[0]:
            print(section)
    print(f"{total} measurements, {num_new} of them new; hash {digest(rows)[:16]}")
    print(f"All tables: {options.out / 'report.md'}")


def rule_of(text: str) -> BenchRule:
    """The rule that `KEY=VALUE KEY=VALUE` describes."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that does not end
        words = []
    if not words or not all("=" in word for word in words):
        fix = "for example --rule 'rollout_is=token rollout_is_threshold=2'"
        raise UsageError(f"`{text}` is not KEY=VALUE", where="--rule", fix=fix)
    base = ["rollout_is=null", "rollout_is_batch_normalize=false", "bypass_mode=true", "loss_type=reinforce"]
    given = [*base, *words]
    whole_batch = "actor.ppo_mini_batch_size=null"  # one update per batch
    spec = load_spec(overrides=[whole_batch, *(CORRECTION + word for word in given)]).spec
    return BenchRule(spec.algorithm.rollout_correction)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
