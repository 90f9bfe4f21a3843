"""Launch files of the shapes that the frameworks ship become specs; every key is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.cli.app import run
from rlctl.convert.conversion_report import spec_yaml
from rlctl.convert.source import _hydra_value, read
from rlctl.convert.translate import KeyOutcome, Translation, translate
from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from tests.unit.convert.launch_files import OPENRLHF, SLIME, TRL, VERL


def imported(
    text: str, name: str, tmp_path: Path, framework: str | None = None, **environment: str
) -> Translation:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return translate(read(file, framework=framework, environment=environment, arguments=[]))


def row(result: Translation, key: str) -> KeyOutcome:
    return next(one for one in result.rows if one.key == key)


def expect(result: Translation, values: dict[str, Any]) -> None:
    assert {key: result.spec.get(key, "absent") for key in values} == values


def test_verl_script(tmp_path: Path) -> None:
    result = imported(VERL, "run.sh", tmp_path)
    assert result.table.name == "verl"
    expect(
        result,
        {
            "model.path": "org/model-1b",
            "data.train_batch_size": 64,
            "data.max_response_length": 2048,
            "actor.lr": 5e-7,
            "actor.ppo_mini_batch_size": 16,
            "rollout.n": 4,
            "algorithm.adv_estimator": "grpo",
            "algorithm.rollout_correction.dialect": "verl",
            "algorithm.rollout_correction.rollout_is_batch_normalize": False,
            "algorithm.rollout_correction.loss_denominator": "after_rejection",
            # clip_ratio alone changes nothing in verl: clip_ratio_low keeps its default.
            "actor.clip_ratio_low": 0.2,
            "actor.clip_ratio_high": 0.28,
            "actor.clip_ratio_c": 3.0,
            "actor.kl_loss_type": "k3",
            "engine.zero_stage": 3,
            "rollout.engine_kwargs.enforce_eager": True,
            "trainer.logger": ["console"],
            "model.enable_gradient_checkpointing": True,
        },
    )
    assert "verl reads it only where" in row(result, "actor_rollout_ref.actor.clip_ratio").note
    assert (
        row(result, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size").status == "not supported"
    )
    assert row(result, "my.own_key").status == "unknown"
    assert row(result, "data.train_batch_size").where == "line 8"
    assert [problem for problem in result.problems if problem.severity == "error"] == []


def test_the_spec_of_a_verl_script_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(VERL, encoding="utf-8")
    spec = tmp_path / "spec.yaml"
    assert run(["import", str(tmp_path / "run.sh"), "--output", str(spec), "--set", "N=8"]) == 0
    loaded = load_spec([], [spec], [])
    assert loaded.spec.rollout.n == 8
    assert "my.own_key" in capsys.readouterr().out


def test_trl_python(tmp_path: Path) -> None:
    result = imported(TRL, "train.py", tmp_path)
    assert result.table.name == "trl"
    expect(
        result,
        {
            "model.path": "org/model-1b",
            # 8 responses per device × 3 micro-batches, of 4 per prompt: prompts per optimizer step.
            "actor.ppo_mini_batch_size": 6,
            "data.train_batch_size": 6,
            "rollout.n": 4,
            "rollout.name": "vllm",
            "actor.loss_agg_mode": "seq-mean-token-sum-norm",
            "algorithm.adv_estimator": "dr_grpo",
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_bound": "truncate",
            "algorithm.rollout_correction.rollout_is_threshold": "3.0",
            "actor.use_kl_loss": True,
            "actor.kl_loss_coef": 0.04,
            "actor.clip_ratio_low": 0.2,
            "actor.clip_ratio_high": 0.28,
            "actor.lr": 2e-6,
            "trainer.total_training_steps": 30,
            "trainer.seed": 7,
        },
    )
    wrong = row(result, "lerning_rate")
    assert (wrong.status, wrong.note) == ("unknown", "did you mean learning_rate?")
    assert "TRL counts responses" in row(result, "per_device_train_batch_size").note
    assert row(result, "reward_funcs").status == "not supported"  # `len` is no function of a file
    assert "reward.terms" in {one.key for one in result.problems}


def test_trl_rloo_subtracts_its_default_kl_from_the_reward(tmp_path: Path) -> None:
    text = (
        "from trl import RLOOConfig\nRLOOConfig(num_generations=4, per_device_train_batch_size=8, beta=0.1)\n"
    )
    expect(
        imported(text, "t.py", tmp_path),
        {
            "algorithm.adv_estimator": "rloo",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.1,
            "algorithm.rollout_correction.rollout_is": None,
        },
    )


def test_a_class_of_trl_has_its_own_defaults(tmp_path: Path) -> None:
    """RLOOConfig samples 2 responses per prompt and penalises KL; a command names the class too."""
    shared = "--model_name_or_path m --per_device_train_batch_size 8 --gradient_accumulation_steps 2"
    python = "RLOOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=2)"
    files = {"a.sh": f"trl rloo {shared}", "b.sh": f"python rloo.py {shared}", "c.py": python}
    for name, text in files.items():
        expect(
            imported(text, name, tmp_path),
            {
                "algorithm.adv_estimator": "rloo",
                "rollout.n": 2,
                "data.train_batch_size": 8,
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.kl_coef": 0.05,
                "trainer.total_epochs": 3,
            },
        )
    ppo = "PPOConfig(cliprange=0.1, per_device_train_batch_size=8, num_mini_batches=4, total_episodes=800)"
    expect(
        imported(ppo, "d.py", tmp_path),
        {
            "algorithm.adv_estimator": "gae",
            "algorithm.lam": 0.95,
            "rollout.n": 1,
            "rollout.temperature": 0.7,
            "data.max_response_length": 53,
            "data.train_batch_size": 8,
            "actor.ppo_mini_batch_size": 2,
            "actor.ppo_epochs": 4,
            "actor.clip_ratio_low": 0.1,
            "actor.clip_ratio_high": 0.1,
            "trainer.total_training_steps": 100,
        },
    )


@pytest.mark.parametrize(
    ("launcher", "processes", "nodes"),
    [
        ("accelerate launch --num_processes 16 --num_machines 2", 8, 2),
        ("torchrun --nproc_per_node 8 --nnodes 2", 8, 2),
        ("torchrun --nproc-per-node=4", 4, 1),
        ("python", 1, 1),
    ],
)
def test_trl_counts_responses_over_all_processes(
    launcher: str, processes: int, nodes: int, tmp_path: Path
) -> None:
    script = f"{launcher} grpo.py --per_device_train_batch_size 16 --generation_batch_size 512 --max_steps 64"
    batches = 64 * 16 * processes * nodes // 512
    expect(
        imported(f"{script} --save_steps 64 --eval_strategy steps --eval_steps 0.5", "run.sh", tmp_path),
        {
            "trainer.n_gpus_per_node": processes if processes > 1 else "absent",
            "trainer.nnodes": nodes if nodes > 1 else "absent",
            "data.train_batch_size": 64,
            "actor.ppo_mini_batch_size": 2 * processes * nodes,
            "trainer.total_training_steps": batches,
            "trainer.save_freq": batches,
            "trainer.test_freq": batches // 2,
        },
    )


def with_more(options: str) -> str:
    """The script of verl with more options."""
    return VERL.replace(" $@", f" {options}")


def missing(result: Translation) -> set[str]:
    return {one.key for one in result.problems if "no counterpart" in one.what}


def test_arguments_in_a_dict_are_read_or_named(tmp_path: Path) -> None:
    text = "common = {'learning_rate': 3e-6, 'beta': 0.1}\nGRPOConfig(seed=7, **common)\nGRPOTrainer(**f())\n"
    result = imported(text, "a.py", tmp_path)
    expect(result, {"actor.lr": 3e-6, "actor.kl_loss_coef": 0.1, "trainer.seed": 7})
    assert "line 3: **f() is not read" in result.notes


def test_an_attribute_that_is_set_later_replaces_the_argument(tmp_path: Path) -> None:
    text = "args = GRPOConfig(\n    learning_rate=1e-6,\n    seed=3,\n)\nargs.learning_rate = 2e-6\n"
    expect(imported(text, "a.py", tmp_path), {"actor.lr": 2e-6, "trainer.seed": 3})


def test_a_variable_with_several_values_is_not_determined(tmp_path: Path) -> None:
    """Which of them is in force depends on the run of the program."""
    text = "lr = 1e-6\nseed = 7\nif big:\n    lr = 3e-6\ndecay = lr * 10\n"
    text += "GRPOConfig(learning_rate=lr, seed=seed, weight_decay=decay)\n"
    result = imported(text, "a.py", tmp_path)
    expect(result, {"actor.lr": "absent", "actor.weight_decay": "absent", "trainer.seed": 7})
    assert "actor.lr" in {problem.key for problem in result.problems if "depends on lr" in problem.what}


def test_a_step_that_ends_within_a_group_has_no_counterpart(tmp_path: Path) -> None:
    given = "GRPOConfig(per_device_train_batch_size=12, steps_per_generation=2)"
    result = imported(given, "a.py", tmp_path)
    assert result.spec["data.train_batch_size"] == 3
    assert missing(result) == {"actor.ppo_mini_batch_size"}
    assert missing(imported("GRPOConfig(save_strategy='epoch')", "b.py", tmp_path)) == {"trainer.save_freq"}


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        (
            "python3 -m openrlhf.cli.train_ppo_ray --train.batch_size 60 --rollout.n_samples_per_prompt 8",
            "run.sh",
            "actor.ppo_mini_batch_size",
        ),
        (
            "python3 train.py --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 4",
            "run.sh",
            "actor.ppo_mini_batch_size",
        ),
    ],
)
def test_responses_that_are_no_whole_groups_are_not_rounded(
    text: str, name: str, key: str, tmp_path: Path
) -> None:
    result = imported(text, name, tmp_path)
    assert key in missing(result)
    assert key not in result.spec


def test_a_warm_up_as_a_fraction_needs_the_number_of_steps(tmp_path: Path) -> None:
    for given in ("warmup_ratio=0.1", "warmup_steps=0.1"):
        assert missing(imported(f"GRPOConfig({given})", "a.py", tmp_path)) == {"actor.lr_warmup_steps"}
        known = imported(f"GRPOConfig({given}, max_steps=55)", "b.py", tmp_path)
        assert (missing(known), known.spec["actor.lr_warmup_steps"]) == (set(), 6)
    ratio = with_more("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")
    result = imported(ratio, "run.sh", tmp_path)
    assert missing(result) == {"actor.lr_warmup_steps"}
    assert row(result, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio").status == "not supported"
    assert row(result, "data.train_batch_size").status == "same"  # read by the formula, not at fault


def test_verls_warm_up_counts_batches(tmp_path: Path) -> None:
    """Its schedule advances after the last update of a batch; here a batch has 4 mini-batches, twice."""
    actor, critic = "actor_rollout_ref.actor", "critic"
    more = f"{actor}.optim.lr_warmup_steps=10 {actor}.ppo_epochs=2 trainer.total_training_steps=50"
    result = imported(with_more(more), "run.sh", tmp_path)
    expect(result, {"actor.lr_warmup_steps": 10 * 4 * 2})
    more += f" {critic}.optim.lr_warmup_steps_ratio=0.1 {critic}.ppo_epochs=3 algorithm.adv_estimator=gae"
    result = imported(with_more(more), "run.sh", tmp_path)
    expect(result, {"critic.lr_warmup_steps": 5 * 4 * 3})


def test_trl_command_line_and_yaml(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nlearning_rate: 1e-6\nuse_vllm: true\n")
    script = (
        "accelerate launch --num_processes 4 -m trl grpo --config grpo.yaml --model_name_or_path m "
        "--per-device-train-batch-size 8 --learning_rate 3e-6"
    )
    result = imported(script.replace("-m trl", "trl"), "run.sh", tmp_path)
    expect(result, {"actor.lr": 3e-6, "trainer.n_gpus_per_node": 4, "actor.ppo_mini_batch_size": 8})
    assert row(result, "num_generations").where == "grpo.yaml:1"


def test_openrlhf_script(tmp_path: Path) -> None:
    result = imported(OPENRLHF, "run.sh", tmp_path, MODEL="org/model-1b")
    expect(
        result,
        {
            "model.path": "org/model-1b",
            "data.train_batch_size": 32,
            "actor.ppo_mini_batch_size": 8,
            "data.max_prompt_length": 1024,
            "algorithm.adv_estimator": "grpo",
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": "1e9",
            "algorithm.rollout_correction.rollout_rs": "geometric",
            "algorithm.rollout_correction.rollout_rs_threshold": "0.5_5.0",
            "actor.use_kl_loss": True,
            "actor.kl_loss_type": "k2",
            "algorithm.use_kl_in_reward": False,
            "actor.clip_ratio_high": 0.27,
            "rollout.mode": "colocated",
        },
    )
    assert row(result, "no.such_flag").status == "unknown"
    assert any("MORE_ARGS" in note for note in result.notes)


def test_a_default_without_an_equivalent_is_listed(tmp_path: Path) -> None:
    """OpenRLHF warms the learning rate up over 3 % of the steps unless the script says otherwise."""

    def implied(text: str) -> set[str]:
        return {
            row.key for row in imported(text, "run.sh", tmp_path).implied if row.status == "not supported"
        }

    command = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m"
    assert "actor.lr_warmup_ratio" in implied(command)
    assert "actor.lr_warmup_ratio" not in implied(f"{command} --actor.lr_warmup_ratio 0")


def test_slime_script(tmp_path: Path) -> None:
    result = imported(SLIME, "run.sh", tmp_path)
    expect(
        result,
        {
            "model.path": "/m",
            "actor.ppo_mini_batch_size": 8,
            "actor.ppo_max_token_len_per_gpu": 9216,
            "actor.loss_agg_mode": "seq-mean-token-mean",
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_bound": "truncate",
            "actor.betas": [0.9, 0.98],
        },
    )
    assert row(result, "unheard-of").status == "unknown"


def test_merge_keys_of_yaml_are_resolved(tmp_path: Path) -> None:
    text = """
