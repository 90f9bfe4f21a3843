"""Finds the names of other packages that rlctl uses, and reads these packages without importing them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
#: Directory to which `make contracts` downloads wheels and source archives.
ARCHIVES = ROOT / ".venv/contracts"


class Sources:
    """A package's Python files, from a wheel, a source archive or a directory.

    Args:
        package: name of the top-level package.
        where: `….whl`, `….tar.gz`, or the directory that contains the package's directory.
    """

    def __init__(self, package: str, where: Path) -> None:
        self.package, self.where = package, where
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Source text per dotted module name."""
        return {
            file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
            for file, text in self._files()
        }

    def _files(self) -> Iterator[tuple[str, str]]:
        start = f"{self.package}/"
        if self.where.is_dir():
            for path in sorted((self.where / self.package).rglob("*.py")):
                yield path.relative_to(self.where).as_posix(), path.read_text(errors="replace")
        elif self.where.suffix == ".whl":
            with zipfile.ZipFile(self.where) as archive:
                for name in archive.namelist():
                    if name.startswith(start) and name.endswith(".py"):
                        yield name, archive.read(name).decode(errors="replace")
        else:
            with tarfile.open(self.where) as archive:
                for member in archive:
                    name = member.name.partition("/")[2]
                    if name.startswith(start) and name.endswith(".py") and member.isfile():
                        yield name, archive.extractfile(member).read().decode(errors="replace")

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self.texts[module])
        return self._trees[module]

    def defines(self, name: str) -> bool:
        """Whether any file defines a name or assigns it as an attribute."""
        pattern = re.compile(rf"\b(def|class)\s+{name}\b|\b{name}\s*(:[^=\n]+)?=[^=]")
        return any(name in text and pattern.search(text) for text in self.texts.values())

    def mentions(self, word: str, below: str = "") -> bool:
        """Whether a module whose name starts with `below` contains this word."""
        pattern = re.compile(rf"(?<![\w/-]){re.escape(word)}(?![\w/-])")
        modules = (text for module, text in self.texts.items() if module.startswith(below or self.package))
        return any(word in text and pattern.search(text) for text in modules)

    def class_named(self, name: str) -> tuple[str, ast.ClassDef]:
        """Module and node of the class with this name."""
        for module, text in self.texts.items():
            if f"class {name}" in text:
                for part in self.tree(module).body:
                    if isinstance(part, ast.ClassDef) and part.name == name:
                        return module, part
        raise LookupError(f"{self.where.name} has no class {name}")

    def find(self, dotted: str) -> tuple[str, ast.AST] | None:
        """Module and node that define a dotted name, following imports; None if not found."""
        module, names = dotted, []
        while module not in self.texts:
            module, _, name = module.rpartition(".")
            if not module:
                return None
            names.insert(0, name)
        found: tuple[str, ast.AST] | None = (module, self.tree(module))
        for name in names:
            found = self._in(*found, name) if found else None
        return found

    def _in(self, module: str, node: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        if isinstance(node, ast.ClassDef):
            return self.member(module, node, name)
        if not isinstance(node, ast.Module):
            return None
        submodule = f"{module}.{name}"
        for part in _statements(node.body):
            if isinstance(part, ast.FunctionDef | ast.ClassDef) and part.name == name:
                return module, part
            if name in _assigned(part):
                return module, part
            if isinstance(part, ast.ImportFrom | ast.Import):
                target = self._imported(module, part, name)
                if target and target != f"{module}.{name}":
                    if found := self.find(target):
                        return found
                    if not isinstance(part, ast.ImportFrom) or all(alias.name != "*" for alias in part.names):
                        return module, part  # in another package, or in a file that the build generates
            if isinstance(part, ast.Dict) or (
                isinstance(part, ast.Assign) and isinstance(part.value, ast.Dict)
            ):
                # Names that `__getattr__` imports lazily: name → "module:name".
                for key, value in zip(part.value.keys, part.value.values, strict=True):
                    texts = [getattr(each, "value", None) for each in (key, value)]
                    if texts[0] == name and isinstance(texts[1], str) and ":" in texts[1]:
                        base = module if texts[1].startswith(".") else ""
                        return self.find((base + texts[1]).replace(":", "."))
        for part in node.body:  # created lazily
            if isinstance(part, ast.FunctionDef) and part.name == "__getattr__":
                for each in ast.walk(part):
                    if isinstance(each, ast.Constant) and each.value == name:
                        return module, part
        return (submodule, self.tree(submodule)) if submodule in self.texts else None

    def _imported(self, module: str, part: ast.Import | ast.ImportFrom, name: str) -> str | None:
        if isinstance(part, ast.Import):
            return next((alias.name for alias in part.names if (alias.asname or alias.name) == name), None)
        base = part.module or ""
        if part.level:
            is_package = any(other.startswith(module + ".") for other in self.texts)
            parents = module.split(".")
            parents = parents[: len(parents) - part.level + is_package]
            base = ".".join([*parents, *filter(None, [base])])
        for alias in part.names:
            if (alias.asname or alias.name) == name:
                return f"{base}.{alias.name}"
            if alias.name == "*" and base in self.texts and self.find(f"{base}.{name}"):
                return f"{base}.{name}"
        return None

    def member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        """Module and node of a method, field or attribute of a class or its base classes."""
        for part in owner.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
                return module, part
            if name in _assigned(part):
                return module, part
        for part in ast.walk(owner):
            is_self = (
                isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr == name
            )
            if is_self and ast.unparse(part.value) == "self":
                return module, part
        for base in self.bases(module, owner):
            if found := self.member(*base, name):
                return found
        return None

    def bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        for base in owner.bases:
            found = self.find(f"{module}.{ast.unparse(base).partition('[')[0]}")
            if found and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]

    def signature(self, module: str, node: ast.AST) -> Signature | None:
        """Parameters of a function or of a class's constructor."""
        if isinstance(node, ast.ClassDef):
            if found := self.member(module, node, "__init__"):
                return self.signature(*found)
            fields = Signature()
            for owner in [*(base for _, base in self.bases(module, node)), node]:
                for part in owner.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        fields.names.append(part.target.id)
                        if part.value is None:
                            fields.required.add(part.target.id)
            return fields
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args)]
        required = set(names[: len(names) - len(given.defaults)])
        required |= {
            each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is None
        }
        if names[:1] in (["self"], ["cls"]):
            required.discard(names.pop(0))
        positional = len(names)
        names += [each.arg for each in given.kwonlyargs]
        anything = given.kwarg is not None
        return Signature(names, required, positional, anything, given.vararg is not None)


