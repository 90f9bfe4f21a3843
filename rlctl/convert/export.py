"""Exports a spec to another framework's configuration, with the tables of the import in reverse."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlctl.convert.table import KeyRule, KeyTable, compute, placeholders, word
from rlctl.convert.translate import Conversion, KeyOutcome
from rlctl.spec.algorithm import CORRECTION
from rlctl.spec.keys import flat, known_leaves, leaves_of
from rlctl.spec.resolve import correction_rules
from rlctl.spec.run_spec import RunSpec

_MISSING = object()
_LEVEL = f"{CORRECTION}rollout_"
#: Spec keys that determine the correction's internal form, see `_rules`.
_RULE_LEAVES = {
    "rules.bound": [f"{_LEVEL}is_bound"],
    "rules.lower": [f"{_LEVEL}is_threshold"],
    "rules.upper": [f"{_LEVEL}is_threshold"],
    "rules.reject_lower": [f"{_LEVEL}rs_threshold"],
    "rules.reject_upper": [f"{_LEVEL}rs_threshold"],
}
#: Text that Hydra reads as this text: of no other type, and without characters of its syntax.
_PLAIN_WORD = re.compile(r"(?!(?i:null|true|false|nan|inf)$)(?:[A-Za-z/]|\.{1,2}/)[A-Za-z0-9_./:+%*@?|-]*")
#: Options of TRL's launcher, which are written in the first line of the text.
_LAUNCHER = ("num_processes", "num_machines")


@dataclass(slots=True)
class Export(Conversion):
    """The other framework's keys; one row for every spec key that differs from its default or is written."""

    #: key → value, without values equal to the framework's default
    settings: dict[str, Any] = field(default_factory=dict)


def export(spec: RunSpec, table: KeyTable) -> Export:
    """Converts a spec to the keys of `table`'s framework."""
    ours, defaults = _values(spec), _values(RunSpec())
    values = ours | _rules(spec)
    written: dict[str, Any] = {}
    lacks: tuple[str, ...] = ()
    read_by: dict[str, list[str]] = {}
    direct: set[str] = set()
    for key, rule in table.keys.items():
        formula = table.export.get(key)
        # A key whose spec key is already written is an older name of that key.
        if not formula and (rule.outside or rule.unsupported or not rule.to or rule.to in direct):
            continue
        if key.startswith("critic.") and not spec.algorithm.estimator_needs("values"):
            continue
        direct.add(rule.to)
        try:
            written[key] = compute(formula, values) if formula else _inverse(rule, values.get(rule.to))
        except ValueError:
            written[key] = _MISSING
        if key == "_class" and written[key] in table.variants:
            lacks = tuple(table.variants[written[key]].lacks)
        elif lacks and key.startswith(lacks):
            if _is_default(written[key], rule.default):
                del written[key]
                continue
            written[key] = _MISSING
        for source in placeholders(formula) if formula else [rule.to]:
            for leaf in _RULE_LEAVES.get(source, [source]):
                read_by.setdefault(leaf, []).append(key)
    theirs = table.defaults(written.get("_class"))
    settings = {
        key: value
        for key, value in written.items()
        if value is not _MISSING and not _is_default(value, theirs.get(key))
    }
    result = Export(table, [], settings)
    for leaf in known_leaves():
        became = {key: written[key] for key in read_by.get(leaf, [])}
        is_changed = word(ours[leaf]) != word(defaults[leaf])
        is_lost = any(one is _MISSING for one in became.values())
        if is_changed or is_lost or any(key in settings for key in became):
            result.rows.append(_outcome(table, theirs, leaf, ours[leaf], became))
    return result


def _values(spec: RunSpec) -> dict[str, Any]:
    """Value of every spec key; tuples as lists."""
    leaves = leaves_of(spec).items()
    return {key: list(value) if isinstance(value, tuple) else value for key, value in leaves}


def _rules(spec: RunSpec) -> dict[str, Any]:
    """The correction in a form independent of the dialect: `rules.bound`, `.lower`, `.upper`, `.reject_…`."""
    rules = correction_rules(spec.algorithm.rollout_correction)
    reject = rules.reject[0] if rules.reject else None
    return {
        "rules.bound": rules.weight.bound,
        "rules.lower": rules.weight.lower,
        "rules.upper": rules.weight.upper,
        "rules.reject_lower": reject.lower if reject else None,
        "rules.reject_upper": reject.upper if reject else None,
    }


