"""The driver of the backend: never active."""

from __future__ import annotations

from triton.backends.driver import DriverBase


class NoDriver(DriverBase):
    """Never active, so that Triton never chooses it."""

    @classmethod
    def is_active(cls):
        return False

    def _absent(self, *_: object):
        raise NotImplementedError("kernels are interpreted, or compiled for another target")

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _absent