.shared: &shared {lr: 1.0e-6, weight_decay: 0.1}
actor_rollout_ref:
  model: {path: org/model-1b}
  actor:
    optim:
      <<: *shared
      lr: 2.0e-6
"""
    result = imported(text, "ppo.yaml", tmp_path, "verl")
    expect(result, {"actor.lr": 2e-6, "actor.weight_decay": 0.1})
    assert row(result, "actor_rollout_ref.actor.optim.weight_decay").where == "line 2"


def test_relative_references_are_resolved(tmp_path: Path) -> None:
    text = """
data: {max_prompt_length: 512}
actor_rollout_ref:
  model: {path: org/model-1b}
  rollout:
    temperature: 0.5
    n: 4
    tensor_model_parallel_size: ${.n}
    val_kwargs:
      do_sample: true
      temperature: ${..temperature}
"""
    result = imported(text, "ppo.yaml", tmp_path, "verl")
    expect(result, {"rollout.val_kwargs.temperature": 0.5, "rollout.tensor_model_parallel_size": 4})


def test_a_configuration_inherits_from_files_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 64, max_prompt_length: 128}\n")
    text = """
defaults: [base, _self_, gone.yaml]
data: {train_batch_size: 32}
actor_rollout_ref: {model: {path: org/model-1b}}
""".replace("base,", "base.yaml,")
    result = imported(text, "ppo.yaml", tmp_path, "verl")
    expect(result, {"data.train_batch_size": 32, "data.max_prompt_length": 128})
    assert row(result, "data.max_prompt_length").where == "base.yaml:1"
    assert any("gone.yaml: this configuration is not read" in note for note in result.notes)


@pytest.mark.parametrize(
    ("text", "name"), [(VERL, "a.sh"), (TRL, "a.py"), (OPENRLHF, "a.sh"), (SLIME, "a.sh")]
)
def test_the_precision_is_the_frameworks_and_not_this_machines(text: str, name: str, tmp_path: Path) -> None:
    """rlctl's default depends on the hardware on which it runs."""
    assert imported(text, name, tmp_path).spec["engine.dtype"] == "bf16"


