"""Which model, in which engine."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, UsageError
from rlctl.evaluate import local_model as local_model_module
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.local_model import LocalModel, files_hash
from rlctl.evaluate.request import EvaluateRequest, Target, check_request
from rlctl.registry import ROLLOUT_ENGINES, Registry
from rlctl.rollout import build_vllm
from rlctl.rollout.hf import HFRollout
from rlctl.run_spec.machine import native_dtype
from tests.unit.evaluate.runs import make_run


def quiet(doing, done, total):
    del doing, done, total


@pytest.fixture
def hub(task, tmp_path, monkeypatch):
    """A hub cache that holds the model as `org/tiny`, large files named by their SHA-256."""
    place = tmp_path / "hub" / "models--org--tiny"
    snapshot = place / "snapshots" / "0123abc"
    for directory in (snapshot, place / "blobs", place / "refs"):
        directory.mkdir(parents=True)
    (place / "refs" / "main").write_text("0123abc")
    for file in task.model_dir.iterdir():
        name = hashlib.sha256(file.read_bytes()).hexdigest()
        (place / "blobs" / name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(place / "blobs" / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.fixture
def told(monkeypatch):
    """The options of an engine that takes vLLM's place."""
    options = {}

    class Fake:
        def __init__(self, _path, _tokenizer, given):
            options.update(given)

        def sample(self, requests, sampling):
            raise NotImplementedError

        def close(self):
            pass

    monkeypatch.setattr(build_vllm, "VLLMRollout", Fake)
    return options


def test_a_hub_model_is_its_snapshot_and_as_good_as_the_same_files_anywhere(hub, task, tmp_path):
    request = EvaluateRequest(
        "org/tiny", [str(task.val_file)], n=2, limit=3, max_response_length=6, out=tmp_path / "hub-out"
    )
    _, found = evaluate(request, quiet)
    assert found.about["model"]["path"] == "org/tiny"
    assert found.num_stored == 0
    local = EvaluateRequest(
        str(task.model_dir), [str(task.val_file)], n=2, limit=3, max_response_length=6, out=tmp_path / "out"
    )
    _, again = evaluate(local, quiet)
    assert again.num_stored == 6
    assert again.about["model"]["sha256"] == found.about["model"]["sha256"]


def test_large_files_of_the_hub_are_not_read_again(hub, monkeypatch):
    whole = files_hash(hub, {})
    monkeypatch.setattr(local_model_module.hashlib, "file_digest", None)
    assert files_hash(hub, {}) == whole


def test_a_checkpoint_has_the_hash_of_its_files(task, tmp_path):
    run_dir = make_run(tmp_path / "run", task)
    plan = check_request(EvaluateRequest(str(run_dir), limit=2))
    assert "model.safetensors" in plan.target.checksums
    assert LocalModel(plan).model["sha256"] == files_hash(task.model_dir, {})


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (1, 1), (2, 2)])
def test_a_runs_model_is_spread_over_as_many_gpus(task, tmp_path, monkeypatch, told, gpus, expected):
    plan = check_request(EvaluateRequest(str(make_run(tmp_path / "run", task)), limit=2))
    rollout = plan.target.spec.rollout.model_copy(update={"name": "vllm", "tensor_model_parallel_size": 2})
    target = replace(plan.target, spec=plan.target.spec.model_copy(update={"rollout": rollout}))
    plan = replace(plan, target=target, engine="vllm")
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with LocalModel(plan)._sampling_engine(12):
        assert told.get("tensor_parallel_size", 1) == expected
    told.clear()
    with LocalModel(replace(plan, engine="hf"))._sampling_engine(12):
        assert not told


