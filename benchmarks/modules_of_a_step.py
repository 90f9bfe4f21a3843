"""Counts the modules of rlctl that run in one training step, from sampling to the weight sync.

    python benchmarks/modules_of_a_step.py [--preset rloo-seq-is]

Trains two steps of the built-in model, and records in the second which of rlctl's modules execute a function.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import rlctl  # noqa: E402
from rlctl.train import loop  # noqa: E402

SMALL = {"data.train_batch_size": 8, "rollout.n": 2, "actor.ppo_mini_batch_size": 8, "trainer.logger": []}


def modules(preset: str) -> set[str]:
    """Names of the modules that run between the beginning of sampling and the end of the sync of step 2."""
    found: set[str] = set()
    package = str(ROOT / "rlctl")

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.add(str(frame.f_globals.get("__name__")))

    begin, end = loop.sample_and_grade, loop.sync_weights

    def sample(run: Any, step: int, timer: Any) -> Any:
        if step == 2:
            threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else sys.setprofile(note)
        return begin(run, step, timer)

    def sync(run: Any, step: int, timer: Any) -> Any:
        try:
            return end(run, step, timer)
        finally:
            sys.setprofile(None)

    loop.sample_and_grade, loop.sync_weights = sample, sync
    with tempfile.TemporaryDirectory() as directory:
        values = SMALL | {"trainer.total_training_steps": 2, "trainer.run_dir": f"{directory}/run"}
        rlctl.train(rlctl.load_spec(preset, values | {"trainer.test_freq": -1}))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="rloo-seq-is")
    names = sorted(modules(parser.parse_args().preset))
    print("\n".join(names))
    print(f"{len(names)} modules")
