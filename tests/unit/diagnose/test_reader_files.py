"""Files of users: names of metrics (`--map`), and readers of a framework's logs (`--reader`)."""

import json
import re
from pathlib import Path

import pytest

from rlctl.api import diagnose
from rlctl.cli.app import run as run_command
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.readers.reader_files import BUILT_IN
from rlctl.errors import UsageError
from rlctl.metric_names import ELSEWHERE, METRICS

EVERYTHING = frozenset({*METRICS, *ELSEWHERE})
MAP = '"solved" = "critic/score/mean"\n"ent" = "actor/entropy"\n"my_step" = "step"\n'
READER = r"""
framework = "my-trainer"
marks = ["opt/"]

[[rows]]
contains = "update "
line = '^<update (?P<step>\d+)> (?P<body>.*)'
figures = "bars"

[names]
"opt/gnorm" = "actor/grad_norm"
"solved" = { key = "critic/score/mean", meaning = "share of solved problems", scale = 0.01 }

[patterns]
'score/(.+)' = 'reward/\1/mean'

[facts]
has_critic = false
"""


@pytest.fixture
def read(tmp_path):
    def read_with(text, reader="", map_=""):
        files = {"log": text, "reader": reader, "map": map_}
        for name, content in files.items():
            (tmp_path / f"{name}.toml").write_text(content)
        readers = BUILT_IN.with_files(
            [tmp_path / "reader.toml"] if reader else [], [tmp_path / "map.toml"] if map_ else []
        )
        return read_run(tmp_path / "log.toml", EVERYTHING, readers=readers)

    return read_with


@pytest.mark.parametrize(
    "text",
    [
        "".join(json.dumps({"my_step": n, "solved": n / 8, "ent": 0.5}) + "\n" for n in (1, 2, 3)),
        "my_step,solved,ent\n1,0.125,0.5\n2,0.25,0.5\n3,0.375,0.5\n",
        "".join(f"step {n}: solved={n / 8} ent={0.5}\n" for n in (1, 2, 3)),
        "| my_step | solved | ent |\n|---|---|---|\n"
        + "".join(f"| {n} | {n / 8} | 0.5 |\n" for n in (1, 2, 3)),
    ],
)
def test_names_of_ones_own_are_read_in_every_format(read, text):
    run = read(text, map_=MAP)
    assert run.table.steps.tolist() == [1, 2, 3]
    assert run.table.series("critic/score/mean").values.tolist() == [0.125, 0.25, 0.375]
    assert run.origins["critic/score/mean"].name == "solved"
    with pytest.raises(UsageError):
        read(text)


def test_a_mapped_name_replaces_the_frameworks_meaning(read):
    text = "step:3 - actor/entropy:0.5 - my/entropy:0.25 - perf/mfu/actor:0.25\n"
    run = read(text, map_='"my/entropy" = "actor/entropy"\n')
    assert (run.framework, run.table.series("actor/entropy").values.tolist()) == ("verl", [0.25])


def test_a_reader_of_ones_own(read):
    text = "".join(f"<update {n}> opt/gnorm: {n}.5 | solved {10 * n} | score/format: 0.5\n" for n in (1, 2))
    run = read(f"started\n{text}done\n", reader=READER)
    assert (run.framework, run.table.steps.tolist()) == ("my-trainer", [1, 2])
    assert run.table.series("actor/grad_norm").values.tolist() == [1.5, 2.5]
    assert run.table.series("critic/score/mean").values.tolist() == pytest.approx([0.1, 0.2])
    assert run.origins["critic/score/mean"].meaning == "share of solved problems"
    assert "reward/format/mean" in run.table.columns
    assert run.facts.has_critic is False


def test_a_step_that_is_no_number_and_a_line_without_figures(read):
    form = 'framework = "x"\nuses_rlctl_names = true\n[[rows]]\nline = "^(?P<step>[^ ]+) *(?P<body>.*)?"\n'
    run = read("one thing\n2 actor/entropy=0.5\n3\n", reader=f'{form}figures = "pairs"\n')
    assert (run.table.steps.tolist(), run.framework) == ([2], "x")