def test_a_precision_of_fsdp_is_no_matter_of_speed(tmp_path: Path) -> None:
    command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m"
    key = "actor_rollout_ref.actor.fsdp_config.dtype"
    result = imported(f"{command} {key}=float16", "run.sh", tmp_path)
    assert row(result, key).status == "not supported"
    assert [one.key for one in result.problems if key in one.what] == ["engine.dtype"]
    mixed = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
    result = imported(f"{command} {mixed}=fp32", "run.sh", tmp_path)
    assert "not results" not in row(result, mixed).note


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("dapo", "gspo"), ("grpo", "gspo"), ("cispo", None), ("sapo", None), ("luspo", None)],
)
def test_a_ratio_of_the_sequence_has_a_counterpart_for_clipping_only(
    loss_type: str, expected: str | None, tmp_path: Path
) -> None:
    text = f"GRPOConfig(loss_type='{loss_type}', importance_sampling_level='sequence')\n"
    result = imported(text, "train.py", tmp_path)
    key = "algorithm.rollout_correction.loss_type"
    assert result.spec.get(key) == expected
    assert any(one.key == key for one in result.problems) is (expected is None)


def test_nothing_is_dropped(tmp_path: Path) -> None:
    """Every key that the file sets has exactly one row, and everything in the spec an origin."""
    for text, name in ((VERL, "a.sh"), (TRL, "b.py"), (OPENRLHF, "c.sh"), (SLIME, "d.sh")):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        source = read(file, framework=None, environment={}, arguments=[])
        result = translate(source)
        assert [one.key for one in result.rows] == list(source.settings)
        assert sum(result.counts.values()) == len(source.settings)
        assert set(result.spec) == set(result.origins)


