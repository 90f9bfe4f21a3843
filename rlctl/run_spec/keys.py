"""Keys of a RunSpec by their dotted names, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rlctl.run_spec.base import Section
from rlctl.run_spec.run_spec import RunSpec

#: Keys of verl and TRL with a different name in rlctl, or the ends of such keys → what to write.
_ELSEWHERE: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("other_names.toml").read_text(encoding="utf-8")
)
#: Components of verl's dotted keys that have no counterpart in rlctl.
_SUPERFLUOUS = {"actor_rollout_ref", "optim"}


@cache
def known_leaves() -> dict[str, FieldInfo]:
    """Dotted key → field, for every value a spec can set, in the order of the sections."""
    return {key: info for key, info in _fields_of(RunSpec) if not _section_of(info.annotation)}


@cache
def known_sections() -> dict[str, type[Section]]:
    """Dotted name → class of all sections, nested ones included."""
    return {key: section for key, info in _fields_of(RunSpec) if (section := _section_of(info.annotation))}


@cache
def open_leaves() -> frozenset[str]:
    """Keys whose value is a mapping with arbitrary keys, such as `rollout.engine_kwargs`.

    Not those of mappings from names, which may have dots.
    """
    mappings = {key: info.annotation for key, info in known_leaves().items()}
    return frozenset(
        key for key, kind in mappings.items() if get_origin(kind) is dict and get_args(kind)[1] is Any
    )


def takes_mapping(key: str) -> bool:
    """Whether the value of a key may be a mapping from names, such as `data.train_files`."""
    return key in known_leaves() and key not in open_leaves() and accepts(key, dict)


def leaf_of(key: str) -> str | None:
    """Returns `key` if it is known, or the key of the open mapping that contains it; None: unknown."""
    if key in known_leaves():
        return key
    return next((leaf for leaf in open_leaves() if key.startswith(f"{leaf}.")), None)


def value_of(spec: RunSpec, key: str) -> Any:
    """The value at a dotted key."""
    return reduce(getattr, key.split("."), spec)


def leaves_of(spec: RunSpec) -> dict[str, Any]:
    """Dotted key → value, for every key."""
    return {key: value_of(spec, key) for key in known_leaves()}


def flat(
    content: Mapping[str, Any], prefix: str = "", *, keeps_empty: bool = False, whole: Container[str] = ()
) -> dict[str, Any]:
    """Flattens nested sections: dotted key → value.

    A mapping at a key in `whole` is a value; an empty mapping is one if `keeps_empty`, else it is left out.
    """
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, Mapping) and key not in whole and (value or not keeps_empty)
        found |= flat(value, f"{key}.", keeps_empty=keeps_empty, whole=whole) if is_section else {key: value}
    return found


def changes(before: RunSpec, after: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value before, value after), for every value that differs."""
    old, new = (flat(spec.model_dump(mode="json")) for spec in (before, after))
    return {key: (old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`: `{"actor.lr": 1e-6}` → `{"actor": {"lr": 1e-6}}`."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, name = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def accepts(key: str, kind: type) -> bool:
    """Whether `kind` is among the types that the value of `key` may have."""
    if key not in known_leaves():  # within an open mapping
        return kind is not str
    return _mentions(known_leaves()[key].annotation, kind)


def advice_for(key: str) -> str | None:
    """Suggestion for an unknown `key`: its translation, the nearest key, or the keys of its section."""
    if not key:
        return None
    for name, advice in _ELSEWHERE.items():
        is_below = name.endswith(".") and key.startswith(name)
        if is_below or f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}"):
            return advice
    nearest = nearest_key(key)
    if nearest:
        return f"did you mean `{nearest}`?"
    section = key.rpartition(".")[0]
    if section not in known_sections():
        return None
    below = [known.removeprefix(f"{section}.") for known in known_leaves() if known.startswith(f"{section}.")]
    return f"the keys of `{section}` are {', '.join(below)}"


def fields_of_items(key: str) -> list[str]:
    """Field names of the items of the list at `key`; empty if the items are plain values."""

    def items(annotation: Any) -> list[str]:
        section = _section_of(annotation)
        if section:
            return list(section.model_fields)
        return [name for argument in get_args(annotation) for name in items(argument)]

    return items(known_leaves()[key].annotation)


def closest(word: str, options: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The option most similar to `word` in any case; None if none reaches the similarity `cutoff`, 0 to 1."""
    by_lower = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(
    word: str, options: Iterable[str], otherwise: str | None = None, *, cutoff: float = 0.6
) -> str | None:
    """Suggestion of the option most similar to `word`; `otherwise` if none reaches the `cutoff`."""
    near = closest(word, options, cutoff=cutoff)
    return f"did you mean `{near}`?" if near else otherwise


def nearest_key(key: str) -> str | None:
    """The known key that `key` most likely means, or None."""
    leaves = known_leaves()
    short = ".".join(part for part in key.split(".") if part not in _SUPERFLUOUS)
    if short in leaves:
        return short
    parent, _, leaf = short.rpartition(".")
    if parent in leaves:  # a key below a plain value
        return parent
    by_leaf = [known for known in leaves if known.rpartition(".")[2] == leaf]
    if by_leaf:
        return closest(short, by_leaf, cutoff=0.0)
    siblings = {known.rpartition(".")[2]: known for known in leaves if known.rpartition(".")[0] == parent}
    sibling = closest(leaf, siblings)
    if sibling:
        return siblings[sibling]
    if parent in known_sections():  # the section is correct, so a similar key of another one is not meant
        return None
    names = {known.rpartition(".")[2]: known for known in leaves}
    return closest(short, leaves, cutoff=0.75) or names.get(closest(leaf, names, cutoff=0.75) or "")


def _mentions(annotation: Any, kind: type) -> bool:
    is_kind = kind in {annotation, get_origin(annotation)}
    return is_kind or any(_mentions(argument, kind) for argument in get_args(annotation))


def _fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields the dotted key and the field of every value and section below `section`."""
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}", info
        nested_section = _section_of(info.annotation)
        if nested_section:
            yield from _fields_of(nested_section, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[Section] | None:
    """The class of a section; None: the annotation of a value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None
