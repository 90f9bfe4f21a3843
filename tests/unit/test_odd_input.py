"""Text that is no path, number or step: a clear error (exit 2), never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.errors import SpecError
from rlctl.files import open_to_append
from rlctl.run_spec.load import load_spec

LONG = "x" * 5000
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", LONG, "--dry-run"],
        ["train", "-p", LONG],
        ["train", "--spec", LONG],
        ["train", f"{LONG}=1", "--dry-run"],
        ["train", "a\0b", "--dry-run"],
        ["samples", LONG],
        ["diagnose", LONG],
        ["import", LONG],
    ],
)
def test_a_very_long_argument_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(arguments) == 2
    assert "Traceback" not in "".join(capsys.readouterr())


def test_from_python_it_is_an_error_of_the_spec() -> None:
    with pytest.raises(SpecError):
        load_spec([LONG], [], [])
    with pytest.raises(SpecError):
        load_spec([], [], [LONG])


@pytest.mark.parametrize("number", ["1e-400", "-1e-999", "0.001e-330"])
@pytest.mark.parametrize("key", ["trainer.test_freq", "trainer.save_freq", "data.seed"])
def test_a_number_too_small_for_a_float_is_not_the_integer_0(number: str, key: str) -> None:
    with pytest.raises(SpecError) as failure:
        load_spec(["rloo-seq-is"], [], [f"{key}={number}"])
    assert key in str(failure.value)


@pytest.mark.parametrize("number", ["0e-400", "0.0", "-0.00e5"])
def test_a_written_0_is_0(number: str) -> None:
    assert load_spec(["rloo-seq-is"], [], [f"actor.entropy_coeff={number}"]).spec.actor.entropy_coeff == 0.0


@pytest.mark.parametrize("names", [["token_k1"] * 50_000, [f"name_{i}" for i in range(50_000)]])
def test_a_long_list_of_criteria_is_refused_without_comparing_them(names: list[str]) -> None:
    with pytest.raises(SpecError, match="50000 criteria; at most 32") as failure:
        load_spec(["rloo-seq-is"], [], [f"{CORRECTION}.rollout_rs={','.join(names)}"])
    assert len(str(failure.value)) < 1000


def test_a_file_that_grows_is_no_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "metrics.jsonl"
    target.write_text("theirs")
    link.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"), open_to_append(link):
        pass
    assert target.read_text() == "theirs"
    for _ in range(2):
        with open_to_append(tmp_path / "new") as file:
            file.write(b"line\n")
    assert (tmp_path / "new").read_text() == "line\nline\n"
