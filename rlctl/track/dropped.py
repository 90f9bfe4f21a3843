"""`dropped.jsonl`: one line per episode that was sampled and not trained on.

    {"step": 12, "group_id": 3, "member": 0, "row": 418, "reason": "aborted", "length": 812, "age": 1,
     "reward": null, "prompt": "…"}

`length` is in sampled tokens, `age` in optimizer updates between the weights that sampled the oldest token
and the trained policy; `reward` is null where the episode was not graded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlctl.errors import RunFailure
from rlctl.files import encodable, lines_of, open_to_append, replacing

DROPPED_FILE = "dropped.jsonl"
#: Characters of a prompt that are kept.
PROMPT_CHARS = 500


@dataclass(frozen=True, slots=True)
class DroppedEpisode:
    """An episode that was sampled and not trained on."""

    group_id: int
    member: int
    row: int  # of the data
    reason: str
    length: int  # sampled tokens
    age: int  # optimizer updates; 0: nothing was sampled
    reward: float | None  # None: it was not graded
    prompt: str


class DroppedLedger:
    """Appends to `dropped.jsonl` in a run directory; there is no file before the first dropped episode.

    Args:
        keep_until: lines of later steps, which a resumed run samples again, and incomplete ones are removed.

    Raises:
        RunFailure: the file cannot be read or written.
    """

    def __init__(self, run_dir: Path, *, keep_until: int) -> None:
        self.path = run_dir / DROPPED_FILE
        self._discard_after(keep_until)

    def add(self, step: int, episodes: Iterable[DroppedEpisode]) -> None:
        """Writes the dropped episodes of a step.

        Raises:
            RunFailure: the file cannot be written.
        """
        lines = []
        for one in episodes:
            row = asdict(one) | {"prompt": encodable(one.prompt[:PROMPT_CHARS])}
            lines.append(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n")
        if lines:
            try:
                with open_to_append(self.path) as file:
                    file.write("".join(lines).encode())
            except OSError as error:
                raise self._failure(error) from error

    def _discard_after(self, step: int) -> None:
        if not self.path.exists():
            return
        try:
            lines = list(lines_of(self.path))
            kept = [line for line in lines if _step_of(line) <= step]
            if len(kept) < len(lines):
                with replacing(self.path) as temporary:
                    temporary.write_bytes(b"".join(kept))
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunFailure:
        message = f"the list of dropped episodes cannot be kept: {error.strerror or error}"
        return RunFailure(message, where=str(self.path), fix="free space, or restore access to the file")


def _step_of(line: bytes) -> float:
    """The step of a line; ∞: it is incomplete."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
