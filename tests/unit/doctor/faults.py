"""What trials may do to the process they run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlctl.errors import EnvironmentFailure


def works() -> str:
    print("noise on stdout")
    return f"ranks: {os.environ.get('RANK')}, hub offline: {os.environ['HF_HUB_OFFLINE']}"


def refuses() -> str:
    raise EnvironmentFailure("no such operator", fix="install it")


def raises() -> str:
    raise ZeroDivisionError("boom\n" + "x" * 2000)


def segfaults() -> str:
    print("about to jump", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return "never"


def leaves() -> str:
    os._exit(7)


def hangs() -> str:
    """With a process of its own, as engines have them."""
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAULTS_PIDS"]).write_text(f"{os.getpid()} {engine.pid}")
    time.sleep(600)
    return "never"
