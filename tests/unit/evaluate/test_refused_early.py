"""Mistakes in a request are refused before torch is imported, and comparisons of stored figures need none."""

import json
import os
import subprocess
import sys

import pytest

from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.evaluate.scores import summarise
from rlctl.run_spec.rollout import RewardSpec
from tests.unit.evaluate.runs import make_run

PROGRAM = """
import contextlib, io, json, sys
from rlctl.cli.app import run
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps({"code": code, "loaded": loaded, "out": out.getvalue(), "err": err.getvalue()}))
"""


def told(*command_lines):
    """Exit code, what was imported, and the output of each command line, one after another in one process."""
    lines = [list(map(str, arguments)) for arguments in command_lines]
    lines = [line if line[:1] == ["reward"] else ["evaluate", *line] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def places(task, tmp_path_factory):
    place = tmp_path_factory.mktemp("early")
    bad = place / "bad.jsonl"
    bad.write_text('{"question": "1+1?", "answer": null}\n')
    (place / "broken.parquet").write_bytes(b"PAR1")
    return {
        "RUN": make_run(place / "run", task),
        "MODEL": task.model_dir,
        "VAL": task.val_file,
        "BAD": bad,
        "BROKEN": place / "broken.parquet",
        "EMPTY": place,
    }


MISTAKES = [
    (["nowhere"], 2, "does not exist here"),
    ([], 2, "Missing argument"),
    (["RUN", "--k", "9"], 2, "pass@9 cannot be estimated"),
    (["RUN", "--temperature", "0"], 2, "temperature 0"),
    (["RUN", "--top-p", "0"], 2, "leaves no token"),
    (["RUN", "--data", "nowhere.parquet"], 2, "no such file"),
    (["RUN", "--data", "gsm9k"], 2, "gsm8k"),
    (["RUN", "--data", "BROKEN"], 2, "cannot be read as Parquet"),
    (["RUN", "--data", "BAD"], 2, "asks for an answer (ground_truth), and no row has one"),
    (["RUN", "--out", "RUN"], 2, "not empty"),
    (["RUN", "--reward", "nonesuch"], 2, "no such reward"),
    (["RUN", "--reward", "nowhere.py:f"], 2, "no such file"),
    (["RUN", "--max-response-length", "100000"], 2, "no tokens for a prompt"),
    (["MODEL", "--data", "VAL", "--max-response-length", "100000"], 2, "no tokens for a prompt"),
    (["no/such/model", "--data", "VAL"], 2, "no such directory"),
    (["nobody/no-such-model", "--data", "VAL"], 4, "unset HF_HUB_OFFLINE"),
    (["MODEL", "--data", "gsm8k", "--benchmarks-dir", "EMPTY"], 4, "hf download openai/gsm8k"),
    (["RUN", "--regrade"], 2, "not an evaluation"),
    (["compare", "RUN", "RUN"], 2, "not an evaluation"),
    (["reward", "test", "nonesuch", "--data", "VAL"], 2, "neither a spec nor a grader"),
    (["reward", "test", "maths", "--data", "nowhere.parquet"], 2, "no such file"),
    (["reward", "test", "maths", "--data", "BROKEN"], 2, "cannot be read as Parquet"),
]


def test_mistakes_are_refused_without_torch(places):
    lines = [[places.get(argument, argument) for argument in arguments] for arguments, _, _ in MISTAKES]
    for (arguments, code, words), result in zip(MISTAKES, told(*lines), strict=True):
        said = " ".join(result["err"].split())
        assert (result["code"], result["loaded"]) == (code, []), (arguments, said)
        assert words in said, arguments
        assert "secret" not in said
    assert not (places["RUN"] / "evaluations").exists()


def test_stored_figures_are_compared_without_torch(make_samples, tmp_path):
    about = {
        "model": {"path": "m", "run_dir": None, "step": None, "sha256": None, "template_sha256": None},
        "data": {"files": ["d.parquet"], "num_overlong_prompts": 0},
        "sampling": {"n": 2, "seed": 1, "greedy": False, "temperature": 1.0, "top_p": 1.0}
        | {"max_response_length": 9, "engine": "hf", "dtype": "fp32"},
    }
    for name, rewards in (("a", [[1.0, 0.0], [0.0, 0.0]]), ("b", [[1.0, 1.0], [0.0, 1.0]])):
        samples = make_samples("x", rewards)
        write_evaluation(
            tmp_path / name,
            Evaluation(about, RewardSpec(), summarise(samples, [1], 2), [], 0.0, (0.0, 1.0)),
            samples,
            page=False,
        )
    [result] = told(["compare", tmp_path / "a", tmp_path / "b"])
    assert (result["code"], result["loaded"]) == (0, [])
    assert "2 shared questions" in result["out"]


def test_benchmarks_are_listed_without_torch():
    as_json, as_text = told(["list", "--json"], ["list"])
    assert as_json["code"] == as_text["code"] == 0
    assert as_json["loaded"] == as_text["loaded"] == []
    names = {entry["name"] for entry in json.loads(as_json["out"])}
    assert {"gsm8k", "math500", "aime24", "aime25", "amc23", "mmlu"} <= names
    assert all(name in as_text["out"] for name in names)
