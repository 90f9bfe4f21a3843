"""The figures of lm-evaluation-harness on the same stored responses: GSM8K and MMLU, answered in words."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.evaluate.evaluation import regrade
from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import summarise
from rlctl.run_spec.rollout import RewardSpec

HARNESS = """
import json, sys
from unittest.mock import MagicMock
import yaml
unused = ("sacrebleu", "evaluate", "sqlitedict", "pytablewriter")
sys.modules |= {name: MagicMock(__spec__=None) for name in unused}
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import ConfigurableTask
config = yaml.safe_load(open(sys.argv[1]))
for key in ("dataset_name", "training_split", "validation_split", "fewshot_split"):
    config.pop(key, None)
files = {"data_files": {"test": sys.argv[2]}}
config |= {"task": "stored", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
task = ConfigurableTask(config=config)
task.build_all_requests(rank=0, world_size=1)
for instance, line in zip(task.instances, open(sys.argv[2]), strict=True):
    instance.resps = [json.loads(line)["response"]]
task.apply_filters()
found = {}
for name in task.instances[0].filtered_resps:
    results = [task.process_results(each.doc, [each.filtered_resps[name]]) for each in task.instances]
    values = [result["exact_match"] for result in results]
    found[name] = mean(values), mean_stderr(values)
print(json.dumps(found))
"""
NUM_QUESTIONS = 40


def gsm8k(draw):
    answer = draw.randrange(2, 5000)
    said = answer if draw.random() < 0.6 else answer + draw.choice((1, -1, 100))
    reasons = draw.choice(("", f"First we have {draw.randrange(99)} apples. ", "Let's see: 3 + 4 = 7. "))
    shown = f"{said:,}" if draw.random() < 0.5 else str(said)
    doc = {"question": "How many?", "answer": f"We add.\\n#### {answer:,}"}
    return doc, f"{reasons}The answer is {shown}.", f"{answer}"


def mmlu(draw):
    right = draw.randrange(4)
    said = right if draw.random() < 0.6 else (right + 1) % 4
    reasons = draw.choice(("", "Water boils at 100 degrees. ", "We can rule out two of them. "))
    doc = {"question": "Which?", "choices": ["a cat", "a dog", "a cow", "a hen"], "answer": right}
    return doc, f"{reasons}The answer is ({'ABCD'[said]}).", "ABCD"[right]


BENCHMARKS = {
    "gsm8k": (gsm8k, "gsm8k/gsm8k-cot-zeroshot.yaml"),
    "mmlu": (mmlu, "mmlu/flan_cot_zeroshot/_mmlu_flan_cot_zeroshot_template_yaml"),
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_same_figures_on_the_same_responses(benchmark, tmp_path):
    harness = Path(sys.prefix) / "lm_eval"
    if not harness.is_dir():
        pytest.skip("lm-evaluation-harness is not installed (make test installs it)")
    make, task = BENCHMARKS[benchmark]
    draw = random.Random(benchmark)
    asked = [make(draw) for _ in range(NUM_QUESTIONS)]
    samples = [
        EvalSample(place, 0, benchmark, f"question {place}", response, truth, truncated=False, num_tokens=9)
        for place, (_, response, truth) in enumerate(asked)
    ]
    about = {
        "model": {"path": "m", "run_dir": None, "step": None, "template_sha256": None},
        "data": {"files": ["x.parquet"], "num_overlong_prompts": 0},
        "sampling": {
            "n": 1,
            "seed": 1,
            "greedy": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_response_length": 99,
        },
    }
    stored = Evaluation(about, RewardSpec(), summarise(samples, [1], 1), [], 1.0)
    write_evaluation(tmp_path / "stored", stored, samples, page=False)
    _, ours = regrade(tmp_path / "stored", lambda *_: None, out=tmp_path / "graded")
    figure = ours.scores[0].figures["avg"]
    assert 0.3 < figure.value < 0.9

    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc | {"response": response}) + "\n" for doc, response, _ in asked))
    path = {"PYTHONPATH": str(harness), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", HARNESS, str(harness / "lm_eval" / "tasks" / task), str(file)]
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert set(theirs) == {"strict-match", "flexible-extract"}
    for mean, stderr in theirs.values():
        assert (figure.value, figure.stderr) == pytest.approx((mean, stderr))
