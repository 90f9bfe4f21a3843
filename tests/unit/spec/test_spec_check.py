"""Each contradiction is found, once, at the right key."""

from __future__ import annotations

import pytest

from rlctl.errors import SpecError
from rlctl.spec.check import CHECKS, check_trainable
from rlctl.spec.keys import known_leaves
from rlctl.spec.load import load_spec

RC = "algorithm.rollout_correction."
REAL = ("model.path=a/b", "data.train_files=t.parquet")


def verdict(*overrides: str) -> dict[str, str]:
    """Key → severity of everything found."""
    try:
        problems = load_spec([], [], list(overrides)).warnings
    except SpecError as error:
        problems = error.problems
    assert all(problem.fix for problem in problems)
    return {problem.key: problem.severity for problem in problems}


def test_defaults_are_clean():
    assert verdict() == {}
    assert verdict(*REAL) == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.ppo_epochs=2"], {"actor.ppo_epochs": "warning"}),
        (["actor.ppo_epochs=2", f"{RC}bypass_mode=false", f"{RC}loss_type=ppo_clip"], {}),
        (["actor.ppo_epochs=2", f"{RC}bypass_mode=false"], {"actor.ppo_epochs": "warning"}),
        ([f"{RC}rollout_is=null"], {"actor.ppo_mini_batch_size": "warning"}),
        ([f"{RC}rollout_is=null", "actor.ppo_mini_batch_size=null"], {}),
        (
            [f"{RC}rollout_is=null", f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=2"],
            {},
        ),
        ([f"{RC}loss_type=ppo_clip"], {f"{RC}rollout_is": "warning"}),
        ([f"{RC}loss_type=ppo_clip", f"{RC}rollout_is=null"], {}),
        ([f"{RC}rollout_is_threshold=2_3"], {f"{RC}rollout_is_threshold": "warning"}),
        ([f"{RC}rollout_is_threshold=0.5"], {f"{RC}rollout_is_threshold": "error"}),
        ([f"{RC}rollout_rs=token_k1"], {f"{RC}rollout_rs_threshold": "error"}),
        ([f"{RC}rollout_rs_threshold=2"], {f"{RC}rollout_rs_threshold": "warning"}),
        (["rollout.n=1"], {"rollout.n": "error"}),
        (["rollout.n=1", "algorithm.adv_estimator=gae"], {}),
        (
            ["algorithm.gamma=0.9", "algorithm.lam=0.9"],
            dict.fromkeys(("algorithm.gamma", "algorithm.lam"), "warning"),
        ),
        (["actor.ppo_mini_batch_size=256"], {"actor.ppo_mini_batch_size": "error"}),
        (["actor.ppo_mini_batch_size=48"], {"actor.ppo_mini_batch_size": "error"}),
        (["trainer.n_gpus_per_node=3"], {"actor.ppo_mini_batch_size": "error"}),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2"], {}),
        (["actor.ppo_mini_batch_size=null", "trainer.nnodes=3"], {"data.train_batch_size": "error"}),
        (["rollout.top_p=0.9"], {"rollout.top_p": "warning"}),
        (["rollout.top_k=50"], {"rollout.top_k": "warning"}),
        (["rollout.min_p=0.1"], {"rollout.min_p": "warning"}),
        (["rollout.top_k=0"], {"rollout.top_k": "error"}),
        (["rollout.temperature=0.01"], {"rollout.temperature": "warning"}),
        (["rollout.temperature=0.7"], {}),
        (["model.path=a/b"], {"data.train_files": "error"}),
        (["data.train_files=t.parquet"], {"data.train_files": "warning"}),
        (["data.max_prompt_length=5"], {"data.max_prompt_length": "error"}),
        (["trainer.test_freq=10"], {}),
        ([*REAL, "trainer.test_freq=10"], {"trainer.test_freq": "error"}),
        ([*REAL, "trainer.test_freq=10", "data.val_files=v.parquet"], {}),
        ([*REAL, "data.val_files=v.parquet"], {"data.val_files": "warning"}),
        (["trainer.save_freq=0"], {"trainer.save_freq": "error"}),
        ([*REAL, "actor.lr=1e-3"], {"actor.lr": "warning"}),
        (["actor.lr=1e-3"], {}),
        (
            ["model.attn_implementation=flash_attention_2", "engine.dtype=fp32"],
            {"model.attn_implementation": "error"},
        ),
        (["model.attn_implementation=flash_attention_2", "engine.dtype=bf16"], {}),
        (["actor.lr=0"], {"actor.lr": "warning"}),
        (["trainer.total_training_steps=10"], {"actor.lr_warmup_steps": "warning"}),
    ],
)
def test_contradictions(overrides, expected):
    assert verdict(*overrides) == expected


def test_checks_name_keys_that_exist():
    for check, keys in CHECKS.items():
        assert set(keys) <= known_leaves().keys(), check.__name__
        assert check.__doc__


def test_gae_loads_but_does_not_train():
    loaded = load_spec(["ppo-seq-is-token-rs"], [], [])
    [problem] = check_trainable(loaded.spec)
    assert problem.severity == "error"
    assert loaded.located(problem).where.startswith("preset ppo-seq-is-token-rs:")
    assert check_trainable(load_spec([], [], []).spec) == []
