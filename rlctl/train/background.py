"""Writes checkpoints in a thread of each rank, while training goes on.

    main thread     begin ─ copy to memory ─┬─ train … ──────────────────────┬─ before the next save: wait
    its writer                              └─ write own files, note hashes ─┘
    of rank 0                                  …, then wait for all notes, publish, remove old checkpoints

A checkpoint is complete or absent at every moment, as with `checkpoint.publish` in the main thread. Threads
take part in no collective, because those of the main threads go on meanwhile: ranks tell rank 0 by files in
the unfinished checkpoint, which is on a disk that all share.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.engine.checkpoint import TrainerState, partial_path, point_to, publish, writing
from rlctl.errors import RlctlError, RunFailure, one_line
from rlctl.files import write_text
from rlctl.processes import note_progress

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks
    from rlctl.engine.state_files import HeldFiles

#: Directory of an unfinished checkpoint in which each rank notes what it has written.
NOTES = ".written"
#: Seconds between two looks at the notes, and at a writer that is waited for.
_LOOK_S, _WAIT_S = 0.1, 1.0
#: Seconds for which rank 0 waits for the others' notes when the run has failed.
_LAST_NOTES_S = 5.0


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """A checkpoint of which this rank's files are in its memory.

    Attributes:
        root: directory of checkpoints.
        files: of this rank.
        keep, best: see `checkpoint.publish`.
    """

    root: Path
    rank: int
    state: TrainerState
    files: HeldFiles
    keep: int | None
    best: int | None

    @property
    def partial(self) -> Path:
        """Where it is written until it is complete."""
        return partial_path(self.root, self.state.step)

    def write(self) -> dict[str, str]:
        """Writes this rank's files; returns each with its SHA-256.

        Raises:
            OSError: from the file system.
        """
        self.files.write()
        digests = digests_below(self.partial, self.files.digests)
        if self.rank:
            write_text(self._note(self.rank), json.dumps(digests))
        return digests

    def note_of(self, rank: int) -> dict[str, str] | None:
        """What another rank has written; None: it has not finished."""
        note = self._note(rank)
        return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None

    def publish(self, digests: dict[str, str]) -> None:
        """Makes the checkpoint visible, when all ranks have written (rank 0)."""
        shutil.rmtree(self.partial / NOTES)
        publish(self.root, self.partial, self.state, keep=self.keep, best=self.best, digests=digests)
        point_to(self.root, "latest", self.state.step)
        point_to(self.root, "best", self.best)

    def _note(self, rank: int) -> Path:
        return self.partial / NOTES / f"rank-{rank:05d}.json"


class BackgroundWriter:
    """Writes one checkpoint at a time; each rank has one. The main thread calls the methods.

    Attributes:
        failure: why the checkpoint could not be written or published, as far as this rank knows.
    """

    def __init__(self) -> None:
        self.failure: RlctlError | None = None
        self._thread: threading.Thread | None = None
        self._wrote = threading.Event()  # this rank's files; only rank 0 has more to do then
        self._gives_up = threading.Event()
        self._noted = 0  # ranks whose notes rank 0 has read

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint was begun and this rank's thread is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, held: HeldCheckpoint, world_size: int) -> None:
        """Begins to write. The checkpoint before must have been waited for."""
        assert self._thread is None
        self._wrote.clear()
        self._gives_up.clear()
        self._noted = 0
        self._thread = threading.Thread(
            target=self._run, args=(held, world_size), name="checkpoint", daemon=True
        )
        self._held = held
        self._thread.start()

    def finish(self, ranks: Ranks) -> None:
        """Waits until the checkpoint is published (a collective); returns at once if none was begun.

        Raises:
            RlctlError: it could not be written or published on a rank, the same error on all ranks.
        """
        if self._thread is None:
            return
        self._wait_for(self._wrote.wait)
        if failures := self._failures(ranks):
            self._gives_up.set()  # rank 0 would wait for a note that does not come
        self._wait_for(self._ended)
        failures = failures or self._failures(ranks)
        self._thread = None
        if failures:
            raise failures[0] from self.failure

    def abandon(self) -> None:
        """Waits for this rank's files when the run has failed, and on rank 0 shortly for those of others.

        So the checkpoint is not lost if its files were all copied before the failure.
        """
        if self._thread is None:
            return
        self._wrote.wait()
        self._thread.join(_LAST_NOTES_S)
        self._gives_up.set()
        self._thread.join()
        self._thread = None

    def _failures(self, ranks: Ranks) -> list[RlctlError]:
        return ranks.exchange([self.failure] if self.failure else [])

    def _ended(self, seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait_for(self, wait: Callable[[float], bool]) -> None:
        """Waits in the main thread; the watchdog sees progress if files or notes become more."""
        before = -1
        while not wait(_WAIT_S):
            now = len(self._held.files.digests) + self._noted
            if now != before:
                before = now
                note_progress()

    def _run(self, held: HeldCheckpoint, world_size: int) -> None:
        try:
            with writing(held.root, held.state.step):
                digests = held.write()
                self._wrote.set()
                if held.rank == 0 and self._has_all(held, world_size, digests):
                    held.publish(digests)
        except RlctlError as error:
            self.failure = error
        except Exception as error:  # such as one that looks like that of a lost rank
            self.failure = RunFailure(one_line(error), where=str(held.root))
        finally:
            self._wrote.set()

    def _has_all(self, held: HeldCheckpoint, world_size: int, digests: dict[str, str]) -> bool:
        """Adds what the other ranks have written to `digests`; False: given up."""
        left = set(range(1, world_size))
        while left:
            for rank in sorted(left):
                if (note := held.note_of(rank)) is not None:
                    digests |= note
                    left.remove(rank)
            self._noted = world_size - len(left)
            if left and self._gives_up.wait(_LOOK_S):
                return False
        return True


def digests_below(partial: Path, digests: Mapping[Path, str]) -> dict[str, str]:
    """File below `partial` → its SHA-256."""
    return {str(path.relative_to(partial)): digest for path, digest in digests.items()}
