"""Builds one checked RunSpec from presets, spec files and `key=value` arguments.

    defaults < inferred values < embedded model's preset < presets, left to right < spec files < key=value

The default of `engine.dtype` depends on this machine's hardware; `rlctl.train.infer` infers values from model
and data. Each layer is a flat mapping `dotted key → leaf`. The last layer that sets a key wins and is its
origin; `rlctl.run_spec.follow` changes values of presets that do not fit it. All errors are reported at once:
unreadable sources and unknown keys, then types and ranges, then contradictions between the remaining values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlctl.errors import Problem, SpecError, UsageError, in_words
from rlctl.files import is_directory, is_file
from rlctl.run_spec import check_algorithm, check_rollout, check_unread  # register their checks  # noqa: F401
from rlctl.run_spec.base import PARTS_UNCHECKED
from rlctl.run_spec.check import NO_EFFECT, check_spec
from rlctl.run_spec.follow import follow_stronger
from rlctl.run_spec.keys import (
    accepts,
    advice_for,
    did_you_mean,
    fields_of_items,
    flat,
    known_leaves,
    known_sections,
    leaf_of,
    nearest_key,
    nested,
    open_leaves,
    takes_mapping,
)
from rlctl.run_spec.machine import native_dtype
from rlctl.run_spec.model import EMBEDDED
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.sources import (
    COMMAND_LINE,
    DESCRIPTION,
    Leaf,
    Origin,
    all_presets,
    parse_scalar,
    read_value,
    read_yaml_file,
)

DEFAULT = Origin("default")
#: Layers that apply without a choice of the user.
_NEUTRAL = {"default", "hardware", "inferred", "embedded"}
#: The key whose default depends on the machine.
_DTYPE = "engine.dtype"

#: Maximum number of characters of an invalid value that a message shows.
_SHOWN = 200

#: In a spec file: a value that is to be written before the spec can be used.
NO_VALUE = "???"
#: Keys that model presets leave to the user.
LEFT_TO_THE_USER = frozenset({"data.train_files"})

#: File of the resolved spec in a run directory; its content is that of `dump_spec`.
RUN_SPEC_FILE = "spec.yaml"


def spec_file_of(run_dir: Path) -> Path:
    """Path of the resolved spec of a run.

    Raises:
        UsageError: not a run directory.
    """
    path = run_dir / RUN_SPEC_FILE
    if not is_file(path):
        why = f"it has no {RUN_SPEC_FILE}" if is_directory(run_dir) else "there is no such directory"
        fix = "`rlctl runs` lists the directories, such as runs/rlctl/run-…"
        raise UsageError(f"not a run directory: {why}", where=str(run_dir), fix=fix)
    return path


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A spec that passed all checks."""

    spec: RunSpec  # the resolved run
    origins: dict[str, Origin]  # dotted leaf key → origin, one for every value of `spec`, defaults included
    warnings: list[Problem]  # problems that do not stop the run


