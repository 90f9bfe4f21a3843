"""What fails on the first row is refused before an engine starts, all of it at once."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.cli.app import run
from rlctl.run_spec.load import load_spec
from rlctl.train import first_row
from rlctl.train.first_row import FirstRow, check_first_row
from rlctl.train.preflight import check_inputs
from tests.own_model import save_tiny_qwen2

PLAIN = "def plain(response, ground_truth):\n    return float(response == ground_truth)\n"
BATCHED = "def batched(completions, ground_truth, **kwargs):\n    return [1.0 for _ in completions]\n"
WANTS_HARD = "def hard(completions, hardness):\n    return [float(h) for h in hardness]\n"
BREAKS = "def breaks(response, ground_truth):\n    return 1.0 / 0.0\n"
TEXT = "def text(response):\n    return 'good'\n"
WANTS_MORE = "def more(response, weather):\n    return 1.0\n"
MISSING = "import no_such_package\ndef f(response):\n    return 1.0\n"
GAME = """
class Game:
    def reset(self, secret: str) -> str:
        return "guess"
    def guess(self, number: int) -> str:
        \"\"\"Guesses.

        Args:
            number: the guess
        \"\"\"
        return "no"
    def get_reward(self) -> float:
        return 0.0
"""
NOT_READ = GAME.replace("secret: str", "level: int")
ANY = GAME.replace("secret: str", "**row")
NO_RESET = "class Game:\n    def get_reward(self) -> float:\n        return 0.0\n"
NO_DOC = GAME.replace("            number: the guess\n", "")
AGENT = """
import json, urllib.request

def agent(task, base_url, api_key):
    body = json.dumps({"model": "policy", "messages": task["prompt"]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers))
"""
TWO = "async def agent(task):\n    return 1.0\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return Path(save_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny", context=512))


def row_of(**changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"secret": "4", "difficulty": 3},
    }
    return row | changes


@pytest.fixture
def train(model, tmp_path) -> Any:
    """The values of a run on rows; files with users' code can be written beside it."""

    def values(*more: str, rows: list[dict[str, Any]] | None = None, **files: str) -> list[str]:
        for name, code in files.items():
            (tmp_path / f"{name}.py").write_text(code)
        data = tmp_path / "data.parquet"
        pq.write_table(pa.Table.from_pylist(rows or [row_of()] * 4), data)
        at = [value.replace("AT", str(tmp_path)) for value in more]
        return [f"model.path={model}", f"data.train_files={data}", "data.train_batch_size=4", *at]

    return values


def check(values: list[str]) -> FirstRow:
    spec = load_spec([], [], values).spec
    return check_first_row(spec, check_inputs(spec), starts=True)


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        (PLAIN, "plain", "gives the ground truth of the first row, '2', 1"),
        (BATCHED, "batched", "gives the ground truth of the first row, '2', 1"),
        ("def none(completions):\n    return [None]\n", "none", "does not grade the first row"),
    ],
)
def test_a_reward_that_works_is_said_to(code, name, says, train) -> None:
    found = check(train(f"reward.name=AT/own.py:{name}", own=code))
    assert found.problems == []
    assert any(says in line for line in found.checked)
    assert "What is 1 + 1?" in found.prompt