def _inverse(rule: KeyRule, value: Any) -> Any:
    """The framework's value that the table maps to `value`; `_MISSING` if there is none."""
    if rule.values is None or (value is None and "null" not in rule.values):
        return value
    for theirs, mapped in rule.values.items():
        if theirs != "*" and word(mapped) == word(value):
            return None if theirs == "null" else theirs
    return value if "*" in rule.values else _MISSING


def _is_default(value: Any, default: Any) -> bool:
    if value in (None, [], {}):
        return True  # omitted: the framework's default applies; `_outcome` adds a note if that is not null
    if default == "null":
        return False
    same_number = isinstance(value, int | float) and isinstance(default, int | float)
    return float(value) == float(default) if same_number else word(value) == word(default)


def _outcome(
    table: KeyTable, defaults: dict[str, Any], leaf: str, value: Any, became: dict[str, Any]
) -> KeyOutcome:
    if not became:
        why = table.export_unsupported.get(leaf, f"{table.title} has no such key")
        return KeyOutcome(leaf, value, "not supported", {}, why, "")
    if _MISSING in became.values():
        lost = [key for key, one in became.items() if one is _MISSING]
        note = f"{', '.join(lost)} has no equivalent value"
        kept = {key: one for key, one in became.items() if one is not _MISSING}
        return KeyOutcome(leaf, value, "not supported", kept, note, "")
    notes = [table.keys[key].difference(one) for key, one in became.items()]
    for key, one in became.items():
        default = defaults.get(key)
        if one is None and default not in (None, "null"):
            notes.append(f"null here; if not set, {key} defaults to {word(default)}")
    note = "; ".join(dict.fromkeys(note for note in notes if note))
    return KeyOutcome(leaf, value, "different" if note else "same", became, note, "")


def as_text(result: Export) -> str:
    """Formats an export for the framework: a launch script for verl and OpenRLHF, YAML for TRL."""
    settings = {key: value for key, value in result.settings.items() if key not in ("_class", *_LAUNCHER)}
    left_out = (row for row in result.rows if row.status == "not supported")
    lost = [f"# Not carried over: {row.key}: {row.note}" for row in left_out]
    if result.table.name == "trl":
        kind = {"RLOOConfig": "rloo"}.get(str(result.settings.get("_class")), "grpo")
        options = [f"--{key} {result.settings[key]}" for key in _LAUNCHER if key in result.settings]
        head = " ".join(["# accelerate launch", *options, f"-m trl.scripts.{kind} --config THIS_FILE"])
        pairs = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
        return "\n".join([head, *lost, *pairs]) + "\n"
    if result.table.style == "flags":
        command = "python3 -m openrlhf.cli.train_ppo_ray"
        options = [_flag(key, value) for key, value in settings.items() if value is not False]
    else:
        command = "python3 -m verl.trainer.main_ppo"
        options = [shlex.quote(f"{key}={_hydra(value)}") for key, value in _hydra_keys(settings)]
    return "\n".join(["#!/usr/bin/env bash", *lost, " \\\n    ".join([command, *options])]) + "\n"


def _flag(key: str, value: Any) -> str:
    if value is True:
        return f"--{key}"
    parts = value if isinstance(value, list) else [value]
    return " ".join([f"--{key}", *(shlex.quote(str(part)) for part in parts)])


def _hydra_keys(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings as Hydra's overrides: a `+` adds a key to a mapping."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"+{key}.").items()
        else:
            yield key, value


def _hydra(value: Any) -> str:
    """A value in Hydra's syntax: a text that is not a plain word is quoted."""
    if isinstance(value, list):
        return f"[{','.join(_hydra(item) for item in value)}]"
    if not isinstance(value, str) or _PLAIN_WORD.fullmatch(value):
        return word(value)
    # Before a quote and at the end, a backslash must be doubled; before `${` it prevents an interpolation.
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + found[2].replace('"', r"\""), value)
    return '"' + escaped.replace("${", r"\${") + '"'