def load_spec(
    presets: Iterable[str] = (),
    files: Iterable[Path] = (),
    overrides: Iterable[str] | Mapping[str, object] = (),
    *,
    left_open: frozenset[str] = frozenset(),
    base: str | None = None,
    inferred: Mapping[str, tuple[object, str]] | None = None,
) -> LoadedSpec:
    """Read, layer, validate and check a spec.

    Args:
        presets: names of shipped presets or paths of preset files, weakest first.
        files: spec files, stronger than presets, weakest first.
        overrides: `dotted.key=value`, strongest; or, from a program, key → value, in which mappings may nest.
        left_open: keys that may stay unset: checks that read one of them are skipped.
        base: a preset that is weaker than inferred values.
        inferred: key → value and the reason for it; used where only defaults and `base` set the key.

    Raises:
        SpecError: with every problem found.
    """
    problems: list[Problem] = []
    leaves: dict[str, Leaf] = {}
    origin_of_values = Origin("values") if isinstance(overrides, Mapping) else COMMAND_LINE
    if base is not None:
        _put_over(leaves, _read_preset(base, origin_of_values, problems))
    for key, (value, why) in (inferred or {}).items():
        leaves[key] = Leaf(value, str(value), Origin("inferred", why))
    for preset in presets:
        _put_over(leaves, _read_preset(preset, origin_of_values, problems))
    for file in files:
        _put_over(leaves, _read_file(file, Origin("file", str(file)), problems))
    if isinstance(overrides, Mapping):
        whole = known_leaves().keys() - open_leaves()
        values: dict[str, Any] = {}
        for name, value in overrides.items():
            found = flat({name: value}, keeps_empty=True, whole=whole)
            twice = sorted(found.keys() & values.keys())
            problems += [
                Problem(
                    severity="error",
                    key=key,
                    what="given twice",
                    fix="keep one of the values",
                    where="values",
                )
                for key in twice
            ]
            values |= found
        _put_over(leaves, {key: _leaf_of_value(value, origin_of_values) for key, value in values.items()})
    else:
        _put_over(leaves, _read_overrides(overrides, origin_of_values, problems))
    model = leaves.get("model.path")
    if model is None or model.value == EMBEDDED:
        path = all_presets()[EMBEDDED].path
        given_leaves = leaves
        leaves = _read_file(path, Origin("embedded", EMBEDDED), problems)
        _put_over(leaves, given_leaves)
    follow_stronger(leaves)
    if _DTYPE not in leaves:
        dtype, why = native_dtype()
        leaves[_DTYPE] = Leaf(dtype, None, Origin("hardware", why))
    missing_keys = {key for key, leaf in leaves.items() if leaf.value == NO_VALUE}
    for key in sorted(missing_keys):
        leaf = leaves.pop(key)
        if key not in left_open:
            missing = Problem("error", key, f"has no value yet: `{NO_VALUE}`", "write one, or give KEY=VALUE")
            problems.append(_located(missing, {key: leaf}, {}))
    spec, invalid = _validated(leaves, problems)
    origins = dict.fromkeys(known_leaves(), DEFAULT) | {
        known: leaf.origin for key, leaf in leaves.items() if (known := leaf_of(key))
    }

    def is_meant(warning: Problem, keys: set[str]) -> bool:
        """Whether one shipped preset sets the key of a warning, and alone all values that led to it (`keys`).

        Its comments explain them. A key without effect matters only if the user sets it.
        """
        origin = origins.get(warning.key, DEFAULT)
        is_presets = origin.layer in {"preset", "embedded"} and origin.name in all_presets()
        if not is_presets or warning.what.startswith(NO_EFFECT):
            return is_presets
        who_decided = {str(origins[key].name) for key in keys if origins[key].layer not in _NEUTRAL}
        return len(who_decided) == 1 and who_decided <= all_presets().keys()

    of_sections = {problem.key.partition(".")[0] for problem in problems}
    can_check_files = of_sections.isdisjoint({"", "model", "data", "reward", "environment"})
    # Contradictions with an invalid value are not reported.
    contradictions = check_spec(spec, left_open | invalid | missing_keys, is_meant)
    problems += [_located(problem, leaves, origins) for problem in contradictions]
    if any(problem.severity == "error" for problem in problems):
        raise SpecError(problems, spec if can_check_files else None)
    return LoadedSpec(spec, origins, problems)


def recorded_spec(file: Path) -> RunSpec:
    """The spec that a run recorded, also if a user's file or a package that it names no longer exists.

    Raises:
        SpecError: the file is not a spec.
    """
    problems: list[Problem] = []
    leaves = _read_file(file, Origin("file", str(file)), problems)
    spec, _ = _validated(leaves, problems, PARTS_UNCHECKED)
    if problems:
        raise SpecError(problems)
    return spec


def dump_spec(spec: RunSpec) -> str:
    """The resolved spec as YAML, from which `load_spec` reads an equal spec."""
    return dump_yaml(spec.model_dump(mode="json"))


def dump_yaml(content: Mapping[str, Any]) -> str:
    """The JSON types of a spec as YAML."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def dump_value(value: Any) -> str:
    """One plain value (JSON types) as YAML on a single line, which `load_spec` can read."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _read_preset(preset: str, given: Origin, problems: list[Problem]) -> dict[str, Leaf]:
    known = all_presets()
    if preset in known:
        return _read_file(known[preset].path, Origin("preset", preset), problems)
    path = Path(preset)
    if is_file(path):
        return _read_file(path, Origin("preset", preset), problems)
    looks_like_path = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1
    fix = None if looks_like_path else did_you_mean(preset, known, "see `rlctl presets list`", cutoff=0.4)
    message = f"no such {'file' if looks_like_path else 'preset'}: `{preset}`"
    problems.append(
        Problem(
            severity="error",
            key="",
            what=message,
            fix=fix,
            where=str(given),
        )
    )
    return {}


