"""Any readable file is data wherever rows are read, and no column of it is lost."""

import gzip
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from rlctl.data.read import load_rows
from rlctl.errors import UsageError
from rlctl.evaluate.questions import load_questions
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.data_files import local_files, read_any
from rlctl.prepare.needs import asked_by, check_needs
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import LAYOUTS, Recipe, recognise
from rlctl.prepare.request import PrepareRequest
from rlctl.reward.pool import GradingPool
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.rollout import RewardSpec, RewardTerm
from tests.unit.prepare.helpers import write_jsonl
from tests.unit.prepare.test_recipes import RECORDS

ROWS = [
    {"question": f"{i} + 1?", "answer": str(i + 1), "level": "easy", "meta": {"source": ["a", str(i)]}}
    for i in range(5)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def write(path, rows=ROWS):
    suffix = path.name.partition(".")[2]
    table = pa.Table.from_pylist(rows)
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix in {"arrow", "feather"}:
        pyarrow.feather.write_feather(
            table, path, compression="lz4" if suffix == "feather" else "uncompressed"
        )
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix in {"csv", "tsv"}:
        separator = "\t" if suffix == "tsv" else ";"
        lines = [
            [*rows[0]],
            *([json.dumps(v) if isinstance(v, dict) else str(v) for v in r.values()] for r in rows),
        ]
        quoted = (separator.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in lines)
        path.write_text("\n".join(quoted))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    return str(path)


SUFFIXES = ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "arrow", "feather"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_of_every_format(tmp_path, suffix):
    notes = []
    rows = read_any([write(tmp_path / f"sums.{suffix}")], note=notes.append)
    assert [row.ground_truth for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row.question for row in rows] == [row["question"] for row in ROWS]
    first = 2 if suffix in {"csv", "tsv"} else 1
    assert rows[3].where == f"sums.{suffix}:{first + 3}", "messages name the source, not the cache"
    meta = json.loads(rows[3].extra["meta"]) if suffix in {"csv", "tsv"} else rows[3].extra["meta"]
    assert (rows[3].extra["level"], meta) == ("easy", {"source": ["a", "3"]})
    assert "prompt: 'question' (--prompt-key), answer: 'answer' (--answer-key)" in notes[0]
    assert "in extra_info: level, meta" in notes[0]


def test_directories_patterns_and_prepared_files_together(tmp_path):
    (tmp_path / "d").mkdir()
    write(tmp_path / "d/a.jsonl")
    write(tmp_path / "d/b.csv")
    prepare(PrepareRequest((str(tmp_path / "d/a.jsonl"),), tmp_path / "out", val_fraction=0.0))
    names = [str(tmp_path / "d"), str(tmp_path / "out"), str(tmp_path / "d" / "*.csv")]
    assert len(read_any(names)) == 20
    assert local_files([names[1]], split="train") == [names[1]]


def test_it_is_prepared_once_by_content(tmp_path, cache):
    name = write(tmp_path / "a.jsonl")
    (file,) = local_files([name], split="train")
    stamp = (tmp_path / file).stat().st_mtime_ns
    assert local_files([name], split="test") == [file]
    (tmp_path / "other").mkdir()
    assert local_files([write(tmp_path / "other/a.jsonl")], split="train") == [file], (
        "the same bytes elsewhere"
    )
    assert (tmp_path / file).stat().st_mtime_ns == stamp
    write(tmp_path / "a.jsonl", ROWS[:3])
    assert local_files([name], split="train") != [file]
    assert len(read_any([name])) == 3
    (changed,) = local_files([name], split="train")
    (tmp_path / changed).write_bytes(b"damaged")
    assert len(read_any([name])) == 3, "a damaged entry is built again"
    assert {path.suffix for path in cache.iterdir()} == {"", ".lock"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_column_of_every_layout_reaches_extra_info(tmp_path, name):
    record, _ = RECORDS[name]
    more = {"Depth": 3, "nested": {"a": [1, None]}, "uuid": "u-1"}
    assert recognise(record | more) == name
    (row,) = read_any([str(write_jsonl(tmp_path / "in.jsonl", [record | more]))])
    assert {key: row.extra[key] for key in more} == more
    in_row = {"prompt", "question", "answer", "data_source", "reward_model", "extra_info", "ability"}
    in_row |= {"messages", "conversations", *LAYOUTS[name].in_truth}
    assert {key for key in record if key not in in_row} <= row.extra.keys()


def test_a_column_and_a_field_of_one_name_and_other_values_clash(tmp_path):
    row = {"prompt": "1?", "answer": "1", "level": 1, "extra_info": {"level": 2}}
    path = write_jsonl(tmp_path / "a.jsonl", [row | {"extra_info": {"level": 1}}, row])
    with pytest.raises(
        UsageError, match=r"a.jsonl:2: column 'level' and extra_info.level have different values"
    ):
        read_any([str(path)])
    path = write_jsonl(tmp_path / "b.jsonl", [{"Question": "1?", "QUESTION": "2?", "answer": "1"}])
    with pytest.raises(UsageError, match="'Question' and 'QUESTION' differ only in case"):
        read_any([str(path)])
    path = tmp_path / "c.csv"
    path.write_text("question,answer,ANSWER\n1?,1,2\n")
    with pytest.raises(UsageError, match=r"c.csv:2: the columns 'answer' and 'ANSWER' differ only in case"):
        read_any([str(path)])
    assert not list(tmp_path.glob("cache/datasets/*/*.parquet")), "nothing was written"


def test_columns_without_a_name_are_kept_apart(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,,\n1?,1,x,y\n2?,2,,z\n")
    rows = read_any([str(path)])
    assert [row.extra["column_4"] for row in rows] == ["y", "z"]
    assert rows[0].extra["column_3"] == "x"


@pytest.mark.parametrize("prompt", ["question", "problem", "prompt", "instruction", "input", "query"])
@pytest.mark.parametrize(
    "answer",
    ["answer", "solution", "final_answer", "expected_answer", "completion", "output", "label", "target"],
)
def test_usual_names_in_any_case(prompt, answer):
    for change in (str, str.upper, str.title, lambda name: f" {name} "):
        record = {change(prompt): "1 + 1?", change(answer): "2", "Level": "easy"}
        row = Recipe(recognise(record)).resolve().to_row(record, "f", 0)
        assert (row.question, row.ground_truth, row.extra["Level"]) == ("1 + 1?", "2", "easy")


def test_prompt_and_completion_of_conversations():
    record = {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    row = Recipe(recognise(record)).resolve().to_row(record, "f", 0)
    assert (row.question, row.ground_truth) == ("1 + 1?", "2")


GAMES = [{"prompt": "Play.", "seed": seed} for seed in range(40)]


def test_rows_without_answers(tmp_path):
    name = str(write_jsonl(tmp_path / "games.jsonl", GAMES))
    rows = read_any([name])
    assert [(row.ground_truth, row.extra["seed"]) for row in rows] == [("", seed) for seed in range(40)]
    assert len(load_questions([name]).rows) == 40
    check_needs(rows, RewardSpec(terms=[]), EnvironmentSpec())
    check_needs(rows, RewardSpec(), EnvironmentSpec(name="guess_number"))  # its own reward counts
    with pytest.raises(UsageError, match=r"the reward `auto` asks for an answer .* no row has one") as caught:
        check_needs(rows, RewardSpec())
    assert caught.value.where == "games.jsonl:1"
    some = [*rows[:3], replace(rows[3], ground_truth="4")]
    with pytest.raises(UsageError, match=r"`exact` asks for an answer .* 3 of 4 rows lack it"):
        check_needs(some, RewardSpec(terms=[RewardTerm(name="exact")]), EnvironmentSpec(name="guess_number"))


def test_a_mixed_input_of_prepare_data_leaves_rows_without_answers_out(tmp_path):
    source = write_jsonl(
        tmp_path / "a.jsonl", [*ROWS, {"question": "Open?", "answer": None}, {"question": "x"}]
    )
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", val_fraction=0.0))
    assert (summary.counts["train"], summary.counts["placeholders_dropped"]) == (5, 2)
    assert summary.report["columns"]["carried"] == ["level", "meta"]
    assert len(read_any([str(source)])) == 7, "a run decides by its reward"


REWARDS = """
def columns(completions, level, answer, other=1, **kwargs): return [0.0] * len(completions)
def plain(response, extra_info): return 0.0
def truth(solution_str, ground_truth): return 0.0
def optional(response, ground_truth=None): return 0.0
def anything(**kwargs): return 0.0
"""


def test_what_a_function_asks_for_is_in_every_row(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    names = ("columns", "plain", "truth", "optional", "anything")
    asked = {name: asked_by(RewardTerm(name=f"{file}:{name}")) for name in names}
    assert asked == {
        "columns": ("answer", "level"),
        "plain": (),
        "truth": ("ground_truth",),
        "optional": (),
        "anything": (),
    }
    rows = read_any([write(tmp_path / "a.jsonl", [*ROWS, {"question": "No level?", "answer": "1"}])])
    check_needs(rows[:5], RewardSpec(name=f"{file}:columns"))
    with pytest.raises(UsageError, match="asks for the column 'level', and 1 of 6 rows lack it") as caught:
        check_needs(rows, RewardSpec(name=f"{file}:columns"))
    assert (caught.value.where, caught.value.exit_code) == ("a.jsonl:6", 2)
    by_source = RewardSpec(by_source={"a.jsonl": f"{file}:columns"})
    with pytest.raises(UsageError, match="'level'"):
        check_needs(rows, by_source)
    check_needs(rows, RewardSpec(by_source={"b": f"{file}:columns"}))


def test_a_function_is_asked_once_until_its_file_changes(tmp_path, monkeypatch):
    """A run checks its rows before it starts and again when all are read."""
    started = []

    class Counted(GradingPool):
        def __init__(self, name, *args, **options):
            started.append(name)
            super().__init__(name, *args, **options)

    monkeypatch.setattr("rlctl.prepare.needs.GradingPool", Counted)
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    truth = RewardTerm(name=f"{file}:truth")
    assert asked_by(truth) == asked_by(truth) == ("ground_truth",)
    assert len(started) == 1
    file.write_text(REWARDS.replace("def truth(solution_str, ground_truth)", "def truth(solution_str)"))
    assert asked_by(truth) == ()
    assert len(started) == 2


def test_what_reset_asks_for_is_in_every_row(tmp_path):
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self, seed, prompt, board=None, **row): ...\n")
    environment = EnvironmentSpec(name=f"{file}:Game")
    rows = read_any([str(write_jsonl(tmp_path / "games.jsonl", [*GAMES, {"prompt": "Play."}]))])
    check_needs(rows[:40], RewardSpec(terms=[]), environment)
    with pytest.raises(
        UsageError, match=r"`reset` of .*Game asks for the column 'seed', and 1 of 41"
    ) as caught:
        check_needs(rows, RewardSpec(terms=[]), environment)
    assert caught.value.where == "games.jsonl:41"


def test_rows_of_one_prompt_are_split_by_row(tmp_path):
    source = str(write_jsonl(tmp_path / "games.jsonl", GAMES))
    summary = prepare(PrepareRequest((source,), tmp_path / "out", val_size=7, leakage="drop"))
    assert (summary.counts["train"], summary.counts["test"], summary.report["duplicates"]["rows"]) == (
        33,
        7,
        0,
    )


def test_rows_of_one_prompt_that_only_an_id_tells_apart_are_tasks(tmp_path):
    source = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "-", "idx": i} for i in range(20)])
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", val_size=5))
    assert (summary.counts["train"], summary.counts["test"]) == (15, 5)
    assert not [one for one in check(CheckRequest((str(source),))).findings if one.code == "duplicates"]


@pytest.mark.parametrize("name", ["id", "ID", "index", "idx", "uuid"])
def test_a_unique_id_does_not_make_rows_different(tmp_path, name):
    rows = [{"prompt": f"{i % 10} + 1?", "answer": i % 10 + 1, name: f"r{i}"} for i in range(30)]
    source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    summary = prepare(PrepareRequest((source,), tmp_path / "out", duplicates="keep"))
    assert summary.report["duplicates"]["rows"] == 20
    (finding,) = (one for one in check(CheckRequest((source,))).findings if one.code == "duplicates")
    assert finding.count == 20
    rows = [row | {name: i % 15} for i, row in enumerate(rows)]  # no longer unique: 30 rows, 30 combinations
    source = str(write_jsonl(tmp_path / "b.jsonl", rows))
    assert prepare(PrepareRequest((source,), tmp_path / "b")).report["duplicates"]["rows"] == 0


def test_rows_that_differ_in_any_column_are_different(tmp_path):
    rows = [{"prompt": f"{i % 10} + 1?", "answer": i % 10 + 1, "schema": {"t": i}} for i in range(30)]
    summary = prepare(PrepareRequest((str(write_jsonl(tmp_path / "a.jsonl", rows)),), tmp_path / "out"))
    assert summary.report["duplicates"] == {"rows": 0, "word_for_word": 0, "conflicting": 0}


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ([100] * 5, 20, 100),  # none is not a split
        ([100] * 5, 260, 300),
        ([100] * 5, 240, 200),
        ([1] * 50, 7, 7),
        ([40, 1, 1, 1, 1], 3, 3),
        ([7], 3, 0),
    ],
)
def test_prompts_stay_whole_and_the_nearest_size_is_said(tmp_path, sizes, wanted, expected):
    rows = [
        {"prompt": f"Game {game}", "seed": seed} for game, size in enumerate(sizes) for seed in range(size)
    ]
    if len(sizes) == 1:
        rows += [{"prompt": "Other", "seed": 0}] * 1
        expected = 1
    source = str(write_jsonl(tmp_path / "a.jsonl", rows))
    summary = prepare(PrepareRequest((source,), tmp_path / "out", val_size=wanted, near_duplicates="off"))
    assert summary.counts["test"] == expected
    said = [one for one in summary.report["findings"] if one["code"] == "split-size"]
    assert bool(said) == (expected != wanted)
    train, test = (load_rows([str(tmp_path / "out" / f"{split}.parquet")]) for split in ("train", "test"))
    assert not {row.question for row in train} & {row.question for row in test}


