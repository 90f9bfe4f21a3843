"""Copies functions out of a training script into a file that can be imported without training.

Copied are the definitions, and the imports, constants, functions and classes that they use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.convert.expressions import NoCounterpart
from rlctl.convert.python_file import Definition, PythonFile, shown_path

#: Calls in a constant's value that do nothing but compute it.
_HARMLESS = ("re.compile", "set", "frozenset", "dict", "list", "tuple", "range", "len", "str", "int", "float")


class ToolClass(str):
    """A class with functions as tools, as `path/to/file.py:name`."""

    __slots__ = ()


class ExtractedFile:
    """A file with parts of a script; empty until something is taken.

    Args:
        path: where it will be written.
        script: the file that is copied from.
    """

    def __init__(self, path: Path, script: PythonFile) -> None:
        self.path = path
        self._script = script
        self._nodes: dict[str, ast.stmt] = {}  # name → statement of the script that binds it
        self._classes: list[str] = []  # texts of classes that are written anew

    @property
    def text(self) -> str:
        """The file; empty if nothing was taken."""
        if not self._nodes and not self._classes:
            return ""
        nodes = sorted(
            {id(node): node for node in self._nodes.values()}.values(), key=lambda node: node.lineno
        )
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        top = "\n".join(sorted({ast.unparse(node) for node in imports}))
        head = f'"""Copied from {self._script.path.name} by `rlctl import`."""'
        others = [self._source(node) for node in nodes if node not in imports]
        return "\n\n\n".join([f"{head}\n\n{top}".rstrip(), *others, *self._classes]) + "\n"

    def take(self, definition: Definition) -> Definition:
        """Copies a definition of the script; one of another file, or that an import gives, stays as it is.

        Raises:
            NoCounterpart: it uses what only a run of the script determines.
        """
        if definition.file is not self._script or not definition.at_top or not self._script.trains_on_import:
            return definition
        self._take(definition.label)
        return self._moved(definition, definition.label)

    def with_tools(self, kind: Definition | None, tools: list[Any]) -> ToolClass:
        """A class with functions as further tools; without a class, one with nothing else.

        Raises:
            NoCounterpart: a part cannot be copied or imported.
        """
        for definition in [kind, *tools] if kind else tools:
            if not isinstance(definition, Definition) or not definition.at_top:
                raise NoCounterpart(f"{definition} cannot be imported: make it a function of a file")
            self._bring(definition)
        base = f"({kind.label})" if kind else ""
        name = f"{kind.label}WithTools" if kind else "Tools"
        lines = [f"class {name}{base}:", f'    """The tools of {self._script.path.name}."""', ""]
        lines += [f"    {tool.label} = staticmethod({tool.label})" for tool in tools]
        if kind is None:
            lines += ["", "    def reset(self) -> None:", '        """Nothing to prepare."""']
        self._classes.append("\n".join(lines))
        return ToolClass(f"{shown_path(self.path)}:{name}")

    def _bring(self, definition: Definition) -> None:
        """Copies a definition of the script, or imports that of another file."""
        if definition.file is self._script:
            self._take(definition.label)
            return
        statement = ast.parse(f"from {definition.file.path.stem} import {definition.label}").body[0]
        self._check_directory(definition.label)
        self._nodes[definition.label] = statement

    def _moved(self, definition: Definition, name: str) -> Definition:
        moved = Definition(f"{shown_path(self.path)}:{name}")
        moved.file = PythonFile(self.path, None, {}, frozenset())
        moved.node = definition.node
        moved.at_top = True
        return moved

    def _take(self, name: str) -> None:
        copied: dict[str, ast.stmt] = {}
        self._copy(name, name, copied)
        self._nodes |= copied

    def _copy(self, name: str, wanted: str, copied: dict[str, ast.stmt]) -> None:
        """Copies what binds a name in the script, and what that uses."""
        if name in copied:
            return
        bindings = [node for node in self._top_level() if name in _bound(node)]
        if not bindings:  # a builtin, or unbound
            return
        [statement, *more] = bindings
        if more:
            raise NoCounterpart(f"{wanted} uses {name}, which has several values")
        if isinstance(statement, ast.Assign | ast.AnnAssign) and not _is_constant(statement):
            raise NoCounterpart(f"{wanted} uses {name}, which only a run of the script determines")
        if isinstance(statement, ast.Import | ast.ImportFrom):
            copied[name] = _import_of(statement, name)
            module = getattr(statement, "module", None) or name
            folder = self._script.path.parent
            if getattr(statement, "level", 0) or (folder / f"{module.partition('.')[0]}.py").exists():
                self._check_directory(wanted)
            return
        if not isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
        ):
            raise NoCounterpart(f"{wanted} uses {name}, which depends on a condition or loop")
        copied[name] = statement
        for used in sorted(_free(statement)):
            self._copy(used, wanted, copied)

    def _check_directory(self, wanted: str) -> None:
        if self.path.absolute().parent != self._script.path.absolute().parent:
            raise NoCounterpart(
                f"{wanted} needs files next to the script: write the spec there with --output"
            )

    def _top_level(self) -> Iterator[ast.stmt]:
        return iter(self._script.tree.body if self._script.tree else ())

    def _source(self, node: ast.stmt) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        lines = self._script.path.read_text(encoding="utf-8-sig").splitlines()
        return "\n".join(lines[first - 1 : node.end_lineno])


def _free(statement: ast.stmt) -> set[str]:
    """Names that a statement reads and does not bind itself."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    return {node.id for node in names} - bound


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a file binds, also inside conditions and loops."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    names = {
        child.id
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }
    inner = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
    return names.union(*map(_bound, inner))


def _import_of(node: ast.Import | ast.ImportFrom, name: str) -> ast.stmt:
    """The import of one name."""
    aliases = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name]
    statement = (
        ast.ImportFrom(node.module, aliases, node.level)
        if isinstance(node, ast.ImportFrom)
        else ast.Import(aliases)
    )
    return ast.copy_location(statement, node)


def _is_constant(node: ast.Assign | ast.AnnAssign) -> bool:
    value = node.value
    if value is None or (
        isinstance(node, ast.Assign) and not all(isinstance(t, ast.Name) for t in node.targets)
    ):
        return False
    calls = [call.func for call in ast.walk(value) if isinstance(call, ast.Call)]
    return all(ast.unparse(called) in _HARMLESS for called in calls)
