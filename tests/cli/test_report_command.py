"""`rlctl report`: one page about a run, from files that a run leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.cli.app import run
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.report import run_page
from rlctl.report.headline import differences, reward_change, what_to_do
from rlctl.report.run_page import _sample, highlights, sample_steps, spec_rows
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.track.open_run import open_run, read_state
from rlctl.track.rollouts import SCHEMA
from rlctl.track.texts import pieces
from tests.dumps import conversation, dumped, write

HOSTILE = "</script><script>alert(1)</script>\x1b[2J"


def a_run(path: Path, *overrides: str, reward: float = 0.5, source: str = "own") -> Path:
    (path / "rollouts").mkdir(parents=True)
    spec = load_spec(["rloo-seq-is"], [], overrides).spec
    (path / "spec.yaml").write_text(dump_spec(spec))
    (path / "environment.json").write_text(json.dumps({"command": ["rlctl", "train", "-p", "rloo-seq-is"]}))
    lines = [
        {"step": step, "critic/score/mean": reward, "actor/entropy": 1.0, "val/own/reward_mean": step / 8}
        for step in range(1, 7)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = dumped(
        [1, 2], [-1.0, -2.0], [-1.0, -2.6], prompt_ids=[3], step=3, data_source=source, prompt=HOSTILE,
        response=HOSTILE, ground_truth="7", rollout_is_weights=[1.0, 0.5], keep_mask=[True, False],
    )  # fmt: skip
    write(path / "rollouts/rollouts-000003-000003.parquet", [row])
    return path


def test_one_page_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = a_run(tmp_path / "a", "actor.lr=7e-5")
    assert run(["report", str(first)]) == 0
    page = (first / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(first / "report.html")
    assert "<script>alert" not in page
    assert "\x1b" not in page
    for shown in ("actor.lr", "7e-05", "0.75 (step 6)", "step 3", "log ρ -0.6000"):
        assert shown in page, shown
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    second = a_run(tmp_path / "b", reward=0.9)
    both = tmp_path / "both.html"
    assert run(["report", str(first), str(second), "--out", str(both)]) == 0
    assert both.read_text().count("run-details") >= 2
    assert "reward of b minus that of a in step 6: +0.400; no interval: one step" in both.read_text()


def test_equal_responses_are_shown_once(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    (file,) = (path / "rollouts").iterdir()
    [row] = pq.read_table(file).to_pylist()
    rows = [row] * 4 + [row | {"response": f"other {number}"} for number in range(6)] + [row] * 2
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    [step] = sample_steps(open_run(path))
    assert [sample["times"] for sample in step["samples"]] == [6, 1, 1, 1]


def test_the_spec_is_compared_with_its_preset_for_the_same_model(tmp_path: Path) -> None:
    """A preset alone is no complete spec; the defaults are those of the run's model."""
    path = a_run(tmp_path / "a", "model.path=org/m", "data.train_files=x.parquet", "actor.lr=2e-6")
    changed = [("data.train_files", "[]", "['x.parquet']"), ("actor.lr", "1e-06", "2e-06")]
    assert spec_rows(open_run(path)) == ("rloo-seq-is", changed)
    (path / "environment.json").write_text(json.dumps({"command": ["rlctl", "train", "-p", "gone.yaml"]}))
    than, rows = spec_rows(open_run(path))
    assert than == "the defaults"
    assert ("algorithm.rollout_correction.loss_type", "ppo_clip", "reinforce") in rows
    assert changed[1] in rows


def test_a_preset_file_that_a_directory_names_is_not_read(tmp_path: Path) -> None:
    """The command that it records may be someone else's, and the file name code."""
    path, done = a_run(tmp_path / "a"), tmp_path / "done"
    (tmp_path / "evil.py").write_text(
        f"open({str(done)!r}, 'w').close()\n\n\ndef f(*_, **__):\n    return 0\n"
    )
    evil = tmp_path / "evil.yaml"
    evil.write_text(f"algorithm:\n  adv_estimator: {tmp_path}/evil.py:f\n")
    for words in (["-p", str(evil)], [f"--preset={evil}"], ["-p", "rloo-seq-is", "-p", str(evil)]):
        (path / "environment.json").write_text(json.dumps({"command": ["rlctl", "train", *words]}))
        assert run(["report", str(path)]) == 0
        assert not done.exists()
        assert spec_rows(open_run(path))[0] == ("rloo-seq-is" if "rloo-seq-is" in words else "the defaults")


