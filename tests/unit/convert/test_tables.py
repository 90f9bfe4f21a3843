"""The tables keep up with the product: its losses, estimators and abilities, and peers' older names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.convert.source import read
from rlctl.convert.table import KeyTable, names, table
from rlctl.convert.translate import Translation, translate
from rlctl.errors import UsageError
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.key_table import key_rows
from rlctl.run_spec.keys import known_sections
from tests.reference.verl_helper import SIDE

LOSS, ESTIMATOR = "algorithm.rollout_correction.loss_type", "algorithm.adv_estimator"


def imported(text: str, name: str, directory: Path) -> Translation:
    file = directory / name
    file.write_text(text, encoding="utf-8")
    return translate(read(file, framework=None, environment={}, arguments=[]))


def missing(result: Translation, key: str) -> str:
    return next((one.what for one in result.problems if one.key == key and one.severity == "error"), "")


#: Key of the spec → framework → start of a command, and the framework's values.
CHOICES = {
    (LOSS, "verl"): (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.dro_beta=0.1 "
        "actor_rollout_ref.actor.policy_loss.loss_mode=",
        "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo",
    ),
    (ESTIMATOR, "verl"): (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=",
        "gae grpo grpo_vectorized reinforce_plus_plus_baseline rloo opo reinforce_plus_plus remax gpg "
        "rloo_vectorized optimal_token_baseline gdpo grpo_passk tir_optimal_token_baseline",
    ),
    (LOSS, "trl"): ("trl grpo --loss_type ", "grpo dapo bnpo dr_grpo cispo sapo luspo vespo"),
    (ESTIMATOR, "openrlhf"): (
        "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator ",
        "gae reinforce rloo reinforce_baseline group_norm dr_grpo",
    ),
    (LOSS, "openrlhf"): ("python -m openrlhf.cli.train_ppo_ray --actor.policy_loss_type ", "ppo gspo"),
    (ESTIMATOR, "slime"): (
        "python3 train.py --hf-checkpoint m --advantage-estimator ",
        "grpo gspo cispo ppo reinforce_plus_plus reinforce_plus_plus_baseline",
    ),
}  # fmt: skip
#: Framework's name → the part's, where they differ.
SAME = {
    "geo_mean": "gmpo",
    "vanilla": "ppo_clip",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "reinforce": "reinforce_plus_plus",
}
SAME |= {"group_norm": "grpo", "reinforce_baseline": "reinforce_plus_plus_baseline", "ppo": "ppo_clip"}
#: They have no counterpart; anything else of a framework's values must have one.
WITHOUT = {"gdpo", "grpo_passk", "tir_optimal_token_baseline", "luspo"}


@pytest.mark.parametrize(("key", "framework"), CHOICES)
def test_every_loss_and_estimator_of_the_registry_is_found(key: str, framework: str, tmp_path: Path) -> None:
    registry = POLICY_LOSSES if key == LOSS else ADVANTAGE_ESTIMATORS
    command, values = CHOICES[key, framework]
    for value in values.split():
        result = imported(f"{command}{value}\n", "run.sh", tmp_path)
        name = SAME.get(value, value)
        assert (name in WITHOUT) is (key not in result.spec), value
        assert name not in WITHOUT or name not in set(registry)
        if name in set(registry) and framework != "slime":
            assert result.spec[key] == name
        if key in result.spec:
            assert result.spec[key] in set(registry)
        assert not [one for one in result.problems if "loss_params" in one.key]


@pytest.mark.skipif(not (SIDE / "verl").is_dir(), reason=f"verl is not in {SIDE}")
@pytest.mark.verl
def test_the_values_are_all_that_verl_has() -> None:
    text = (SIDE / "verl/trainer/ppo/core_algos.py").read_text(encoding="utf-8")
    losses = set(re.findall(r'^@register_policy_loss\("(\w+)"\)', text, re.MULTILINE)) - {"bypass_mode"}
    assert losses == set(CHOICES[LOSS, "verl"][1].split())
    [kinds] = [
        node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "AdvantageEstimator"
    ]
    body = getattr(kinds, "body", [])
    values = {node.value.value for node in body if isinstance(node, ast.Assign)}
    assert values == set(CHOICES[ESTIMATOR, "verl"][1].split())


def test_parameters_of_losses_are_kept(tmp_path: Path) -> None:
    params = "algorithm.rollout_correction.loss_params"
    text = "GRPOConfig(loss_type='vespo', vespo_k_pos=1.5, vespo_lambda_neg=4)\n"
    found = imported(text, "t.py", tmp_path).spec
    assert found[params] == {"k_pos": 1.5, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 4}
    actor = "actor_rollout_ref.actor"
    verl = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode="
    command = f"{verl}kl_cov actor_rollout_ref.actor.policy_loss.ppo_kl_coef=0.3"
    assert imported(command, "a.sh", tmp_path).spec[params] == {"fraction": 0.0002, "kl_coef": 0.3}
    command = f"{verl}geo_mean {actor}.clip_ratio_low=0.4 {actor}.clip_ratio_high=0.5"
    assert imported(command, "a.sh", tmp_path).spec[params] == {"low": 0.4, "high": 0.5}


CLASSIC = """
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --pretrain org/model-1b --remote_rm_url /path/reward.py --save_path /ckpt --ckpt_path /ckpt/all \\
   --micro_train_batch_size 2 --train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 64 \\
   --n_samples_per_prompt 8 --max_epochs 1 --prompt_max_len 700 --generate_max_len 3000 --zero_stage 3 \
   --bf16 \\
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 1e-3 --use_kl_loss \
   --kl_estimator k3 \\
   --advantage_estimator group_norm --prompt_data data.jsonl --input_key prompt --apply_chat_template \\
   --normalize_reward --gradient_checkpointing --packing_samples --flash_attn --vllm_num_engines 4 \\
   --vllm_tensor_parallel_size 1 --colocate_all_models --vllm_gpu_memory_utilization 0.6 \
   --vllm_enable_sleep \\
   --deepspeed_enable_sleep --enforce_eager --save_steps 20 --eps_clip_low_high 0.2 0.28 --use_wandb $KEY \\
   --lambd 0.95 --gamma 1.0 --max_samples 100000 --vllm_sync_backend nccl --ref_num_nodes 1 \\
   --actor_num_gpus_per_node 8 --logging_steps 1 --dynamic_filtering --seed 3 --temperature 0.9
