"""Reading what training reads: this project's files, and verl's own."""

import datetime as dt
import json
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import BatchWriter, Message, Row, arrow_schema, batch_of, write_rows
from rlctl.errors import UsageError

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 41, "question": "1+1?", "answer": "#### 2"},
}


def write(path, rows, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def test_a_row_of_the_schema(tmp_path):
    path = write(tmp_path / "a.parquet", [ROW])
    (row,) = load_rows([path])
    assert row.prompt == (Message("user", "1+1?"),)
    assert (row.data_source, row.ground_truth, row.ability, row.style) == (
        "openai/gsm8k",
        "2",
        "math",
        "rule",
    )
    assert (row.split, row.index, row.where) == ("train", 41, f"{path}:1")


@pytest.mark.parametrize(
    "change",
    [
        {"agent_name": "tool_agent", "images": []},
        {"prompt": "1+1?"},
        {"extra_info": {"need_tools_kwargs": True}},
        {"extra_info": None},
        {"reward_model": {"ground_truth": 2}},
        {"ability": None},
    ],
)
def test_files_of_others(tmp_path, change):
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | change])])
    assert row.prompt == (Message("user", "1+1?"),)
    assert row.ground_truth == "2"
    assert row.index in {41, 0}


FOREIGN = {
    "split": "train",
    "index": 3,
    "difficulty": 0.5,
    "tags": ["a", None],
    "meta": {"level": "5", "when": dt.date(2024, 1, 2)},
    "price": Decimal("1.50"),
    "absent": None,
    "other": "not JSON",
}


def test_the_whole_extra_info_is_kept(tmp_path):
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"extra_info": FOREIGN}])])
    assert dict(row.extra) == FOREIGN | {
        "meta": {"level": "5", "when": "2024-01-02"},
        "price": "1.50",
    }
    json.dumps(row.extra)


def test_own_fields_come_back_from_their_text(tmp_path):
    extra = {
        "level": "é 5",
        "tags": [1, {"a": None}],
        "other": "mine",
        "index": "ignored",
        "split": "ignored",
    }
    row = Row("s", (Message("user", "1+1?"),), "2", index=41, question="1+1?", extra=extra)
    table = pa.Table.from_batches([batch_of([row], "train")])
    pq.write_table(table, tmp_path / "a.parquet")
    (read,) = load_rows([str(tmp_path / "a.parquet")])
    own = {"split": "train", "index": 41, "question": "1+1?", "answer": ""}
    assert dict(read.extra) == own | {"level": "é 5", "tags": [1, {"a": None}], "other": "mine"}
    again = pa.Table.from_batches([batch_of([read], "train")])
    assert again.column("extra_info").combine_chunks().field("other") == table.column(
        "extra_info"
    ).combine_chunks().field("other")


def test_without_own_fields_nothing_is_written(tmp_path):
    row = Row("s", (Message("user", "1+1?"),), "2")
    assert row.other == ""
    pq.write_table(pa.Table.from_batches([batch_of([row], "")]), tmp_path / "a.parquet")
    assert "other" not in load_rows([str(tmp_path / "a.parquet")])[0].extra


def test_a_ground_truth_with_fields_is_read_as_json(tmp_path):
    judged = {"style": "rule", "ground_truth": {"numbers": [2, 3, 4], "target": 24}}
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"reward_model": judged}])])
    assert json.loads(row.ground_truth) == judged["ground_truth"]


def test_only_the_three_columns_are_needed(tmp_path):
    slim = {name: ROW[name] for name in ("data_source", "prompt", "reward_model")}
    assert len(load_rows([write(tmp_path / "a.parquet", [slim, slim])])) == 2


def test_a_list_of_one_ground_truth_is_read_as_prepare_data_reads_it(tmp_path):
    for truths, read in ((["7"], "7"), (["7", "8"], '["7", "8"]')):
        judged = {"style": "rule", "ground_truth": truths}
        (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"reward_model": judged}])])
        assert row.ground_truth == read


REPLY = {"role": "assistant", "content": "The answer is"}


