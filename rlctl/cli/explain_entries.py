"""What `rlctl explain` says about keys of the spec, sections, metrics and parts. It imports the spec."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from rlctl.cli.dry_run_summary import show
from rlctl.errors import UsageError
from rlctl.metric_names import METRICS, describe
from rlctl.registry import REJECTION_CRITERIA, Registry
from rlctl.run_spec.explain import criterion_bands
from rlctl.run_spec.key_table import key_rows
from rlctl.run_spec.keys import advice_for, did_you_mean, known_leaves, known_sections
from rlctl.run_spec.resolve import criteria_names
from rlctl.run_spec.sources import all_presets, read_yaml_file

Entry = dict[str, Any]


def entries_of(name: str | None) -> list[Entry]:
    """The sections; or what has this name; or the names of all that mention it.

    Raises:
        UsageError: nothing mentions it.
    """
    if name is None:
        return [
            {"name": section, "meaning": inspect.cleandoc(kind.__doc__ or "")}
            for section, kind in known_sections().items()
        ]
    entries = [*_of_spec(name), *_of_metric(name), *_of_parts(name)]
    if entries:
        return entries
    entries = _of_frameworks(name)
    if entries:
        return entries
    entries = _mentions(name)
    if entries:
        return entries
    nearest = _nearest(name)
    entries = [] if (nearest or "").startswith("did you mean") else _of_frameworks(name, by_prefix=True)
    if entries:
        return entries
    message = f"neither a key of the spec, nor a metric, nor the name of a part: {name}"
    raise UsageError(message, fix=nearest)


def _of_frameworks(name: str, *, by_prefix: bool = False) -> list[Entry]:
    """What other frameworks' keys of this name, or whose last part is the name, become here.

    `by_prefix`: of a key that the tables know by the beginning of its name only.
    """
    from rlctl.convert.table import explained, tables

    meanings = {row.key: row.meaning for row in key_rows()}
    entries: list[Entry] = []
    for table in tables().values():
        for key, targets, texts in explained(table, name, by_prefix=by_prefix):
            becomes = [f"{target}: {meanings.get(target, '').partition('. ')[0]}" for target in targets]
            about = {
                "meaning": f"a key of {table.title}" if table.is_framework else "no name of rlctl",
                "becomes": becomes,
                "note": texts,
            }
            entries.append({"name": key, **{heading: text for heading, text in about.items() if text}})
    return entries


def _mentions(words: str) -> list[Entry]:
    """Keys, presets, parts and metrics that contain all words; those whose names contain them come first."""
    metrics = [(metric.name, metric.definition) for metric in METRICS.values()]
    parts = [
        (part.name, f"{registry.kind}: {part.title}")
        for registry in Registry.all
        for part in registry.parts()
    ]
    presets = [(each.name, f"preset: {each.description}") for each in all_presets().values()]
    all_names = [*((row.key, row.meaning) for row in key_rows()), *presets, *parts, *metrics]
    wanted = words.lower().split()
    entries = [
        {"name": name, "meaning": meaning.partition(". ")[0].rstrip(".")}
        for name, meaning in all_names
        if all(word in f"{name} {meaning}".lower() for word in wanted)
    ]
    return sorted(entries, key=lambda entry: not all(word in entry["name"].lower() for word in wanted))


def _of_spec(name: str) -> list[Entry]:
    """Entries of the keys that `name` matches: a full key, the end of keys, or all keys of a section."""
    leaves = known_leaves()
    keys = [name] if name in leaves else [key for key in leaves if key.startswith(f"{name}.")]
    keys = keys or [key for key in leaves if key.endswith(f".{name}")]
    rows = {row.key: row for row in key_rows()} if keys else {}
    entries: list[Entry] = []
    for key in keys:
        row = rows[key]
        entry: Entry = {"name": key, "meaning": row.meaning, "type": row.type, "default": row.default}
        if len(keys) == 1:
            values = {
                preset.name: read_yaml_file(preset.path, leaves).leaves.get(key)
                for preset in all_presets().values()
            }
            set_by = [f"{preset}: {show(leaf.value)}" for preset, leaf in values.items() if leaf]
            if set_by:
                entry["presets"] = set_by
        entries.append(entry)
    return entries


def _of_metric(name: str) -> list[Entry]:
    metric = describe(name)
    if metric is None:
        return []
    entry: Entry = {"name": metric.name, "meaning": metric.definition, "unit": metric.unit}
    if metric.peers:
        entry["same as"] = [f"{framework}: {theirs}" for framework, theirs in metric.peers.items()]
    return [entry]


def _of_parts(name: str) -> Iterator[Entry]:
    """Entries of the losses, estimators and other parts of this name, and of the rejection criterion."""
    for registry in Registry.all:
        if name in set(registry) and registry is not REJECTION_CRITERIA:
            registered = registry.part(name)
            about = {"meaning": f"{registry.kind}: {registered.title}", "key": registry.key}
            about |= {
                "formula": registered.formula,
                "source": registered.source,
                "needs": ", ".join(sorted(registered.needs)),
            }
            about["params"] = ", ".join(registered.params.model_fields) if registered.params else ""
            yield {"name": name, **{heading: text for heading, text in about.items() if text}}
    if name in criteria_names():
        meaning = f"{REJECTION_CRITERIA.kind}; with a threshold as an example, per dialect"
        yield {"name": name, "meaning": meaning, "key": REJECTION_CRITERIA.key, **criterion_bands(name)}


def _nearest(name: str) -> str | None:
    """Suggestion for an unknown name."""
    parts = [*criteria_names(), *(part for registry in Registry.all for part in registry)]
    names = METRICS if "/" in name else [*known_sections(), *parts]
    near = did_you_mean(name, names, cutoff=0.8) or advice_for(name)
    return near or did_you_mean(name, METRICS, "`rlctl explain --format markdown` lists every key")
