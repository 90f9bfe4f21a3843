"""The files for lm-evaluation-harness, read as its tables, its W&B logger and its Zeno script read them."""

import json
import re
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.evaluate.scores import summarise
from rlctl.spec.rollout import RewardSpec

ABOUT = {
    "model": {"path": "org/model", "run_dir": None, "step": None, "sha256": "s", "template_sha256": "t"},
    "data": {
        "files": ["a.parquet"],
        "benchmarks": [
            {
                "name": "gsm8k",
                "dataset": "openai/gsm8k",
                "revision": "r",
                "split": "test",
                "num_questions": 1319,
            }
        ],
        "num_overlong_prompts": 0,
    },
    "sampling": {"n": 2, "seed": 1, "greedy": False, "temperature": 1.0, "top_p": 1.0}
    | {"max_response_length": 9, "engine": "hf", "dtype": "fp32"},
}


@pytest.fixture
def written(make_samples, tmp_path):
    """The model's directory, and all evaluated samples: two sources, one of them with a failure to grade."""
    first = make_samples("openai/gsm8k", [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [["1", "2"]] * 3)
    second = make_samples("my/own: data", [[1.0, None], [0.5, 0.0]], first=3, truncated=True, tokens=5)
    second[0] = replace(second[0], response="half \udc80 a pair")
    samples = [*first, *second]
    evaluation = Evaluation(ABOUT, RewardSpec(), summarise(samples, [1, 2], 2), [], 1.5)
    write_evaluation(tmp_path / "out", evaluation, samples)
    return tmp_path / "out" / "lm_eval" / "org__model", evaluation


def results_of(directory):
    [path] = directory.glob("results_*.json")
    return path, json.loads(path.read_text(encoding="utf-8"))


def lines_of(directory, task):
    [path] = directory.glob(f"samples_{task}_*.jsonl")
    return path, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_names_are_those_its_tools_look_for(written):
    directory, _ = written
    path, results = results_of(directory)
    date = path.name[path.name.rfind("_") + 1 :].removesuffix(".json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{6}", date)
    assert set(results["configs"]) == {"gsm8k", "my_own_data"}
    for task in results["configs"]:
        samples, _ = lines_of(directory, task)
        assert samples.name[samples.name.find("_") + 1 : samples.name.rfind("_")] == task
        assert samples.name[samples.name.rfind("_") + 1 :].removesuffix(".jsonl") == date


def test_figures_and_standard_errors_are_those_of_the_samples(written):
    directory, evaluation = written
    _, results = results_of(directory)
    checked = 0
    for task in results["configs"]:
        _, lines = lines_of(directory, task)
        row = results["results"][task]
        assert row["sample_len"] == len(lines) == results["n-samples"][task]["effective"]
        for metric in results["configs"][task]["metric_list"]:
            assert metric["aggregation"] == "mean"
            values = [line[metric["metric"]] for line in lines if line[metric["metric"]] is not None]
            assert row[f"{metric['metric']},none"] == pytest.approx(fmean(values))
            if len(values) > 1:
                error = stdev(values) / len(values) ** 0.5
                assert row[f"{metric['metric']}_stderr,none"] == pytest.approx(error, abs=1e-12)
            else:
                assert row[f"{metric['metric']}_stderr,none"] == "N/A"
            checked += 1
    assert checked == 6 + 5  # maj@2 is missing where no answers are read
    overall = evaluation.scores[-1]
    assert results["groups"]["overall"]["avg@2,none"] == overall.figures["avg"].value
    assert results["groups"]["overall"]["avg@2_stderr,none"] == overall.figures["avg"].stderr
    assert results["group_subtasks"]["overall"] == ["my_own_data", "gsm8k"]


def test_every_row_is_what_its_tables_can_print(written):
    """As `lm_eval.utils.make_table` goes through a result."""
    directory, _ = written
    _, results = results_of(directory)
    for column in ("results", "groups"):
        for name, row in results[column].items():
            assert name in results["versions"]
            assert name in results["n-shot"]
            assert name in results["group_subtasks"]
            metrics = {key: value for key, value in row.items() if key not in {"name", "alias", "sample_len"}}
            for key, value in metrics.items():
                metric, comma, kind = key.partition(",")
                assert (comma, kind) == (",", "none")
                assert isinstance(value, float) or (metric.endswith("_stderr") and value == "N/A")
                if not metric.endswith("_stderr"):
                    assert f"{metric}_stderr,none" in metrics
                    assert results["higher_is_better"][name][metric] in {True, False}
    assert isinstance(results["config"]["model_args"], dict)  # the Zeno script makes a name of it


def test_samples_have_what_its_viewers_read(written):
    directory, _ = written
    _, lines = lines_of(directory, "gsm8k")
    assert [line["doc_id"] for line in lines] == [0, 1, 2]
    first = lines[0]
    assert first["arguments"]["gen_args_0"]["arg_0"] == "question 0?"
    assert first["resps"] == [["response 0", "response 1"]]
    assert first["filtered_resps"][0] == "response 0"
    assert (first["target"], first["filter"]) == ("1", "none")
    assert set(first["metrics"]) <= first.keys()
    assert all(len(first[f"{part}_hash"]) == 64 for part in ("doc", "prompt", "target"))


def test_sources_with_names_too_long_for_files_are_told_apart(make_samples, tmp_path):
    samples = make_samples("数" * 300 + "a", [[1.0]]) + make_samples("数" * 300 + "b", [[0.0]], first=1)
    samples += make_samples("n" * 400, [[1.0]], first=2)
    evaluation = Evaluation(ABOUT, RewardSpec(), summarise(samples, [1], 2), [], 1.5)
    write_evaluation(tmp_path / "out", evaluation, samples)
    assert len(list((tmp_path / "out" / "lm_eval" / "org__model").glob("samples_*.jsonl"))) == 3