@dataclass
class Signature:
    """Parameters of a callable, without `self`."""

    names: list[str] = field(default_factory=list)
    required: set[str] = field(default_factory=set)
    positional: int = 0
    takes_any_name: bool = False
    takes_any_number: bool = False

    def refuses(self, call: ast.Call) -> str:
        """Reason why a call does not match the parameters; "" if it does."""
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        spreads = any(keyword.arg is None for keyword in call.keywords)
        count = len(call.args)
        if any(isinstance(each, ast.Starred) for each in call.args):
            return ""
        if (unknown := given - set(self.names)) and not self.takes_any_name:
            return f"it takes no {', '.join(sorted(unknown))}"
        if count > (self.positional or len(self.names)) and not self.takes_any_number:
            return f"it takes {self.positional} positional arguments, not {count}"
        missing = self.required - given - set(self.names[:count])
        if missing and not spreads:
            return f"it needs {', '.join(sorted(missing))}"
        return ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, also in `if`, `try` and `with`; later ones, which take precedence, first."""
    for part in reversed(body):
        yield part
        for name in ("body", "orelse", "finalbody"):
            if isinstance(part, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(part, name, []))
        for handler in getattr(part, "handlers", []):
            yield from _statements(handler.body)


def _assigned(part: ast.AST) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(part, ast.Assign):
        targets = part.targets
    elif isinstance(part, ast.AnnAssign):
        targets = [part.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


# --- names that rlctl uses -------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """A use of a package's name in rlctl.

    Attributes:
        where: file and line.
        dotted: the name, starting with the package.
        call: the call expression; None if the name is not called here.
    """

    where: str
    dotted: str
    call: ast.Call | None = None


#: Functions that return an object → its class.
RESULTS = {"deepspeed.initialize": "deepspeed.runtime.engine.DeepSpeedEngine"}


def uses_of(package: str) -> list[Use]:
    """Uses of a package in rlctl: imports, attributes of imported names, calls, members of its objects."""
    found: list[Use] = []
    for path in sorted((ROOT / "rlctl").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"(import|from) {package}\b", text):
            found += uses_in(ast.parse(text), package, path.relative_to(ROOT).as_posix())
    return found


def uses_in(tree: ast.Module, package: str, file: str) -> Iterator[Use]:
    names: dict[str, str] = {}  # expression → its dotted name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield Use(f"{file}:{node.lineno}", f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == package:
                    names[alias.asname or package] = alias.name if alias.asname else package
                    yield Use(f"{file}:{node.lineno}", alias.name)
    for node in ast.walk(tree):  # functions that return the package
        if isinstance(node, ast.FunctionDef):
            for part in ast.walk(node):
                if (
                    isinstance(part, ast.Return)
                    and part.value
                    and ast.unparse(part.value) == package in names
                ):
                    names[f"{node.name}()"] = package
    objects: dict[str, str] = {}  # expression → dotted name of its class
    for _ in range(3):  # repeated, because assignments depend on other assignments
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.expr):
                continue
            target = targets[0]
            if isinstance(target, ast.Tuple):
                target = target.elts[0]
            known = _dotted(value, names)
            if known:
                names[ast.unparse(target)] = known
            elif isinstance(value, ast.Call) and (made := _dotted(value.func, names)):
                objects[ast.unparse(target)] = RESULTS.get(made, made)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func, names | objects)):
            calls_object = ast.unparse(node.func) in objects  # not its class
            yield Use(f"{file}:{node.lineno}", dotted, None if calls_object else node)
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node, names | objects)):
            yield Use(f"{file}:{node.lineno}", dotted)


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    text = ast.unparse(node)
    if text in names:
        return names[text]
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def constants(file: str, matches) -> set[str]:
    """String constants of a file of rlctl for which `matches` returns true."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and matches(node.value)
    }