def _put_over(leaves: dict[str, Leaf], stronger: Mapping[str, Leaf]) -> None:
    """Adds the leaves of a stronger source; `{}` removes all keys below an open mapping."""
    for emptied in [key for key in open_leaves() & stronger.keys() if stronger[key].value == {}]:
        for key in [key for key in leaves if key.startswith(f"{emptied}.")]:
            del leaves[key]
    leaves |= stronger


def _read_file(path: Path, origin: Origin, problems: list[Problem]) -> dict[str, Leaf]:
    """Leaves of one YAML file, each with its line number."""
    source = read_yaml_file(path, known_leaves().keys() - open_leaves(), origin)
    problems += source.problems
    keys = [key for key in source.leaves if key != DESCRIPTION]
    if any(key.startswith("actor_rollout_ref.") for key in keys) or (
        len(keys) > 1 and not any(map(leaf_of, keys))
    ):
        message = "this is a configuration of another framework"
        fix = f"rlctl import {path} --output spec.yaml"
        problems.append(
            Problem(
                severity="error",
                key="",
                what=message,
                fix=fix,
                where=str(path),
            )
        )
    return {key: leaf for key, leaf in source.leaves.items() if key != DESCRIPTION}


def _leaf_of_value(value: object, origin: Origin) -> Leaf:
    """A leaf for a value from a program: paths become text, NumPy's numbers and arrays plain values."""
    plain = _plain(value)
    return Leaf(plain, str(plain), origin)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    return plain.tolist() if hasattr(plain, "tolist") else plain


def _read_overrides(overrides: Iterable[str], origin: Origin, problems: list[Problem]) -> dict[str, Leaf]:
    """Leaves of `key=value` arguments; of several for the same key, the last one wins."""
    leaves: dict[str, Leaf] = {}
    for argument in overrides:
        key, equals, text = argument.partition("=")
        key = key.strip()
        try:
            if not equals or not key:
                raise ValueError(f"`{argument}` is not of the form key=value")
            if key[0] in "+~":
                raise ValueError(f"`{argument}`: `{key.rstrip(key.lstrip('+~'))}` is Hydra's")
            leaves[key] = read_value(text, origin, takes_mapping=takes_mapping(key))
        except ValueError as error:
            message = str(error) if argument in str(error) else f"`{argument}`: {error}"
            problems.append(
                Problem(
                    severity="error",
                    key="",
                    what=message,
                    fix=_override_fix(argument),
                    where=str(origin),
                )
            )
    return leaves


def _override_fix(argument: str) -> str | None:
    """Suggestion for an argument that cannot be parsed; None: there is none."""
    path = Path(argument)
    key = nearest_key(argument.partition("=")[0])
    for applies, fix in (
        (argument.startswith("="), "write key=value without spaces"),
        (argument.startswith("+"), f"leave it out: {argument.lstrip('+')}"),
        (argument.startswith("~"), "a key cannot be deleted; leave it out, or set it to null"),
        (argument in all_presets(), f"for a preset write --preset {argument}"),
        (path.suffix in {".yaml", ".yml"}, f"for a spec file write --spec {argument}"),
        (is_file(path / RUN_SPEC_FILE), f"to continue this run write --resume {argument}"),
        (is_file(path / "config.json"), f"for a model write model.path={argument}"),
        (0 < len(argument) < 256 and path.is_dir(), "this is a directory: name a spec file in it"),
        (is_file(path), f"a spec is a .yaml file; for another framework's file: rlctl import {argument}"),
        (key and "=" not in argument, f"for example {key}=…"),
    ):
        if applies:
            return fix
    return None


def _validated(
    leaves: dict[str, Leaf], problems: list[Problem], context: dict[str, str] | None = None
) -> tuple[RunSpec, frozenset[str]]:
    """The spec of the leaves with defaults for invalid values, and the keys of these; adds to `problems`."""
    good = {key: leaf for key, leaf in leaves.items() if leaf_of(key)}
    unknown = {key: leaf for key, leaf in leaves.items() if key not in good and not _is_empty(key, leaf)}
    problems += [_unknown(key, leaf) for key, leaf in unknown.items()]
    known = frozenset(good)
    for key, leaf in list(good.items()):
        is_bool = isinstance(leaf.value, bool)
        if is_bool and not accepts(key, bool):  # Pydantic reads true as 1
            problems.append(_problem(key, good.pop(key), "must not be true or false"))
        elif isinstance(leaf.value, int) and abs(leaf.value) >= 2**63:
            problems.append(_problem(key, good.pop(key), "must be an integer of 64 bits"))
    while True:
        try:
            values = {key: _value(key, leaf) for key, leaf in good.items()}
            spec = RunSpec.model_validate(nested(values), context=context)
            return spec, known - good.keys()
        except ValidationError as error:
            bad: dict[str, dict[str, Any]] = {}  # key → item of a list, or "" → the first of its errors
            for details in error.errors():
                key = _key_of(details["loc"])
                bad.setdefault(key, {}).setdefault(_within(key, details["loc"]), details)
            if not bad.keys() & good.keys():  # a broken default is a bug
                raise
            for key in sorted(bad, key=list(known_leaves()).index):
                leaf = good.pop(key)
                problems += [_invalid(key, leaf, details) for details in bad[key].values()]


