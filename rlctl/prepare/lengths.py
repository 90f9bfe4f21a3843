"""Prompts under a model's tokenizer and chat template: their lengths and their text."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from rlctl.data.prompts import Renderer, template_sha256
from rlctl.data.schema import Message, Row
from rlctl.errors import RlctlError, UsageError
from rlctl.prepare.findings import DataFinding
from rlctl.prepare.recipes import read_rows
from rlctl.prepare.sources import find_sources

#: Number of rows whose prompts `show` measures.
MEASURED_ROWS = 20_000
_PROBE = Row("probe", (Message("user", "How much is 2 + 2?"),), "4")


class MeasuredRow(NamedTuple):
    """A row with the length of its prompt."""

    row: Row  # as given
    num_tokens: int = 0  # of the rendered prompt; 0 if it cannot be rendered
    #: why the row cannot be used, or "": the template rejects it, or it starts with two start tokens
    problem: str = ""


class PromptLengths:
    """Measures prompts in tokens.

    Built once per worker: pickling stores only the constructor arguments.

    `model` is a directory or hub id; its tokenizer and chat template are used. `chat_template_kwargs` are
    those of `Renderer`.

    Raises:
        UsageError: the model does not exist, its tokenizer cannot be read, or its template does not use
            one of the arguments.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """

    def __init__(
        self,
        model: str,
        *,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._kwargs = chat_template_kwargs or {}
        self._rebuild = partial(
            PromptLengths,
            model,
            trust_remote_code=trust_remote_code,
            chat_template_kwargs=chat_template_kwargs,
        )
        # The worker processes already run in parallel.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from rlctl.model_files import load_reader

        try:
            tokenizer, config = load_reader(model, trust_remote_code=trust_remote_code)
        except RlctlError:
            raise
        except Exception as error:  # the tokenizers library and custom tokenizer code raise any type
            raise UsageError(f"the tokenizer cannot be read: {error}", where=model) from error
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.context = positions if isinstance(positions, int) else None  # in tokens, if the config says
        if tokenizer.is_fast:
            content = tokenizer.backend_tokenizer.to_str()
        else:
            content = json.dumps([tokenizer.get_vocab(), type(tokenizer).__name__], sort_keys=True)
        self._tokenizer_sha256 = hashlib.sha256(content.encode()).hexdigest()
        self.renderer = Renderer(tokenizer, chat_template_kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild, ()

    def measure(self, rows: Sequence[Row]) -> list[MeasuredRow]:
        """Measures the rows in tokens."""
        texts = [""] * len(rows)
        problems = [""] * len(rows)
        for index, row in enumerate(rows):
            try:
                texts[index] = self.renderer.text(row)
            except UsageError as error:
                problems[index] = error.what
        return [
            MeasuredRow(row, problem=problem) if problem else self._checked(row, ids)
            for row, ids, problem in zip(rows, self.renderer.encode(texts), problems, strict=True)
        ]

    def _checked(self, row: Row, ids: Sequence[int]) -> MeasuredRow:
        try:
            self.renderer.check_start(row, ids)
        except UsageError as error:
            return MeasuredRow(row, problem=error.what)
        return MeasuredRow(row, len(ids))

    def describe(self) -> dict[str, Any]:
        """Identifies the tokenizer and template that determine the lengths, without paths, for the manifest.

        `template_sha256` is computed as in `results.json` of an evaluation.
        """
        tokenizer = self.renderer.tokenizer
        given = {"chat_template_kwargs": dict(self._kwargs)} if self._kwargs else {}
        return given | {
            "tokenizer": type(tokenizer).__name__,
            "tokenizer_sha256": self._tokenizer_sha256,
            "vocabulary": len(tokenizer),
            "template_sha256": template_sha256(tokenizer.chat_template),
            "context": self.context,
        }


def template_findings(renderer: Renderer) -> list[DataFinding]:
    """Findings about a model's chat template, tested with one plain question."""
    tokenizer = renderer.tokenizer
    if not tokenizer.chat_template:
        message = "the tokenizer has no chat template: messages are joined by blank lines, roles are lost"
        return [DataFinding("no-template", "warning", message, 1, fix="use the instruct model's tokenizer")]
    try:
        text = renderer.text(_PROBE)
        renderer.check_start(_PROBE, renderer.encode([text])[0])
    except UsageError as error:
        return [DataFinding("template", "error", f"a plain question: {error.what}", 1, fix=error.fix or "")]
    findings = []
    if text == renderer.text(_PROBE, generation_prompt=False):
        message = "the chat template adds no generation prompt, which marks the start of the model's turn"
        fix = "correct for a model trained like this; else add `{% if add_generation_prompt %}…`"
        findings.append(DataFinding("no-generation-prompt", "warning", message, 1, fix=fix))
    start = tokenizer.bos_token
    if start and renderer.adds_start and text.startswith(start):
        message = f"both the tokenizer and its chat template put {start} first"
        fix = "rlctl adds it once; elsewhere encode rendered prompts with add_special_tokens=False"
        findings.append(DataFinding("start-token", "info", message, 1, fix=fix))
    return findings