def keys_given(file: str, function: str) -> set[str]:
    """String keys of dictionaries and of assigned subscripts in a function of rlctl."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            stores = [
                part
                for part in ast.walk(node)
                if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Subscript)
            ]
            values = {id(part.value) for part in stores}  # keys inside stored values do not count
            keys = [part.targets[0].slice for part in stores]
            for part in ast.walk(node):
                if isinstance(part, ast.Dict) and id(part) not in values:
                    keys += part.keys
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return found


def asked_by_name(file: str) -> set[str]:
    """Attribute names that a file of rlctl passes to `getattr` and `hasattr`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    named = {
        target.id: part.value.value
        for part in tree.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            name = node.args[1]
            text = name.value if isinstance(name, ast.Constant) else named.get(ast.unparse(name))
            found |= {text} if isinstance(text, str) else set()
    return found


# --- process-wide state that a package changes ------------------------------------------------------

_CHANGES = {
    "chdir",
    "manual_seed",
    "manual_seed_all",
    "putenv",
    "set_allocator_settings",
    "set_default_device",
    "set_default_dtype",
    "set_default_tensor_type",
    "set_device",
    "set_float32_matmul_precision",
    "set_num_interop_threads",
    "set_num_threads",
    "set_per_process_memory_fraction",
    "set_sharing_strategy",
    "set_start_method",
    "set_stream",
    "setrecursionlimit",
    "setrlimit",
    "unsetenv",
    "use_deterministic_algorithms",
}
_OF_ENVIRONMENT = {"setdefault", "update", "pop", "clear"}
_HINT = re.compile(
    rf"os\.environ(\[[^\]]*\]\s*=|\.({'|'.join(_OF_ENVIRONMENT)})\b)|del os\.environ"
    rf"|\b({'|'.join(_CHANGES)})\(|\btorch\.[\w.]+ = "
)


def state_changes(sources: Sources) -> set[str]:
    """Changes of process-wide state as `module: change`: calls, writes to the environment and to torch."""
    found: set[str] = set()
    for module, text in sources.texts.items():
        if _HINT.search(text):
            found |= {f"{module}: {change}" for change in _changes(sources.tree(module))}
    return found


def _changes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Call):
            last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if last not in _CHANGES | _OF_ENVIRONMENT:
                continue
            name = ast.unparse(node.func)
            owner = name.rpartition(".")[0]
            if last in _CHANGES and not owner.startswith("self"):
                yield name if len(name) < 60 else last
            elif owner == "os.environ" and last in _OF_ENVIRONMENT:
                key = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "…"
                yield f"os.environ[{key}]"
        elif isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                yield f"os.environ[{target.slice.value if isinstance(target.slice, ast.Constant) else '…'}]"
            elif isinstance(target, ast.Attribute) and ast.unparse(target).startswith("torch."):
                yield f"{ast.unparse(target)} ="


# --- download ---------------------------------------------------------------------------------------


def allowed(package: str) -> Requirement:
    """Requirement of a package in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = project["dependencies"] + extras["train"] + extras["vllm"]
    [found] = [each for each in map(Requirement, texts) if each.name == package]
    return found


def lower_bound(package: str) -> Version:
    """The lowest allowed version."""
    return next(Version(part.version) for part in allowed(package).specifier if part.operator == ">=")


def main() -> None:
    """Downloads the lowest allowed versions, and the newest vLLM's CUDA build (300 MB per vLLM build)."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    wanted = [f"{package}=={lower_bound(package)}" for package in ("vllm", "deepspeed", "transformers")]
    for each in [*wanted, str(allowed("vllm"))]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(ARCHIVES), each]
        if subprocess.run(command, check=False).returncode:
            print(f"{each} cannot be had: what needs it is skipped")


if __name__ == "__main__":
    main()