def test_a_model_that_is_nowhere(hub, task):
    plan = check_request(EvaluateRequest("org/tiny", [str(task.val_file)], limit=2))
    with pytest.raises(EnvironmentFailure, match="neither a directory nor in the cache"):
        LocalModel(replace(plan, target=Target("org/other", [str(task.val_file)])))


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_gets_the_model_and_is_closed(task, tmp_path, monkeypatch, fails):
    told = {}

    class Fake:
        def __init__(self, model_path, tokenizer, options):
            told.update(options, model_path=model_path)
            model, _ = local_model_module.load_policy(
                model_path,
                revision=None,
                trust_remote_code=False,
                attn_implementation="sdpa",
                dtype=local_model_module.DTYPES[native_dtype()[0]],
            )
            self._engine = HFRollout(model, tokenizer, "cpu")

        def sample(self, requests, sampling):
            if fails:
                raise KeyboardInterrupt
            told["rows"] = len(requests)
            return self._engine.sample(requests, sampling)

        def close(self):
            told["closed"] = True

    monkeypatch.setattr(build_vllm, "VLLMRollout", Fake)
    request = EvaluateRequest(
        str(task.model_dir),
        [str(task.val_file)],
        n=2,
        limit=30,
        max_response_length=6,
        engine="vllm",
        batch_size=8,
        out=tmp_path / "out",
    )
    if fails:
        with pytest.raises(KeyboardInterrupt):
            evaluate(request, quiet)
    else:
        _, found = evaluate(request, quiet)
        assert found.about["sampling"]["engine"] == "vllm"
        assert told["rows"] == 60  # it makes its own batches
    assert told["closed"]
    assert told["model_path"] == str(task.model_dir)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[native_dtype()[0]]  # as a run of it would have
    assert (told["dtype"], told["max_num_seqs"]) == (dtype, 8)
    assert told["max_model_len"] == 6 + 6  # "12+34=" and the response
    assert told["gpu_memory_utilization"] == 0.9  # nothing else is on the GPU


def test_a_run_on_vllm_is_evaluated_with_its_engine_kwargs(task, tmp_path, told):
    kwargs = {"enforce_eager": True, "block_size": 32}
    options = [f"rollout.engine_kwargs.{name}={json.dumps(value)}" for name, value in kwargs.items()]
    run = make_run(tmp_path / "run", task, "rollout.name=vllm", *options)
    model = LocalModel(check_request(EvaluateRequest(str(run), limit=2)))
    with model._sampling_engine(12):
        assert kwargs.items() <= told.items()
    assert model.settings["engine_kwargs"] == kwargs, "other arguments, other responses"
    assert model.about_sampling["engine_kwargs"] == kwargs
    by_hf = LocalModel(check_request(EvaluateRequest(str(run), limit=2, engine="hf")))
    assert "engine_kwargs" not in by_hf.settings


#: An engine that gets its weights by sync, declares a parameter, and counts what it sampled.
OWN_ENGINE = """
import copy
from pydantic import BaseModel
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.hf import HFRollout

CALLS = []

class Options(BaseModel):
    max_rows: int = 4

class Own(HFRollout):
    def sync_weights(self, policy, policy_version):
        super().sync_weights(policy, policy_version)
        CALLS.append("sync")

    def sample(self, requests, sampling):
        assert CALLS[-1] != "close"
        CALLS.append(len(requests))
        return super().sample(requests, sampling)

    def close(self):
        super().close()
        CALLS.append("close")

@ROLLOUT_ENGINES.register(params=Options)
def engine(context):
    CALLS.append(context.params.max_rows)
    empty = copy.deepcopy(context.model)
    for weight in empty.parameters():
        weight.data.zero_()
    return Own(empty, context.tokenizer, context.device)

def no_engine(context):
    return "no engine"
"""


@pytest.fixture
def own_engine(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_ENGINE)
    return f"{file}:engine"


def calls_of(engine):
    return ROLLOUT_ENGINES[engine].__globals__["CALLS"]


def test_a_users_engine_samples_with_the_models_weights(task, tmp_path, own_engine):
    asked = {"data": [str(task.val_file)], "n": 2, "limit": 3, "max_response_length": 6, "fresh": True}
    evaluate(EvaluateRequest(str(task.model_dir), **asked, out=tmp_path / "hf"), quiet)
    request = EvaluateRequest(str(task.model_dir), **asked, engine=own_engine, out=tmp_path / "own")
    _, found = evaluate(request, quiet)
    assert calls_of(own_engine) == [4, "sync", 6, "close"]
    about = found.about["sampling"]
    assert about["engine"] == own_engine
    responses = [pq.read_table(tmp_path / name / "samples.parquet")["response"] for name in ("hf", "own")]
    assert responses[0] == responses[1], "the engine had the weights of the model"
    again = replace(request, fresh=False, out=tmp_path / "again")
    assert evaluate(again, quiet)[1].num_stored == 6
    Path(own_engine.partition(":")[0]).write_text(OWN_ENGINE + "# another version\n")
    _, unchanged = evaluate(replace(again, out=tmp_path / "unchanged"), quiet)
    assert unchanged.num_stored == 6, "the imported version sampled"
    part = ROLLOUT_ENGINES._parts.pop(own_engine)  # as in a new process
    del sys.modules[part.function.__module__]
    _, changed = evaluate(replace(again, out=tmp_path / "changed"), quiet)
    assert changed.num_stored == 0, "another version of the engine may sample other responses"
    assert changed.about["sampling"]["engine_sha256"] != about["engine_sha256"]