def test_a_value_without_counterpart_is_an_error_not_a_default(tmp_path: Path) -> None:
    script = VERL.replace("adv_estimator=grpo", "adv_estimator=gdpo")
    result = imported(script, "run.sh", tmp_path)
    assert row(result, "algorithm.adv_estimator").status == "not supported"
    assert "algorithm.adv_estimator" in {one.key for one in result.problems if one.severity == "error"}
    assert "# Missing: algorithm.adv_estimator" in spec_yaml(result, "run.sh")


def test_a_misspelt_key_is_unknown_even_among_keys_that_are_not_supported(tmp_path: Path) -> None:
    script = VERL.replace("ppo_mini_batch_size=16", "ppo_mini_batch_sze=16")
    wrong = row(imported(script, "run.sh", tmp_path), "actor_rollout_ref.actor.ppo_mini_batch_sze")
    assert wrong.status == "unknown"
    assert wrong.note == "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"


def test_an_open_variable_in_a_list_is_named(tmp_path: Path) -> None:
    result = imported(
        "python3 train.py --hf-checkpoint m --adam-beta2 $BETA --use-tis", "s.sh", tmp_path, "slime"
    )
    assert "actor.betas" not in result.spec
    assert any(one.key == "actor.betas" and "$BETA" in one.what for one in result.problems)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("/d/x-1.parquet", "/d/x-1.parquet"),
        ('"a,b c"', "a,b c"),
        ('"x=1/[a]"', "x=1/[a]"),
        ('"null"', "null"),
        ('"123"', "123"),
        (r'"a\"b\\"', 'a"b\\'),
        (r'"a\b"', r"a\b"),
        (r'"/d/\${x}"', "/d/${x}"),
        ("""[a,"b's"]""", ["a", "b's"]),
        ("0.5", 0.5),
        ("null", None),
    ],
)
def test_values_in_hydras_syntax(written: str, value: object) -> None:
    """The values are those that Hydra 1.3 and OmegaConf read from the texts."""
    assert _hydra_value(written) == value


