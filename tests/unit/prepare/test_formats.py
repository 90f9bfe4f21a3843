"""Other frameworks' columns: what is in them, and that nothing is lost on the way there and back."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data.schema import Message, Row, arrow_schema, batch_of
from rlctl.prepare.output import convert, schema
from rlctl.prepare.recipes import Recipe, recognise

ROWS = [
    Row(
        "openai/gsm8k",
        (Message("system", "Sys."), Message("user", f"Question {i}?\nBe brief.")),
        str(i),
        ability="math",
        style="code" if i == 2 else "rule",
        index=i,
        question=f"Question {i}?",
        answer=f"Because.\n#### {i}",
        extra={"level": i, "tests": ["é", {"a": None}]} if i else {},
    )
    for i in range(4)
]


def batch():
    return batch_of(ROWS, "train")


def through_parquet(table, path):
    pq.write_table(table, path)
    return pq.read_table(path).to_pylist()


def rows_of(records, names=("data_source", "prompt", "ability", "style", "index", "question", "answer")):
    recipe = Recipe(recognise(records[0])).resolve()
    rows = [recipe.to_row(record, "f", place) for place, record in enumerate(records)]
    return [
        [
            *(getattr(row, name) for name in names),
            row.ground_truth,
            row.other,
        ]
        for row in rows
    ]


def test_verl_is_ours():
    assert schema("verl", with_other=True) == arrow_schema(with_other=True)
    assert convert(batch(), "verl") == batch()


def test_trl_has_what_its_trainer_and_its_accuracy_reward_read(tmp_path):
    records = through_parquet(pa.Table.from_batches([convert(batch(), "trl")]), tmp_path / "t.parquet")
    assert records[1]["prompt"] == [
        {"role": "system", "content": "Sys."},
        {"role": "user", "content": "Question 1?\nBe brief."},
    ]
    assert records[1]["solution"] == records[1]["ground_truth"] == "1"
    assert records[1]["data_source"] == "openai/gsm8k"


def test_there_and_back_through_trl_changes_nothing(tmp_path):
    table = pa.Table.from_batches([convert(batch(), "trl")])
    records = through_parquet(table, tmp_path / "t.parquet")
    assert recognise(records[0]) == "trl"
    assert rows_of(records) == rows_of(batch().to_pylist())
    assert rows_of(json.loads(json.dumps(records))) == rows_of(records)


def test_openrlhf_gets_chat_label_and_source(tmp_path):
    records = through_parquet(pa.Table.from_batches([convert(batch(), "openrlhf")]), tmp_path / "o.parquet")
    assert set(records[0]) == {"input", "label", "datasource"}
    assert records[3]["input"][0] == {"role": "system", "content": "Sys."}
    assert recognise(records[0]) == "openrlhf"
    names = ("data_source", "prompt", "index")
    back = [row[:4] for row in rows_of(records, names)]
    assert back == [row[:4] for row in rows_of(batch().to_pylist(), names)]


@pytest.mark.parametrize("to", ["verl", "trl", "openrlhf"])
def test_batches_of_any_slice_fit_the_schema(to):
    part = convert(batch().slice(1, 2), to)
    assert part.cast(schema(to, with_other=True)).to_pylist() == part.to_pylist()
    assert part.to_pylist() == convert(batch(), to).to_pylist()[1:3]
    assert convert(batch().slice(0, 0), to).num_rows == 0