def test_rows_that_are_given_to_the_built_in_model_are_the_ones_that_are_checked(train) -> None:
    found = check(["model.path=embedded", *train("reward.name=AT/own.py:plain", own=PLAIN)[1:]])
    assert any("the ground truth of the first row, '2', 1" in line for line in found.checked)


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        (WANTS_HARD, "hard", "asks for the column 'hardness'"),
        (BREAKS, "breaks", "ZeroDivisionError"),
        (TEXT, "text", "not a number"),
        (WANTS_MORE, "more", "no value for the parameter `weather`"),
        (MISSING, "f", "no_such_package"),
        (PLAIN, "absent", "no such function"),
        ("import os\ndef f(response):\n    os._exit(3)\n", "f", "fails on the first row"),
    ],
)
def test_a_reward_that_cannot_work_is_an_error(code, name, says, train) -> None:
    [problem] = check(train(f"reward.name=AT/own.py:{name}", own=code)).problems
    assert (problem.severity, problem.key) == ("error", "reward.name")
    assert says in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    ("reward", "truth", "severity"),
    [("maths", "2", ""), ("maths", "a long sentence without a value, at all", "error"), ("exact", "yes", ""),
     ("multiple_choice", "17", "error"), ("countdown", "12", "error"), ("code", "print(1)", "error")],
)  # fmt: skip
def test_a_ground_truth_that_the_reward_cannot_read(reward, truth, severity, train) -> None:
    rows = [row_of(reward_model={"style": "rule", "ground_truth": truth})] * 4
    found = check(train(f"reward.name={reward}", rows=rows))
    assert {problem.severity for problem in found.problems} == ({severity} if severity else set())
    if severity:
        assert any(str(problem.where).endswith("data.parquet:1") for problem in found.problems)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (GAME, "a class with its own reward; tools: guess"),
        (ANY, "a class with its own reward; tools: guess"),
        (AGENT, "an agent function"),
    ],
)
def test_an_environment_is_described(code, says, train) -> None:
    kind = "agent" if code is AGENT else "Game"
    found = check(train(f"environment.name=AT/own.py:{kind}", "reward.terms=null", own=code))
    assert found.problems == []
    assert any(line.endswith(says) for line in found.checked)


def test_the_first_prompt_is_the_one_of_the_environment(train) -> None:
    values = train("environment.name=AT/own.py:Game", "reward.terms=null", own=GAME)
    found = check([*values, "data.max_prompt_length=500"])
    assert found.problems == []
    assert "What is 1 + 1?guess" in found.prompt
    assert '"name": "guess"' in found.prompt
    length = len(found.prompt.encode())  # a token is a byte
    assert any(f"has {length} tokens of at most 500" in line for line in found.checked)
    [problem] = check([*values, f"data.max_prompt_length={length - 1}"]).problems
    assert (problem.severity, problem.key) == ("warning", "data.max_prompt_length")
    assert str(length) in str(problem.fix)


def test_an_episode_that_cannot_begin_is_said_to(train) -> None:
    code = GAME.replace('return "guess"', "raise ConnectionError('no server')")
    found = check(train("environment.name=AT/own.py:Game", "reward.terms=null", own=code))
    [problem] = found.problems
    assert (problem.severity, problem.key) == ("warning", "environment.name")
    assert "no server" in problem.what


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (NOT_READ, "Game", "asks for the column 'level'"),
        (NO_RESET, "Game", "no method `reset`"),
        (NO_DOC, "Game", "no schema"),
        (TWO, "agent", "three arguments"),
    ],
)
def test_a_wrong_environment_is_an_error(code, kind, says, train) -> None:
    [problem] = check(train(f"environment.name=AT/own.py:{kind}", "reward.terms=null", own=code)).problems
    assert (problem.severity, problem.key) == ("error", "environment.name")
    assert says in problem.what


def test_a_taskset_that_is_not_installed(train, monkeypatch) -> None:
    values = train("environment.name=verifiers", "environment.params.taskset=no_such_taskset")
    spec = load_spec([], [], values).spec
    monkeypatch.setattr(first_row, "find_spec", lambda _: None)
    found = check_first_row(spec, starts=False)
    assert found.problems == []
    assert any("verifiers is not installed here" in line for line in found.unchecked)
    [problem] = check(values).problems
    assert problem.key == "environment.name"


def test_rows_that_are_not_the_first_are_read_too(train) -> None:
    rows = [row_of(), row_of(), row_of(reward_model={"style": "rule", "ground_truth": ""}), row_of()]
    [problem] = check(train("reward.name=maths", rows=rows)).problems
    assert "1 of 4 rows lack it" in problem.what
    assert str(problem.where).endswith(":3")


def test_rows_need_no_answer_where_the_environment_scores(train) -> None:
    rows = [row_of(reward_model={"style": "rule", "ground_truth": ""})] * 4
    found = check(train("environment.name=AT/own.py:Game", rows=rows, own=GAME))
    assert found.problems == []


