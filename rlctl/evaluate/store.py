"""Stores responses on arrival, so that no evaluation samples one twice.

`<cache>/evaluations/<key>/` contains `settings.json`, the settings that the key is computed from (model,
engine, sampling), and `responses.sqlite`, one row per response. What was added survives if the process is
killed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.evaluate.samples import Pair, Response
from rlctl.files import cache_failure, write_text

DIRECTORY = "evaluations"
RESPONSES_FILE = "responses.sqlite"
SETTINGS_FILE = "settings.json"

#: SHA-256 of the rendered prompt, question index, sample index, seed: everything a response depends on
#: besides the settings. Equal texts at different indices are different questions.
Key = tuple[str, int, int, int]
#: `text` is JSON, because a tokenizer may produce lone surrogates.
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    prompt TEXT, question INTEGER, sample INTEGER, seed INTEGER,
    text TEXT, truncated INTEGER, num_tokens INTEGER, reward REAL,
    PRIMARY KEY (prompt, question, sample, seed)
)"""


def prompt_hash(text: str) -> str:
    """SHA-256 of a rendered prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class ResponseStore:
    """Stored responses for one model and one set of sampling settings; a context manager.

    Args:
        root: root directory of the cache.
        settings: everything that responses depend on except question and seed; JSON-serializable.

    Raises:
        EnvironmentFailure: the store cannot be written.
        RunFailure: it is damaged.
    """

    _rows: sqlite3.Connection  # while the store is open

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        text = json.dumps(settings, sort_keys=True)
        self.directory = root / DIRECTORY / hashlib.sha256(text.encode()).hexdigest()
        self._settings = settings

    def __enter__(self) -> Self:
        with self._failing():
            self.directory.mkdir(parents=True, exist_ok=True)
            settings = json.dumps(self._settings, indent=1, sort_keys=True)
            write_text(self.directory / SETTINGS_FILE, settings + "\n")
            self._rows = sqlite3.connect(self.directory / RESPONSES_FILE, timeout=60.0)
            self._rows.execute(_TABLE)
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def find(self, wanted: Mapping[Key, Pair]) -> dict[Pair, Response]:
        """Returns the wanted responses that are stored."""
        with self._failing():
            return {
                wanted[key]: Response(json.loads(text), bool(truncated), num_tokens, reward)
                for *of_key, text, truncated, num_tokens, reward in self._rows.execute(
                    "SELECT * FROM responses"
                )
                if (key := tuple(of_key)) in wanted
            }

    def forget(self, unwanted: Mapping[Key, Pair]) -> None:
        """Removes these responses."""
        where = "prompt = ? AND question = ? AND sample = ? AND seed = ?"
        with self._failing(), self._rows:
            self._rows.executemany(f"DELETE FROM responses WHERE {where}", list(unwanted))

    def add(self, responses: Mapping[Key, Response]) -> None:
        """Stores responses, so that they survive if this process is killed."""
        rows = [
            (*key, json.dumps(response.text), response.truncated, response.num_tokens, response.reward)
            for key, response in responses.items()
        ]
        with self._failing(), self._rows:
            self._rows.executemany("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        where = str(self.directory / RESPONSES_FILE)
        try:
            yield
        except OSError as error:
            raise cache_failure("responses cannot be stored", self.directory, error) from error
        except sqlite3.OperationalError as error:  # a full disk, a missing permission
            message = f"responses cannot be stored: {error}"
            raise EnvironmentFailure(message, where=where, fix="free space, or set RLCTL_CACHE") from error
        except (sqlite3.DatabaseError, ValueError) as error:
            message = f"the stored responses cannot be read: {error}"
            raise RunFailure(
                message, where=where, fix="delete it; its responses are then sampled again"
            ) from error
