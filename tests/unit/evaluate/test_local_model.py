"""Which model, in which engine."""

import hashlib
import json
from dataclasses import replace

import pytest
from huggingface_hub import constants

from rlctl.errors import EnvironmentFailure
from rlctl.evaluate import local_model as local_model_module
from rlctl.evaluate.evaluation import evaluate
from rlctl.evaluate.local_model import LocalModel, files_hash
from rlctl.evaluate.request import EvaluateRequest, Target, check_request
from rlctl.rollout import vllm
from rlctl.rollout.hf import HFRollout
from rlctl.spec.machine import native_dtype
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
        def __init__(self, *_, **given):
            options.update(given)

        def close(self):
            pass

    monkeypatch.setattr(vllm, "VLLMRollout", Fake)
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
    monkeypatch.setattr(local_model_module.torch.cuda, "device_count", lambda: gpus)
    with LocalModel(replace(plan, target=target))._sampling_engine(12):
        assert told["engine_kwargs"].get("tensor_parallel_size", 1) == expected
    told.clear()
    with LocalModel(
        replace(plan, target=target, request=replace(plan.request, engine="hf"))
    )._sampling_engine(12):
        assert not told


def test_a_model_that_is_nowhere(hub, task):
    plan = check_request(EvaluateRequest("org/tiny", [str(task.val_file)], limit=2))
    with pytest.raises(EnvironmentFailure, match="neither a directory nor in the cache"):
        LocalModel(replace(plan, target=Target("org/other", [str(task.val_file)])))


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_gets_the_model_and_is_closed(task, tmp_path, monkeypatch, fails):
    told = {}

    class Fake:
        def __init__(self, model_path, tokenizer, **options):
            told.update(options, model_path=model_path)
            model, _ = local_model_module.load_policy(
                model_path,
                revision=None,
                trust_remote_code=False,
                attn_implementation="sdpa",
                dtype=local_model_module.DTYPES[options["dtype"]],
            )
            self._engine = HFRollout(model, tokenizer, "cpu")

        def generate(self, *arguments, **options):
            if fails:
                raise KeyboardInterrupt
            told["rows"] = len(arguments[0].texts)
            return self._engine.generate(*arguments, **options)

        def close(self):
            told["closed"] = True

    monkeypatch.setattr(vllm, "VLLMRollout", Fake)
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
    assert (told["dtype"], told["max_num_seqs"]) == (native_dtype()[0], 8)  # as a run of it would have
    assert told["max_model_len"] == 6 + 6  # "12+34=" and the response


def test_a_run_on_vllm_is_evaluated_with_its_engine_kwargs(task, tmp_path, told):
    kwargs = {"enforce_eager": True, "block_size": 32}
    options = [f"rollout.engine_kwargs.{name}={json.dumps(value)}" for name, value in kwargs.items()]
    run = make_run(tmp_path / "run", task, "rollout.name=vllm", *options)
    model = LocalModel(check_request(EvaluateRequest(str(run), limit=2)))
    with model._sampling_engine(12):
        assert told["engine_kwargs"] == kwargs
    assert model.settings["engine_kwargs"] == kwargs, "other arguments, other responses"
    assert model.about_sampling["engine_kwargs"] == kwargs
    by_hf = LocalModel(check_request(EvaluateRequest(str(run), limit=2, engine="hf")))
    assert "engine_kwargs" not in by_hf.settings
