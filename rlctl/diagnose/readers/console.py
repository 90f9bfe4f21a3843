"""What frameworks print: verl's `step:N - key:value`, printed dictionaries, tables of `name value | …`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from rlctl.diagnose.readers.collect import STEP_KEYS, Collector, LogReading

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_RAY = re.compile(r"\([^()]*\bpid=\d+[^()]*\)\s?")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
#: A number as printed by Python: bare, quoted, or inside `np.float64(…)` and `tensor(…, device=…)`.
_VALUE = rf"(?:(?:\w+\.)?\w+\(|['\"])?(?P<number>{_NUMBER}|True|False)(?=['\"),\s}}\]]|$)"
_WHOLE_VALUE = re.compile(_VALUE, re.IGNORECASE)
_PAIR = re.compile(rf"['\"](?P<name>[^'\"{{}}]{{1,200}})['\"]:\s*{_VALUE}", re.IGNORECASE)
_CELL = re.compile(
    rf"(?P<name>[A-Za-z][\w .-]*?):?\s+(?P<number>{_NUMBER})(?P<percent>%?)(?!\S*/)", re.IGNORECASE
)

_VERL = re.compile(r"(?:^|\s)step:(-?\d+) - (\S.*)")
_OPENRLHF = re.compile(r"Global step (\d+): (\{.*)")
_SLIME = re.compile(r"(?:^|\s|-)(step|rollout|perf|eval|passrate|multi_turn) (\d+): (\{.*)")
_PRIME_RL = re.compile(r"(?:^|\s)Step (\d+) \| (.*)")
_NEMO_HEAD = re.compile(r"={3,} Step (\d+)/\S+ ={3,}")
_NEMO_CELL = re.compile(rf"\s*• (?P<name>[A-Z][\w ]+): (?P<number>{_NUMBER})\s*$")
_DICT = re.compile(r"\{'[^{}]*\}\s*$")
_CONFIG_START = re.compile(r"\{'\w+': ")
#: A printed dictionary is a trainer's row only with one of these; graders and data loaders print others.
_TRAINER_KEYS = frozenset(
    {*STEP_KEYS, "epoch", "loss", "train_loss", "eval_loss", "grad_norm", "learning_rate", "lr"}
)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")

_Row = dict[str, Any]


class Console:
    """Turns printed lines into rows.

    Printed dictionaries are used only where the log has no rows of another kind.
    """

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading
        self._dictionaries = Collector(reading.collector.keeps)
        self._count = 0  # of dictionaries without a step
        self._nemo_step: int | None = None
        self._config: _ConfigDump | None = None
        self._formats: tuple[Callable[[str], bool], ...] = (
            *(self._verl, self._openrlhf, self._slime, self._prime_rl, self._nemo_rl, self._dictionary),
        )

    def read(self, line: bytes) -> bool:
        """Take one line; False if there was no row in it."""
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        # A progress bar returns to the start of its line without ending it.
        found = [self._part(part) for part in text.split("\r") if part]
        return any(found)

    @property
    def is_full(self) -> bool:
        """Whether a first look has seen enough dictionaries."""
        return self._reading.limit is not None and self._dictionaries.num_rows >= self._reading.limit

    def finish(self) -> None:
        """Hand over the dictionaries if there was nothing else."""
        if self._reading.collector.num_rows or not self._dictionaries.num_rows:
            return
        self._reading.collector = self._dictionaries
        if self._count:
            self._reading.notes.append("the printed lines have no step: they are counted from 1")

    def _part(self, text: str) -> bool:
        prefix = match.group() if (match := _RAY.match(text)) else ""
        text = text[len(prefix) :]
        if self._config is None and _CONFIG_START.match(text) and not _DICT.match(text):
            self._config = _ConfigDump(prefix)
        if self._config and self._config.take(prefix, text):
            if self._config.is_done:
                self._reading.config |= self._config.value()
                self._config = None
            return False
        return any(read(text) for read in self._formats)

    def _add(self, row: _Row) -> bool:
        return len(row) > 1 and self._reading.collector.add(row)

    def _verl(self, text: str) -> bool:
        if "step:" not in text or not (match := _VERL.search(text)):
            return False
        row: _Row = {"step": int(match[1])}
        for cell in match[2].split(" - "):
            name, _, value = cell.rpartition(":")
            if name and (number := _number(value)) is not None:
                row[name] = number
        self._reading.hint = "verl"
        return self._add(row)

    def _openrlhf(self, text: str) -> bool:
        if not (match := _OPENRLHF.search(text)):
            return False
        self._reading.hint = "openrlhf"
        return self._add({"step": int(match[1]), **_pairs(match[2])})

    def _slime(self, text: str) -> bool:
        if not (match := _SLIME.search(text)):
            return False
        key = {"step": "train/step", "eval": "eval/step"}.get(match[1], "rollout/step")
        return self._add({**_pairs(match[3]), key: int(match[2])})

    def _prime_rl(self, text: str) -> bool:
        if not (match := _PRIME_RL.search(text)):
            return False
        cells = filter(None, (_CELL.match(cell.strip()) for cell in match[2].split(" | ")))
        row = {cell["name"]: float(cell["number"]) * (0.01 if cell["percent"] else 1.0) for cell in cells}
        return self._add({"step": int(match[1]), **row})

    def _nemo_rl(self, text: str) -> bool:
        if match := _NEMO_HEAD.search(text):
            self._nemo_step = int(match[1])
        if self._nemo_step is None or not (cell := _NEMO_CELL.match(text)):
            return False
        return self._add({"step": self._nemo_step, cell["name"]: float(cell["number"])})

    def _dictionary(self, text: str) -> bool:
        """Hugging Face's trainer; rows without a step are counted."""
        if not (match := _DICT.search(text)):
            return False
        row = _pairs(match.group())
        # `train_runtime` is in the summary of the whole run.
        if len(row) < 2 or "train_runtime" in row or _TRAINER_KEYS.isdisjoint(row):
            return False
        if not any(key in row for key in STEP_KEYS):
            self._count += not all(name.startswith("eval_") or name == "epoch" for name in row)
            row["step"] = self._count
        return self._dictionaries.add(row)


class _ConfigDump:
    """A configuration printed over many lines, as `pprint` does it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []
        self._depth = 0
        self.is_done = False

    def take(self, prefix: str, text: str) -> bool:
        """Take a line; False if the dump does not continue in it."""
        if prefix != self._prefix or (self._lines and not text.startswith(" ")):
            return False
        self._lines.append(text)
        bare = _STRING.sub("", text)
        self._depth += sum(map(bare.count, "{[(")) - sum(map(bare.count, "}])"))
        self.is_done = self._depth <= 0
        return True

    def value(self) -> dict[str, Any]:
        """The configuration; empty if it is not a literal."""
        try:
            value = ast.literal_eval("\n".join(self._lines))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def _number(text: str) -> float | None:
    """The number that Python printed; None for any other text."""
    try:
        return float(text)  # nearly always, and many times faster than a regular expression
    except ValueError:
        match = _WHOLE_VALUE.match(text)
        return _plain(match["number"]) if match else None


def _pairs(text: str) -> _Row:
    """The numbers of a printed dictionary."""
    return {pair["name"]: _plain(pair["number"]) for pair in _PAIR.finditer(text)}


def _plain(number: str) -> float | int:
    if number.lower() in {"true", "false"}:
        return number.lower() == "true"
    return float(number) if not number.lstrip("-").isdigit() else int(number[:400])
