"""Validation: the same figures on any number of ranks, and an evaluation to read and to compare."""

import json
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import pytest
import torch

from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.engine.model import load_policy
from rlctl.environment.build import EpisodeSource
from rlctl.errors import RunFailure
from rlctl.evaluate.compare import compare
from rlctl.evaluate.samples import read_samples
from rlctl.reward.build import build_reward
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.shared_engine import EngineLock, LockedRollout
from rlctl.run_spec.load import load_spec
from rlctl.train.validate import validate
from tests.processes import on_ranks
from tests.unit.evaluate.runs import quick_task

REWARD = "def even(response):\n    return float(len(response) % 2 == 0)\n"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return quick_task(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return f"{path}:even"


def figures_of(ranks, where, model_dir, reward, *overrides):
    """Validate as a run does; what it returns and wrote."""
    spec = load_spec([], [], [f"reward.name={reward}", "data.max_response_length=6", *overrides]).spec
    model, tokenizer = load_policy(
        str(model_dir),
        revision=None,
        trust_remote_code=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    rows = [
        Row("even" if place % 3 else "odd/source", (Message("user", f"{place + 10}+34="),), "640")
        for place in range(21)
    ]
    run_dir = where / f"run{ranks.world_size}"
    run_dir.mkdir(parents=True, exist_ok=True)
    run = SimpleNamespace(
        spec=spec,
        ranks=ranks,
        run_dir=run_dir,
        tokenizer=tokenizer,
        val_prompts=PromptDataset(rows, tokenizer, max_prompt_length=50, filter_overlong=True),
        rollout=LockedRollout(HFRollout(model, tokenizer, "cpu"), EngineLock(), first=True),
        episodes=EpisodeSource.of(spec, tokenizer),
        reward=build_reward(spec.reward, max_response_length=6, device=torch.device("cpu")),
    )
    try:
        return validate(run, 8)
    finally:
        run.reward.close()


SAMPLED = ("rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0")


@pytest.mark.parametrize("overrides", [(), SAMPLED], ids=["greedy", "sampled"])
def test_two_ranks_find_what_one_does(tmp_path, task, reward, overrides):
    [alone] = on_ranks(1, figures_of, tmp_path, task.model_dir, reward, *overrides, where=tmp_path)
    main, other = on_ranks(2, figures_of, tmp_path, task.model_dir, reward, *overrides, where=tmp_path)
    assert main == alone
    assert other == {}
    one, two = (tmp_path / f"run{count}" / "evaluations" / "step_000008" for count in (1, 2))
    assert read_samples(one / "samples.parquet") == read_samples(two / "samples.parquet")
    results = json.loads((one / "results.json").read_text())
    by_source = {score["data_source"]: score for score in results["scores"]}
    assert alone["val/odd/source/reward_mean"] == by_source["odd/source"]["avg"]["value"]
    assert 0 < alone["val/even/response_length_mean"] <= 6
    if overrides:
        assert alone["val/even/pass@4"] >= alone["val/even/pass@1"] > 0
        assert "val/even/truncated_fraction" in alone
        assert len(read_samples(one / "samples.parquet")) == 84
    else:
        assert set(alone) == {
            f"val/{source}/{name}"
            for source in ("even", "odd/source")
            for name in ("reward_mean", "response_length_mean")
        }
    report = compare(one, two)
    assert report.comparisons[0].conclusion == "no difference on any question"
    assert [warning.partition(" are compared")[0] for warning in report.warnings] == ["2 data sources"]


def test_too_many_failures_stop_the_run(tmp_path, task):
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(response):\n    raise ValueError('no')\n")
    alone = SimpleNamespace(
        rank=0, world_size=1, is_main=True, sum=list, exchange=list, first=lambda text: text
    )
    with pytest.raises(RunFailure, match="failed on 21 of 21 responses"):
        figures_of(alone, tmp_path, task.model_dir, f"{broken}:broken")
    assert not (tmp_path / "run1" / "evaluations").exists()


def test_aborted_responses_are_left_out(tmp_path, task, reward, monkeypatch):
    sample = HFRollout.sample

    def aborting(self, requests, sampling):
        turns = sample(self, requests, sampling)
        aborted = [replace(turn, finish_reason="abort") for turn in turns[::2]]
        return [turn for pair in zip_longest(aborted, turns[1::2]) for turn in pair if turn]

    alone = SimpleNamespace(
        rank=0, world_size=1, is_main=True, sum=list, exchange=list, first=lambda text: text
    )
    whole = figures_of(alone, tmp_path / "whole", task.model_dir, reward)
    monkeypatch.setattr(HFRollout, "sample", aborting)
    figures = figures_of(alone, tmp_path / "aborted", task.model_dir, reward)
    one, two = (tmp_path / name / "run1" / "evaluations" / "step_000008" for name in ("whole", "aborted"))
    kept = read_samples(two / "samples.parquet")
    assert kept == read_samples(one / "samples.parquet")[1::2]
    rewards = [sample.reward for sample in kept if sample.data_source == "even"]
    assert figures["val/even/reward_mean"] == sum(rewards) / len(rewards)
    assert whole.keys() == figures.keys()
    assert json.loads((two / "results.json").read_text())["data"]["num_aborted_responses"] == 11


def test_several_greedy_responses_are_refused():
    with pytest.raises(Exception, match="greedy responses"):
        load_spec([], [], ["rollout.val_kwargs.n=4"])
