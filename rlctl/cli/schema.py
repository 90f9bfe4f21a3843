"""`rlctl schema` and `rlctl explain`: describe every key of the spec, one of them, or a metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import AsJson, complete_key, print_json
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from rlctl.registry import Registry

_RANGES = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema(
    section: Annotated[
        str | None,
        typer.Option(
            "--section", metavar="NAME", help="One section only: actor, algorithm.rollout_correction …"
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A table for reading instead of JSON Schema.")
    ] = False,
) -> None:
    """Print every key of a spec, as JSON Schema.

    Use it in your editor's YAML support for completion and checks while typing.

      rlctl schema > rlctl.schema.json

      rlctl schema --section actor --markdown
    """
    from rlctl.spec.keys import known_sections
    from rlctl.spec.run_spec import RunSpec
    from rlctl.spec.sources import DESCRIPTION

    model = known_sections().get(section) if section else RunSpec
    if model is None:
        fix = f"one of {', '.join(sorted(known_sections()))}"
        raise UsageError(f"no such section: {section}", where="--section", fix=fix)
    content = _json_schema(model)
    if markdown:
        typer.echo("| key | type | default | meaning |\n|---|---|---|---|")
        for row in _rows(content, content.get("$defs", {}), f"{section}." if section else ""):
            meaning = row.meaning.replace("|", "\\|")
            typer.echo(f"| `{row.key}` | {row.type} | `{row.default}` | {meaning} |")
        return
    if section is None:
        content["properties"][DESCRIPTION] = {"type": "string", "description": "For readers only."}
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **content}
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _json_schema(section: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a section, with the names of the rejection criteria, which a comma separates."""
    from rlctl.spec.resolve import criteria_names

    content = section.model_json_schema()
    for part in (content, *content.get("$defs", {}).values()):
        if criteria := part["properties"].get("rollout_rs"):
            criteria["examples"] = criteria_names()
    return content


@dataclass(frozen=True, slots=True)
class KeyRow:
    """Description of one key of the spec; `default` is JSON."""

    key: str
    type: str
    default: str
    meaning: str


def key_rows() -> Iterator[KeyRow]:
    """Every key of the spec, in the order of its sections."""
    from rlctl.spec.run_spec import RunSpec

    content = _json_schema(RunSpec)
    yield from _rows(content, content.get("$defs", {}), "")


def _rows(content: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[KeyRow]:
    """Yields one row per leaf; keys of nested sections follow in place."""
    for name, field in content["properties"].items():
        if "$ref" in field:
            yield from _rows(definitions[field["$ref"].rsplit("/", 1)[-1]], definitions, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get("default"), ensure_ascii=False)
        meaning = " ".join(field.get("description", "").split())
        kind = _type(field, definitions)
        if names := ", ".join(f"`{example}`" for example in field.get("examples", [])):
            kind += f", such as {names}"
        yield KeyRow(f"{prefix}{name}", kind, default, meaning)


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's type and range in a few words."""
    if "anyOf" in field:
        return " or ".join(_type(option, definitions) for option in field["anyOf"])
    if "$ref" in field:  # an item of a list
        fields = definitions[field["$ref"].rsplit("/", 1)[-1]]["properties"]
        return f"{{{', '.join(fields)}}}"
    for key in ("enum", "const"):
        if key in field:
            values = field[key] if key == "enum" else [field[key]]
            return ", ".join(f"`{value}`" for value in values)
    is_path = ".py:" in field.get("pattern", "")
    words = "`path/to/file.py:function`" if is_path else str(field.get("type", "any"))
    if words == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        return f"list of {_type(items, definitions)}"
    ranges = [f"{sign} {field[key]}" for key, sign in _RANGES.items() if key in field]
    return " ".join([words, ", ".join(ranges)]).strip()


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
        typer.echo(entry.pop("name"))
        for heading, text in entry.items():
            for index, line in enumerate(text if isinstance(text, list) else [text]):
                typer.echo(f"  {'' if index else heading:<8} {line}")
        typer.echo("")


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
            about = {"meaning": f"{registry.kind}: {part.label}", "key": registry.key}
            about |= {"formula": part.formula, "source": part.source, "needs": ", ".join(sorted(part.needs))}
            about["params"] = ", ".join(part.params.model_fields) if part.params else ""
            yield {"name": name, **{heading: text for heading, text in about.items() if text}}
    if name in criteria_names():
        meaning = f"{REJECTION_CRITERIA.kind}; with a threshold as an example, per dialect"
        yield {"name": name, "meaning": meaning, "key": REJECTION_CRITERIA.key, **criterion_bands(name)}


def _registries() -> list[Registry]:
    """Registries of the parts that a spec or an option names; their modules import no torch."""
    from rlctl.registry import METRIC_CONVENTIONS, Registry

    return [registry for registry in Registry.all if registry is not METRIC_CONVENTIONS]


def _nearest(name: str) -> str | None:
    """Suggestion for an unknown name."""
    from rlctl.metric_names import METRICS
    from rlctl.spec.keys import advice_for, closest, did_you_mean, known_sections
    from rlctl.spec.resolve import criteria_names

    if "/" in name:
        return did_you_mean(name, METRICS, "docs/reference/metrics.md lists all metrics")
    parts = [*criteria_names(), *(part for registry in _registries() for part in registry)]
    if near := did_you_mean(name, [*known_sections(), *parts], cutoff=0.8) or advice_for(name):
        return near
    by_end = {metric.rpartition("/")[2]: metric for metric in METRICS}
    end = closest(name, by_end)
    return f"did you mean `{by_end[end]}`?" if end else "`rlctl schema --markdown` lists every key"