class LengthQuantiles:
    """Lengths of prompts."""

    def __init__(self, unit: Literal["tokens", "characters"]) -> None:
        self.unit = unit
        self._lengths = array("q")

    def add(self, lengths: Iterable[int]) -> None:
        """Adds lengths."""
        self._lengths.extend(lengths)

    @property
    def total(self) -> int:
        """Number of lengths added."""
        return len(self._lengths)

    def summary(self) -> dict[str, int]:
        """Minimum, quantiles (lengths that at least this share of the prompts do not exceed) and maximum."""
        names = ("min", "p50", "p90", "p99", "max")
        shares = (0.0, 0.5, 0.9, 0.99, 1.0)
        found = np.quantile(self._lengths, shares, method="inverted_cdf") if self.total else np.zeros(5)
        return dict(zip(names, map(int, found), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serializable dict."""
        return {"unit": self.unit, **self.summary()}


def characters(row: Row) -> int:
    """Number of characters in the messages of a row."""
    return sum(len(message.content) for message in row.prompt)


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One row rendered for display."""

    where: str  # `file:row`
    row: Row | None  # as the recipe read it; None if it cannot be used
    problem: str = ""  # why the row cannot be used or rendered
    #: the prompt as the model reads it: (text, whether it is a special token). Without a model, or if the
    #: prompt cannot be rendered: role and content of each message
    pieces: tuple[tuple[str, bool], ...] = ()
    ids: list[int] | None = None  # token ids; None without a model or if the prompt cannot be rendered


def show_rows(
    file: str, lengths: PromptLengths | None, *, first: int, count: int
) -> tuple[list[RenderedRow], LengthQuantiles]:
    """Renders `count` rows of a file or directory from row `first` on, counted from 1 over all its files.

    Also returns the prompt lengths of the first `MEASURED_ROWS` rows. Without `lengths`, the chat template is
    not applied, and lengths are in characters.

    Raises:
        UsageError: the file cannot be read, or has no such row.
    """
    shown: list[RenderedRow] = []
    rows: list[Row] = []
    last = first + count - 1
    number = 0
    read = chain.from_iterable(map(read_rows, find_sources([file])))
    for number, (record, row, problem) in enumerate(read, 1):
        if first <= number <= last:
            shown.append(_shown(record.where, row, problem, lengths))
        if row is not None and number <= MEASURED_ROWS:
            rows.append(row)
        if number >= max(last, MEASURED_ROWS):
            break
    if not shown:
        raise UsageError(f"there is no row {first}: it has {number}", where=file, fix="lower --row")
    measured = LengthQuantiles("tokens" if lengths else "characters")
    if lengths is None:
        measured.add(map(characters, rows))
    else:
        measured.add(one.num_tokens for one in lengths.measure(rows) if one.num_tokens)
    return shown, measured


def _shown(where: str, row: Row | None, problem: str, lengths: PromptLengths | None) -> RenderedRow:
    turns = row.prompt if row else ()
    plain = tuple(
        part
        for turn in turns
        for part in ((f"{turn.role}:", True), (f" {turn.content or turn.other}\n", False))
    )
    if row is None or lengths is None:
        return RenderedRow(where, row, problem, plain)
    renderer = lengths.renderer
    try:
        text = renderer.text(row)
        ids = renderer.encode([text])[0]
        renderer.check_start(row, ids)
    except UsageError as error:
        return RenderedRow(where, row, error.what, plain)
    added = renderer.tokenizer.added_tokens_decoder.values()
    special = sorted(filter(None, map(str, added)), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return RenderedRow(
        where=where,
        row=row,
        problem="",
        pieces=tuple((piece, piece in special) for piece in pieces if piece),
        ids=ids,
    )
