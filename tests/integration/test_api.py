"""The Python API: typed, lazy, and the same as the command line."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rlctl
from tests import runs

SMALL = dict(item.split("=", 1) for item in runs.SMALL) | {
    "trainer.total_training_steps": 2,
    "trainer.logger": [],
}


def test_importing_it_and_reading_a_spec_load_no_torch() -> None:
    code = """
        import sys
        import rlctl
        assert set(rlctl.__all__) <= set(dir(rlctl))
        spec = rlctl.load_spec("rloo-seq-is", {"actor.lr": 1e-4, "rollout.n": 4})
        assert (spec.actor.lr, spec.rollout.n) == (1e-4, 4)
        rlctl.open_run, rlctl.diagnose, rlctl.grade
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_types_are_there_for_everything_exported() -> None:
    package = Path(rlctl.__file__).parent
    assert (package / "py.typed").is_file()
    stub = (package / "__init__.pyi").read_text()
    [exported] = [node for node in ast.parse(stub).body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(exported.value) == rlctl.__all__


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(AttributeError, match="load_spec"):
        rlctl.tran  # noqa: B018


def test_a_bad_spec_raises_every_problem() -> None:
    with pytest.raises(rlctl.RlctlError) as caught:
        rlctl.load_spec("rloo-seq-is", {"actor.lrr": 1, "rollout.n": 0})
    assert "actor.lr" in str(caught.value)
    assert "rollout.n" in str(caught.value)


def test_warnings_of_a_spec_are_warnings() -> None:
    with pytest.warns(UserWarning, match=r"actor\.lr"):
        rlctl.load_spec(
            "rloo-seq-is", {"model.path": "some/model", "data.train_files": ["x"], "actor.lr": 0.5}
        )


@pytest.mark.usefixtures("embedded")
def test_two_runs_in_one_process_are_the_command_lines(tmp_path: Path) -> None:
    steps: list[tuple[int, float]] = []
    spec = rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.run_dir": str(tmp_path / "one")})
    run = rlctl.train(spec, callbacks=[lambda step, metrics: steps.append((step, metrics["actor/pg_loss"]))])
    assert [step for step, _ in steps] == [1, 2]
    assert gc.get_freeze_count() == 0  # the search for garbage includes the caller's objects again
    table = run.metrics()
    assert table["step"].to_pylist() == [1, 2]
    assert table["actor/pg_loss"].to_pylist() == [loss for _, loss in steps]
    assert run.spec.rollout.n == spec.rollout.n
    assert len(run.checkpoints) == 1
    assert (run.checkpoints[0] / "model" / "config.json").is_file()

    again = rlctl.train(rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.run_dir": str(tmp_path / "two")}))
    by_hand = runs.train(tmp_path / "three", "trainer.total_training_steps=2", "--preset", "rloo-seq-is")
    for other in (again, rlctl.open_run(by_hand)):
        assert other.metrics()["actor/grad_norm"] == table["actor/grad_norm"]

    rollouts = run.rollouts()
    assert set(rollouts["step"].to_pylist()) == {1, 2}
    assert run.rollouts(step=2).num_rows == rollouts.num_rows // 2
    diagnosis = rlctl.diagnose(run)
    assert diagnosis.findings is not None
    evaluation = rlctl.evaluate(run, n=2, limit=4, out=tmp_path / "evaluation")
    assert evaluation.path == tmp_path / "evaluation"
    assert evaluation.results


def test_a_callback_that_raises_ends_the_run(tmp_path: Path, embedded: Path) -> None:
    def refuse(step: int, metrics: object) -> None:
        raise KeyError("on purpose")

    spec = rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.run_dir": str(tmp_path / "run")})
    with pytest.raises(KeyError, match="on purpose"):
        rlctl.train(spec, callbacks=[refuse])


@pytest.mark.usefixtures("embedded")
def test_an_interrupted_run_is_saved_and_no_result(tmp_path: Path) -> None:
    """A loop over settings would otherwise go on with the next one."""

    def interrupt(step: int, metrics: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    spec = rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.run_dir": str(tmp_path / "run")})
    with pytest.raises(KeyboardInterrupt):
        rlctl.train(spec, callbacks=interrupt)
    run = rlctl.open_run(tmp_path / "run")
    assert (run.state, run.reason, len(run.checkpoints)) == ("interrupted", None, 1)
    assert rlctl.train(spec, resume=run).state == "finished"


@pytest.mark.usefixtures("embedded")
def test_a_thread_inside_an_event_loop_can_train(tmp_path: Path) -> None:
    """Signals can be handled in the main thread only."""
    spec = rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.run_dir": str(tmp_path / "run")})

    async def main() -> rlctl.RunRecord:
        return await asyncio.to_thread(rlctl.train, spec)

    assert asyncio.run(main()).state == "finished"


@pytest.mark.usefixtures("embedded")
def test_a_script_that_every_rank_would_run_is_told_so(tmp_path: Path) -> None:
    values = SMALL | {"trainer.n_gpus_per_node": 2, "trainer.run_dir": str(tmp_path / "run")}
    script = tmp_path / "script.py"
    script.write_text(f"import rlctl\nrlctl.train(rlctl.load_spec('rloo-seq-is', {values!r}))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "every rank imports this script" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_callbacks_are_refused_where_they_cannot_be_called(tmp_path: Path) -> None:
    spec = rlctl.load_spec("rloo-seq-is", SMALL | {"trainer.n_gpus_per_node": 2})
    with pytest.raises(rlctl.RlctlError, match="torchrun"):
        rlctl.train(spec, callbacks=[print])


def test_grading() -> None:
    responses = [r"It is \boxed{42}", "no idea", "the answer is 41"]
    assert rlctl.grade("maths", responses, ["42"] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(rlctl.RlctlError, match="2 responses and 1 ground truths \\(give"):
        rlctl.grade("maths", ["1", "2"], ["1"])


def test_a_grader_that_fails_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def grade(response, ground_truth):\n    return 1.0 / len(response)\n")
    with pytest.warns(UserWarning, match=r"(?s)1 of 2 responses could not.*ZeroDivisionError"):
        assert rlctl.grade(f"{file}:grade", ["", "ab"], ["x", "y"]) == [None, 0.5]


def test_a_response_that_ends_its_grading_scores_as_in_training(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n\n\ndef grade(response, ground_truth):\n"
        "    os._exit(1) if response == 'crash' else None\n    return 1.0\n"
    )
    assert rlctl.grade(f"{file}:grade", ["a", "crash"], ["x", "y"]) == [1.0, 0.0]


@pytest.mark.parametrize("damage", ["missing", "middle"])
def test_a_run_that_cannot_be_read_says_why(tmp_path: Path, damage: str) -> None:
    with pytest.raises(rlctl.RlctlError, match="not a run directory"):
        rlctl.open_run(tmp_path)
    (tmp_path / "spec.yaml").write_text("rollout:\n  n: 4\n")
    if damage == "middle":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(rlctl.RlctlError, match="cannot be read" if damage == "missing" else "2: not a step"):
        rlctl.open_run(tmp_path).metrics()


def test_damaged_rollouts_are_named(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("rollout:\n  n: 4\n")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "rollouts-000001-000002.parquet").write_bytes(b"PAR1cut off")
    with pytest.raises(rlctl.RlctlError, match=r"cannot be read: .*rollouts-000001-000002\.parquet"):
        rlctl.open_run(tmp_path).rollouts()


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("rollout:\n  n: 4\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": "NaN"}\n{"step": 2, "b": 2.0}\n{"step": 3, "a')
    table = rlctl.open_run(tmp_path).metrics()
    assert table["step"].to_pylist() == [1, 2]
    assert table["b"].to_pylist() == [None, 2.0]


def test_a_last_line_cut_inside_a_character_and_names_with_line_separators(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("rollout:\n  n: 4\n")
    named = '{"step": 1, "val/a\u2028b/reward_mean": 1.0}\n'.encode()
    (tmp_path / "metrics.jsonl").write_bytes(named + '{"step": 2, "val/é'.encode()[:-1])
    assert [row["step"] for row in rlctl.open_run(tmp_path).rows()] == [1]
