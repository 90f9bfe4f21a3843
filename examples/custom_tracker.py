"""A tracker: trainer.logger=[console,examples/custom_tracker.py:Lines]"""

from collections.abc import Mapping

from rlctl.parts import SinkInputs


class Lines:
    """Writes the mean score of each step to a file; `log` and `close` are all that a tracker needs."""

    name = "lines"

    def __init__(self, inputs: SinkInputs) -> None:
        self.file = (inputs.run_dir / "lines.txt").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step, and with step 0 after a validation before the first one."""
        if "critic/score/mean" in metrics:
            print(step, metrics["critic/score/mean"], file=self.file, flush=True)

    def close(self, status: str) -> None:
        """Called at the end, with `finished`, `failed` or `interrupted`."""
        self.file.close()