def test_a_prompt_that_ends_with_a_reply_is_refused_unless_it_is_to_be_continued(tmp_path):
    continued = ROW | {"prompt": [{"role": "user", "content": "1+1?"}, REPLY]}
    path = write(tmp_path / "a.parquet", [continued])
    with pytest.raises(UsageError, match="ends with a reply of the assistant") as caught:
        load_rows([path])
    assert caught.value.where == f"{path}:1"
    (row,) = load_rows([path], continue_final_message=True)
    assert row.prompt[-1] == Message("assistant", "The answer is")
    alone = write(tmp_path / "b.parquet", [ROW | {"prompt": [REPLY]}])
    with pytest.raises(UsageError, match="ends with a reply"):
        load_rows([alone], continue_final_message=True)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ROW | {"prompt": None}, "the prompt is null"),
        (ROW | {"prompt": []}, "no messages"),
        (ROW | {"prompt": [{"role": None, "content": "x"}]}, "no role"),
        (ROW | {"prompt": [{"role": "user", "content": None}]}, "content is null"),
        (ROW | {"data_source": None}, "data_source is null"),
        (ROW | {"reward_model": None}, "no column 'reward_model.ground_truth'"),
        (ROW | {"reward_model": {"style": "rule", "ground_truth": "['a' 'b']"}}, "without commas"),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, reason):
    path = write(tmp_path / "a.parquet", [ROW, ROW, bad])
    with pytest.raises(UsageError, match=reason) as caught:
        load_rows([path])
    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize(
    "column",
    [
        {"images": [{"bytes": b"x", "path": None}]},
        {"image": "a.png"},
        {"question_image": "a.png"},
        {"image_1": "a.jpg"},
        {"img_path": "a"},
        {"image_base64": "QQ=="},
        {"figure": b"\x89PNG\r\n"},
        {"figure": ["data:image/png;base64,QQ=="]},
        {"Video_url": "a.mp4"},
        {"audio": {"path": "a.wav"}},
        {"scan": {"bytes": b"x", "path": None}},
        {"scans": [{"bytes": b"x", "path": "a.png"}]},
        {"extra_info": {"index": 1, "images": [{"bytes": b"x", "path": None}]}},
        {"extra_info": {"index": 1, "scan": b"\x89PNG\r\n"}},
        {"prompt": [{"role": "user", "content": "<image>What?", "images": ["a.png"]}]},
    ],
)
def test_rows_with_pictures_or_sound_are_refused(tmp_path, column):
    path = write(tmp_path / "a.parquet", [ROW | column])
    with pytest.raises(UsageError, match="has pictures, videos or sound") as caught:
        load_rows([path])
    assert (caught.value.where, caught.value.exit_code) == (f"{path}:1", 2)


@pytest.mark.parametrize("kind", ["image", "image_url", "audio"])
def test_a_part_that_is_no_text_is_refused_with_an_empty_text_too(tmp_path, kind):
    parts = [{"type": kind, "text": ""}, {"type": "text", "text": "What is shown?"}]
    with pytest.raises(UsageError, match=f"is {kind}, not text"):
        load_rows([write(tmp_path / "a.parquet", [ROW | {"prompt": [{"role": "user", "content": parts}]}])])
    parts = [{"type": "text", "text": "What is"}, {"type": "input_text", "text": "shown?"}]
    path = write(tmp_path / "b.parquet", [ROW | {"prompt": [{"role": "user", "content": parts}]}])
    assert load_rows([path])[0].prompt[0].content == "What is\nshown?"


def test_nan_is_no_ground_truth(tmp_path):
    judged = {"style": "rule", "ground_truth": float("nan")}
    with pytest.raises(UsageError, match="ground_truth is nan"):
        load_rows([write(tmp_path / "a.parquet", [ROW | {"reward_model": judged}])])


def test_other_columns_join_extra_info_and_a_clash_is_an_error(tmp_path):
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"level": 3, "tests": [{"a": [1]}]}])])
    assert (row.extra["level"], row.extra["tests"], row.extra["index"]) == (3, [{"a": [1]}], 41)
    path = write(tmp_path / "b.parquet", [ROW | {"index": None}, ROW | {"index": 7}])
    with pytest.raises(UsageError, match="column 'index' and extra_info") as caught:
        load_rows([path])
    assert caught.value.where == f"{path}:2"


def test_a_row_may_lack_a_ground_truth(tmp_path):
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"reward_model": {"ground_truth": None}}])])
    assert row.ground_truth == ""


def test_a_missing_column_is_named_with_those_there(tmp_path):
    path = write(tmp_path / "a.parquet", [{"prompt": "x", "answer": "2"}])
    with pytest.raises(
        UsageError, match=r"columns data_source, reward_model missing \(it has prompt, answer\)"
    ):
        load_rows([path])


def test_a_prompt_of_the_wrong_type_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", [ROW | {"prompt": 7}])
    with pytest.raises(UsageError, match="the prompt is of type int"):
        load_rows([path])


