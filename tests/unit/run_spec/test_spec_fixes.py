"""Applying all suggestions of the messages gives a valid spec."""

from __future__ import annotations

import random
import re

import pytest

from rlctl.errors import Problem, SpecError
from rlctl.run_spec.keys import known_leaves
from rlctl.run_spec.load import load_spec

RC = "algorithm.rollout_correction."
#: Values that contradict each other in many combinations; the first of each list is harmless.
VALUES: dict[str, list[str]] = {
    "data.train_batch_size": ["128", "1", "8", "12", "96"],
    "actor.ppo_mini_batch_size": ["64", "4", "7", "36", "48", "200"],
    "critic.ppo_mini_batch_size": ["64", "4", "48", "72"],
    "trainer.n_gpus_per_node": ["1", "2", "3", "8"],
    "data.max_prompt_length": ["20", "4", "8"],
    "data.max_response_length": ["20", "4", "6"],
    "actor.ppo_max_token_len_per_gpu": ["100", "10", "13"],
    "critic.ppo_max_token_len_per_gpu": ["100", "10", "13"],
    "reward.overlong.buffer_length": ["0", "3", "5", "30"],
    "reward.name": ["maths", "model"],
    "reward.model.path": ["null", "a/reward"],
    "trainer.save_freq": ["5", "0"],
    "trainer.test_freq": ["-1", "0", "5"],
    "trainer.total_training_steps": ["20", "1", "3"],
    "trainer.critic_warmup": ["0", "2", "30"],
    "model.path": ["embedded", "a/b"],
    "data.train_files": ["[]", "train.parquet"],
    "data.val_files": ["[]", "val.parquet"],
    "model.attn_implementation": ["sdpa", "varlen"],
    "model.lora_rank": ["0", "8", "1024"],
    "model.target_modules": ["all-linear", "[]", "[q_proj]"],
    "engine.dtype": ["fp32", "bf16"],
    "engine.zero_stage": ["0", "1", "2", "3"],
    "engine.offload": ["none", "optimizer", "all"],
    "engine.offload_base": ["false", "true"],
    "engine.deepspeed.zero_optimization.stage": ["1"],
    "rollout.name": ["hf", "vllm"],
    "rollout.mode": ["colocated", "server"],
    "rollout.n": ["8", "1"],
    "rollout.dtype": ["null", "int8", "bf16"],
    "rollout.merge_lora": ["false", "true"],
    "rollout.free_cache_engine": ["true", "false"],
    "rollout.tensor_model_parallel_size": ["1", "2"],
    "rollout.temperature": ["1", "0.001"],
    "rollout.top_k": ["-1", "0", "5"],
    "rollout.top_p": ["1", "0.9"],
    "rollout.staleness": ["0", "2"],
    "rollout.max_staleness": ["0", "1", "3"],
    "rollout.server.urls": ["[]", "host:1", "http://host:1"],
    "rollout.engine_kwargs.seed": ["1"],
    "rollout.engine_kwargs.block_size": ["16"],
    "rollout.val_kwargs.n": ["1", "4"],
    "rollout.val_kwargs.temperature": ["0", "1"],
    "algorithm.adv_estimator": ["rloo", "gae", "grpo", "reinforce_plus_plus"],
    "algorithm.gamma": ["1", "0.9"],
    "algorithm.kl_penalty": ["k1", "sequence"],
    "algorithm.use_kl_in_reward": ["false", "true"],
    "algorithm.kl_ctrl.type": ["fixed", "adaptive"],
    "algorithm.kl_ctrl.kl_coef": ["0.001", "0"],
    "critic.enable": ["null", "true", "false"],
    "critic.path": ["null", "a/critic", "embedded"],
    "ref.path": ["null", "a/ref", "embedded"],
    "actor.use_kl_loss": ["false", "true"],
    "actor.kl_loss_coef": ["0.001", "0"],
    "actor.ppo_epochs": ["1", "2"],
    "actor.lr": ["1e-6", "0", "0.1"],
    f"{RC}dialect": ["rlctl", "verl"],
    f"{RC}bypass_mode": ["true", "false"],
    f"{RC}loss_type": ["reinforce", "ppo_clip", "gspo"],
    f"{RC}rollout_is": ["sequence", "null", "token"],
    f"{RC}rollout_is_threshold": ["2", "0.5", "3_2", "2_3"],
    f"{RC}rollout_rs": ["null", "token_k1", "token_k1,seq_max_k2", "seq_mean_k3,token_veto",
                       "off_policy,sequence"],
    f"{RC}rollout_rs_threshold": ["null", "0.5_2", "2", "0.5,3_4", "0.5_2,0.5_2", "1,2,3"],
}  # fmt: skip
#: Suggestions in words alone: what to write is known to the reader only.
OPEN = re.compile(
    r"^(list terms|name layers|add the weights up|start them with|the parameters of|"
    r"set data.val_files$|write http|set model.path to|leave train_files out)"
)