def test_flags_of_hydra_are_passed_over(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo --config-dir=conf --hydra-help x data.train_batch_size=64\n"
    expect(imported(script, "s.sh", tmp_path), {"data.train_batch_size": 64})


def test_an_open_variable_is_named(tmp_path: Path) -> None:
    script = VERL.replace("MODEL=${MODEL:-org/model-1b}\n", "")
    result = imported(script, "run.sh", tmp_path)
    [problem] = [one for one in result.problems if one.key == "model.path"]
    assert "$MODEL" in problem.what
    assert "model.path" not in result.spec


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.sh", b"echo hello\n", "no launch command"),
        ("x.py", b"def broken(:\n", "not valid Python"),
        ("x.yaml", b"a: [1\n", "not valid YAML"),
        ("x.yaml", b"\xff\xfe", "not UTF-8"),
        ("x.json", b"{}", "not a shell script"),
        ("x.yaml", b"hello: 1\n", "no launch command"),
        ("x.yaml", b"a: &a\n  b: *a\n", "nested too deeply"),
        ("x.yaml", b"a: " + 5000 * b"[", "nested too deeply"),
    ],
)
def test_unreadable_files_are_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read(tmp_path / name, framework=None, environment={}, arguments=[])


def test_exit_codes_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    script = tmp_path / "run.sh"
    script.write_text(VERL, encoding="utf-8")
    assert run(["import", str(script), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["counts"]["unknown"] == 1
    assert content["spec"]["rollout.n"] == 4
    assert run(["import", str(script), "--from", "verl"]) == 0
    assert "line 8: data.train_batch_size = 64 → " in capsys.readouterr().out
    assert run(["import", str(tmp_path / "missing.sh")]) == 2
    assert run(["import", str(script), "--from", "nobody"]) == 2
    assert run(["import", str(script), "--set", "oops"]) == 2


def test_a_value_of_several_lines_does_not_break_the_spec(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_batch_size=$(a\n\0b)"
    text = spec_yaml(imported(script, "run.sh", tmp_path), "run.sh")
    assert any(line.startswith("# Missing: data.train_batch_size: ") for line in text.split("\n"))
    assert yaml.safe_load(text)["model.path"] == "m"


def test_float16_is_not_called_float32(tmp_path: Path) -> None:
    """transformers sets bf16 to the opposite of fp16 if only fp16 is given."""
    for given, dtype in {"fp16=True, bf16=False": "bf16", "fp16=True": "bf16", "bf16=False": "fp32"}.items():
        result = imported(f"GRPOConfig({given})\n", "train.py", tmp_path)
        assert result.spec["engine.dtype"] == dtype
        assert all(one.status == "not supported" for one in result.rows if one.key == "fp16")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GRPOConfig(chat_template_kwargs={'enable_thinking': False})\n", "train.py"),
        ("trl grpo --chat_template_kwargs '{\"enable_thinking\": false}'\n", "run.sh"),
        (
            "python3 -m verl.trainer.main_ppo +data.apply_chat_template_kwargs.enable_thinking=False\n",
            "run.sh",
        ),
        (
            "python train.py --n-samples-per-prompt 4 --apply-chat-template-kwargs "
            "'{\"enable_thinking\":false}'",
            "a.sh",
        ),
    ],
)
def test_arguments_of_the_chat_template(text: str, name: str, tmp_path: Path) -> None:
    result = imported(text, name, tmp_path)
    spec_file = tmp_path / "spec.yaml"
    spec_file.write_text(spec_yaml(result, name))
    loaded = load_spec(
        [], [spec_file], [], left_open=frozenset({"data.train_files", "model.path", "reward.terms"})
    )
    assert loaded.spec.data.chat_template_kwargs == {"enable_thinking": False}


ACCELERATE = """
mixed_precision: bf16
num_processes: 8
num_machines: 2
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none}
"""


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("accelerate launch --config_file acc.yaml grpo.py", 4),
        ("accelerate launch --config_file=acc.yaml --num_processes 4 grpo.py", 2),
        (
            "accelerate launch --num_processes=4 --config_file acc.yaml grpo.py",
            2,
        ),  # the option overrides, too
        ("trl grpo --accelerate_config acc.yaml", 4),
        (
            "accelerate launch --num_processes 4 --num_machines 2 --zero_stage 3 "
            "--offload_optimizer_device cpu grpo.py",
            2,
        ),
    ],
)
def test_accelerates_configuration_file(command: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(ACCELERATE, encoding="utf-8")
    result = imported(f"{command} --per_device_train_batch_size 2 --num_generations 4\n", "run.sh", tmp_path)
    expect(
        result,
        {
            "trainer.n_gpus_per_node": ranks,
            "trainer.nnodes": 2,
            "data.train_batch_size": ranks,  # 2 nodes × ranks × 2 responses ÷ 4 per prompt
            "engine.zero_stage": 3,
            "engine.offload": "optimizer",
        },
    )
    assert not [one for one in result.rows if one.status == "unknown"]
    missing = imported("accelerate launch --config_file none.yaml grpo.py --beta 0", "run.sh", tmp_path)
    assert any("none.yaml: this configuration is not read" in note for note in missing.notes)


def test_a_spec_is_not_another_frameworks(tmp_path: Path) -> None:
    text = "data: {train_files: [a.parquet]}\nalgorithm: {adv_estimator: grpo}\nactor: {lr: 1e-6}\n"
    for framework in (None, "verl"):
        with pytest.raises(UsageError, match="this is a spec"):
            imported(text, "spec.yaml", tmp_path, framework=framework)
    of_both = "data: {train_files: [a.parquet]}\nalgorithm: {adv_estimator: grpo}\n"
    assert imported(of_both, "spec.yaml", tmp_path).table.name == "verl"


# --- values that are easily taken for others --------------------------------------------------------------


# A factor on the reward of responses that are cut off: 0 removes it, 1 leaves it.
@pytest.mark.parametrize(
    ("coefficient", "status"), [("0.0", "not supported"), ("1.0", "same"), ("-0.5", "not supported")]
)
def test_a_factor_of_zero_is_not_off(coefficient: str, status: str, tmp_path: Path) -> None:
    key = "reward.stop_properly_penalty_coef"
    text = OPENRLHF.replace("--train.colocate_all", f"--{key} {coefficient}")
    assert row(imported(text, "run.sh", tmp_path), key).status == status


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peft_config=LoraConfig()", (8, 8, ["q_proj", "v_proj"])),
        ("peft_config=LoraConfig(r=4, target_modules='all-linear')", (4, 8, "all-linear")),
        ("peft_config=LoraConfig(lora_alpha=64)", (8, 64, ["q_proj", "v_proj"])),
        ("use_peft=True", (16, 32, ["q_proj", "v_proj"])),
        ("lora_alpha=64", (0, "absent", "absent")),
    ],
)
def test_adapters_have_their_own_classs_defaults(text: str, expected: Any, tmp_path: Path) -> None:
    is_peft = "Lora" in text
    called = f"GRPOTrainer(args=GRPOConfig(), {text})" if is_peft else f"GRPOConfig({text})"
    result = imported(called + "\n", "t.py", tmp_path)
    rank, alpha, targets = expected
    expect(result, {"model.lora_alpha": alpha, "model.target_modules": targets})
    assert result.spec.get("model.lora_rank", 0) == rank


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_alpha=16", "run.sh"),
        (
            "python3 -m openrlhf.cli.train_ppo_ray --ds.lora.alpha 16 --ds.lora.target_modules q_proj",
            "run.sh",
        ),
    ],
)
def test_an_alpha_without_adapters_is_left_out(text: str, name: str, tmp_path: Path) -> None:
    result = imported(text, name, tmp_path)
    expect(result, {"model.lora_alpha": "absent", "model.target_modules": "absent"})
    assert all(one.status == "same" for one in result.rows)


