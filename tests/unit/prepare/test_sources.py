"""Every format gives the same records; errors in invalid files name the position."""

import gzip
import json
import pickle
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.prepare import sources
from rlctl.prepare.blocks import records_of
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


@pytest.mark.parametrize(
    ("kind", "number"), [("timestamp[s]", 10**12), ("date32[day]", 10**8), ("duration[s]", 10**17)]
)
def test_a_value_that_python_cannot_hold_is_one_bad_row(tmp_path, kind, number):
    times = pa.array([1, number, 2]).cast("int32" if kind.startswith("date") else "int64").cast(kind)
    path = tmp_path / "a.parquet"
    meta = pa.StructArray.from_arrays([times], ["at"])
    pq.write_table(pa.table({"q": ["1", "2", "3"], "meta": meta}), path)
    assert [bool(record.values) for record in records_in(path)] == [True, False, True]


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


TWICE = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], ["a", "a"])


def _write_arrow(path, table):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


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
        ("a.parquet", lambda path: pq.write_table(TWICE, path), "column 'a' twice"),
        ("a.arrow", lambda path: _write_arrow(path, TWICE), "column 'a' twice"),
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


def test_zero_rows_of_parquet_are_an_empty_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"q": pa.array([], pa.string())}), path)
    with pytest.raises(UsageError, match="is empty"):
        records_in(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_is_too_long_is_refused_by_number(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50_000)
    lines = [{"a": 1}, {"a": "x" * 40_000}, {"a": "y" * 80_000}, {"a": 4}]
    path = tmp_path / f"a.jsonl{suffix}"
    for number, content in {None: lines[:2], 3: lines, 1: lines[2:3]}.items():
        text = "\n".join(json.dumps(line) for line in content).encode()
        path.write_bytes(gzip.compress(text) if suffix else text)
        if number is None:
            assert [record.values for record in records_in(path)] == content
            continue
        with pytest.raises(UsageError, match="a line has more than") as caught:
            records_in(path)
        assert caught.value.where == f"{path}:{number}"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_line_of_a_million_characters_goes_through(tmp_path, suffix):
    long = "word " * 200_000
    rows = [{"q": long, "a": "1"}, {"q": "short", "a": "2"}]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in rows))
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(r) + "\n" for r in rows))
    assert values(path) == rows


def test_blocks_of_any_size_hold_the_same_records(tmp_path, monkeypatch):
    rows = [{"q": "q" * (i * 37 % 101), "a": i} for i in range(300)]
    paths = [tmp_path / f"a.{suffix}" for suffix in ("jsonl", "jsonl.gz", "csv", "parquet", "arrow")]
    text = "\n".join(json.dumps(row) + "\n" * (row["a"] % 3) for row in rows)
    paths[0].write_text(text)
    paths[1].write_bytes(gzip.compress(text.encode()))
    paths[2].write_text("q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, paths[3], row_group_size=70)
    with pa.OSFile(str(paths[4]), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=90)
    for path in paths:
        source = Source(path, "name")
        whole = [(record.number, record.values) for record in read_records(source)]
        assert len(whole) == 300
        monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
        monkeypatch.setattr(sources, "BLOCK_ROWS", 7)
        assert len(list(read_blocks(source))) > 20
        assert [(record.number, record.values) for record in read_records(source)] == whole
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[1, 2", ":1"),
        ('[\n1,\n"a', ":3"),
        ("[1,\n\n2 3]", ":3"),
        ("[1]\nmore", ":2"),
        ("[1,]", ":1"),
        ("[1, 2\n}", ":2"),
    ],
)
def test_a_broken_array_names_the_line(tmp_path, text, where):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="invalid JSON") as caught:
        records_in(path)
    assert caught.value.where == f"{path}{where}"