def test_a_reader_extends_a_built_in_one(read):
    run = read("{'loss': 0.5, 'mine': 0.25, 'reward_std': 0.1, 'step': 4}\n",
               reader='framework = "trl"\nextends = "trl"\n[names]\n"mine" = "actor/entropy"\n')  # fmt: skip
    assert run.table.columns.keys() >= {"actor/entropy", "actor/pg_loss", "reward/group_std"}


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("framework = ", "not valid TOML"),
        ("marks = []", "framework: "),
        ('framework = "x"\nframe = 1', "frame: "),
        ('framework = "x"\nmarks = ["("]', "marks.0: .*regular expression"),
        ('framework = "x"\nextends = "nobody"', "no built-in reader `nobody`.*one of verl"),
        ('framework = "x"\n[names]\n"a" = "critic/score/maen"', "did you mean critic/score/mean"),
        ('framework = "x"\n[[rows]]\nline = "a"\nfigures = "words"', "rows.0.figures: .*'pairs'"),
        ('framework = "x"\n[[rows]]\nline = "a"\nfigures = "list"', "rows.0: .*step"),
        ('framework = "x"\n[[rows]]\nline = "(?P<step>1)"\nfigures = "pairs"', "rows.0: .*body"),
        ('framework = "x"\n[facts]\nhas_critics = true', "facts.has_critics"),
        ('framework = "x"\n[implied_facts]\na = {no_fact = 1}', "implied_facts.*no_fact"),
        ('framework = "x"\n[implied_facts]\n"(" = {has_critic = true}', "implied_facts"),
        ('framework = "x"\n[[other_quantities]]\npattern = "a"', "other_quantities.0.setting"),
        ('framework = "x"\n[patterns]\n"a" = \'reward/\\1/mean\'', "patterns: a has fewer groups"),
        ('framework = "x"\n[config]\nlr = 3', "config"),
        (
            'framework = "x"\n[[rows]]\nline = "(?P<step>1)(?P<body>.)"\nfigures = "pairs"\n'
            'clocks = {a = "eval/step"}',
            "rows.0: `clocks`",
        ),
    ],
)
def test_a_wrong_reader_is_refused_with_its_place(read, reader, said):
    with pytest.raises(UsageError, match=said) as refused:
        read("step 1: loss=0.5 reward=0.5\n", reader=reader)
    assert "reader.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("map_", "said"), [('"a" = "no/such"', "no metric `no/such`"), ("[a]\nb = 1", r"a\.key: ")]
)
def test_a_wrong_map_is_refused(read, map_, said):
    with pytest.raises(UsageError, match=said):
        read("step 1: loss=0.5 reward=0.5\n", map_=map_)


def test_both_in_python(tmp_path):
    (tmp_path / "map.toml").write_text(MAP)
    (tmp_path / "reader.toml").write_text(READER)
    (tmp_path / "run.log").write_text("<update 1> opt/gnorm: 1.5 | ent: 0.5\n")
    found = diagnose(
        tmp_path / "run.log", maps=tmp_path / "map.toml", readers=[str(tmp_path / "reader.toml")]
    )
    assert found.run.framework == "my-trainer"
    assert found.run.table.series("actor/entropy").values.tolist() == [0.5]


def test_both_on_the_command_line(tmp_path, capsys):
    (tmp_path / "map.toml").write_text(MAP)
    (tmp_path / "reader.toml").write_text(READER)
    (tmp_path / "run.log").write_text("<update 1> opt/gnorm: 1.5 | ent: 0.5\n")
    options = ["--map", str(tmp_path / "map.toml"), "--reader", str(tmp_path / "reader.toml")]
    assert run_command(["diagnose", str(tmp_path / "run.log"), *options]) == 0
    assert "logged by my-trainer" in capsys.readouterr().out
    assert run_command(["diagnose", str(tmp_path / "run.log"), "--map", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_examples_of_the_page_are_read(read):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "diagnose-inputs.md").read_text(
        encoding="utf-8"
    )
    map_, reader = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    run = read("<update 3> opt/gnorm: 0.5 | solved 25\n", reader=reader)
    assert (run.framework, run.table.steps.tolist()) == ("my-trainer", [3])
    assert run.table.series("critic/score/mean").values.tolist() == [0.25]
    run = read('{"env/update": 7, "env/solved": 0.5, "policy/ent": 0.25}\n', map_=map_)
    assert (run.table.steps.tolist(), len(run.table.columns)) == ([7], 2)