def _is_empty(key: str, leaf: Leaf) -> bool:
    """Whether it is a section without keys; null: all keys below `actor:` are commented out."""
    return key in known_sections() and leaf.value in (None, {})


def _unknown(key: str, leaf: Leaf) -> Problem:
    """The problem of a key that is none, or of a section with a value."""
    if key not in known_sections():
        return _problem(key, leaf, "unknown key", advice_for(key))
    fix = f"set the keys below it, {key}.…"
    if isinstance(leaf.value, str) and (pair := re.match(r"(\w+):(?=\S)", leaf.value)):
        fix = f"write a space after the colon: `{pair[0]} {leaf.value[pair.end() :]}`"
    return _problem(key, leaf, "is a section, not a value", fix)


def _invalid(key: str, leaf: Leaf, details: Any) -> Problem:
    """Converts an error of Pydantic to a problem."""
    message = in_words(details)
    within = _within(key, details["loc"])
    got = details["input"] if within else leaf.value
    fix = None
    if details["type"] == "string_pattern_mismatch":
        message = (
            "must consist of letters, digits, dots, dashes and underscores, and not start with a dot or dash"
        )
    elif details["type"] == "literal_error":
        options = str(details["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        fix = did_you_mean(str(got), options, cutoff=0.5)
    elif details["type"] == "part_error":
        return _problem(key, leaf, message, details["ctx"]["fix"] or None)
    elif details["type"] == "extra_forbidden":  # within one item of a list
        message = "unknown key"
        names = fields_of_items(key)
        fix = did_you_mean(str(details["loc"][-1]), names, f"write one of {', '.join(names)}")
    shown = "null" if got is None else repr(got)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    return _problem(key, leaf, f"{within}{message}, got {shown}", fix)


def _within(key: str, location: tuple[int | str, ...]) -> str:
    """The part of a list that is invalid, e.g. `item 2, weight: `; empty for the whole value."""
    below = location[len(key.split(".")) :]
    if not below or not isinstance(below[0], int):
        return ""
    return ", ".join([f"item {below[0] + 1}", *map(str, below[1:])]) + ": "


def _problem(key: str, leaf: Leaf, what: str, fix: str | None = None) -> Problem:
    return Problem(
        severity="error",
        key=key,
        what=what,
        fix=fix,
        where=str(leaf.origin),
    )


def _key_of(location: tuple[int | str, ...]) -> str:
    """The dotted key of a Pydantic error, whose location may continue into a list or a union."""
    for length in range(1, len(location) + 1):
        key = ".".join(str(part) for part in location[:length])
        if key in known_leaves():
            return key
    return ".".join(str(part) for part in location)


def _value(key: str, leaf: Leaf) -> Any:
    """The value for Pydantic: a number in a field that accepts text is passed as written, e.g. `2.10`."""
    as_text = type(leaf.value) in {int, float} and leaf.text and accepts(key, str)
    return leaf.text if as_text else leaf.value


def _located(problem: Problem, leaves: Mapping[str, Leaf], origins: dict[str, Origin]) -> Problem:
    """Adds the origin of the value to the problem, unless the value is a default."""
    leaf = leaves.get(problem.key)
    origin = leaf.origin if leaf else origins.get(leaf_of(problem.key) or "", DEFAULT)
    is_default = origin.layer in {"default", "hardware", "inferred"}
    return problem if is_default or problem.where else replace(problem, where=str(origin))


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `sources` reads back: text that looks like a number or null is quoted."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns True, so that repeated lists are written in full: `sources` refuses aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "" if isinstance(parse_scalar(text), str) else "'"
    if not text.isprintable():
        style = '"'  # with escapes; other styles lose unusual line breaks
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
