"""`rlctl environment test`: exit codes and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.data.schema import Message, Row, write_rows
from tests.unit.environment.templates import tokenizer_of

FILE = Path(__file__).with_name("broken.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "words.parquet"
    rows = [
        Row("words", (Message("user", "Guess."),), "x", extra={"word": word}) for word in ("pear", "plum")
    ]
    write_rows(path, "train", rows)
    return str(path)


def _test(name: str, *more: str) -> int:
    return run(["environment", "test", f"{FILE}:{name}", "--episodes", "8", *more])


def test_a_sound_environment(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _test("Sound", "--data", data, "--fail-on", "warning") == 0
    shown = capsys.readouterr().out
    assert '"name": "guess"' in shown
    assert "empty replies         2       0         0.00" in shown
    assert shown.endswith("nothing found\n")


def test_findings_end_with_code_3_only_if_asked(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _test("ToolRaises", "--data", data) == 0
    assert "warning: tool_raises  tool guess: LookupError" in capsys.readouterr().out
    assert _test("ToolRaises", "--data", data, "--fail-on", "critical") == 0
    assert _test("ToolRaises", "--data", data, "--fail-on", "warning", "--format", "json") == 3
    captured = capsys.readouterr().out
    document = json.loads(captured[captured.index("{\n") :])
    assert [finding["name"] for finding in document["findings"]] == ["tool_raises"]
    assert next(one["policy"] for one in document["policies"]) == "empty replies"


def test_rows_without_their_columns_are_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert _test("Sound", "--fail-on", "critical") == 3
    assert "missing 1 required positional argument: 'word'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "the class has no method `reset`"),
        ("UntypedTool", "tool hint has no schema"),
        ("NotThere", "NotThere"),
    ],
)
def test_what_cannot_be_built_is_usage(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _test(name) == 2
    assert message in capsys.readouterr().err


def test_single_turns_are_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["environment", "test", "single_turn"]) == 2
    assert run(["environment", "test", "nothing-like-it"]) == 2
    assert "neither a spec nor an environment" in capsys.readouterr().err


def test_a_model_is_audited_in_colour(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    tokenizer_of("gemma").save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert _test("Sound", "--data", data, "--model", str(tmp_path), "--fail-on", "warning") == 3
    shown = capsys.readouterr().out
    assert "no_tool_role" in shown
    assert "after output of a tool: 1 sequence\x1b" in shown
    assert "\x1b[1;32m4<end_of_turn>" in shown