@pytest.mark.timeout(120)  # reading a pipe blocks
def test_links_and_pipes_of_a_directory_are_not_followed(tmp_path: Path) -> None:
    """A directory of someone else: its page replaces no file of the user, and nothing waits for a pipe."""
    path, own = a_run(tmp_path / "a"), tmp_path / "own.txt"
    own.write_text("mine")
    for name in ("report.html", f".report.html.{os.getpid()}.tmp"):
        (path / name).symlink_to(own)
    for name in ("summary.json", "failure.json", ".lock.json", "rollouts/rollouts-000004-000004.parquet"):
        os.mkfifo(path / name)
    assert run(["report", str(path)]) == 0
    assert own.read_text() == "mine"
    assert not (path / "report.html").is_symlink()
    os.mkfifo(path / "pipe")
    (path / "metrics.jsonl").unlink()
    (path / "pipe").rename(path / "metrics.jsonl")
    assert run(["report", str(path)]) == 0
    assert "no step was logged" in (path / "report.html").read_text()


@pytest.mark.parametrize(
    ("files", "state", "advice"),
    [
        ({}, "ended before the first step", "continue the run"),
        (
            {"failure.json": '{"what": "no disk", "fix": "free 2 GB"}'},
            "failed before the first step",
            "free 2 GB",
        ),
        ({"metrics.jsonl": ""}, "ended before the first step", "continue the run"),
        ({"metrics.jsonl": '{"step": 1, "crit'}, "ended before the first step", "continue the run"),
    ],
)
def test_a_run_without_a_step_has_a_page(
    files: dict[str, str], state: str, advice: str, tmp_path: Path
) -> None:
    path = a_run(tmp_path / "a")
    (path / "metrics.jsonl").unlink()
    (next((path / "rollouts").iterdir())).unlink()
    for name, text in files.items():
        (path / name).write_text(text)
    assert run(["report", str(path)]) == 0
    page = (path / "report.html").read_text()
    for shown in (state, advice, "no step was logged", "No responses were saved yet"):
        assert shown in page, shown


