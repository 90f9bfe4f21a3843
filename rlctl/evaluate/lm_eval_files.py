"""Writes an evaluation in the format of lm-evaluation-harness, for its tables and viewers.

The files are `<model>/results_<time>.json` and one `samples_<task>_<time>.jsonl` per data source, with one
line per question. The layout is that of lm_eval 0.4.9 and later: metrics have the key `metric,filter`,
standard errors `metric_stderr,filter`, and the only filter is `none`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import OVERALL, Question, Score, questions_of

DIRECTORY = "lm_eval"
_FILTER = "none"
#: Maximum bytes of a task name, which becomes part of a file name.
_LONGEST_NAME = 150
#: Metrics for which lower is better.
_LOWER_IS_BETTER = ("truncated", "response_length")


def write_lm_eval(
    directory: Path, document: Mapping[str, Any], scores: Sequence[Score], samples: Sequence[EvalSample]
) -> None:
    """Writes the results file and the samples files below `directory`."""
    name = str(document["model"]["path"])
    sanitized = re.sub(r'["<>:/|\\?*\[\]]+', "__", name).lstrip(".")[-200:] or "model"
    place = directory / sanitized
    place.mkdir(parents=True)
    written = datetime.fromisoformat(document["written"])
    date = written.replace(tzinfo=None).isoformat(timespec="microseconds").replace(":", "-")
    n, tasks = int(document["sampling"]["n"]), _tasks(document, scores)
    by_task: dict[str, list[Question]] = {task: [] for task in tasks.values()}
    for question in questions_of(samples):
        by_task[tasks[question.data_source]].append(question)
    names = scores[0].figures if scores else ()
    ks = [int(name.removeprefix("pass@")) for name in names if name.startswith("pass@")]
    hashes = {}
    for task, questions in by_task.items():
        lines = [_line(question, document["sampling"], n, ks) for question in questions]
        parts = (line[f"{part}_hash"] for line in lines for part in ("doc", "prompt", "target"))
        hashes[task] = _hash("".join(parts))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (place / f"samples_{task}_{date}.jsonl").write_bytes(text.encode("utf-8", "replace"))
    results = _results(document, scores, tasks, n) | {
        "task_hashes": hashes,
        "date": written.timestamp(),
        "model_source": document["sampling"].get("engine", "rlctl"),
        "model_name": name,
        "model_name_sanitized": sanitized,
    }
    text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
    (place / f"results_{date}.json").write_bytes(text.encode("utf-8", "replace"))


def _tasks(document: Mapping[str, Any], scores: Sequence[Score]) -> dict[str, str]:
    """Data source → task name: the benchmark or source name, made unique and valid in file names."""
    known = {entry["dataset"]: entry["name"] for entry in document["data"].get("benchmarks", [])}
    tasks: dict[str, str] = {}
    for score in scores:
        if score.data_source == OVERALL and len(scores) > 1:
            continue
        name = known.get(score.data_source) or re.sub(r"[^\w.-]+", "_", score.data_source)
        name = name.encode("utf-8", "replace")[:_LONGEST_NAME].decode(errors="ignore") or "task"
        while name in tasks.values() or name == OVERALL:
            name += "+"
        tasks[score.data_source] = name
    return tasks


def _results(
    document: Mapping[str, Any], scores: Sequence[Score], tasks: Mapping[str, str], n: int
) -> dict[str, Any]:
    sampling, model = document["sampling"], document["model"]
    benchmarks = {entry["name"]: entry for entry in document["data"].get("benchmarks", [])}
    figures = {tasks.get(score.data_source, OVERALL): (score, _metrics(score, n)) for score in scores}
    results = {
        name: {"name": name, "alias": name, "sample_len": score.num_questions, **metrics}
        for name, (score, metrics) in figures.items()
    }
    higher = {
        name: {
            key.partition(",")[0]: not key.startswith(_LOWER_IS_BETTER)
            for key in metrics
            if "_stderr," not in key
        }
        for name, (_, metrics) in figures.items()
    }
    groups = {name: row for name, row in results.items() if name not in tasks.values()}
    return {
        "results": results,
        **({"groups": groups} if groups else {}),
        "group_subtasks": {name: list(tasks.values()) if name in groups else [] for name in results},
        "configs": {
            name: {
                "task": name,
                "dataset_path": benchmarks.get(name, {}).get("dataset", source),
                "test_split": benchmarks.get(name, {}).get("split"),
                "output_type": "generate_until",
                "num_fewshot": 0,
                "repeats": n,
                "generation_kwargs": _generation(sampling),
                "metric_list": [
                    {"metric": metric, "aggregation": "mean", "higher_is_better": is_higher}
                    for metric, is_higher in higher[name].items()
                ],
                "metadata": {"version": benchmarks.get(name, {}).get("revision", "N/A")},
            }
            for source, name in tasks.items()
        },
        "versions": {name: benchmarks.get(name, {}).get("revision", "N/A") for name in results},
        "n-shot": dict.fromkeys(results, 0),
        "higher_is_better": higher,
        "n-samples": {
            name: {
                "original": benchmarks.get(name, {}).get("num_questions", figures[name][0].num_questions),
                "effective": figures[name][0].num_questions,
            }
            for name in tasks.values()
        },
        "config": {
            "model": sampling.get("engine", "rlctl"),
            "model_args": {"pretrained": model["path"], "dtype": sampling.get("dtype")},
            "model_sha": model.get("sha256"),
            "model_dtype": sampling.get("dtype"),
            "gen_kwargs": _generation(sampling),
            "random_seed": sampling["seed"],
        },
        "rlctl_version": document["versions"]["rlctl"],
        "transformers_version": document["versions"]["transformers"],
        "chat_template_sha": model.get("template_sha256"),
        "total_evaluation_time_seconds": str(document["seconds"]),
    }


def _metrics(score: Score, n: int) -> dict[str, float | str]:
    """`metric,filter` and `metric_stderr,filter` of the metrics that have a value."""
    others = {"truncated": score.truncated_fraction, "response_length": score.mean_length}
    found: dict[str, float | str] = {}
    for metric, estimate in (score.figures | others).items():
        if estimate is not None:
            name = metric.replace("avg", f"avg@{n}")
            found[f"{name},{_FILTER}"] = float(estimate.value)
            found[f"{name}_stderr,{_FILTER}"] = "N/A" if estimate.stderr is None else estimate.stderr
    return found


def _line(question: Question, sampling: Mapping[str, Any], n: int, ks: Sequence[int]) -> dict[str, Any]:
    """One question as an lm-eval sample; metrics without a value are null."""
    samples = question.samples
    first = samples[0]
    doc = {
        "question_index": first.question_index,
        "data_source": first.data_source,
        "messages": list(first.messages),
    }
    figures = {name.replace("avg", f"avg@{n}"): value for name, value in question.figures(ks, n).items()}
    figures["truncated"] = sum(sample.truncated for sample in samples) / len(samples)
    figures["response_length"] = sum(sample.num_tokens for sample in samples) / len(samples)
    responses = [sample.response for sample in samples]
    return {
        "doc_id": first.question_index,
        "doc": doc,
        "target": first.ground_truth,
        "arguments": {"gen_args_0": {"arg_0": first.prompt, "arg_1": _generation(sampling)}},
        "resps": [responses],
        "filtered_resps": responses,
        "filter": _FILTER,
        "metrics": list(figures),
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(first.prompt),
        "target_hash": _hash(first.ground_truth),
        **figures,
    }


def _generation(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings as `generation_kwargs`."""
    return {
        "do_sample": not sampling["greedy"],
        "temperature": 0.0 if sampling["greedy"] else sampling["temperature"],
        "top_p": sampling["top_p"],
        "max_gen_toks": sampling["max_response_length"],
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
