"""Packages outside the base installation, and the extra of rlctl that installs each.

The base installation reads logs, runs and data. Modules that need more import it inside functions, or are
imported inside functions themselves, so that only a command that needs a package fails without it.
"""

from __future__ import annotations

import importlib.util

from rlctl.errors import EnvironmentFailure

#: Extra of `pyproject.toml` → the modules that are imported of its packages, and of those that they require.
EXTRAS: dict[str, tuple[str, ...]] = {
    "formats": ("google", "rensa", "tensorboard", "tree_sitter", "tree_sitter_bash", "wandb"),
    "train": (
        *("deepspeed", "gguf", "h11", "httpx", "huggingface_hub", "latex2sympy2_extended", "math_verify"),
        *("peft", "safetensors", "sympy", "tokenizers", "torch", "transformers"),
    ),
    "graders": ("jsonschema", "jsonschema_specifications", "langdetect", "referencing"),
    "vllm": ("vllm",),
    "liger": ("liger_kernel",),
    "tools": ("bm25s", "mcp"),
    "verifiers": ("verifiers",),
    "ray": ("ray",),
    "trackio": ("pandas", "trackio"),
    "mlflow": ("mlflow",),
    "datasets": ("datasets",),
}
#: Modules without which no run starts.
TRAINING = ("torch", "transformers", "deepspeed")
#: Modules that are imported of packages with another name.
_PACKAGE_OF = {
    **dict.fromkeys(("latex2sympy2_extended", "math_verify", "sympy"), "math-verify"),
    **{"google": "protobuf", "liger_kernel": "liger-kernel", "mlflow": "mlflow-skinny"},
    **dict.fromkeys(("jsonschema_specifications", "referencing"), "jsonschema"),
    **{"tree_sitter": "tree-sitter", "tree_sitter_bash": "tree-sitter-bash"},
}
_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


class MissingPackage(EnvironmentFailure):
    """A package of an extra is not installed (exit 4)."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.package = _PACKAGE_OF.get(module, module)
        super().__init__(f"the package {self.package} is not installed", fix=install_line(_EXTRA_OF[module]))


def install_line(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'rlctl[{extra}]'"


def missing_package(error: BaseException) -> MissingPackage | None:
    """Converts the error of an import to a failure with a fix; None: not of a package of an extra."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    return MissingPackage(module) if module in _EXTRA_OF and not is_installed(module) else None


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; it is not imported."""
    return importlib.util.find_spec(module) is not None


def first_missing(*modules: str) -> MissingPackage | None:
    """The failure for the first of these modules that cannot be imported; None: all can."""
    return next((MissingPackage(module) for module in modules if not is_installed(module)), None)


def require(*modules: str) -> None:
    """Checks that modules of extras can be imported, before work that would fail later.

    Raises:
        MissingPackage: the first one that cannot.
    """
    missing = first_missing(*modules)
    if missing:
        raise missing