def saved_dataset(path, rows, num_files=2):
    """What `datasets.Dataset.save_to_disk` writes."""
    path.mkdir(parents=True)
    names = [f"data-{place:05}-of-{num_files:05}.arrow" for place in range(num_files)]
    share = -(-len(rows) // num_files)
    for place, name in enumerate(names):
        table = pa.Table.from_pylist(rows[place * share : (place + 1) * share])
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (path / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_files_in_order(tmp_path):
    rows = [{"q": str(i), "a": i} for i in range(9)]
    saved_dataset(tmp_path / "sums", rows)
    found = find_sources([str(tmp_path / "sums")])
    assert [source.name for source in found] == ["sums", "sums"]
    assert [record.values for source in found for record in read_records(source)] == rows


def test_what_the_library_itself_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    rows = [{"q": str(i), "a": i} for i in range(9)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "sums", num_shards=2)
    found = find_sources([str(tmp_path / "sums")])
    assert [record.values for source in found for record in read_records(source)] == rows
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows))
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(UsageError, match="splits test, train") as caught:
        find_sources([str(tmp_path / "both")])
    assert str(tmp_path / "both/train") in caught.value.fix
    assert len(find_sources([str(tmp_path / "both/train")])) == 1


def test_a_saved_dataset_with_a_hole_is_refused(tmp_path):
    saved_dataset(tmp_path / "sums", [{"q": "1"}, {"q": "2"}])
    (tmp_path / "sums/data-00001-of-00002.arrow").unlink()
    with pytest.raises(UsageError, match="it has 1 of 2 files"):
        find_sources([str(tmp_path / "sums")])


def test_the_hub_needs_its_library_and_a_network(monkeypatch):
    pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    with pytest.raises(EnvironmentFailure, match="could not be loaded"):  # the tests run offline
        find_sources(["hf:nobody/nothing-of-this-name:test"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFailure, match="`datasets`") as caught:
        find_sources(["hf:nobody/nothing"])
    assert caught.value.fix == 'pip install "rlctl[datasets]"'


def test_a_dataset_of_the_hub_is_its_cached_files(tmp_path, monkeypatch):
    rows = [{"q": str(i), "a": i} for i in range(4)]
    saved_dataset(tmp_path / "cache", rows, num_files=1)
    file = tmp_path / "cache/data-00000-of-00001.arrow"
    asked = []

    def load_dataset(*names, split, revision=None):
        asked.append((*names, split, revision))
        if names == ("some/configured",):
            raise ValueError("Config name is missing.\nPlease pick one among: ['main', 'socratic']")
        if split == "dev":
            raise ValueError('Unknown split "dev". Should be one of [train].')
        return types.SimpleNamespace(cache_files=[{"filename": str(file)}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (source,) = find_sources(["hf:some/sums"])
    assert (source.path, source.name) == (file, "some/sums")
    find_sources(["hf:some/sums:test"])
    find_sources(["hf:some/sums/easy@v1.0:test"])
    find_sources(["hf:some/configured"])
    assert asked == [
        ("some/sums", "train", None),
        ("some/sums", "test", None),
        ("some/sums", "easy", "test", "v1.0"),
        ("some/configured", "train", None),
        ("some/configured", "main", "train", None),
    ]
    with pytest.raises(UsageError, match="Unknown split"):
        find_sources(["hf:some/sums:dev"])
    for name, problem in (("hf:", "no dataset is named"), ("hf:some/sums:train[:9]", "a slice")):
        with pytest.raises(UsageError, match=problem):
            find_sources([name])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_blocks_hold_their_rows_wherever_they_are_read(tmp_path, name):
    path = tmp_path / name
    table = pa.Table.from_pylist([{"q": "1", "a": "2"}])
    if name.endswith("parquet"):
        pq.write_table(table, path)
    else:
        path.write_text("q,a\n1,2\n" if name.endswith("csv") else '{"q": "1", "a": "2"}')
    (block,) = read_blocks(Source(path, "name"))
    path.unlink()
    assert [record.values for record in records_of(pickle.loads(pickle.dumps(block)))] == table.to_pylist()
