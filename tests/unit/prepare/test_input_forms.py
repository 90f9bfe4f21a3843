"""The same rows in the forms that files have in practice; unreadable input is reported with file and row."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import UsageError
from rlctl.prepare.recipes import read_rows
from rlctl.prepare.sources import Source, find_sources, read_records

ROWS = [{"question": f"Wie groß ist {i}, und „{i}“ 数?", "answer": f"{i}"} for i in range(3)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
CSV = "question,answer\n" + "".join(f'"{row["question"]}",{row["answer"]}\n' for row in ROWS)
FORMS = {
    "a.jsonl": "\n".join(LINES) + "\n",
    "a.json": json.dumps(ROWS, ensure_ascii=False, indent=2),
    "a.csv": CSV,
    "a.tsv": "question\tanswer\n" + "".join(f"{row['question']}\t{row['answer']}\n" for row in ROWS),
}
WRAPPED = {"version": "1.1", "data": ROWS}


def records(path):
    return list(read_records(Source(path, "a")))


def rows(path):
    found = records(path)
    assert [record.problem for record in found if record.values is None] == []
    return [record.values for record in found]


def refusal(path):
    with pytest.raises(UsageError) as caught:
        records(path)
    assert str(path) in caught.value.where
    return caught.value.what


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_encodings_and_line_ends(tmp_path, name, encoding, ends, suffix):
    content = FORMS[name].replace("\n", ends).encode(encoding)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert rows(path) == ROWS


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_with_advice(tmp_path, name, encoding):
    path = tmp_path / name
    path.write_bytes(FORMS[name].encode(encoding))
    with pytest.raises(UsageError, match="UTF-16 or UTF-32") as caught:
        records(path)
    assert (caught.value.where, caught.value.fix) == (str(path), "save it as UTF-8")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=4),
        json.dumps(WRAPPED),
        json.dumps(WRAPPED, indent=1),
        json.dumps({"Data": ROWS, "meta": {"n": [1, 2]}}),
        json.dumps({"train": ROWS}, indent=2),
        json.dumps({"data": {"train": ROWS}}, indent=2),
        "\n".join(LINES),
        ",\n".join(LINES) + ",\n",
        "[\n" + ",\n".join(LINES) + "\n]\n",
        "\n \n" + "\r\n".join(LINES),
    ],
)
def test_json_by_any_name(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert rows(path) == ROWS


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "row",
    [
        ROWS[0],
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
        {"question": "Which?", "choices": ["a", "b"], "answer": 0},
        {"question": "Which?", "answer": "A", "sources": [{"page": 1}]},
        {"nums": [1, 2], "target": 3},
    ],
)
def test_one_object_is_one_row(tmp_path, row, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(row, indent=indent))
    assert rows(path) == [row]


def test_a_document_is_read_up_to_a_size(tmp_path, monkeypatch):
    many = [{"question": f"{i}?", "answer": str(i)} for i in range(300)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 2, "data": many, "license": "MIT"}, indent=1))
    assert rows(path) == many
    monkeypatch.setattr("rlctl.prepare.text_files.MAX_DOCUMENT_BYTES", 1000)
    assert "a JSON document of more than" in refusal(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"train": ROWS, "test": ROWS}, "several lists of rows: train, test"),
        ({"data": ROWS, "rows": ROWS}, "several lists of rows: data, rows"),
        ({"question": {"0": "a", "1": "b"}, "answer": {"0": 1, "1": 2}}, "columns, not rows"),
        ({"question": ["a", "b"], "answer": [1, 2]}, "columns, not rows"),
    ],
)
def test_an_object_that_is_no_list_of_rows_is_refused(tmp_path, value, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ('{"a": \n{"a": 2}\n{"a": 3}\n', {1: "invalid JSON"}),
        ('[{"a": 1}]\n[{"a": 2}]\n', {1: "not a JSON object", 2: "not a JSON object"}),
        ('{"a": 1}\n{"a": "\0"}\n', {2: "Invalid control character"}),
        ('{"a": 1}\n{"a": 2}\n{"a": "cut', {3: "invalid JSON"}),
    ],
)
def test_bad_lines_are_named(tmp_path, text, bad):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    found = {record.number: record.problem for record in records(path) if record.values is None}
    assert found.keys() == bad.keys()
    assert all(what in found[number] for number, what in bad.items())


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "a", "question": "b", "answer": "1"}',
        '{"question": "a: \\"x\\":", "answer": "1", "answer": "2"}',
        '{"question": [{"role": "user", "content": "a", "content": "b"}], "answer": "1"}',
        '{"question" : "a", "question" : "b", "answer": "1"}',
    ],
)
def test_a_key_that_occurs_twice_is_no_choice_of_the_last(tmp_path, line):
    good = '{"question": "\\"q\\": 1", "answer": "1"}'
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{line}\n")
    first, second = records(path)
    assert first.values == json.loads(good)
    assert second.values is None
    assert re.search(r"the key '(question|answer|content)' occurs twice", second.problem)
    path = tmp_path / "a.json"
    path.write_text(f"[{good},\n{line}]")
    with pytest.raises(UsageError, match="occurs twice") as caught:
        records(path)
    assert caught.value.where == str(path)


def test_integers_beyond_64_bits_are_exact(tmp_path):
    path = tmp_path / "a.jsonl"
    written = [{"a": 10**30 + 1, "d": 1e30}, {"b": {"c": -(10**20) - 1}}, {"b": [{"c": [1, 10**25 + 1]}]}]
    path.write_text("\n".join(map(json.dumps, written)))
    assert rows(path) == written


def test_binary_columns_that_are_text(tmp_path):
    kinds = [
        pa.binary(),
        pa.large_binary(),
        pa.list_(pa.struct([("role", pa.binary()), ("content", pa.binary())])),
    ]
    prompt = [{"role": b"user", "content": "é?".encode()}]
    table = pa.table(
        {"answer": [b"4"], "other": [b"\xff\x00"], "prompt": [prompt]},
        schema=pa.schema(list(zip(["answer", "other", "prompt"], kinds, strict=True))),
    )
    pq.write_table(table, tmp_path / "a.parquet")
    text = [{"role": "user", "content": "é?"}]
    assert rows(tmp_path / "a.parquet") == [{"answer": "4", "other": b"\xff\x00", "prompt": text}]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("first", ["", "sep"])
def test_csv_delimiters(tmp_path, delimiter, first):
    lines = [["question", "answer"], *([row["question"], row["answer"]] for row in ROWS)]
    text = "".join(delimiter.join(f'"{field}"' for field in line) + "\n" for line in lines)
    path = tmp_path / "a.csv"
    path.write_text(f"sep={delimiter}\n{text}" if first else text, encoding="utf-8")
    assert rows(path) == ROWS


def test_a_header_repeated_where_files_were_joined_is_no_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(CSV + CSV + "question , answer\n" + "x,9\n", encoding="utf-8")
    found = records(path)
    assert [record.values for record in found] == [*ROWS, *ROWS, {"question": "x", "answer": "9"}]
    assert [record.number for record in found] == [2, 3, 4, 6, 7, 8, 10]


def test_an_index_column_without_a_name_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(",question, answer\n0,q,1\n")
    assert rows(path) == [{"": "0", "question": "q", "answer": "1"}]


def test_a_column_that_is_named_twice_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,question\na,1,b\n")
    assert refusal(path) == "the header names the column 'question' twice"


@pytest.mark.parametrize("block_rows", [1, 4096])
def test_a_csv_cut_in_a_quoted_field_names_the_row_and_the_end(tmp_path, monkeypatch, block_rows):
    monkeypatch.setattr("rlctl.prepare.sources.BLOCK_ROWS", block_rows)
    path = tmp_path / "a.csv"
    path.write_text('q,a\n"one",1\n"tw\no,2\nthree,3\n')
    good, bad = records(path)
    assert good.values == {"q": "one", "a": "1"}
    assert (bad.number, bad.values) == (3, None)
    assert "a quoted field is still open where the file ends, in line 5" in bad.problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 and more", "Parquet"),
        (b"PK\x03\x04 and more", "a zip archive"),
        (b"BZh91AY&SY", "bzip2"),
    ],
)
def test_other_formats_under_a_text_name_are_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert message in refusal(path)


def test_sub_directories_are_read_in_order_of_name(tmp_path):
    for name in ("b/z.jsonl", "a.jsonl", "b/c/y.csv", ".cache/x.jsonl", "readme.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FORMS["a.csv" if name.endswith("csv") else "a.jsonl"], encoding="utf-8")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    found = [str(source.path.relative_to(tmp_path)) for source in find_sources([str(tmp_path)])]
    assert found == ["a.jsonl", "b/c/y.csv", "b/z.jsonl"]


def test_sub_directories_of_several_splits_are_not_mixed(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.jsonl").write_text(FORMS["a.jsonl"], encoding="utf-8")
    with pytest.raises(UsageError, match="has the splits test, train"):
        find_sources([str(tmp_path)])
    assert len(find_sources([str(tmp_path / "train")])) == 1


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("train.jsonl", "test.jsonl"), r"splits test, train"),
        (("train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl"), r"splits train, validation"),
        (("train/a.jsonl", "dev_v2.jsonl"), r"splits dev, train"),
    ],
)
def test_files_of_several_splits_are_not_mixed(tmp_path, names, words):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FORMS["a.jsonl"], encoding="utf-8")
    with pytest.raises(UsageError, match=words) as caught:
        find_sources([str(tmp_path)])
    assert str(tmp_path / "train") in caught.value.fix


def test_files_that_only_begin_like_a_split_are_read(tmp_path):
    for name in ("training.jsonl", "tests.jsonl", "train.jsonl"):
        (tmp_path / name).write_text(FORMS["a.jsonl"], encoding="utf-8")
    assert len(find_sources([str(tmp_path)])) == 3


def test_what_lies_beside_the_rows_is_no_data(tmp_path):
    for name in ("manifest.json", "quarantine.jsonl", "dataset_infos.json"):
        (tmp_path / name).write_text('{"format": 1}', encoding="utf-8")
    (tmp_path / "train.jsonl").write_text(FORMS["a.jsonl"], encoding="utf-8")
    assert [source.path.name for source in find_sources([str(tmp_path)])] == ["train.jsonl"]


def test_float32_columns_keep_their_digits(tmp_path):
    column = pa.array([0.1, 3.0, None, float("inf")], pa.float32())
    pq.write_table(pa.table({"answer": column, "other": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert [row["answer"] for row in rows(tmp_path / "a.parquet")] == [0.1, 3.0, None, float("inf")]


def test_lists_of_turns_are_rows(tmp_path):
    turns = [
        [
            {"from": "human", "value": f"{place} + 1?"},
            {"from": "assistant", "ground_truth": {"value": str(place + 1), "pass_at_n": 0.5}},
        ]
        for place in range(3)
    ]
    forms = {
        "whole.json": json.dumps(turns),
        "pretty.json": json.dumps(turns, indent=1),
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in turns),
    }
    for name, content in forms.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        read = [row for _, row, _ in read_rows(Source(tmp_path / name, "orz"))]
        assert [(row.question, row.ground_truth) for row in read] == [
            ("0 + 1?", "1"),
            ("1 + 1?", "2"),
            ("2 + 1?", "3"),
        ]
