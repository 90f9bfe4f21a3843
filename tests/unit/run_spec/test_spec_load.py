"""Layers, origins, and every mistake at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.errors import SpecError
from rlctl.run_spec.keys import advice_for, known_leaves
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.sources import Origin, SpecSource, all_presets, presets_dir, read_yaml


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(presets=(), files=(), overrides=()) -> dict[str, object]:
    with pytest.raises(SpecError) as caught:
        load_spec(list(presets), list(files), list(overrides))
    return {problem.key or problem.what: problem for problem in caught.value.problems}


def test_later_layers_win_and_are_remembered(tmp_path):
    preset = write(tmp_path / "mine.yaml", "actor:\n  lr: 2e-4\nrollout:\n  n: 4\n")
    file = write(tmp_path / "spec.yaml", "rollout:\n  n: 6\ntrainer:\n  seed: 9\n")
    loaded = load_spec(["rloo-seq-is", str(preset)], [file], ["trainer.seed=7"])
    assert loaded.spec.trainer.seed == 7
    assert str(loaded.origins["trainer.seed"]) == "command line"
    assert loaded.spec.rollout.n == 6
    assert str(loaded.origins["rollout.n"]) == f"{file}:2"
    assert loaded.spec.actor.lr == 2e-4
    assert str(loaded.origins["actor.lr"]) == f"preset {preset}:2"
    assert str(loaded.origins["algorithm.adv_estimator"]).startswith("preset rloo-seq-is:")
    assert str(loaded.origins["data.train_batch_size"]) == "embedded model"
    assert str(loaded.origins["rollout.temperature"]) == "default"
    assert loaded.origins.keys() == known_leaves().keys()


def test_presets_layer_left_to_right():
    assert load_spec(["rloo-seq-is", "grpo-rs-only"], [], []).spec.algorithm.adv_estimator == "grpo"
    assert load_spec(["grpo-rs-only", "rloo-seq-is"], [], []).spec.algorithm.adv_estimator == "rloo"


def test_embedded_layer_only_for_the_embedded_model():
    tiny = load_spec([], [], []).spec
    assert (tiny.data.max_prompt_length, tiny.engine.dtype) == (8, "fp32")
    other = load_spec([], [], ["model.path=Qwen/Qwen2.5-0.5B", "data.train_files=a.parquet"])
    assert other.spec.data.max_prompt_length == 512
    assert str(other.origins["data.max_prompt_length"]) == "default"


def test_everything_wrong_is_reported_at_once(tmp_path):
    broken = write(tmp_path / "broken.yaml", "actor:\n  lr: [\n")
    file = write(
        tmp_path / "spec.yaml",
        "actor:\n  lr: fast\n  ppo_mini_batch_size: 48\nalgorithm:\n  lr: 1e-6\n  adv_estimator: rlo\n",
    )
    found = problems_of(
        ["rlo-seq-is"],
        [broken, file, tmp_path / "none.yaml"],
        ["rollout.n=1.5", "+trainer.seed=1", "trainer.sed=1", "rollout.top_k=0", "seed"],
    )
    assert found["actor.lr"].where == f"{file}:2"
    assert found["actor.ppo_mini_batch_size"].fix == "use a divisor of 128, for example 32"
    assert found["actor.ppo_mini_batch_size"].where == f"{file}:3"
    assert found["algorithm.lr"].where == f"{file}:5"
    assert found["algorithm.lr"].fix == "did you mean `actor.lr`?"
    assert found["algorithm.adv_estimator"].fix == "did you mean `rloo`?"
    assert found["rollout.n"].where == "command line"
    assert found["trainer.sed"].fix == "did you mean `trainer.seed`?"
    assert found["rollout.top_k"].severity == "error"
    by_place = {(problem.where or "").removeprefix(str(tmp_path)): problem for problem in found.values()}
    assert "expected" in by_place["/broken.yaml:3"].what
    assert "No such file" in by_place["/none.yaml"].what
    assert any("`rloo-seq-is`" in (problem.fix or "") for problem in found.values())
    assert any(problem.fix == "leave it out: trainer.seed=1" for problem in found.values())
    assert any("not of the form key=value" in problem.what for problem in found.values())


def test_every_wrong_item_of_a_list_is_reported_and_compared_with_what_stands_there(tmp_path):
    terms = "reward:\n  terms:\n    - {name: mathss}\n    - {name: maths, wieght: 2}\n"
    with pytest.raises(SpecError) as raised:
        load_spec([], [write(tmp_path / "a.yaml", terms)], ["trainer.logger=[console,mlfow,wanb]"])
    fixes = {problem.what.partition(":")[0]: problem.fix for problem in raised.value.problems}
    assert fixes == {
        "item 1, name": "did you mean `maths`?",
        "item 2, wieght": "did you mean `weight`?",
        "item 2": "did you mean `mlflow`?",
        "item 3": "did you mean `wandb`?",
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("actor:\n  lr:1e-6\n", 1, "write a space after the colon: `lr: 1e-6`"),
        ("trainer:\n  run_dir: %x\n", 2, "in quotes"),
        ("algorithm:\n  adv_estimator: GRPO\n", 2, "did you mean `grpo`?"),
        ("Actor:\n  LR: 1\n", 2, "did you mean `actor.lr`?"),
        ("actor:\n  betas: 0.9\n", 2, "must be a list, `[a, b]`, got 0.9"),
        ("reward:\n  terms: [maths]\n", 2, "item 1: must be a mapping, `name: value`, got 'maths'"),
        ("reward:\n  terms:\n  - weight: 2\n", 2, "item 1, name: is missing"),
        ("engine:\n  deepspeed:\n    zero_optimisation: {}\n", 3, "write zero_optimization"),
        ("engine:\n  deepspeed: none.json\n", 2, "must be a mapping, or a JSON file: No such file"),
        ("algorithm:\n  adv_params:\n    x: 1\n", 3, "rloo takes no parameters"),
        ("actor:\n  lr: fast\n", 2, "must be a number, got 'fast'"),
        ("rollout:\n  n: 2.5\n", 2, "must be an integer, got 2.5"),
        ("rollout:\n  n: ten\n", 2, "must be an integer, got 'ten'"),
        ("actor:\n  use_kl_loss: maybe\n", 2, "must be true or false, got 'maybe'"),
        ("rollout:\n  num_samples: 8\n", 2, "use `rollout.n`"),
        ("actor:\n  lr: 1e-6\n ppo_epochs: 1\n", 3, "correct the indentation"),
    ],
)
def test_frequent_mistakes_are_reported_with_their_line_and_what_to_write(text, line, words, tmp_path):
    [problem] = problems_of([], [write(tmp_path / "a.yaml", text)]).values()
    assert problem.where == f"{tmp_path}/a.yaml:{line}"
    assert words in f"{problem.what}; {problem.fix}"


def test_an_integer_that_python_refuses_to_read_is_a_problem_with_its_line(tmp_path):
    file = write(tmp_path / "a.yaml", f"trainer:\n  seed: {'7' * 5000}\n")
    found = problems_of([], [file], [f"rollout.n={'7' * 5000}"])
    assert found["trainer.seed"].where == f"{file}:2"
    assert all(len(found[key].what) < 400 for key in ("trainer.seed", "rollout.n"))


def test_no_contradiction_is_reported_about_unreadable_values():
    found = problems_of([], [], ["rollout.n=many", "actor.ppo_mini_batch_size=x", "data.train_batch_size=7"])
    assert set(found) == {"rollout.n", "actor.ppo_mini_batch_size"}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.model.path", "`model.path`"),
        ("actor_rollout_ref.actor.optim.lr", "`actor.lr`"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "`actor.ppo_mini_batch_size`"),
        ("actor_rollout_ref.actor.ppo_epochs", "`actor.ppo_epochs`"),
        ("actor_rollout_ref.rollout.n", "`rollout.n`"),
        ("actor_rollout_ref.rollout.calculate_log_probs", "always on here, leave it out"),
        ("actor_rollout_ref.actor.use_kl_loss", "`actor.use_kl_loss`"),
        ("use_kl_in_reward", "`algorithm.use_kl_in_reward`"),
        ("critic.model.path", "`critic.path`"),
        ("critic.optim.lr", "`critic.lr`"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "`algorithm.rollout_correction.loss_type`"),
        ("reward_model.model.path", "`reward.model.path`"),
        ("reward_funcs", "`reward.terms`"),
        ("trainer.project_nam", "`trainer.project_name`"),
        ("rollout_is", "`algorithm.rollout_correction.rollout_is`"),
        ("algorithm.rollout_correcton.rollout_is", "`algorithm.rollout_correction.rollout_is`"),
        ("actor.learning_rate", "`actor.lr`"),
        ("num_generations", "`rollout.n`"),
        ("actor.lr.value", "`actor.lr`"),
        ("clip_ratio_hi", "`actor.clip_ratio_high`"),
        ("rollout.val_kwargs.temprature", "`rollout.val_kwargs.temperature`"),
        # nothing here is close: a key that only shares the section's name is no better than its neighbours
        ("trainer.guardrails.enabel", "mode"),
        ("trainer.guardrails.enabel", "keys of `trainer.guardrails` are"),
        ("rollot.temperature", "`rollout.temperature`"),
    ],
)
def test_unknown_keys_get_advice(key, words):
    assert words in (advice_for(key) or "")


def test_keys_of_nothing_get_no_advice():
    assert advice_for("zzz.qqq") is None


def test_advice_names_only_keys_that_exist():
    import re

    from rlctl.run_spec.keys import _ELSEWHERE

    for advice in _ELSEWHERE.values():
        for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", advice):
            assert name in known_leaves()


def test_numbers_where_text_is_wanted_keep_their_digits(tmp_path):
    file = write(tmp_path / "a.yaml", "trainer:\n  experiment_name: 2.10\nmodel:\n  revision: 1e10\n")
    spec = load_spec([], [file], ["algorithm.rollout_correction.rollout_is_threshold=0.5_2"]).spec
    assert spec.trainer.experiment_name == "2.10"
    assert spec.model.revision == "1e10"
    assert spec.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"


def test_shell_style_values():
    overrides = [
        "algorithm.rollout_correction.rollout_rs=null",
        "algorithm.rollout_correction.bypass_mode=True",
        'trainer.logger=["console","wandb"]',
        "data.val_files=a.parquet",
        "trainer.test_freq=5",
        "trainer.seed=1",
        "trainer.seed=2",
    ]
    spec = load_spec([], [], overrides).spec
    assert spec.algorithm.rollout_correction.rollout_rs is None
    assert spec.algorithm.rollout_correction.bypass_mode is True
    assert spec.trainer.logger == ["console", "wandb"]
    assert spec.data.val_files == ["a.parquet"]
    assert spec.trainer.seed == 2


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", "-1", "true", "[1]", "", "1e999"])
def test_bad_numbers_are_refused(value):
    assert set(problems_of([], [], [f"actor.lr={value}"])) == {"actor.lr"}


@pytest.mark.parametrize("name", ["..", ".", ".x", "a/b", "../x", "-x", "a b", "ü", "a\n"])
def test_names_cannot_leave_the_runs_directory(name):
    assert set(problems_of([], [], [f'trainer.project_name="{name}"'])) == {"trainer.project_name"}


@pytest.mark.parametrize("value", ["[0.9]", "[0.9,1]", "[0.9,0.99,0.999]", "0.9", "[0.9,x]"])
def test_bad_betas_are_one_problem(value):
    assert set(problems_of([], [], [f"actor.betas={value}"])) == {"actor.betas"}


def test_sections_are_no_values(tmp_path):
    assert set(problems_of([], [], ["actor=3"])) == {"actor"}
    commented_out = write(tmp_path / "a.yaml", "actor:\n# lr: 1\n")
    load_spec([], [commented_out], [])


def test_arguments_that_are_something_else(tmp_path):
    write(tmp_path / "spec.yaml", "")
    script = write(tmp_path / "run.sh", "")
    given = ["rloo-seq-is", "my.yaml", "~actor.lr", str(tmp_path), str(script), "="]
    fixes = {problem.fix for problem in problems_of([], [], given).values()}
    assert "for a preset write --preset rloo-seq-is" in fixes
    assert "for a spec file write --spec my.yaml" in fixes
    assert any("set it to null" in fix for fix in fixes if fix)
    assert f"to continue this run write --resume {tmp_path}" in fixes
    assert f"a spec is a .yaml file; for another framework's file: rlctl import {script}" in fixes
    assert "write key=value without spaces" in fixes


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref:\n  rollout: {n: 8}\ndata:\n  train_batch_size: 8\n",
        "model_name_or_path: x\nlearning_rate: 1e-6\nnum_generations: 8\n",
    ],
)
def test_a_configuration_of_another_framework_is_named(text, tmp_path):
    file = write(tmp_path / "a.yaml", text)
    first = next(iter(problems_of([], [file]).values()))
    assert (first.where, first.fix) == (str(file), f"rlctl import {file} --output spec.yaml")


def test_a_spec_with_misspelled_keys_is_no_configuration_of_another_framework(tmp_path):
    file = write(tmp_path / "a.yaml", "actor:\n  learning_rate: 1e-6\n  epochs: 1\nrollout:\n  n: 4\n")
    assert set(problems_of([], [file])) == {"actor.learning_rate", "actor.epochs"}


@pytest.mark.parametrize("name", list(all_presets()))
def test_presets_load_and_round_trip(name, tmp_path):
    prompts = frozenset({"data.train_files"})  # a model's preset leaves them to others
    loaded = load_spec([name], [], [], left_open=prompts)
    again = load_spec([], [write(tmp_path / "spec.yaml", dump_spec(loaded.spec))], [], left_open=prompts)
    assert again.spec == loaded.spec
    assert all_presets()[name].description
    assert all_presets()[name].path.read_text(encoding="utf-8").startswith("# ")


def test_what_is_left_open_is_not_missed_but_everything_else_is():
    only_prompts = frozenset({"data.train_files"})
    with pytest.raises(SpecError) as caught:
        load_spec(["llama3-8b"], [], ["rollout.top_k=0"], left_open=only_prompts)
    assert [problem.key for problem in caught.value.problems] == ["rollout.top_k"]


def test_odd_values_round_trip(tmp_path):
    overrides = [
        "trainer.experiment_name=1e3",
        'data.train_files=["007", "a b: c", "null", "ünïcode", "[x]"]',
        "data.val_files=yes",
        "trainer.test_freq=1",
        "model.revision=0x10",
        "actor.lr=5e-7",
        "trainer.run_dir=~/x",
    ]
    spec = load_spec([], [], overrides).spec
    assert spec.data.train_files == ["007", "a b: c", "null", "ünïcode", "[x]"]
    assert load_spec([], [write(tmp_path / "s.yaml", dump_spec(spec))], []).spec == spec


def test_preset_names_are_unique():
    names = [path.stem for path in presets_dir().rglob("*.yaml")]
    assert len(names) == len(set(names)) == len(all_presets())


def test_reference_numbers_of_the_complete_runs():
    rloo = load_spec(["qwen2.5-7b-rloo-seq-is"], [], []).spec
    grpo = load_spec(["qwen2.5-7b-grpo-multi-rs"], [], []).spec
    for spec in (rloo, grpo):
        assert spec.model.path == "Qwen/Qwen2.5-7B"
        assert (spec.data.max_prompt_length, spec.data.max_response_length) == (2048, 4096)
        assert (spec.data.train_batch_size, spec.actor.ppo_mini_batch_size) == (128, 32)
        assert spec.trainer.logger == ["console", "wandb"]
    assert (rloo.actor.lr, rloo.trainer.total_epochs) == (5e-7, 10)
    assert (grpo.actor.lr, grpo.trainer.total_epochs) == (3e-6, 5)
    assert rloo.trainer.project_name == "rollout_corr_rloo"
    assert grpo.trainer.project_name == "rollout_corr_multi_rs"
    short = load_spec(["grpo-token-is-multi-rs"], [], []).spec
    assert short.algorithm == grpo.algorithm
    assert load_spec(["rloo-seq-is"], [], []).spec.algorithm == rloo.algorithm


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=100, deadline=None)
@given(text, st.lists(text, max_size=3), st.floats(0, 1e9))
def test_any_text_and_number_reads_back_equal(path, files, lr):
    base = RunSpec()
    spec = base.model_copy(
        update={
            "model": base.model.model_copy(update={"path": path}),
            "data": base.data.model_copy(update={"train_files": files}),
            "actor": base.actor.model_copy(update={"lr": lr}),
        }
    )
    source = read_yaml(dump_spec(spec).encode(), known_leaves(), SpecSource(Origin("file")))
    assert not source.problems
    assert source.leaves["model.path"].value == path
    assert source.leaves["data.train_files"].value == files
    assert source.leaves["actor.lr"].value == lr


def test_an_empty_mapping_removes_the_keys_of_weaker_sources(tmp_path):
    weak, strong = tmp_path / "weak.yaml", tmp_path / "strong.yaml"
    weak.write_text("rollout:\n  name: vllm\n  engine_kwargs: {block_size: 16, swap_space: 2}\n")
    strong.write_text("rollout:\n  engine_kwargs: {}\nactor: {}\n")
    key = "rollout.engine_kwargs"
    assert load_spec([], [weak], [f"{key}.block_size=32"]).spec.rollout.engine_kwargs == {
        "block_size": 32,
        "swap_space": 2,
    }
    assert load_spec([], [weak], [f"{key}={{}}"]).spec.rollout.engine_kwargs == {}
    assert load_spec([], [weak], {key: {}}).spec.rollout.engine_kwargs == {}
    loaded = load_spec([], [weak, strong], [f"{key}.block_size=32"])
    assert loaded.spec.rollout.engine_kwargs == {"block_size": 32}
    assert load_spec([], [weak, strong], []).spec.rollout.engine_kwargs == {}
    with pytest.raises(SpecError, match=r"a\.b=value"):
        load_spec([], [weak], [f"{key}={{block_size: 4}}"])


@pytest.mark.parametrize(
    ("section", "name", "form"),
    [
        ("TrainerSpec", "save_every", "number"),
        ("TrainerSpec", "hang_timeout", "number"),
        ("TrainerSpec", "logger", "string"),
        ("EngineSpec", "deepspeed", "string"),
        ("RolloutSpec", "engine_kwargs", "string"),
        ("RolloutCorrectionSpec", "dialect", "enum guide"),
        ("RolloutCorrectionSpec", "rollout_is_threshold", "number"),
        ("FilterGroupsSpec", "metric", "enum acc"),
        ("ActorSpec", "kl_loss_type", "enum low_var_kl"),
        ("AlgorithmSpec", "kl_penalty", "enum kl"),
    ],
)
def test_the_schema_offers_the_other_forms_that_a_value_may_have(section: str, name: str, form: str) -> None:
    schema = RunSpec.model_json_schema()["$defs"][section]["properties"][name]

    def forms(of: dict) -> set[str]:
        below = {found for each in of.get("anyOf", []) for found in forms(each)}
        return below | {of.get("type", "")} | {f"enum {value}" for value in of.get("enum", [])}

    assert form in forms(schema)


@pytest.mark.parametrize(
    ("presets", "overrides", "mini_batch"),
    [
        ([], ["data.train_batch_size=32"], None),  # smaller than the embedded preset's 64
        ([], ["data.train_batch_size=96"], None),
        ([], ["data.train_batch_size=256"], 64),  # still divides
        (["stale-token-is"], ["data.train_batch_size=24"], None),
        (["guess-number"], ["data.train_batch_size=14"], None),
    ],
)
def test_a_batch_needs_no_second_key(presets, overrides, mini_batch) -> None:
    loaded = load_spec(presets, [], overrides)
    assert loaded.spec.actor.ppo_mini_batch_size == mini_batch
    if mini_batch is None:
        assert "does not divide" in str(loaded.origins["actor.ppo_mini_batch_size"])


def test_a_mini_batch_of_the_batchs_own_layer_is_an_error(tmp_path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("data: {train_batch_size: 32}\nactor: {ppo_mini_batch_size: 64}\n")
    for sources in (([], [own], []), ([], [], ["data.train_batch_size=32", "actor.ppo_mini_batch_size=64"])):
        with pytest.raises(SpecError):
            load_spec(*sources)
    assert load_spec([], [own], ["data.train_batch_size=16"]).spec.ppo_mini_batch_size == 16


def test_inferred_values_are_the_weakest(tmp_path) -> None:
    inferred = {"data.train_batch_size": (40, "of the data"), "data.max_prompt_length": (77, "of the data")}
    values = ["model.path=a/b", "data.train_files=t.parquet", "data.train_batch_size=8"]
    loaded = load_spec([], [], values, inferred=inferred)
    assert (loaded.spec.data.train_batch_size, loaded.spec.data.max_prompt_length) == (8, 77)
    assert str(loaded.origins["data.max_prompt_length"]) == "inferred: of the data"
    assert load_spec([], [], values[:-1], inferred=inferred).spec.data.train_batch_size == 40


@pytest.mark.parametrize(
    ("overrides", "budget"),
    [
        ([], 3072),
        (["data.max_response_length=2048"], 3072),
        (["data.max_response_length=4096"], 1024 + 4096),
        (["data.max_prompt_length=2049"], 2049 + 2048),
        (["data.max_response_length=4096", "engine.sequence_parallel=2"], 3072),
        (["data.max_response_length=8192", "engine.sequence_parallel=2"], (1024 + 8192) // 2),
    ],
)
def test_longer_responses_need_no_second_key(overrides, budget) -> None:
    given = [
        "data.train_files=t.parquet",
        "engine.offload_base=false",
        "trainer.n_gpus_per_node=2",
        *overrides,
    ]
    loaded = load_spec(["llama3-8b", "1gpu-24gb"], [], given)
    assert loaded.spec.actor.ppo_max_token_len_per_gpu == budget
    with pytest.raises(SpecError):
        load_spec(["llama3-8b", "1gpu-24gb"], [], [*given, "actor.ppo_max_token_len_per_gpu=1024"])


def test_an_adapter_says_what_it_is(tmp_path) -> None:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["model.layers.0.q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    given = ["model.path=a/b", "data.train_files=t.parquet", f"model.lora_adapter_path={tmp_path}"]
    for presets in ([], ["1gpu-lora"]):
        model = load_spec(presets, [], given).spec.model
        assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 8.0, ["q_proj", "v_proj"])
    assert load_spec([], [], [*given, "model.lora_rank=16"]).spec.model.lora_rank == 16  # refused by a check
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(SpecError, match="lora_rank"):
        load_spec([], [], given)
