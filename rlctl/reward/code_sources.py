"""What programs know without importing it, and their memory, by the data's source: `code_sources.toml`."""

from __future__ import annotations

import importlib
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

#: MiB of address space of a program from a source that states none.
MEMORY_MB = 512
#: Programs that contain one of these words may use a name that is not a word of their text.
_BY_TEXT = {"eval", "exec", "globals", "locals", "vars"}


@dataclass(frozen=True)
class CodeSource:
    """One kind of data source."""

    sources: str = r"(?!)"  # names of data sources, a regular expression
    star: str = ""  # modules whose public names are known; all these are separated by spaces
    modules: str = ""  # modules that are known
    names: dict[str, str] = field(default_factory=dict)  # module → names of it that are known
    aliases: dict[str, str] = field(default_factory=dict)  # name → the module that it means
    optional: dict[str, str] = field(
        default_factory=dict
    )  # as `names`, of packages that may not be installed
    memory_mb: int = MEMORY_MB

    def prelude(self, program: str) -> str:
        """The imports of the names that are words of a program; all, if it may use names that are not.

        One statement a name, so that a program does not pay for modules that it does not use.
        """
        imports = _imports(self)
        words = set(re.findall(r"\w+", program))
        is_all = not words.isdisjoint(_BY_TEXT)
        needed = (imports[name] for name in imports if is_all or name in words)
        return "\n".join(dict.fromkeys(needed))

    # a dictionary is not hashable; the sources are few and made once
    __hash__ = object.__hash__


PLAIN = CodeSource()


@cache
def _imports(source: CodeSource) -> dict[str, str]:
    """Name → the statement that imports it."""
    imports: dict[str, str] = {}
    for module in source.star.split():
        found = importlib.import_module(module)
        public = getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]
        if module == "builtins":
            for name in public:
                imports.pop(name, None)
        else:
            imports |= {name: f"from {module} import {name}" for name in public}
    for module, names in source.names.items():
        imports |= {name: f"from {module} import {name}" for name in names.split()}
    imports |= {module: f"import {module}" for module in source.modules.split()}
    optional = {name: f"import {module} as {name}" for name, module in source.aliases.items()}
    for module, names in source.optional.items():
        optional |= {name: f"from {module} import {name}" for name in names.split()}
    for name, statement in optional.items():
        imports[name] = f"try: {statement}\nexcept ImportError: pass"
    return imports


@cache
def _sources() -> dict[str, CodeSource]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: CodeSource(**values) for name, values in tomllib.loads(text).items()}


@lru_cache(maxsize=1024)
def code_source(data_source: str, tests: str = "") -> CodeSource:
    """The source of this name; for an unknown name, the one whose form the tests have, else `PLAIN`.

    Args:
        data_source: as in the rows.
        tests: the ground truth. Tests of a function by name (`fn_name`), and of methods of `Solution`, are of
            LeetCode's form, `check(candidate)` is of HumanEval's.
    """
    for source in _sources().values():
        bounded = rf"(?:^|[/_.\- ])(?:{source.sources})(?:$|[/_.\- ])"
        if re.search(bounded, data_source, re.IGNORECASE):
            return source
    if re.search(r'"fn_name"|\bSolution\(\)', tests):
        return _sources()["live_code_bench"]
    return _sources()["functions"] if re.search(r"def check\(\w+\)", tests) else PLAIN
