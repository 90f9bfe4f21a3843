"""From a file's first bytes to the reader of its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic_core import from_json

from rlctl.diagnose.readers import events, wandb_run
from rlctl.diagnose.readers.documents import read_document
from rlctl.diagnose.readers.lines import read_lines
from rlctl.diagnose.readers.reading import Reading
from rlctl.diagnose.readers.source import Source, opened
from rlctl.diagnose.readers.tables import csv_header, read_csv, read_parquet
from rlctl.errors import UsageError

LOOKED_FOR = (
    "name a run directory, or a log: metrics.jsonl, trainer_state.json, files of TensorBoard or W&B, what "
    "verl, TRL, OpenRLHF, slime, prime-rl or NeMo-RL print, or a CSV, JSONL or Parquet table of steps"
)
_PARQUET = b"PAR1"


def read_files(files: Sequence[Path], reading: Reading) -> None:
    """Read one log: a file, or the event files of one TensorBoard directory.

    Raises:
        UsageError: it cannot be read, is empty or binary, or a table has no step column.
    """
    try:
        if len(files) > 1:
            events.read_events(files, reading)
            return
        with opened(files[0], reading.watch) as source:
            _read(source, reading)
            reading.notes += source.notes
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(files[0])) from error


def _read(source: Source, reading: Reading) -> None:
    head, where = source.head, str(source.path)
    if not head.strip():
        what = "nothing in this compressed file can be read" if source.is_gzip else "the log is empty"
        raise UsageError(what, where=where, fix=LOOKED_FOR)
    if head.startswith(_PARQUET):
        with source.on_disk() as path:
            try:
                has_steps = read_parquet(path, reading)
            except ValueError as error:
                raise UsageError(f"a Parquet file that cannot be read: {error}", where=where) from error
        if not has_steps:
            raise UsageError("a table without a step column", where=where, fix=LOOKED_FOR)
    elif head.startswith(wandb_run.MARK):
        with source.open() as stream:
            wandb_run.read_wandb(stream, reading)
    elif events.MARK in head[:64]:
        with source.on_disk() as path:
            events.read_events([path], reading)
    elif b"\0" in head:
        raise UsageError("not a log that is known: a binary file", where=where, fix=LOOKED_FOR)
    else:
        _read_text(source, reading)


def _read_text(source: Source, reading: Reading) -> None:
    if header := csv_header(source.head):
        with source.open() as stream:
            read_csv(stream, *header, reading)
        return
    if _may_be_document(source.head):
        with source.open() as stream:
            if read_document(stream, reading):
                return
    with source.open() as stream:
        read_lines(stream, reading)


def _may_be_document(head: bytes) -> bool:
    """Whether the file may be one JSON value, and not one per line; settled without reading it whole."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"[":
        return text[1:].lstrip()[:1] == b"{"
    if text[:1] != b"{" or text[1:].lstrip()[:1] != b'"':
        return False
    first, _, rest = text.partition(b"\n")
    if not rest.strip():
        return True
    try:
        from_json(first)
    except ValueError:  # goes on in the next line, or is cut
        return not rest.lstrip().startswith(b"{")
    return False
