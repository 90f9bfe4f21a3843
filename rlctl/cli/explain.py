"""`rlctl explain`: describes a key of the spec, a section, or a metric."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlctl.cli.command import AsJson, complete_key, print_json
from rlctl.errors import UsageError


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A spec key (actor.lr, or lr), a section (rollout), or a metric (rollout_corr/kl).",
            autocompletion=complete_key,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a spec key (meaning, type, default, what the presets set), a section, or a metric.

    rlctl explain algorithm.rollout_correction.rollout_is

    rlctl explain rollout_corr/rollout_is_eff_sample_size
    """
    found = _of_spec(name) or _of_metric(name)
    if not found:
        raise UsageError(f"neither a key of the spec nor a metric: {name}", fix=_nearest(name))
    if as_json:
        print_json(found)
        return
    for entry in found:
        typer.echo(entry.pop("name"))
        for heading, text in entry.items():
            for index, line in enumerate(text if isinstance(text, list) else [text]):
                typer.echo(f"  {'' if index else heading:<8} {line}")
        typer.echo("")


def _of_spec(name: str) -> list[dict[str, Any]]:
    """Entries of the keys that `name` matches: a full key, the end of keys, or all keys of a section."""
    from rlctl.cli.dry_run import show
    from rlctl.cli.schema import key_rows
    from rlctl.spec.keys import known_leaves
    from rlctl.spec.sources import all_presets, read_yaml_file

    leaves = known_leaves()
    if name in leaves:
        keys = [name]
    else:
        keys = [key for key in leaves if key.startswith(f"{name}.")]
        keys = keys or [key for key in leaves if key.endswith(f".{name}")]
    rows = {row.key: row for row in key_rows()}
    entries: list[dict[str, Any]] = []
    for key in keys:
        row = rows[key]
        entry: dict[str, Any] = {
            "name": key,
            "meaning": row.meaning,
            "type": row.type,
            "default": row.default,
        }
        if len(keys) == 1:
            values = {
                preset.name: read_yaml_file(preset.path, leaves).leaves.get(key)
                for preset in all_presets().values()
            }
            if set_by := [f"{preset}: {show(leaf.value)}" for preset, leaf in values.items() if leaf]:
                entry["presets"] = set_by
        entries.append(entry)
    return entries


def _of_metric(name: str) -> list[dict[str, Any]]:
    from rlctl.metric_names import describe

    metric = describe(name)
    if metric is None:
        return []
    entry: dict[str, Any] = {"name": metric.name, "meaning": metric.definition, "unit": metric.unit}
    if metric.peers:
        entry["same as"] = [f"{framework}: {theirs}" for framework, theirs in metric.peers.items()]
    return [entry]


def _nearest(name: str) -> str | None:
    """Suggestion for an unknown name."""
    from rlctl.metric_names import METRICS
    from rlctl.spec.keys import advice_for, closest, did_you_mean, known_sections

    if "/" in name:
        return did_you_mean(name, METRICS, "docs/reference/metrics.md lists all metrics")
    if of_sections := did_you_mean(name, known_sections(), cutoff=0.8):
        return of_sections
    by_end = {metric.rpartition("/")[2]: metric for metric in METRICS}
    end = closest(name, by_end)
    of_metrics = f"did you mean `{by_end[end]}`?" if end else "`rlctl schema --markdown` lists every key"
    return advice_for(name) or of_metrics
