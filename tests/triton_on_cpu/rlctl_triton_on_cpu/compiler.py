"""The compiler of the backend: for no target."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    """Supports no target, so that Triton's compiler never chooses it."""

    @staticmethod
    def supports_target(target):
        return False

    def _absent(self, *_: object):
        raise NotImplementedError("kernels are interpreted, or compiled for another target")

    hash = parse_options = add_stages = load_dialects = get_module_map = _absent