def test_a_batch_of_zero_is_that_of_the_asynchronous_trainer(tmp_path: Path) -> None:
    script = VERL.replace("train_batch_size=$prompts", "train_batch_size=0")
    expect(imported(script, "run.sh", tmp_path), {"data.train_batch_size": 16})
    script = script.replace("my.own_key=3", "async_training.require_batches=4")
    result = imported(script, "run.sh", tmp_path)
    expect(result, {"data.train_batch_size": 64, "actor.ppo_mini_batch_size": 16})
    assert not [one for one in result.problems if one.severity == "error"]


@pytest.mark.parametrize(
    ("text", "name", "option"),
    [
        (VERL, "run.sh", ("actor.clip_ratio_high=0.28", "actor.clip_ratio_low=10")),
        (OPENRLHF, "run.sh", ("--actor.eps_clip_low_high 0.2 0.27", "--actor.eps_clip 1.0")),
        (SLIME, "run.sh", ("--eps-clip 0.2", "--eps-clip 1.0")),
    ],
)
def test_a_clip_that_bounds_nothing_below(
    text: str, name: str, option: tuple[str, str], tmp_path: Path
) -> None:
    result = imported(text.replace(*option), name, tmp_path)
    expect(result, {"actor.clip_ratio_low": 0.999999})
    assert "actor.clip_ratio_low" not in {one.key for one in result.problems}