def test_broken_empty_and_missing_files(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no footer")
    (tmp_path / "nothing.parquet").write_bytes(b"")
    write(tmp_path / "empty.parquet", [], pa.Table.from_pylist([ROW]).schema)
    for name, reason in [
        ("broken.parquet", "cannot be read as Parquet"),
        ("nothing.parquet", "cannot be read as Parquet"),
        ("empty.parquet", "no rows"),
        ("missing.parquet", "no such file"),
    ]:
        with pytest.raises(UsageError, match=reason) as caught:
            load_rows([str(tmp_path / name)])
        assert name in caught.value.where


def test_a_row_that_python_cannot_hold_is_named(tmp_path):
    table = pa.Table.from_pylist([ROW] * 5)
    days = pa.array([1, 2, 3, 10**8, 4], pa.int32()).cast(pa.date32())
    extra = pa.StructArray.from_arrays([days], ["day"])
    pq.write_table(table.set_column(4, "extra_info", extra), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="date value") as caught:
        load_rows([str(tmp_path / "a.parquet")])
    assert caught.value.where == f"{tmp_path / 'a.parquet'}:4"


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_pylist([ROW])
    pq.write_table(table.append_column("data_source", pa.array(["other"])), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="'data_source' twice"):
        load_rows([str(tmp_path / "a.parquet")])


def test_directories(tmp_path):
    with pytest.raises(UsageError, match=r"no \.parquet file"):
        load_rows([str(tmp_path)])
    write(tmp_path / "b.parquet", [ROW | {"data_source": "b"}])
    write(tmp_path / "a.parquet", [ROW | {"data_source": "a"}])
    assert [row.data_source for row in load_rows([str(tmp_path)])] == ["a", "b"]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [("train", "test"), ("train-0", "validation-0"), ("train", "val"), ("train_v2", "test_v2")],
)
def test_training_data_is_not_read_with_held_out_data(tmp_path, train, held_out):
    write(tmp_path / f"{train}.parquet", [ROW])
    write(tmp_path / f"{held_out}.parquet", [ROW])
    with pytest.raises(UsageError, match="mix") as caught:
        load_rows([str(tmp_path)])
    assert str(tmp_path / "train") in caught.value.fix


def test_shards_are_named_by_a_pattern(tmp_path):
    for split, names in {"train": "ab", "test": "c"}.items():
        for place, name in enumerate(names):
            write(tmp_path / f"{split}-{place:05}-of-{len(names):05}.parquet", [ROW | {"data_source": name}])
    assert [row.data_source for row in load_rows([str(tmp_path / "train-*.parquet")])] == ["a", "b"]
    with pytest.raises(UsageError, match="mix"):
        load_rows([str(tmp_path)])
    with pytest.raises(UsageError, match="no such file"):
        load_rows([str(tmp_path / "val-*.parquet")])


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.mark.parametrize("as_text", [True, False])
def test_columns_of_episodes(tmp_path, as_text):
    tools = [TOOL, {"type": "function", "function": {"name": "now", "description": "the time"}}]
    given = {"environment": "words.py:Words", "tools": json.dumps(tools) if as_text else tools}
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | given])])
    assert row.environment == "words.py:Words"
    assert row.tools == tools  # without the nulls that Parquet adds
    with_other = BatchWriter(tmp_path / "b.parquet", arrow_schema(with_other=True))
    with with_other as batches:
        batches.add(batch_of([row]))
    (again,) = load_rows([str(tmp_path / "b.parquet")])
    assert (again.environment, again.tools) == (row.environment, row.tools)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": 3}, "environment is of type int, not a name"),
        ({"tools": "add"}, "tools is not JSON"),
        ({"tools": [{"name": "add"}]}, "tools is not a list of {type: function"),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "a tool call of the prompt is not",
        ),
    ],
)
def test_columns_of_episodes_in_another_form(tmp_path, change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_rows([write(tmp_path / "a.parquet", [ROW | change])])


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_conversations_with_tools(tmp_path, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    prompt = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    (row,) = load_rows([write(tmp_path / "a.parquet", [ROW | {"prompt": prompt}])])
    assert row.prompt == (
        Message("user", "1+1?"),
        Message("assistant", "", row.prompt[1].other),
        Message("tool", "2"),
    )
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert row.prompt[1].fields == {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **called}]}
    write_rows(tmp_path / "b.parquet", "train", [row])
    assert load_rows([str(tmp_path / "b.parquet")])[0].prompt == row.prompt
