"""What the expressions of a Python file mean, across the files that it imports. No code is executed.

Values that only a run determines are `Unresolved`: a variable with several values, a call, an option of the
command line without default.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rlctl.convert.expressions import value_of
from rlctl.run_spec.sources import parse_scalar

_NOT_EVALUATED = (
    ValueError,
    TypeError,
    ArithmeticError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
)
#: Methods whose result are the options of the command line, or the records that a parser fills with them.
_PARSERS = (
    "parse_args",
    "parse_known_args",
    "parse_args_into_dataclasses",
    "parse_args_and_config",
    "parse_dict",
)
#: Methods and operators that change a list.
_APPENDS, _EXTENDS = "append", "extend"


class Unresolved(str):
    """A value that the file does not determine, as written in the file."""

    __slots__ = ()


class Definition(str):
    """A function or class, as `path/to/file.py:name`."""

    __slots__ = ("at_top", "file", "node")
    file: PythonFile  # in which it is defined
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None  # None: the file is not there
    at_top: bool  # whether an import of the file gives it: it is not inside a function

    @property
    def label(self) -> str:
        """Its name."""
        return self.rpartition(":")[2]


class LibraryName(str):
    """A name of an installed package, as `package.module.name`, or a call of it, as the file writes it."""

    __slots__ = ("call", "name")
    name: str
    call: ast.Call | None


class Pretrained(str):
    """A model that `from_pretrained` loads: its directory or hub id."""

    __slots__ = ()


class _Undetermined(dict[str, Any]):
    """Names without a value."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError(f"{name} is a parameter")


