"""Numbers of more digits than Python converts, or a column holds, wherever someone else writes a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.digits import whole_number
from rlctl.environment.guess_number import LOWER, GuessNumber
from rlctl.errors import UsageError
from rlctl.prepare.recipes import RowError, _chosen, _countdown
from rlctl.run_spec.machine import machine_of
from rlctl.track.open_run import chosen_step

MANY = "9" * 5000
LARGE = (str(2**63), "1" + "0" * 30, MANY)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("7", 7), ("-7", -7), ("007", 7), ("٣", 3), ("0" * 5000 + "7", 7), ("0" * 5000, 0)),
        *((str(2**63 - 1), 2**63 - 1), (str(1 - 2**63), 1 - 2**63)),
        *((text, None) for text in (*LARGE, f"-{MANY}", "", "-", "--7", "+7", "1_0", "1.0", "²", " 7", "a")),
    ],
)
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number


#: A log of steps 1, 2 and another one.
LOGS = {
    "verl.log": lambda step: "\n".join(
        f"step:{each} - actor/pg_loss:0.1 - critic/score/mean:0.2 - actor/entropy:0.3"
        for each in (1, 2, step)
    ),
    "sections.txt": lambda step: "\n".join(
        f"Step {each}:\n  reward: 0.1\n  loss: 0.2\n" for each in (1, 2, step)
    ),
    "table.txt": lambda step: f"metric | step 1 | step {step}\nreward | 0.1 | 0.2\nloss | 0.2 | 0.1\n",
    "by_step.json": lambda step: json.dumps({"loss": {"1": 1.0, "2": 1.0, step: 2.0}, "reward": {"1": 0.5}}),
    "lines.jsonl": lambda step: f'{{"step": 1, "reward": 0.5}}\n{{"step": {step}, "reward": 0.5}}\n',
    "columns.csv": lambda step: f"step,loss,reward\n1,0.1,0.2\n{step},0.1,0.2\n",
}


@pytest.mark.parametrize("step", LARGE, ids=["2^63", "10^30", "5000 digits"])
@pytest.mark.parametrize("name", LOGS)
def test_a_log_has_no_such_step(tmp_path: Path, capsys, name: str, step: str) -> None:
    (tmp_path / name).write_text(LOGS[name](step))
    code = run(["diagnose", str(tmp_path / name)])
    said = "".join(capsys.readouterr())
    assert "bug in rlctl" not in said
    assert code in {0, 2}


def test_a_step_of_a_command() -> None:
    assert chosen_step("none", "007") == 7
    for text in LARGE:
        with pytest.raises(UsageError, match="not a step") as refused:
            chosen_step("none", text)
        assert len(str(refused.value)) < 200


def test_a_policy_may_answer_with_any_number() -> None:
    game = GuessNumber()
    game.reset(5)
    assert [game.respond(text) for text in LARGE[:2]] == [LOWER, LOWER]
    game.reset(5)
    assert game.respond(MANY) == LOWER


def test_the_answer_to_a_choice_or_a_target() -> None:
    with pytest.raises(RowError, match="not one of the choices"):
        _chosen(MANY, ["A", "B"], ["x", "y"])
    assert _chosen("1", ["A", "B"], ["x", "y"]) == 1
    for target in LARGE:
        with pytest.raises(RowError, match="not a whole number"):
            _countdown({"numbers": [1, 2], "target": target}, "numbers", "target")


def test_a_machine_of_many_gpus() -> None:
    for name in (f"{MANY}xh100", f"{MANY}x8xh100", f"8x{MANY}xh100", "0xh100"):
        with pytest.raises(UsageError, match="no machine") as refused:
            machine_of(name)
        assert len(str(refused.value)) < 3000
    assert machine_of("2x8xh100").nodes == 2
