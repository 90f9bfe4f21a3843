"""A spec becomes another framework's configuration and comes back as it was, where the tables say it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.cli.app import run
from rlctl.convert.export import _hydra, as_text, export
from rlctl.convert.source import _hydra_value, read
from rlctl.convert.table import table
from rlctl.convert.translate import translate
from rlctl.spec.keys import value_of
from rlctl.spec.load import load_spec
from rlctl.spec.resolve import correction_rules
from rlctl.spec.run_spec import RunSpec

BASE = [
    "model.path=org/model-1b",
    "data.train_files=[train.parquet]",
    "rollout.name=vllm",
    "rollout.n=4",
    "rollout.max_num_seqs=64",
    "data.train_batch_size=32",
    "actor.ppo_mini_batch_size=16",
    "actor.clip_ratio_low=0.1",
    "actor.clip_ratio_high=0.3",
    "actor.lr=3e-7",
    "trainer.n_gpus_per_node=2",
    "trainer.total_epochs=3",
    "trainer.seed=42",
    "engine.zero_stage=3",
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is_batch_normalize=false",
]
RULES = ("algorithm.rollout_correction.rollout_is_", "algorithm.rollout_correction.rollout_rs_")
_C = "algorithm.rollout_correction."
CASES = {
    "verl decoupled, token weights, rejection": [
        f"{_C}dialect=verl",
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=ppo_clip",
        f"{_C}rollout_is=token",
        f"{_C}rollout_is_threshold=3.0",
        f"{_C}rollout_rs=seq_mean_k1",
        f"{_C}rollout_rs_threshold=0.999_1.001",
        f"{_C}loss_denominator=after_rejection",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.02",
    ],
    "verl bypass": [
        f"{_C}dialect=verl",
        f"{_C}loss_type=reinforce",
        f"{_C}rollout_is=sequence",
        f"{_C}rollout_is_bound=mask",
        f"{_C}rollout_is_threshold=0.5_5.0",
        "actor.ppo_max_token_len_per_gpu=9000",
        "actor.lr_warmup_steps=6",
        "algorithm.use_kl_in_reward=true",
    ],
    "verl gspo": [
        f"{_C}dialect=verl",
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=gspo",
        f"{_C}rollout_is=null",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.clip_ratio_low=3e-4",
        "actor.clip_ratio_high=4e-4",
    ],
    "trl grpo": [
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=ppo_clip",
        f"{_C}rollout_is=sequence",
        f"{_C}rollout_is_bound=mask",
        f"{_C}rollout_is_threshold=1e-9_3.0",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.use_kl_loss=true",
        "actor.kl_loss_coef=0.04",
        "actor.kl_loss_type=unbiased",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.total_training_steps=50",
        "algorithm.adv_estimator=dr_grpo",
    ],
    "trl rloo": [
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=ppo_clip",
        f"{_C}rollout_is=null",
        "actor.loss_agg_mode=seq-mean-token-sum",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "algorithm.adv_estimator=rloo",
        "rollout.n=8",  # the default of GRPOConfig, not of RLOOConfig
    ],
    "openrlhf icepop": [
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=ppo_clip",
        f"{_C}rollout_is=token",
        f"{_C}rollout_is_bound=mask",
        f"{_C}rollout_is_threshold=0.5_5.0",
        "actor.use_kl_loss=true",
        "actor.kl_loss_type=k2",
        "actor.loss_agg_mode=seq-mean-token-mean",
    ],
    "openrlhf geometric": [
        f"{_C}bypass_mode=false",
        f"{_C}loss_type=ppo_clip",
        f"{_C}rollout_is=token",
        f"{_C}rollout_is_bound=truncate",
        f"{_C}rollout_is_threshold=1e9",
        f"{_C}rollout_rs=geometric",
        f"{_C}rollout_rs_threshold=0.9_1.1",
    ],
}


def spec_of(case: str) -> RunSpec:
    return load_spec([], [], BASE + CASES[case]).spec


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str, tmp_path: Path) -> None:
    """Of every key that the export carries over, the import gives the same value back."""
    name = case.split(maxsplit=1)[0]
    spec = spec_of(case)
    result = export(spec, table(name))
    file = tmp_path / ("run.yaml" if name == "trl" else "run.sh")
    file.write_text(as_text(result), encoding="utf-8")
    if name == "trl":  # the launcher's settings are not in the file
        file = tmp_path / "run.sh"
        kind = "rloo" if case == "trl rloo" else "grpo"
        file.write_text(f"accelerate launch --num_processes 2 trl {kind} --config run.yaml\n")
    back = translate(read(file, framework=name, environment={}, arguments=[]))
    assert not [row for row in back.rows if row.status == "unknown"]
    again = load_spec([], [], back.spec, left_open=frozenset({"data.train_files"})).spec
    carried = [row.key for row in result.rows if row.status != "not supported" and row.became]
    carried = [key for key in carried if value_of(spec, key) is not None and not key.startswith(RULES)]
    assert len(carried) > 15
    changed = {key: (value_of(spec, key), value_of(again, key)) for key in carried}
    assert {key: pair for key, pair in changed.items() if pair[0] != pair[1]} == {}
    # The correction is the same rule, however its thresholds are written.
    correction, again_correction = (one.algorithm.rollout_correction for one in (spec, again))
    assert correction_rules(again_correction) == correction_rules(correction)
    assert (again_correction.bypass_mode, again_correction.loss_type) == (
        correction.bypass_mode,
        correction.loss_type,
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("/d/x-1.parquet", "/d/x-1.parquet"),
        ("a,b c", '"a,b c"'),  # unquoted, Hydra reads a sweep over two values
        ("x=1/[a]", '"x=1/[a]"'),
        ("null", '"null"'),
        ("123", '"123"'),
        ("1_0", '"1_0"'),
        ("é#~", '"é#~"'),
        ('a"b\\', r'"a\"b\\"'),
        (r"a\b", r'"a\b"'),
        ("/d/${x}", r'"/d/\${x}"'),
        (["a", "b's"], """[a,"b's"]"""),
        (0.5, "0.5"),
        (None, "null"),
    ],
)
def test_values_in_hydras_syntax(value: object, written: str) -> None:
    """The expected texts are those that Hydra 1.3 and OmegaConf read as the value."""
    assert _hydra(value) == written
    assert _hydra_value(written) == value


@given(text=st.text(alphabet="ab/.$\"'\\\\{}[](),:= #~é1_-+%*@?|&!nul"))
def test_every_text_reads_back(text: str) -> None:
    assert _hydra_value(_hydra(text.strip())) == text.strip()
    assert _hydra_value(_hydra([text, "x"])) == [text, "x"]


def test_arguments_of_the_chat_template_are_added_to_verls_mapping() -> None:
    asked = [*BASE, "data.chat_template_kwargs.enable_thinking=false"]
    text = as_text(export(load_spec([], [], asked).spec, table("verl")))
    assert " +data.apply_chat_template_kwargs.enable_thinking=false " in text


def test_what_is_not_carried_over_is_said() -> None:
    spec = load_spec([], [], [*BASE, f"{_C}rollout_rs=geometric", f"{_C}rollout_rs_threshold=0.9_1.1"]).spec
    result = export(spec, table("verl"))
    lost = {row.key for row in result.rows if row.status == "not supported"}
    # rlctl's criterion is not verl's, and its `clip` of weights is neither truncation nor mask.
    assert {f"{_C}rollout_rs", f"{_C}rollout_is"} <= lost
    assert "algorithm.rollout_correction.rollout_rs=" not in as_text(result).replace("# Not", "")
    assert f"# Not carried over: {_C}rollout_rs" in as_text(result)


def test_a_class_of_trl_gets_its_own_keys_and_defaults() -> None:
    """RLOOConfig has no importance sampling, and other defaults than GRPOConfig."""
    settings = export(spec_of("trl rloo"), table("trl")).settings
    assert (settings["num_generations"], settings["beta"]) == (8, 0.0)
    corrected = export(load_spec(["rloo-seq-is"], [], BASE[:2]).spec, table("trl"))
    assert not [key for key in corrected.settings if key.startswith(("vllm_importance", "use_bias"))]
    assert f"# Not carried over: {_C}rollout_is:" in as_text(corrected)


def test_a_warm_up_in_part_of_a_batch_is_not_carried_over() -> None:
    """verl's schedule advances once per batch, here of two optimizer steps."""
    for steps, carried in ((6, 3), (5, None)):
        spec = load_spec([], [], [*BASE, f"actor.lr_warmup_steps={steps}"]).spec
        settings = export(spec, table("verl")).settings
        assert settings.get("actor_rollout_ref.actor.optim.lr_warmup_steps") == carried


def test_every_changed_key_has_a_row() -> None:
    spec = spec_of("verl bypass")
    rows = {row.key for row in export(spec, table("trl")).rows}
    assert {"actor.lr", "rollout.n", f"{_C}rollout_is_bound", f"{_C}dialect"} <= rows


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.sh"
    assert run(["export-config", "rloo-seq-is", "--to", "verl", "--output", str(target)]) == 0
    assert "not supported" in capsys.readouterr().out
    assert "algorithm.adv_estimator=rloo" in target.read_text()
    assert run(["export-config", "rloo-seq-is", "--to", "openrlhf", "--format", "json"]) == 0
    assert '"algo.advantage.estimator": "rloo"' in capsys.readouterr().out
    assert run(["export-config", "no-such-preset", "--to", "trl"]) == 2