def test_a_prompt_that_the_template_refuses(train) -> None:
    found = check(train("reward.name=maths", "data.chat_template_kwargs.no_such_switch=true"))
    assert [problem.key for problem in found.problems] == ["data.chat_template_kwargs"]


def test_all_errors_come_at_once_and_before_anything_starts(train, tmp_path, capsys, monkeypatch) -> None:
    """In the dry run and at the start: files, rows, reward and environment."""
    start = import_module("rlctl.train.start")
    monkeypatch.setattr(start, "start_run", lambda *_, **__: pytest.fail("it has started"))
    values = train(
        "reward.name=AT/own.py:breaks", "environment.name=AT/game.py:Game", own=BREAKS, game=NOT_READ
    )
    values += [f"data.val_files={tmp_path}/gone.parquet", "trainer.test_freq=1"]
    for dry_run in (["--dry-run"], []):
        assert run(["train", *values, *dry_run]) == 2
        shown = "".join(capsys.readouterr())
        for words in ("ZeroDivisionError", "'level'", "data.val_files: no such file"):
            assert words in shown


def test_a_data_set_of_the_hub_without_its_package(train, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    values = [value for value in train("reward.name=maths") if not value.startswith("data.train_files")]
    spec = load_spec([], [], [*values, "data.train_files=org/set"]).spec
    [problem] = check_first_row(spec, starts=False).problems
    assert (problem.key, problem.fix) == ("data.train_files", 'pip install "rlctl[datasets]"')


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_contradictions_of_the_spec_come_with_the_errors_of_rows(train, capsys, dry_run) -> None:
    terms = "reward.terms=[{name: AT/own.py:hard}, {name: AT/more.py:more}, {name: AT/own.py:breaks}]"
    values = train(terms, own=WANTS_HARD + BREAKS, more=WANTS_HARD.replace("hard", "more"))
    values += ["actor.ppo_mini_batch_size=3", "engine.name=none_such"]
    assert run(["train", *values, *dry_run]) == 2
    shown = "".join(capsys.readouterr())
    for words in ("ppo_mini_batch_size", "engine.", "the column 'hardness'", "the column 'moreness'"):
        assert words in shown, shown


def test_an_unreadable_value_of_the_data_hides_the_errors_of_rows(train, capsys) -> None:
    """They would be those of other files, or of another reward."""
    values = train("reward.name=AT/own.py:breaks", own=BREAKS)
    assert run(["train", *values, "data.train_files=3", "reward.nam=x", "--dry-run"]) == 2
    shown = "".join(capsys.readouterr())
    assert "reward.nam" in shown
    assert "ZeroDivisionError" not in shown


def test_models_that_are_elsewhere_are_listed_as_not_checked(train) -> None:
    values = [
        value for value in train("actor.use_kl_loss=true", "ref.path=org/ref") if "model.path" not in value
    ]
    spec = load_spec([], [], ["model.path=org/name", "reward.name=maths", *values]).spec
    found = check_first_row(spec, starts=False)
    assert found.problems == []
    unchecked = " ".join(found.unchecked)
    assert all(words in unchecked for words in ("the tokenizer of org/name", "ref.path: org/ref"))


def test_the_dry_run_is_short_and_says_first_whether_the_run_can_start(train, capsys) -> None:
    values = train("reward.name=maths")
    assert run(["train", *values, "-p", "grpo-token-is-multi-rs", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no errors: the run can start"
    assert [line.split()[0] for line in lines[1:4]] == ["peak", "one", "the"]
    assert len(lines) <= 40
    titles = [line.split(",")[0] for line in lines if line and not line.startswith(" ")]
    assert titles.index("Checked") < titles.index("Rollout correction")
    assert run(["train", *values, "-p", "grpo", "--dry-run"]) == 0
    assert "Rollout correction" not in capsys.readouterr().out  # nothing is corrected
    assert run(["train", *values, "reward.name=exact", "data.train_batch_size=8", "--dry-run"]) == 2
    assert capsys.readouterr().out.startswith("1 error: the run cannot start\n")
