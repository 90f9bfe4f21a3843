"""Every format gives the same records; every broken one says where."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import UsageError
from rlctl.prepare.sources import Source, find_sources, read_blocks, read_records

ROWS = [{"q": "one, two", "a": "3"}, {"q": 'say "hi"\nagain', "a": "4"}]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'q,a\n"one, two",3\n"say ""hi""\nagain",4\n'


def records_in(path):
    return list(read_records(Source(path, "name")))


def values(path):
    records = records_in(path)
    assert all(record.values is not None for record in records)
    return [record.values for record in records]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", JSONL),
        ("a.ndjson", "\n" + JSONL.replace("\n", "\r\n") + "  \n"),
        ("a.jsonl", "\ufeff" + JSONL),
        ("a.json", json.dumps(ROWS, indent=1)),
        ("a.json", "\ufeff" + json.dumps(ROWS)),
        ("a.json", JSONL),
        ("a.csv", CSV),
        ("a.csv", "\ufeff" + CSV),
        ("A.TSV", CSV.replace("q,a", "q\ta").replace(",3", "\t3").replace(",4", "\t4")),
        ("odd ../name ü.jsonl".replace("/", "_"), JSONL),
    ],
)
def test_text_formats(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert values(path) == ROWS
    half = len(text) // 2
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstd)):
        zipped = tmp_path / f"{name}{suffix}"
        # two members one after the other, as `cat a.gz b.gz` makes them
        zipped.write_bytes(compress(text[:half].encode()) + compress(text[half:].encode()))
        assert values(zipped) == ROWS


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert values(path) == ROWS


def test_numbers_are_lines_an_editor_shows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [record.where for record in records_in(path)] == [f"{path}:1", f"{path}:3"]
    table = tmp_path / "a.csv"
    table.write_text('q,a\n"x\ny",1\nz,2\n')
    assert [record.number for record in records_in(table)] == [2, 4]


@pytest.mark.parametrize(
    ("name", "content", "number", "problem"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n{"a": 3}\n', 2, "invalid JSON: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n{"a": 3}\n', 2, "not valid UTF-8 at byte 8"),
        ("a.jsonl", b'{"a": 1}\n[1]\n{"a": 3}\n', 2, "not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 100_000 + b'\n{"a": 3}\n', 2, "nested too deeply"),
        ("a.json", b'[{"a": 1}, 7, {"a": 3}]', 2, "not a JSON object"),
        ("a.csv", b"q,a\n1,2\n3\n5,6\n", 3, "1 fields where the header has 2"),
    ],
)
def test_a_bad_row_is_named_and_the_rest_read(tmp_path, name, content, number, problem):
    path = tmp_path / name
    path.write_bytes(content)
    records = records_in(path)
    assert len(records) == 3
    (bad,) = [record for record in records if record.values is None]
    assert bad.number == number
    assert problem in bad.problem


def _corrupt_parquet(path, at):
    pq.write_table(pa.Table.from_pylist([{"q": f"{i}" * 50, "a": i} for i in range(5000)]), path)
    content = bytearray(path.read_bytes())
    content[at : at + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", lambda path: path.write_bytes(b""), "is empty"),
        ("a.json", lambda path: path.write_bytes(b"[]"), "is empty"),
        ("a.csv", lambda path: path.write_bytes(b"q,a\n"), "is empty"),
        ("a.json", lambda path: path.write_bytes(b'[{"a": 1},\n{"a": }]'), "invalid JSON"),
        ("a.json", lambda path: path.write_bytes(b'[{"a": "\xff"}]'), "not valid UTF-8"),
        ("a.parquet", lambda path: path.write_bytes(b""), "cannot be read"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1 this is not Parquet"), "cannot be read"),
        ("a.parquet", lambda path: _corrupt_parquet(path, 8), "cannot be read"),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(JSONL.encode() * 99)[:-20]), "gzip"),
        ("a.jsonl.gz", lambda path: path.write_bytes(b"plain text"), "gzip"),
        ("a.jsonl.zst", lambda path: path.write_bytes(zstd(JSONL.encode() * 99)[:-20]), "zstd"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, name, make, message):
    path = tmp_path / name
    make(path)
    with pytest.raises(UsageError, match=message) as caught:
        records_in(path)
    assert str(path) in caught.value.where


def test_finding(tmp_path):
    (tmp_path / "b.jsonl").write_text(JSONL)
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "LICENSE").write_text("free")
    assert [source.path.name for source in find_sources([str(tmp_path)])] == ["a.csv", "b.jsonl"]
    for missing, message in [
        ("nothing.jsonl", "no such file"),
        ("LICENSE", "format"),
        ("a.parquet.gz", "no such file"),
    ]:
        with pytest.raises(UsageError, match=message):
            find_sources([str(tmp_path / missing)])


def test_progress_adds_up(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(JSONL * 50_000)
    blocks = list(read_blocks(Source(path, "name")))
    assert sum(block.num_bytes for block in blocks) == path.stat().st_size
    assert len(blocks) > 1