def test_a_broken_quote_far_down_is_named(tmp_path):
    lines = [f"{i} + 1?,{i + 1}" for i in range(9_500)]
    lines[8_998] = '"open quote,5'
    path = tmp_path / "big.csv"
    path.write_text("question,answer\n" + "\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=r"big.csv:9000: a quoted field is still open .* a quote is missing"):
        local_files([str(path)], split="train")
    assert not list(tmp_path.glob("cache/datasets/*/*.parquet"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_pictures_are_refused_by_every_reader(tmp_path, suffix):
    rows = [row | {"image": "a.png"} for row in ROWS]
    name = write(tmp_path / f"in.{suffix}", rows)
    for read in (lambda: read_any([name]), lambda: load_questions([name])):
        with pytest.raises(UsageError, match="column 'image' has pictures") as caught:
            read()
        assert caught.value.exit_code == 2


def test_check_warns_of_data_without_answers_and_refuses_some(tmp_path):
    found = check(CheckRequest((str(write_jsonl(tmp_path / "a.jsonl", GAMES)),))).findings
    assert [(one.code, one.severity, one.count) for one in found if one.code != "no-grader"] == [
        ("no-answers", "warning", 40)
    ]
    found = check(
        CheckRequest((str(write_jsonl(tmp_path / "b.jsonl", [*ROWS, {"question": "x?"}])),))
    ).findings
    assert [(one.severity, one.count) for one in found if one.code == "placeholder"] == [("error", 1)]
