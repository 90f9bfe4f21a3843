"""Compressed files and zip archives: read as what they contain, refused if they expand or lead too far."""

import bz2
import gzip
import json
import lzma
import zipfile

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from rlctl.errors import UsageError
from rlctl.prepare import compressed
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from rlctl.prepare.sources import find_sources, read_records

ROWS = [{"question": f"{place} + 1?", "answer": f"#### {place + 1}"} for place in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)


def values(*names):
    return [record.values for source in find_sources(names) for record in read_records(source)]


def write_zip(path, files, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return str(path)


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".bz2", bz2.compress), (".xz", lzma.compress), (".gz", gzip.compress)]
)
def test_text_is_decompressed_by_its_suffix_or_its_content(tmp_path, suffix, compress):
    two = compress(JSONL[:99]) + compress(JSONL[99:])  # as parallel compressors write it
    for name in (f"a.jsonl{suffix}", "b.jsonl"):
        (tmp_path / name).write_bytes(two)
        assert values(str(tmp_path / name)) == ROWS
    (tmp_path / f"c.csv{suffix}").write_bytes(compress(CSV.encode()))
    assert values(str(tmp_path / f"c.csv{suffix}")) == ROWS
    (tmp_path / f"cut.jsonl{suffix}").write_bytes(compress(JSONL)[:-9])
    (tmp_path / f"no.jsonl{suffix}").write_bytes(b"plain text")
    for name in (f"cut.jsonl{suffix}", f"no.jsonl{suffix}"):
        with pytest.raises(UsageError, match="truncated or damaged"):
            values(str(tmp_path / name))


@pytest.mark.parametrize("compression", ["lz4", "zstd", "uncompressed"])
def test_feather_files_are_read(tmp_path, compression):
    feather.write_feather(pa.Table.from_pylist(ROWS), tmp_path / "a.feather", compression=compression)
    assert values(str(tmp_path / "a.feather")) == ROWS


def binary(write):
    sink = pa.BufferOutputStream()
    write(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


def test_a_zip_archive_is_read_as_a_directory(tmp_path):
    files = {
        "data/b.csv": CSV,
        "data/a.jsonl": JSONL,
        "data/c.jsonl.gz": gzip.compress(JSONL),
        "data/d.parquet": binary(pq.write_table),
        "data/e.feather": binary(feather.write_feather),
        "readme.md": "no rows",
        "manifest.json": "{}",
        "__MACOSX/data/._a.jsonl": "x",
        "data/.hidden.jsonl": "x",
    }
    path = write_zip(tmp_path / "all.zip", files)
    assert [source.path.name[0] for source in find_sources([path])] == ["a", "b", "c", "d", "e"]
    assert values(path) == 5 * ROWS
    assert values(f"{path}/data/b.csv") == ROWS
    assert values(f"{path}/data") == 5 * ROWS
    assert next(read_records(find_sources([path])[0])).where == f"{path}/data/a.jsonl:1"
    with pytest.raises(UsageError, match="no such file of a known format"):
        find_sources([f"{path}/data/z.jsonl"])


def test_archives_are_prepared_and_checked(tmp_path):
    path = write_zip(tmp_path / "all.zip", {"train.jsonl": JSONL, "train2.parquet": binary(pq.write_table)})
    request = PrepareRequest((path,), tmp_path / "out", val_fraction=0.0, duplicates="drop")
    summary = prepare(request)
    assert (summary.counts["train"], summary.counts["duplicates_dropped"]) == (5, 5)
    assert prepare(request).unchanged
    report = check(CheckRequest((path,)))
    assert [file.num_rows for file in report.files] == [5, 5]
    inside = write_zip(tmp_path / "out" / "in.zip", {"train.jsonl": JSONL})
    with pytest.raises(UsageError, match=r"did not write|contains this input"):
        prepare(PrepareRequest((inside,), tmp_path / "out", overwrite=True))
    splits = write_zip(tmp_path / "splits.zip", {"train.jsonl": JSONL, "test.jsonl": JSONL})
    with pytest.raises(UsageError, match="would mix them") as caught:
        find_sources([splits])
    assert f"{splits}/train.jsonl" in caught.value.fix


@pytest.mark.parametrize(
    "name", ["../a.jsonl", "data/../../a.jsonl", "/etc/a.jsonl", "..\\a.jsonl", "C:\\a.jsonl"]
)
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path, name):
    path = write_zip(tmp_path / "a.zip", {"good.jsonl": JSONL, name: JSONL})
    for asked in (path, f"{path}/good.jsonl"):
        with pytest.raises(UsageError, match="leads out of it"):
            find_sources([asked])


def test_archive_bombs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "EXPANDED_BYTES", 1 << 20)
    zeros = (b"{}" + 998 * b" " + b"\n") * 4000
    path = write_zip(tmp_path / "bomb.zip", {"a.jsonl": zeros})
    with pytest.raises(UsageError, match="too many for its size"):
        find_sources([path])
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (tmp_path / f"bomb.jsonl{suffix}").write_bytes(compress(zeros))
        with pytest.raises(UsageError, match="expands to more than"):
            values(str(tmp_path / f"bomb.jsonl{suffix}"))
    nested = write_zip(tmp_path / "nested.zip", {"a.jsonl.xz": lzma.compress(zeros)})
    with pytest.raises(UsageError, match="expands to more than"):
        values(nested)
    monkeypatch.setattr(compressed, "MAX_MEMBERS", 3)
    many = write_zip(tmp_path / "many.zip", {f"{place}.jsonl": JSONL for place in range(4)})
    with pytest.raises(UsageError, match="more than 3"):
        find_sources([many])


def test_damaged_and_encrypted_archives_are_refused(tmp_path):
    (tmp_path / "no.zip").write_bytes(b"no archive")
    with pytest.raises(UsageError, match="cannot be read as a zip archive"):
        find_sources([str(tmp_path / "no.zip")])
    path = tmp_path / "a.zip"
    write_zip(path, {"a.jsonl": JSONL})
    content = bytearray(path.read_bytes())
    for place in (60, 70):  # in the compressed data
        content[place] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        values(str(path))
    write_zip(path, {"a.jsonl": JSONL})
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + 8] |= 1  # the flag of encryption in the directory
    path.write_bytes(content)
    with pytest.raises(UsageError, match="encrypted"):
        find_sources([str(path)])