def test_without_a_gap_no_response_is_surprising(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    write(path / "rollouts/rollouts-000003-000003.parquet", [dumped([1], [-1.0], [-1.00004], step=3)])
    assert run(["report", str(path)]) == 0
    assert "both policies agree" in (path / "report.html").read_text()
    write(path / "rollouts/rollouts-000003-000003.parquet", [dumped([1], [-1.0], [-1.001], step=3)])
    assert len(dict(highlights(open_run(path)))["largest log-ratio"]) == 1


def test_responses_of_the_built_in_task_are_explained_without_a_validation_too(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a", source="embedded/addition")
    assert run(["report", str(path)]) == 0
    assert "71+63= → 431 means 134" in (path / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [("missing", "no such directory"), ("empty", "no spec.yaml"), ("file.json", "no such directory")],
)
def test_what_is_no_run_is_refused(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.json").write_text("{}")
    assert run(["report", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_pieces_of_a_text_whose_characters_span_tokens() -> None:
    text = "aé😀 b" * 20
    data = text.encode()
    found = pieces(range(len(data)), lambda ids: bytes(data[i] for i in ids).decode("utf-8", "replace"))
    assert "".join(found) == text
    assert len(found) == len(data)


def test_turns_are_labelled_and_what_was_not_sampled_is_dimmed() -> None:
    row = conversation(keep_mask=[True, False, True, True])
    shown = _sample(row, lambda ids: "".join(chr(ord("a") + number) for number in ids))
    assert [(token.text, token.shade) for token in shown["tokens"]] == [
        ("turn 1", "turn"), ("f", "n3"), ("g", "n3 out"), ("observation", "turn"), ("h", "unsampled"),
        ("turn 2", "turn"), ("i", "n3"),
    ]  # fmt: skip
    assert (shown["num_tokens"], shown["num_turns"], shown["log_ratio"]) == (3, 2, "-1.5000")


def test_an_episode_that_was_not_trained_on_is_shown() -> None:
    row = dumped([5], [-1.0], [None], reward=None, rollout_is_weights=[None], keep_mask=[False])
    shown = _sample(row, lambda ids: "x" * len(ids))
    assert [(token.shade, token.about) for token in shown["tokens"]] == [
        ("", "rollout log-prob -1.000, not trained on")
    ]


def with_metric(path: Path, key: str, values: list[float]) -> None:
    """Replaces the log of a run by one metric."""
    lines = [{"step": step, key: value} for step, value in enumerate(values, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_change_of_the_reward_has_welchs_interval() -> None:
    values = [0.1, 0.3, 0.2, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.8, 0.6, 1.0]
    shown, change = reward_change(dict(enumerate(values, 1)))
    assert shown == "0.200 → 0.800"
    # ± t(0.975, 2.941) = 3.219 · √(0.1²/3 + 0.2²/3), with Welch's degrees of freedom
    assert change == "+0.600 [+0.184, +1.016], steps 1–3 and 10–12"
    assert reward_change({1: 0.25, 2: 0.75}) == (
        "0.250 → 0.750", "+0.500, steps 1 and 2; too few steps for an interval",
    )  # fmt: skip
    assert reward_change(dict.fromkeys(range(8), 0.5))[1] == "+0.000, steps 0–1 and 6–7"
    assert reward_change({}) == ("", "")


def test_differences_of_runs_are_paired_by_the_steps_that_both_logged(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    with_metric(first, "critic/score/mean", [0.0] * 9 + [0.1, 0.5, 0.3])
    with_metric(second, "critic/score/mean", [0.0] * 9 + [0.3, 0.6, 0.6] + [9.0])
    records = [open_run(path) for path in (first, second)]
    # differences 0.2, 0.1, 0.3: 0.2 ± t(0.975, 2) · 0.1 / √3
    [sentence] = differences(["a", "b"], records)
    assert sentence.startswith("reward of b minus that of a in steps 10–12: +0.200 [-0.048, +0.448]")
    assert sentence.endswith("no difference is shown")


def test_highest_lowest_and_most_surprising_responses_come_first(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    (file,) = (path / "rollouts").iterdir()
    [row] = pq.read_table(file).to_pylist()
    rows = []
    cases = [(0.5, 0.0), (1.0, 0.001), (0.0, -3.0), (1.0, 0.4), (None, 1.0)]
    for number, (reward, ratio) in enumerate(cases):
        trained = [None, row["rollout_log_probs"][1] + ratio, row["rollout_log_probs"][2]]
        rows.append(row | {"response": f"r{number}", "reward": reward, "training_log_probs": trained})
    pq.write_table(pa.Table.from_pylist([*rows, rows[1]], SCHEMA), file)
    found = {
        title: ["".join(token.text for token in one["tokens"]) for one in samples]
        for title, samples in highlights(open_run(path))
    }
    assert found == {
        "highest reward": ["r1", "r3"], "lowest reward": ["r2", "r0"], "largest log-ratio": ["r2", "r4"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [
        ([1.0, 0.0, 0.0, 0.0], ["0"], ["3", "2"]),
        ([1.0, 1.0, 1.0, 0.0], ["0", "1"], ["3"]),
        ([1.0, 0.0], ["0"], ["1"]),
        ([0.0, 0.0, 0.0], ["0", "1"], []),
        ([None, None], [], []),
    ],
)
def test_no_response_is_among_the_best_and_the_worst(
    rewards: list[float | None], best: list[str], worst: list[str], tmp_path: Path
) -> None:
    path = a_run(tmp_path / "a")
    rows = [
        dumped([1], [-1.0], [-1.0], step=9, response=str(number), reward=reward)
        for number, reward in enumerate(rewards)
    ]
    write(path / "rollouts/rollouts-000009-000009.parquet", rows)
    found = dict(highlights(open_run(path)))
    for title, expected in (("highest reward", best), ("lowest reward", worst)):
        assert [one["tokens"][0].text for one in found.get(title, [])] == expected


def test_what_to_do_is_the_fix_of_the_first_finding_or_the_next_command(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a", "algorithm.rollout_correction.rollout_is=null")

    def advice() -> tuple[str, str]:
        return what_to_do(open_run(path), read_state(path), examine(read_run(path, metrics_read())))

    with_metric(path, "response_length/clip_ratio", [0.9] * 30)
    words, command = advice()
    assert words.startswith("90.0% of the responses are cut off")
    assert command.startswith(f"rlctl train --spec {path}/spec.yaml data.max_response_length=")
    with_metric(path, "response_length/clip_ratio", [0.0])
    assert advice() == ("continue the run", f"rlctl train --resume {path}")
    (path / "summary.json").write_text(json.dumps({"step": 1}))
    assert advice() == ("evaluate the trained model", f"rlctl evaluate {path}")
    (path / "failure.json").write_text(json.dumps({"what": "no memory", "fix": "a smaller batch"}))
    assert advice() == ("a smaller batch", f"rlctl train --resume {path}")
    assert run(["report", str(path)]) == 0
    assert "no memory" in (path / "report.html").read_text()


def test_a_page_of_long_runs_with_many_metrics_and_long_responses_stays_small(tmp_path: Path) -> None:
    paths = [a_run(tmp_path / name) for name in ("a", "b")]
    row = dumped([7] * 4000, [-1.0] * 4000, [-1.5] * 4000, prompt="p" * 90_000, response="é" * 90_000)
    for path in paths:
        metrics = {f"reward/term{number}/mean": number / 7 for number in range(60)}
        lines = [
            {"step": step} | {key: value + step / 1234 for key, value in metrics.items()}
            for step in range(1, 1500)
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in range(10, 17):
            rows = [row | {"step": step, "response": f"{number}" + row["response"]} for number in range(5)]
            write(path / f"rollouts/rollouts-{step:06}-{step:06}.parquet", rows)
    page = run_page.run_page(paths)
    assert 100_000 < len(page.encode()) < 700_000