class PythonFile:
    """A Python file.

    Args:
        path: where it is.
        tree: its syntax tree; None: there is no such file.
        variables: values that take the place of variables, environment variables and options.
        library: packages whose names are not looked for in files.
        options: values of options of its command line.
    """

    def __init__(
        self,
        path: Path,
        tree: ast.Module | None,
        variables: Mapping[str, str],
        library: frozenset[str],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.tree = tree
        self.variables = variables
        self.library = library
        self.options = options or {}
        self._open: set[str] = set()  # names whose values are being found

    def value(self, node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
        """The value of an expression; `Unresolved` if the file does not determine it."""
        try:
            return value_of(node, names or {}, lambda inner: self._other(inner, names or {}))
        except _NOT_EVALUATED:
            return Unresolved(ast.unparse(node))

    def items(self, node: ast.expr, names: Mapping[str, Any] | None = None) -> list[Any]:
        """The items of a list; those that the file does not determine are `Unresolved`. Else the value."""
        names = names or {}
        match node:
            case ast.List() | ast.Tuple():
                return [item for element in node.elts for item in self.items(element, names)]
            case ast.Starred():
                return self.items(node.value, names)
            case ast.BinOp(op=ast.Add()):
                return self.items(node.left, names) + self.items(node.right, names)
            case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name), ifs=[]) as loop]):
                each = self.items(loop.iter, names)
                return [item for value in each for item in self.items(node.elt, {**names, name: value})]
            case ast.Name(id=name) if name not in names and (steps := self._steps.get(name)):
                return [item for step in steps for item in self.items(step)]
        value = self.value(node, names)
        return list(value) if isinstance(value, list) else [value]

    def defined(self, name: str) -> Any:
        """What a name means at the end of the file.

        Raises:
            ValueError: the file does not determine it.
        """
        if name in self._open:
            raise ValueError(f"{name} depends on itself")
        self._open.add(name)
        try:
            return self._defined(name)
        finally:
            self._open.discard(name)

    def _defined(self, name: str) -> Any:
        definitions = self._definitions.get(name, [])
        values = self._values.get(name, {})
        if name in self.variables and not definitions:
            return parse_scalar(self.variables[name])
        if len(definitions) == 1 and not values:
            return self._definition(name, definitions[0])
        if name in self._imports and not definitions and not values:
            return self._imported(*self._imports[name])
        if name in self._steps:
            items = [item for step in self._steps[name] for item in self.items(step)]
            if not any(isinstance(item, Unresolved) for item in items):
                return items
        if len(values) == 1 and not definitions and name not in self._changed:
            return value_of(next(iter(values.values())), {}, lambda inner: self._other(inner, {}))
        if not values and not definitions:
            return self._of_star(name)
        raise ValueError(f"{name} is not determined")

    def _of_star(self, name: str) -> Any:
        """What one of the imports `from module import *` gives."""
        for node in self._nodes:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                other = self._imported(node.module or "", "", node.level)
                if isinstance(other, PythonFile):
                    return other.defined(name)
        raise ValueError(f"{name} is not defined")

    def _definition(self, name: str, node: Any) -> Definition:
        definition = Definition(f"{shown_path(self.path)}:{name}")
        definition.file = self
        definition.node = node
        definition.at_top = self.tree is None or any(node is top for top in self.tree.body)
        return definition

    def _imported(self, module: str, name: str, level: int) -> Any:
        """What `from module import name` gives; of `import module`, without a name, the module's file."""
        if level == 0 and module.partition(".")[0] in self.library:
            return _library(f"{module}.{name}" if name else module)
        own = self.path.parent
        places = [own, Path.cwd()] if level == 0 else [own.joinpath(*[".."] * (level - 1))]
        for folder in places:
            whole = folder.joinpath(*module.split(".")) if module else folder
            for file in (whole / f"{name}.py", whole.with_suffix(".py"), whole / "__init__.py"):
                if file.is_file() and (other := self.beside(file)):
                    is_module = file.stem == name and file.parent == whole
                    return other if is_module or not name else other.defined(name)
        if level or not name:
            raise ValueError(f"{module} is not next to the file")
        missing = PythonFile(own.joinpath(*module.split(".")).with_suffix(".py"), None, {}, self.library)
        return missing._definition(name, None)

    @cached_property
    def trains_on_import(self) -> bool:
        """Whether an import of the file constructs a trainer, or calls its `train`."""
        for statement in self.tree.body if self.tree else ():
            is_main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
            if is_main or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
            names = [getattr(called, "attr", getattr(called, "id", "")) for called in calls]
            if any(name == "train" or name.endswith("Trainer") for name in names):
                return True
        return False

    def parameters_at(self, node: ast.AST) -> Mapping[str, Any]:
        """The parameters of the functions that a node is in: names without a value."""
        return self._parameters.get(id(node), {})

    @cached_property
    def _parameters(self) -> dict[int, Mapping[str, Any]]:
        parameters: dict[int, Mapping[str, Any]] = {}
        for function in self._nodes:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                signature = function.args
                declared = (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
                names = {parameter.arg for parameter in declared}
                names -= self._parsed  # passed on under the same name
                for node in ast.walk(function):
                    parameters[id(node)] = _Undetermined(
                        {**parameters.get(id(node), {}), **dict.fromkeys(names)}
                    )
        return parameters

    def beside(self, file: Path) -> PythonFile | None:
        """Another file; None if it cannot be read."""
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None
        return PythonFile(file, tree, {}, self.library)

    def _other(self, node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: PLR0911
        """The values of expressions that are more than arithmetic."""

        def value(inner: ast.expr) -> Any:
            return value_of(inner, names, lambda deeper: self._other(deeper, names))

        match node:
            case ast.Name(id=name):
                return self.defined(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._parsed:
                return self._option(attribute)
            case ast.Attribute(value=inner, attr=attribute):
                return self._attribute(value(inner), attribute)
            case ast.ListComp(generators=[ast.comprehension(target=ast.Name(), ifs=[])]):
                items = self.items(node, names)
                if not any(isinstance(item, Unresolved) for item in items):
                    return items
            case ast.Call(func=ast.Attribute(attr="from_pretrained")):
                named = [word.value for word in node.keywords if word.arg in _PRETRAINED]
                [path] = [value(inner) for inner in [*node.args[:1], *named]][:1]
                return Pretrained(path)
            case ast.Call(func=ast.Attribute(value=inner, attr="values" | "keys"), args=[]):
                return list(getattr(value(inner), node.func.attr)())  # type: ignore[attr-defined]
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner], keywords=[]):
                return list(value(inner))
            case ast.Call() if ast.unparse(node.func) in (
                "os.environ.get",
                "os.getenv",
                "environ.get",
                "getenv",
            ):
                name, *default = [value(inner) for inner in node.args]
                return self.variables[name] if name in self.variables else default[0]
            case ast.Call(func=ast.Attribute(value=inner, attr="copy"), args=[]):
                return value(inner)
            case ast.Call():
                return self._called(node, value(node.func))
        raise ValueError(f"cannot be evaluated: {ast.unparse(node)}")

    def _called(self, node: ast.Call, function: Any) -> Any:
        """An object of one of the file's classes, as its fields; or a call of a library's function."""
        if isinstance(function, LibraryName):
            return _library(function.name, node)
        is_class = isinstance(function, Definition) and isinstance(function.node, ast.ClassDef)
        if not is_class or node.args:
            raise ValueError("a call")
        keywords = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        return {"": function, **_fields(function), **keywords}

    def _attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, PythonFile):
            return value.defined(name)
        if isinstance(value, LibraryName):
            return _library(f"{value.name}.{name}")
        if isinstance(value, Definition) and isinstance(value.node, ast.ClassDef):
            return _fields(value)[name]
        if isinstance(value, dict) and "" in value:  # an object
            return value[name]
        raise ValueError(f"no value of {name}")

    @property
    def own_options(self) -> set[str]:
        """Names of the options that it defines itself, by `add_argument` or as fields of its classes."""
        nodes = [nodes[0] for nodes in self._definitions.values() if isinstance(nodes[0], ast.ClassDef)]
        return {name for node in nodes for name in _fields(self._definition(node.name, node))} | set(
            self.arguments
        )

    @property
    def reads_options(self) -> bool:
        """Whether it reads the options of its command line."""
        return bool(self._parsed)

    def _option(self, name: str) -> Any:
        """Default of an option of the command line: of `add_argument`, or of a dataclass's field."""
        if name in self.options:
            return self.options[name]
        if name in self.variables:
            return parse_scalar(self.variables[name])
        options = [*self.arguments.get(name, [])]
        classes = [nodes[0] for nodes in self._definitions.values() if isinstance(nodes[0], ast.ClassDef)]
        fields = [_fields(self._definition(node.name, node)) for node in classes]
        options += [each[name] for each in fields if name in each]
        if len(options) != 1 or isinstance(options[0], Unresolved):
            raise ValueError(f"{name} is an option of the command line")
        return options[0]

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree)) if self.tree else []

    @cached_property
    def _members(self) -> set[int]:
        """Statements in the body of a class, by `id`."""
        classes = [node for node in self._nodes if isinstance(node, ast.ClassDef)]
        return {id(member) for node in classes for member in node.body}

    @cached_property
    def _definitions(self) -> dict[str, list[Any]]:
        """Functions and classes, of which methods are none."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        definitions: dict[str, list[Any]] = {}
        for node in self._nodes:
            if isinstance(node, kinds) and id(node) not in self._members:
                definitions.setdefault(node.name, []).append(node)
        return definitions

    @cached_property
    def _imports(self) -> dict[str, tuple[str, str, int]]:
        """Name → module, name in it, level of a relative import."""
        imports: dict[str, tuple[str, str, int]] = {}
        for node in self._nodes:
            if isinstance(node, ast.ImportFrom):
                imports |= {a.asname or a.name: (node.module or "", a.name, node.level) for a in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    imports[alias.asname or module] = (module, "", 0)
        return imports

    @cached_property
    def _values(self) -> dict[str, dict[str, ast.expr]]:
        """Variable → its values in the file, by their text."""
        of_variables: dict[str, dict[str, ast.expr]] = {}
        statements = [node for node in self._nodes if id(node) not in self._members]
        for target, value in _assignments(statements):
            if not _adds_adapter(target, value):
                of_variables.setdefault(target, {})[ast.unparse(value)] = value
        return of_variables

    @cached_property
    def _parsed(self) -> set[str]:
        """Variables that hold the options of the command line."""
        names_read: set[str] = set()
        for node in self._nodes:
            value = getattr(node, "value", None)
            while isinstance(value, ast.Subscript):  # parse_args_into_dataclasses()[0]
                value = value.value
            is_parser = isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _PARSERS
            if isinstance(node, ast.Assign) and is_parser:
                names = (name for target in node.targets for name in ast.walk(target))
                names_read |= {name.id for name in names if isinstance(name, ast.Name)}
        return names_read

    @cached_property
    def arguments(self) -> dict[str, list[Any]]:
        """Option of `add_argument` → its default."""
        defaults: dict[str, list[Any]] = {}
        for node in self._nodes:
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"):
                continue
            words = {word.arg: self.value(word.value) for word in node.keywords}
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            longest = max(map(str, flags), key=len, default="").lstrip("-").replace("-", "_")
            switches = {"store_true": False, "store_false": True}
            default = words.get("default", switches.get(str(words.get("action"))))
            unset = "default" not in words and words.get("action") not in switches
            name = str(words.get("dest") or longest)
            defaults.setdefault(name, []).append(Unresolved(name) if unset else default)
        return defaults

    @cached_property
    def _changes(self) -> dict[str, list[tuple[int, ast.expr]]]:
        """Variable → the lists that `append`, `extend` and `+=` add to it, with each statement's block."""
        changes: dict[str, list[tuple[int, ast.expr]]] = {}
        for block, node in _statements(self._nodes):
            match node:
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                    changes.setdefault(name, []).append((block, value))
                case ast.AugAssign(target=ast.Name(id=name), value=value):
                    changes.setdefault(name, []).append((-1, value))
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr), args=args)
                ):
                    added: ast.expr | None = None
                    if attr == _APPENDS:
                        added = ast.List(args, ast.Load())
                    elif len(args) == 1:
                        added = args[0]
                    known = attr in (_APPENDS, _EXTENDS) and added is not None
                    if known or attr in ("insert", "remove", "pop", "clear", "update"):
                        entry = (block, added) if known and added is not None else (-1, ast.Constant(None))
                        changes.setdefault(name, []).append(entry)
                case (
                    ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))])
                    | ast.Delete(targets=[ast.Subscript(value=ast.Name(id=name))])
                ):
                    changes.setdefault(name, []).append((-1, ast.Constant(None)))
        return changes

    @property
    def _changed(self) -> set[str]:
        """Variables whose value is changed after it is assigned."""
        return set(self._changes)

    @cached_property
    def _steps(self) -> dict[str, list[ast.expr]]:
        """List that is built in steps → the parts that it consists of, if no condition or loop decides."""
        steps: dict[str, list[ast.expr]] = {}
        blocks: dict[str, list[tuple[int, ast.expr]]] = {}
        for block, node in _statements(self._nodes):
            for name, value in _assignments([node]):
                blocks.setdefault(name, []).append((block, value))
        for name, changes in self._changes.items():
            starts = blocks.get(name, [])
            if len(starts) == 1 and all(block == starts[0][0] for block, _ in changes):
                steps[name] = [starts[0][1], *(value for _, value in changes)]
        return steps