def problems_of(values: dict[str, str]) -> list[Problem]:
    try:
        return load_spec([], [], [f"{key}={value}" for key, value in values.items()]).warnings
    except SpecError as error:
        return error.problems


def suggestions(problem: Problem) -> list[dict[str, str | None]]:
    """Each alternative of a message as keys and values; None: leave the key out."""
    fix = re.sub(r"\(.*?\)|`", "", problem.fix or "")
    read = (
        suggestion(problem.key, text.strip()) for text in re.split(r";|, or |, unless | or (?=set )", fix)
    )
    return [alternative for alternative in read if alternative]


def suggestion(key: str, text: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    if OPEN.match(text):
        return found
    for name, value in re.findall(r"([a-z][\w.]*)(?:: |=| to (?=\d))([-\w.…/]+(?:,[\w.]+)*)", text):
        if leaf := leaf_named(name, near=key):
            found[leaf] = value
    if not found and "leave it out" in text:
        return {key: None}
    word = re.fullmatch(r"(?:use|write) (?!a |the )([a-z]\w*)(?:,.*| or .*)?", text)
    number = re.search(
        r"(?<!\w)-?\d[\d._]*(?:e-?\d+)?(?:,[\d._]+)*", text.partition("for example ")[2] or text
    )
    if not found and word:
        found[key] = word[1]
    elif not found and number:
        found[key] = str(int(number[0]) - 1) if "less than" in text else number[0].rstrip(".")
    return found


def leaf_named(name: str, near: str) -> str | None:
    leaves = list(known_leaves())
    section = near.rpartition(".")[0]
    whole = [f"{section}.{name}", name, *(leaf for leaf in leaves if leaf.endswith(f".{name}"))]
    return next((leaf for leaf in whole if leaf in leaves), None)


def written(values: dict[str, str], *fixes: dict[str, str | None]) -> dict[str, str]:
    changed = dict(values)
    for fix in fixes:
        for key, value in fix.items():
            changed.pop(key, None)
            if value is None:
                changed = {k: v for k, v in changed.items() if not k.startswith(f"{key}.")}
            else:
                changed[key] = value.replace("…", "a/b")
    return changed


def drawn(seed: int) -> dict[str, str]:
    generator = random.Random(seed)
    keys = generator.sample(sorted(VALUES), generator.choice([2, 4, 8, 16]))
    return {key: generator.choice(VALUES[key]) for key in keys}


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_all_suggestions_together_make_a_spec_that_is_accepted(first: int) -> None:
    for seed in range(first, first + 100):
        values = drawn(seed)
        errors = [problem for problem in problems_of(values) if problem.severity == "error"]
        fixes = [suggestions(problem) for problem in errors]
        unread = [
            each
            for each, fix in zip(errors, fixes, strict=True)
            if not fix and not OPEN.match(each.fix or "")
        ]
        assert not unread, (values, unread)
        together = written(values, *(alternatives[0] for alternatives in fixes if alternatives))
        left = [
            each
            for each in problems_of(together)
            if each.severity == "error" and not OPEN.match(each.fix or "")
        ]
        assert not left, (values, errors, fixes, left)


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_suggestion_removes_its_problem_and_makes_no_other_error(first: int) -> None:
    for seed in range(first, first + 100):
        values = drawn(seed)
        before = problems_of(values)
        errors = {problem.key for problem in before if problem.severity == "error"}
        if "actor.ppo_mini_batch_size" in errors:  # without it, the same fault is that of the batch
            errors.add("data.train_batch_size")
        for problem in before:
            for number, alternative in enumerate(suggestions(problem)):
                if number and alternative.keys() != {problem.key}:
                    continue  # another part of the program comes into play, with checks of its own
                after = problems_of(written(values, alternative))
                new = [each for each in after if each.severity == "error" and each.key not in errors]
                assert not new, (values, problem, alternative, new)
                assert problem not in after, (values, problem, alternative)


@pytest.mark.parametrize(
    ("batch", "mini", "ranks"),
    [(128, 48, 2), (96, 20, 4), (96, 200, 8), (60, 7, 3), (64, 24, 16), (30, 4, 4), (100, None, 8)],
)
def test_a_suggested_mini_batch_meets_every_constraint_at_once(
    batch: int, mini: int | None, ranks: int
) -> None:
    values = {"data.train_batch_size": str(batch), "trainer.n_gpus_per_node": str(ranks)}
    values |= {"actor.ppo_mini_batch_size": str(mini or "null")}
    [first, *_] = problems_of(values)
    assert not problems_of(written(values, suggestions(first)[0]))
