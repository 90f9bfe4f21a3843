"""`rlctl explain`: describes a key of the spec, a section, a metric or a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import AsJson, complete_key, echo, print_json
from rlctl.cli.schema import key_rows
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.registry import Registry


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A spec key (actor.lr, or lr), a section (rollout), a metric (rollout_corr/kl), or the "
            "name of a loss, estimator, weight, criterion, grader, engine, tracker or rule (grpo).",
            autocompletion=complete_key,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Explain a spec key (meaning, type, default, what the presets set), a section, a metric, or a part.

    rlctl explain algorithm.rollout_correction.rollout_is

    rlctl explain rollout_corr/rollout_is_eff_sample_size

    rlctl explain seq_max_k2
    """
    found = [*_of_spec(name), *_of_metric(name), *_of_parts(name)]
    if not found:
        what = f"neither a key of the spec, nor a metric, nor the name of a part: {name}"
        raise UsageError(what, fix=_nearest(name))
    if as_json:
        print_json(found)
        return
    for entry in found:
        echo(entry.pop("name"))
        for heading, text in entry.items():
            for index, line in enumerate(text if isinstance(text, list) else [text]):
                echo(f"  {'' if index else heading:<8} {line}")
        echo("")


def _of_spec(name: str) -> list[dict[str, Any]]:
    """Entries of the keys that `name` matches: a full key, the end of keys, or all keys of a section."""
    from rlctl.cli.dry_run import show
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


def _of_parts(name: str) -> Iterator[dict[str, Any]]:
    """Entries of the losses, estimators and other parts of this name, and of the rejection criterion."""
    from rlctl.registry import REJECTION_CRITERIA
    from rlctl.spec.explain import criterion_bands
    from rlctl.spec.resolve import criteria_names

    for registry in _registries():
        if name in set(registry) and registry is not REJECTION_CRITERIA:
            part = registry.part(name)
            about = {"meaning": f"{registry.kind}: {part.title}", "key": registry.key}
            about |= {"formula": part.formula, "source": part.source, "needs": ", ".join(sorted(part.needs))}
            about["params"] = ", ".join(part.params.model_fields) if part.params else ""
            yield {"name": name, **{heading: text for heading, text in about.items() if text}}
    if name in criteria_names():
        meaning = f"{REJECTION_CRITERIA.kind}; with a threshold as an example, per dialect"
        yield {"name": name, "meaning": meaning, "key": REJECTION_CRITERIA.key, **criterion_bands(name)}


def _registries() -> list[Registry]:
    """Registries of the parts that a spec or an option names; their modules import no torch."""
    from rlctl.registry import Registry

    return list(Registry.all)


def _nearest(name: str) -> str | None:
    """Suggestion for an unknown name."""
    from rlctl.metric_names import METRICS
    from rlctl.spec.keys import REMOVED, advice_for, closest, did_you_mean, known_sections, unknown_key
    from rlctl.spec.resolve import criteria_names

    if name in REMOVED:
        return "; ".join(filter(None, unknown_key(name)))
    if "/" in name:
        return did_you_mean(name, METRICS, "docs/reference/metrics.md lists all metrics")
    parts = [*criteria_names(), *(part for registry in _registries() for part in registry)]
    if near := did_you_mean(name, [*known_sections(), *parts], cutoff=0.8) or advice_for(name):
        return near
    by_end = {metric.rpartition("/")[2]: metric for metric in METRICS}
    end = closest(name, by_end)
    return f"did you mean `{by_end[end]}`?" if end else "`rlctl schema --markdown` lists every key"