def test_a_function_of_slime_replaces_its_weights(tmp_path: Path) -> None:
    script = SLIME.replace("--use-tis", "--use-tis --custom-tis-function-path mis.py:compute_mis_weights")
    result = imported(script, "run.sh", tmp_path)
    key = "algorithm.rollout_correction.rollout_is"
    assert key in {one.key for one in result.problems if one.severity == "error"}
    assert row(result, "custom-tis-function-path").status == "not supported"
    script = script.replace("--use-tis", "--get-mismatch-metrics")
    result = imported(script, "run.sh", tmp_path)  # only measured
    assert key not in {one.key for one in result.problems}


@pytest.mark.parametrize(
    ("text", "name", "key", "status"),
    [
        ("python3 -m verl.trainer.main_ppo trainer.logger='[console,mlflow,trackio]'", "run.sh",
         "trainer.logger", "same"),
        ("python3 -m verl.trainer.main_ppo trainer.logger='[console,swanlab]'", "run.sh",
         "trainer.logger", "different"),
        ("GRPOConfig(report_to=['trackio', 'mlflow'])", "t.py", "report_to", "same"),
        ("GRPOConfig(report_to='none')", "t.py", "report_to", "same"),
        ("GRPOConfig(report_to='comet_ml')", "t.py", "report_to", "different"),
    ],
)  # fmt: skip
def test_trackers_that_exist_here_are_kept(
    text: str, name: str, key: str, status: str, tmp_path: Path
) -> None:
    result = imported(text, name, tmp_path)
    assert row(result, key).status == status
    kept = [one for one in ("mlflow", "trackio") if one in text]
    assert set(kept) <= set(result.spec.get("trainer.logger", []))


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("python3 -m verl.trainer.main_ppo trainer.save_freq=20", "run.sh", "trainer.save_freq"),
        ("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2", "run.sh",
         "actor_rollout_ref.actor.strategy"),
        (OPENRLHF, "run.sh", "train.batch_size"),
        (SLIME, "run.sh", "num-steps-per-rollout"),
        (TRL, "t.py", "per_device_train_batch_size"),
    ],
)  # fmt: skip
def test_what_loses_nothing_has_the_same_meaning(text: str, name: str, key: str, tmp_path: Path) -> None:
    found = row(imported(text, name, tmp_path), key)
    assert found.status == "same"
    assert found.note


def test_an_import_with_an_error_does_not_pass_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = VERL.replace("adv_estimator=grpo", "adv_estimator=gdpo")
    (tmp_path / "run.sh").write_text(script, encoding="utf-8")
    spec = tmp_path / "spec.yaml"
    assert run(["import", str(tmp_path / "run.sh"), "--output", str(spec)]) == 0
    capsys.readouterr()
    assert run(["train", "--spec", str(spec), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "algorithm.adv_estimator: has no value yet: `???`" in error
    loaded = load_spec([], [spec], ["algorithm.adv_estimator=grpo"])  # takes its place
    assert loaded.spec.algorithm.adv_estimator == "grpo"
