"""Reads settings from Python files: arguments of the tables' classes, and attributes that are set later."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.convert.expressions import NoCounterpart
from rlctl.convert.extract import ExtractedFile
from rlctl.convert.python_file import Definition, LibraryName, Pretrained, PythonFile, Unresolved
from rlctl.convert.python_parts import is_environments_reward
from rlctl.convert.table import ForeignSetting, KeyTable
from rlctl.errors import UsageError

#: Keys of a trainer's environment classes, and of functions that are tools beside their methods.
_CLASSES, _TOOLS = "environment_factory", "tools"


def parsed(
    path: Path,
    text: str,
    chosen: list[KeyTable],
    variables: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
) -> PythonFile:
    """The file; `variables` and `options` as in `PythonFile`.

    Raises:
        UsageError: it is not valid Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 1)
        raise UsageError("not valid Python", where=f"{path}:{line}") from error
    library = frozenset(name for key_table in chosen for name in key_table.packages)
    return PythonFile(path, tree, variables, library, options)


def python_settings(
    file: PythonFile, chosen: list[KeyTable], copied: ExtractedFile, notes: list[str]
) -> tuple[KeyTable, list[ForeignSetting]] | None:
    """Reads the keyword arguments of configuration classes and later assignments to their attributes."""
    tree = file.tree or ast.Module([], [])
    each = [(key_table, list(_python_settings(key_table, file, tree))) for key_table in chosen]
    best = max(each, key=lambda item: len(item[1]))
    best = best[0], _same_parts(best[0], best[1])
    unread = [setting for setting in best[1] if setting.key.endswith("**")]
    notes += [f"{setting.where}: **{setting.value} is not read" for setting in unread]
    settings = [setting for setting in best[1] if setting not in unread]
    if not any(setting.key.endswith("_class") and setting.key != "peft._class" for setting in settings):
        return None
    notes += _subclass_notes(best[0], tree)
    return best[0], list(_with_copies(best[0], settings, copied))


def _same_parts(table: KeyTable, settings: list[ForeignSetting]) -> list[ForeignSetting]:
    """The settings; functions, classes and models that several trainers get differently are unknown."""
    values: dict[str, list[Any]] = {}
    for setting in settings:
        values.setdefault(table.canonical(setting.key), []).append(setting.value)
    several = {key for key in table.parts if any(each != values[key][0] for each in values.get(key, []))}
    unknown = [Unresolved("one of several values")]
    return [
        replace(setting, value=unknown) if table.canonical(setting.key) in several else setting
        for setting in settings
    ]


def _with_copies(
    table: KeyTable, settings: list[ForeignSetting], copied: ExtractedFile
) -> Iterator[ForeignSetting]:
    """The settings, in which functions of a script that trains when it is imported are copies of them."""

    def taken(item: Any) -> Any:
        if not isinstance(item, Definition) or is_environments_reward(item):
            return item
        try:
            return copied.take(item)
        except NoCounterpart as error:
            return Unresolved(f"{item}: {error}")

    values = {table.canonical(setting.key): setting.value for setting in settings}
    kinds = [kind for kind in values.get(_CLASSES, []) if isinstance(kind, Definition)]
    for setting in settings:
        key = table.canonical(setting.key)
        if key == _TOOLS and setting.value and len(kinds) == len(values.get(_CLASSES, [])) < 2:
            try:
                joined = copied.with_tools(kinds[0] if kinds else None, setting.value)
                yield replace(setting, value=[joined])
            except NoCounterpart as error:
                yield replace(setting, value=[Unresolved(f"{error}")])
        elif key in table.parts:
            yield replace(setting, value=[taken(item) for item in setting.value])
        else:
            yield setting


def _python_settings(table: KeyTable, file: PythonFile, tree: ast.Module) -> Iterator[ForeignSetting]:
    """Arguments of the table's classes, and attributes of their objects that are set later."""
    kinds = table.classes | {name: table.classes[base] for name, base in _subclasses(table, tree).items()}
    bases = _subclasses(table, tree)
    configs = {
        node.targets[0].id: _called(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
    }
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Assign)]
    has_config = any(isinstance(node, ast.Call) and kinds.get(_called(node)) == "" for node in nodes)
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        match node:
            case ast.Call() if (name := _called(node)) in kinds:
                prefix = kinds[name]
                base = bases.get(name, name)
                yield ForeignSetting(f"{prefix}_class", base, f"line {node.lineno}")
                config = base.replace("Trainer", "Config")
                if config != base and not has_config:
                    yield ForeignSetting("_class", config, f"line {node.lineno}")
                by_place = zip(table.positional.get(base, []), node.args, strict=False)
                for key, value in [*by_place, *((word.arg, word.value) for word in node.keywords)]:
                    yield from _argument(table, file, prefix, key, value)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name))) if (
                table.canonical(f"trainer.{name}") in table.parts
            ):  # trainer.reward_funcs.append(…)
                yield ForeignSetting(
                    f"trainer.{name}", [Unresolved(ast.unparse(node))], f"line {node.lineno}"
                )
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=variable), attr=name), *_]):
                kind = configs.get(variable, "")
                if kind in kinds:
                    yield from _argument(table, file, kinds[kind], name, node.value)


def _argument(
    key_table: KeyTable, file: PythonFile, prefix: str, key: str | None, node: ast.expr
) -> Iterator[ForeignSetting]:
    """The setting of an argument; of `**mapping`, those of its entries."""
    where = f"line {node.lineno}"
    of_key = f"{prefix}{key}"
    names = file.parameters_at(node)
    if key is not None and key_table.canonical(of_key) in key_table.parts:
        items = [Pretrained(item) if type(item) is str else item for item in file.items(node, names)]
        yield ForeignSetting(of_key, [item for item in items if item is not None], where)
        return
    value = file.value(node, names)
    if isinstance(value, Definition | LibraryName | PythonFile) or (isinstance(value, dict) and "" in value):
        value = Unresolved(ast.unparse(node))  # a name that has a meaning for a program only
    entries = value if key is None and isinstance(value, dict) else {key or "**": value}
    for name, each in entries.items():
        yield ForeignSetting(f"{prefix}{name}", each, where)


def _subclasses(key_table: KeyTable, tree: ast.Module) -> dict[str, str]:
    """Classes of the file that inherit from one of the table's → that class."""
    subclasses: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            known = [base if base in key_table.classes else subclasses.get(base) for base in bases]
            subclasses |= dict.fromkeys([node.name] if any(known) else [], next(filter(None, known), ""))
    return subclasses


def _subclass_notes(key_table: KeyTable, tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: {node.name} is a subclass: what its own code changes is not read"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in _subclasses(key_table, tree)
    ]


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def trainers(chosen: list[KeyTable]) -> list[str]:
    """Trainers whose arguments the tables read."""
    return [name for key_table in chosen for name in key_table.classes if name.endswith("Trainer")]


def other_trainers(text: str) -> str:
    """Trainers that Python code constructs."""
    called = (_called(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return ", ".join(dict.fromkeys(name for name in called if re.fullmatch(r"[A-Z]\w*Trainer", name)))
