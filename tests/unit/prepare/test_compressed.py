"""Compressed files: read as what they contain; archives are refused."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from rlctl.errors import UsageError
from rlctl.prepare.sources import find_sources, read_records

ROWS = [{"question": f"{place} + 1?", "answer": f"#### {place + 1}"} for place in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)


def values(*names):
    return [record.values for source in find_sources(names) for record in read_records(source)]


@pytest.mark.parametrize(("suffix", "compress"), [(".bz2", bz2.compress), (".gz", gzip.compress)])
def test_text_is_decompressed_by_its_suffix(tmp_path, suffix, compress):
    two = compress(JSONL[:99]) + compress(JSONL[99:])  # as parallel compressors write it
    (tmp_path / f"a.jsonl{suffix}").write_bytes(two)
    assert values(str(tmp_path / f"a.jsonl{suffix}")) == ROWS
    (tmp_path / "b.jsonl").write_bytes(two)
    with pytest.raises(UsageError, match="compressed by") as caught:
        values(str(tmp_path / "b.jsonl"))
    assert caught.value.fix == f"name it {suffix}"
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


def test_archives_are_refused_with_advice(tmp_path):
    for name in ("a.zip", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(b"any")
        with pytest.raises(UsageError, match="format is not known") as caught:
            find_sources([str(tmp_path / name)])
        assert "unpack archives" in caught.value.fix