def test_a_run_is_evaluated_with_its_own_engine_and_parameters(task, tmp_path, own_engine, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the spec has a relative path
    run = make_run(tmp_path / "run", task, "rollout.name=own.py:engine", "rollout.engine_params.max_rows=7")
    asked = EvaluateRequest(str(run), n=1, limit=2, out=tmp_path / "out")
    with pytest.raises(UsageError, match=r"rollout\.name runs own\.py:engine"):
        evaluate(asked, quiet)
    _, found = evaluate(replace(asked, trust=True), quiet)
    assert calls_of(own_engine)[0] == 7
    assert found.about["sampling"]["engine_params"] == {"max_rows": 7}
    plan = check_request(EvaluateRequest(str(run), limit=2, engine=own_engine))
    assert LocalModel(plan).about_sampling["engine_params"] == {"max_rows": 7}, "the same engine"
    (tmp_path / "own.py").rename(tmp_path / "gone.py")
    for registry in Registry.all:
        registry._parts.pop(own_engine, None)
    with pytest.raises(UsageError, match="--engine hf"):
        check_request(EvaluateRequest(str(run), limit=2, trust=True))
    assert check_request(EvaluateRequest(str(run), limit=2, engine="hf")).engine == "hf"


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("vlm", "--engine: no rollout engine `vlm`"),
        ("FILE:missing", "no such function"),
        ("FILE:no_engine", "has no"),
    ],
)
def test_an_engine_that_is_none(task, tmp_path, own_engine, engine, says):
    name = engine.replace("FILE", own_engine.partition(":")[0])
    data = {"data": [str(task.val_file)], "n": 1, "limit": 1, "out": tmp_path / "out"}
    with pytest.raises(RlctlError, match=says):
        evaluate(EvaluateRequest(str(task.model_dir), **data, engine=name), quiet)


#: An engine that aborts the first response of the calls in ABORTS, numbered from 1.
ABORTING = """
from dataclasses import replace
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.hf import HFRollout

CALLS = []

class Aborting(HFRollout):
    def sample(self, requests, sampling):
        turns = list(super().sample(requests, sampling))
        CALLS.append(len(turns))
        if len(CALLS) in ABORTS:
            turns[0] = replace(turns[0], finish_reason="abort")
        return turns

@ROLLOUT_ENGINES.register()
def engine(context):
    return Aborting(context.model, context.tokenizer, context.device)
"""


def test_a_response_that_the_engine_aborted_is_neither_graded_nor_stored(task, tmp_path):
    file = tmp_path / "aborting.py"
    file.write_text(f"ABORTS = {{1, 2}}\n{ABORTING}")
    request = EvaluateRequest(
        str(task.model_dir), data=[str(task.val_file)], n=2, limit=3, engine=f"{file}:engine"
    )
    found = []
    for name in "abc":
        directory, evaluation = evaluate(replace(request, out=tmp_path / name), quiet)
        samples = pq.read_table(directory / "samples.parquet").to_pylist()
        found.append([(each["question_index"], each["sample_index"]) for each in samples])
        assert evaluation.scores[0].num_samples == len(samples)
        data = json.loads((directory / "results.json").read_text())["data"]
        assert (data["num_aborted_responses"], data["num_overlong_prompts"]) == (6 - len(samples), 0)
        shown = " ".join([*evaluation.notes, (directory / "samples.html").read_text()])
        assert ("1 response was ended by the engine" in shown) == (len(samples) < 6)
    everything = [(question, sample) for question in range(3) for sample in range(2)]
    assert found == [everything[1:], everything[1:], everything]
    assert calls_of(request.engine) == [6, 1, 1]


def test_an_engine_that_aborts_everything(task, tmp_path):
    file = tmp_path / "aborting.py"
    file.write_text(f"ABORTS = {{1}}\n{ABORTING}")
    request = EvaluateRequest(
        str(task.model_dir), data=[str(task.val_file)], n=1, limit=1, engine=f"{file}:engine"
    )
    with pytest.raises(RunFailure, match="the engine ended all 1 responses"):
        evaluate(replace(request, out=tmp_path / "out"), quiet)
    assert not (tmp_path / "out").exists()