#: Names of the first argument of `from_pretrained`.
_PRETRAINED = ("pretrained_model_name_or_path", "model_name")


def _library(name: str, call: ast.Call | None = None) -> LibraryName:
    library_name = LibraryName(name if call is None else ast.unparse(call))
    library_name.name = name
    library_name.call = call
    return library_name


def _fields(definition: Definition) -> dict[str, Any]:
    """The fields of a class with their defaults."""
    defaults: dict[str, Any] = {}
    for node in definition.node.body if isinstance(definition.node, ast.ClassDef) else ():
        match node:
            case ast.AnnAssign(
                target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="field"), keywords=words)
            ):
                arguments = {word.arg: word.value for word in words}
                if "default" in arguments:
                    defaults[name] = definition.file.value(arguments["default"])
                elif isinstance(made := arguments.get("default_factory"), ast.Lambda):
                    defaults[name] = definition.file.value(made.body)
                else:
                    defaults[name] = Unresolved(name)
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                defaults[name] = Unresolved(name) if value is None else definition.file.value(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                defaults[name] = definition.file.value(value)
    return defaults


def _adds_adapter(target: str, value: ast.expr) -> bool:
    """Whether a value is the variable's model with an adapter, whose arguments are read elsewhere."""
    match value:
        case ast.Call(func=function, args=[ast.Name(id=name), *_]) if name == target:
            return getattr(function, "attr", getattr(function, "id", "")) == "get_peft_model"
    return False


def _assignments(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Variables and the values that these statements give them; of a loop or `with`, no single value."""
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _unpacked(target, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                yield name, value
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                yield name, value
            case ast.For(target=target) | ast.AsyncFor(target=target):
                yield from _unpacked(target, ast.Name("<loop>", ast.Load()))


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(target.elts) == len(value.elts):
            for element, of_part in zip(target.elts, value.elts, strict=True):
                yield from _unpacked(element, of_part)
        case ((ast.Tuple() | ast.List()), ast.Call(func=ast.Attribute(attr="from_pretrained"))):
            yield from _unpacked(target.elts[0], value)  # the model; its tokenizer follows
        case ((ast.Tuple() | ast.List()), _):
            for index, element in enumerate(target.elts):
                yield from _unpacked(element, ast.Subscript(value, ast.Constant(index), ast.Load()))


def _statements(nodes: list[ast.AST]) -> Iterator[tuple[int, ast.AST]]:
    """Every statement with the number of the block that it is in."""
    for node in nodes:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            for statement in block if isinstance(block, list) else ():
                yield id(block), statement


def shown_path(path: Path) -> str:
    """The path as a spec names it: relative to the working directory, if it is below it."""
    absolute = Path(os.path.normpath(path.absolute()))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
