"""Small files that expand to any size, and chat templates that do not end or reach for Python."""

from __future__ import annotations

import collections
import gzip
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl import chat_template
from rlctl.data.prompts import Renderer
from rlctl.data.schema import Message, Row
from rlctl.environment.byte_tokenizer import byte_tokenizer
from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError
from rlctl.prepare import blocks, sources, text_files
from rlctl.prepare.sources import find_sources, read_records

#: MiB in one line, and limits that let it show in a test what they do for 1.5 GB.
MIB, LINE_LIMIT, DOCUMENT_LIMIT, BATCH_LIMIT = 64, 4 << 20, 8 << 20, 64 << 20


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", LINE_LIMIT)
    monkeypatch.setattr(text_files, "MAX_DOCUMENT_BYTES", DOCUMENT_LIMIT)
    monkeypatch.setattr(blocks, "MAX_BATCH_BYTES", BATCH_LIMIT)


def refusal(file: Path) -> UsageError:
    [source] = find_sources([str(file)])
    with pytest.raises(UsageError) as caught:
        collections.deque(read_records(source), maxlen=0)
    return caught.value


@pytest.mark.parametrize(
    ("name", "start", "fill", "end"),
    [
        ("a.jsonl.gz", b'{"question": "', b"a", b'"}\n'),
        ("a.jsonl.gz", b"", b" ", b"{}\n"),
        ("a.json.gz", b"[\n", b" ", b"{}]"),
        ("a.csv.gz", b"question,answer\n", b"a", b",1\n"),
        ("a.csv.gz", b'question,answer\n"', b"a", b'",1\n'),
        ("a.csv.gz", b"", b"a,", b"\n"),
        ("a.tsv.gz", b"question\tanswer\n", b"\t", b"\n"),
    ],
)
def test_one_endless_line(tmp_path: Path, name: str, start: bytes, fill: bytes, end: bytes) -> None:
    with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(MIB):
            file.write(fill * ((1 << 20) // len(fill)))
        file.write(end)
    assert " MiB" in refusal(tmp_path / name).what


def bombs(directory: Path) -> dict[str, Path]:
    """Name → a file whose first rows take 160 to 300 MB."""
    text = pa.array(["x" * (1 << 20)])
    indices = pa.array(np.zeros(300, dtype=np.int32))
    few = pa.table({"question": pa.DictionaryArray.from_arrays(indices, text), "answer": ["1"] * 300})
    pq.write_table(few, directory / "dictionary.parquet")
    count = 20_000_000
    zeros = pa.array(np.zeros(count, dtype=np.int64))
    lists = pa.ListArray.from_arrays(pa.array([0, count], type=pa.int32()), zeros)
    long = pa.record_batch([pa.array(["a"]), lists], names=["question", "answer"])
    pq.write_table(pa.Table.from_batches([long]), directory / "list.parquet")
    pq.write_table(pa.Table.from_batches([long]), directory / "zstd.parquet", compression="zstd")
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with new(directory / name, long.schema, options=options) as writer:
            writer.write_batch(long)
    return {path.name: path for path in directory.iterdir()}


def test_columns_that_expand(tmp_path: Path) -> None:
    files = bombs(tmp_path)
    assert len(files) == 5
    for name, file in files.items():
        assert file.stat().st_size < 1 << 20, name
        error = refusal(file)
        assert "expand to more than" in error.what, name
        assert str(file) in str(error.where)


def test_ordinary_columns_are_read_beside(tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": "x" * 1000} for number in range(9000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [source] = find_sources([str(tmp_path / "a.parquet")])
    assert [record.values for record in read_records(source)] == rows


# --- chat templates ---------------------------------------------------------------------------------

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
REACHING = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch {marker}') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ ''.format_map.__self__.__class__ }}",
]
ROW = Row("s", (Message("user", "?"),), "1", where="data.parquet:7")


def tokenizer_with(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template", [ENDLESS, RECURSIVE, "{% for a in messages %}" + ENDLESS + "{% endfor %}"]
)
def test_a_template_that_does_not_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.2)
    tokenizer = tokenizer_with(template)
    for render in (
        lambda: Renderer(tokenizer).text(ROW),
        lambda: ChatRenderer(tokenizer).text([{"role": "user", "content": "?"}]),
    ):
        with pytest.raises(UsageError, match="refuses") as caught:
            render()
        assert "more than 0.2 s" in caught.value.what or template == RECURSIVE


def test_in_several_threads_only_the_endless_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)
    fine, endless = tokenizer_with("{{ messages[0].content }}"), tokenizer_with(ENDLESS)
    results: dict[int, str] = {}

    def render(number: int) -> None:
        try:
            for _ in range(1 if number % 2 else 200):
                results[number] = Renderer(endless if number % 2 else fine).text(ROW)
        except UsageError as error:
            results[number] = error.what

    threads = [threading.Thread(target=render, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number] == "?" for number in range(6)] == [True, False] * 3
    time.sleep(2 * chat_template._CHECK_S)  # nothing is raised afterwards


@pytest.mark.parametrize("template", REACHING)
def test_a_template_reaches_no_python(template: str, tmp_path: Path) -> None:
    template = template.replace("{marker}", str(tmp_path / "executed"))
    for render in (
        lambda: Renderer(tokenizer_with(template)).text(ROW),
        lambda: ChatRenderer(tokenizer_with(template)).text([{"role": "user", "content": "?"}]),
    ):
        try:
            text = render()
        except UsageError as error:
            text = error.what.partition("refuses")[1]
        assert text == "refuses" or not ("class" in text or "module" in text)
    assert not (tmp_path / "executed").exists()
