"""Stores responses on arrival, so that no evaluation samples one twice.

`<cache>/evaluations/<key>/` contains `settings.json`, the settings that the key is computed from (model,
engine, sampling), and `responses.jsonl`, one line per response. A killed process leaves at most one
incomplete last line, which is removed when the store is opened again. Only one process at a time can open a
store.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import IO, Any, Self

from filelock import FileLock, Timeout

from rlctl.errors import RunFailure
from rlctl.evaluate.samples import Pair, Response
from rlctl.files import cache_failure, open_to_append, replacing, write_text
from rlctl.track.run_dir import version_of

DIRECTORY = "evaluations"
RESPONSES_FILE = "responses.jsonl"
SETTINGS_FILE = "settings.json"

#: SHA-256 of the rendered prompt, question index, sample index, seed: everything a response depends on
#: besides the settings. Equal texts at different indices are different questions.
Key = tuple[str, int, int, int]
#: Fields of a line: first those of the key, then those of the response.
_FIELDS: dict[str, type] = {"prompt": str, "question": int, "sample": int, "seed": int} | {
    "text": str,
    "truncated": bool,
    "num_tokens": int,
}


def prompt_hash(text: str) -> str:
    """SHA-256 of a rendered prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class ResponseStore:
    """Stored responses for one model and one set of sampling settings; a context manager that holds a lock.

    Args:
        root: root directory of the cache.
        settings: everything that responses depend on except question and seed; JSON-serializable.

    Raises:
        RunFailure: another process has the store open.
        EnvironmentFailure: the store cannot be written.
    """

    _append: IO[str]  # responses.jsonl, while the store is open

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True)
        self.directory = root / DIRECTORY / hashlib.sha256(text.encode()).hexdigest()
        self._file = self.directory / RESPONSES_FILE
        self._settings = settings
        self._lock = FileLock(f"{self.directory}.lock", timeout=0)
        self._version = version_of("rlctl")

    def __enter__(self) -> Self:
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise RunFailure(
                    "another process is sampling from this model with these settings",
                    where=str(self.directory),
                    fix="wait for it; its responses are stored and reused",
                ) from None
            try:
                write_text(
                    self.directory / SETTINGS_FILE,
                    json.dumps(self._settings, indent=1, sort_keys=True) + "\n",
                )
                if self._file.exists() and self._file.stat().st_size:
                    with self._file.open("rb+") as file:  # remove an incomplete last line
                        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                            end = content.rfind(b"\n") + 1
                        file.truncate(end)
                self._append = open_to_append(self._file, "a", encoding="utf-8")
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._append.close()
        self._lock.release()

    def find(self, wanted: Mapping[Key, Pair]) -> dict[Pair, Response]:
        """Returns the wanted responses that are stored.

        Raises:
            RunFailure: a line is damaged.
        """
        return {wanted[key]: response for key, response, _ in self._lines() if key in wanted}

    def forget(self, unwanted: Mapping[Key, Pair]) -> None:
        """Removes these responses atomically.

        Raises:
            RunFailure: a line is damaged.
            EnvironmentFailure: the disk is full.
        """
        with self._writing():
            with replacing(self._file) as temporary, temporary.open("w", encoding="utf-8") as file:
                file.writelines(line for key, _, line in self._lines() if key not in unwanted)
            self._append.close()
            self._append = open_to_append(self._file, "a", encoding="utf-8")

    def add(self, responses: Mapping[Key, Response]) -> None:
        """Appends and flushes responses, so that they survive if this process is killed.

        Raises:
            EnvironmentFailure: the disk is full.
        """
        with self._writing():
            for key, response in responses.items():
                *said, reward = astuple(response)
                record = dict(zip(_FIELDS, (*key, *said), strict=True))
                record |= {} if reward is None else {"reward": reward}
                self._append.write(json.dumps(record | {"rlctl": self._version}) + "\n")
            self._append.flush()

    def _lines(self) -> Iterator[tuple[Key, Response, str]]:
        number = 0
        try:
            with self._file.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):  # noqa: B007 - read in the handler
                    record = json.loads(line)
                    for name, kind in _FIELDS.items():
                        if not isinstance(record[name], kind):
                            raise TypeError(f"`{name}` is not of type {kind.__name__}")
                    prompt, question, sample, seed, *said = (record[name] for name in _FIELDS)
                    response = Response(*said)
                    if "reward" in record:
                        response = replace(response, reward=float(record["reward"]))
                    yield (prompt, question, sample, seed), response, line
        except (ValueError, KeyError, TypeError) as error:
            raise RunFailure(
                f"a stored response cannot be read: {type(error).__name__}: {error}",
                where=f"{self._file}:{number}",
                fix=f"delete {self._file}; its responses are then sampled again",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cache_failure("responses cannot be stored", self.directory, error) from error