"""


def test_older_options_of_openrlhf(tmp_path: Path) -> None:
    result = imported(CLASSIC, "run.sh", tmp_path)
    assert not [row.key for row in result.rows if row.status == "unknown"]
    expected = {
        "model.path": "org/model-1b",
        "actor.ppo_mini_batch_size": 16,
        "data.train_batch_size": 64,
        "data.max_prompt_length": 700,
        "data.max_response_length": 3000,
        "rollout.n": 8,
        "rollout.mode": "colocated",
        "algorithm.adv_estimator": "grpo",
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 1e-3,
        "actor.lr": 5e-7,
        "algorithm.lam": 0.95,
        "algorithm.filter_groups.enable": True,
        "engine.zero_stage": 3,
        "trainer.seed": 3,
    }
    assert {key: result.spec.get(key) for key in expected} == expected
    assert "reward_func" in missing(result, "reward.name")
    with_model = CLASSIC.replace("--remote_rm_url /path/reward.py", "--reward_pretrain org/rm")
    found = imported(with_model, "run.sh", tmp_path).spec
    assert (found["reward.name"], found["reward.model.path"]) == ("model", "org/rm")


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("python -m openrlhf.cli.train_ppo_ray --train.agent_func_path a.py", "a.sh", "environment.name"),
        ("python -m openrlhf.cli.train_ppo_ray --reward.remote_url http://rm:5000", "a.sh", "reward.name"),
        ("python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m", "a.sh", "reward.terms"),
        ("python3 train.py --hf-checkpoint m --rm-url http://rm:5000", "a.sh", "reward.name"),
        ("python3 train.py --hf-checkpoint m --custom-rm-path mine.reward", "a.sh", "reward.name"),
        ("python3 train.py --hf-checkpoint m --rm-type f1", "a.sh", "reward.name"),
        ("python3 train.py --hf-checkpoint m --rollout-batch-size 8", "a.sh", "reward.terms"),
        ("python -m verl.trainer.main_ppo reward.reward_manager.name=batch "
         "custom_reward_function.path=r.py", "a.sh", "reward.name"),
        ("python -m verl.trainer.main_ppo reward.reward_manager.name=mine", "a.sh", "reward.name"),
        ("python -m verl.trainer.main_ppo distillation.enabled=True", "a.sh", "algorithm.teacher.kl_type"),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.rollout.multi_turn.enable=True", "a.sh",
         "environment.name"),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.rollout.agent.default_agent_loop=tools", "a.sh",
         "environment.name"),
    ],
)  # fmt: skip
def test_what_runs_a_frameworks_own_code_is_missing(text: str, name: str, key: str, tmp_path: Path) -> None:
    result = imported(text, name, tmp_path)
    assert missing(result, key)
    assert key not in result.spec


def test_conversations_of_verl_keep_their_limits(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    text = f"python3 -m verl.trainer.main_ppo {rollout}.multi_turn.enable=True "
    text += f"{rollout}.multi_turn.max_assistant_turns=5 "
    text += (
        f"{rollout}.multi_turn.tool_config_path=tools.yaml {rollout}.multi_turn.max_tool_response_length=2000"
    )
    result = imported(text, "a.sh", tmp_path)
    keys = ("environment.max_turns", "environment.max_tool_output")
    assert [result.spec.get(key) for key in keys] == [5, 2000]
    assert "tools.yaml" in missing(result, "environment.name")
    off = imported(text.replace("enable=True", "enable=False"), "a.sh", tmp_path)
    assert not any(key.startswith("environment.") for key in off.spec)


@pytest.mark.parametrize("start", ["custom_reward_function", "reward.custom_reward_function"])
def test_arguments_of_verls_function_are_kept(start: str, tmp_path: Path) -> None:
    text = f"python3 -m verl.trainer.main_ppo {start}.path=r.py +{start}.reward_kwargs.alpha=2"
    result = imported(text, "a.sh", tmp_path)
    assert (result.spec["reward.name"], result.spec["reward.params.alpha"]) == ("r.py:compute_score", 2)


def test_a_file_of_unknown_keys_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m openrlhf.cli.train_ppo_ray --pretrainn m --roll 3 --rolll 4 --train_batch_size 8\n"
    (tmp_path / "run.sh").write_text(text)
    spec = tmp_path / "spec.yaml"
    assert run(["import", str(tmp_path / "run.sh"), "--output", str(spec)]) == 2
    assert "3 of 4 keys are none of OpenRLHF" in capsys.readouterr().err
    assert not spec.exists()
    with pytest.raises(UsageError, match="keys are none of"):
        imported("GRPOConfig(lerning_rate=1, learning_rat=1)\n", "t.py", tmp_path)


#: What a reason denies: `no X`, `there is no X`, `X is not supported`, `not translated`.
_DENIED = re.compile(
    r"(?:^|[:;,] )(?:there (?:is|are) )?(?:no|without) ([^;:,]+)|([^;:,]+) (?:is|are) not supported"
)
#: Denied, although words of it are in the product: what it has is something else.
TRUE = {
    "no quantised training": "rollout weights can be of 8 bits, trained ones cannot",
    "there is no float16: engine.dtype is bf16": "the precision of a file's weights may be",
    "no label smoothing": "",
    "no noise on embeddings": "",
    "no profiler": "",
    "no profiler; timing is in the metrics": "",
    "no DoRA": "",
    "adapters have no dropout": "",
    "adapters have no bias": "",
    "no multi-token prediction": "responses have tokens",
    "PF-PPO's reweighting is not supported": "PPO is, without it",
    "the engine is DeepSpeed: no pipeline stages": "ZeRO has other stages",
}


def reasons(one: KeyTable) -> set[str]:
    return {rule.unsupported for rule in one.keys.values() if rule.unsupported} | set(
        one.unsupported.values()
    )


@cache
def words_of_the_product() -> str:
    product = " ".join(f"{row.key} {row.meaning}" for row in key_rows()).lower()
    product += " ".join(kind.__doc__ or "" for kind in known_sections().values()).lower()
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        product += " ".join(f"{part.name} {part.title}" for part in registry.parts()).lower()
    return product


def denied(reason: str) -> list[str]:
    """Words that a reason denies and that are in the product."""
    product = words_of_the_product()
    nouns = [match[1] or match[2] for match in _DENIED.finditer(reason)]
    words = [word for noun in nouns for word in re.findall(r"[a-z]{3,}", noun.lower())]
    return [word for word in words if re.search(rf"\b{word.rstrip('s')}", product)]


@pytest.mark.parametrize("name", names())
def test_no_reason_denies_what_the_product_has(name: str) -> None:
    """Nouns that a reason denies occur in no key of the spec and no part, or `TRUE` says why it is right."""
    for reason in sorted(reasons(table(name)) - TRUE.keys()):
        assert "not translated" not in reason, reason
        assert not denied(reason), reason


def test_a_reason_that_denies_a_part_is_noticed() -> None:
    for reason in (
        "no tools",
        "one turn per response; no agents",
        "no distillation",
        "VESPO is not supported",
    ):
        assert denied(reason)
