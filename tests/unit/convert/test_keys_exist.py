"""Every key in the tables is one of the framework's, and every default is its own.

verl's configuration and TRL's classes are read where `make verl` installed them; nothing of them is run.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.cli.explain_entries import entries_of
from rlctl.convert.table import KeyTable, explained, names, placeholders, table, tables, word
from rlctl.errors import UsageError
from rlctl.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.keys import leaf_of
from tests.processes import ROOT
from tests.reference.verl_helper import SIDE

needs_side = pytest.mark.skipif(not (SIDE / "verl").is_dir(), reason=f"verl and TRL are not in {SIDE}")


@cache
def verl_defaults() -> dict[str, Any]:
    text = (SIDE / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = {}

    def flatten(content: dict[str, Any], prefix: str) -> None:
        for key, value in content.items():
            found[f"{prefix}{key}"] = value
            if isinstance(value, dict):
                flatten(value, f"{prefix}{key}.")

    flatten(yaml.safe_load(text), "")
    return found


@cache
def trl_defaults() -> dict[str, Any]:
    """Of GRPOConfig; names alone of RLOOConfig, ScriptArguments, ModelConfig and GRPOScriptArguments."""
    from transformers import TrainingArguments

    found: dict[str, Any] = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TrainingArguments)
    }
    files = ["trainer/model_config.py", "scripts/utils.py", "scripts/grpo.py", "trainer/rloo_config.py"]
    for file in [*files, "trainer/base_config.py", "trainer/grpo_config.py"]:
        tree = ast.parse((SIDE / "trl" / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
                defaults = [one.value for one in keywords if one.arg == "default"]
                value = defaults[0].value if defaults and isinstance(defaults[0], ast.Constant) else None
                found[node.target.id] = value
    return found


DEFAULTS = {"verl": verl_defaults, "trl": trl_defaults}


@needs_side
@pytest.mark.verl
@pytest.mark.parametrize("name", DEFAULTS)
def test_every_key_is_the_frameworks_own(name: str) -> None:
    known = DEFAULTS[name]()
    ours = {key for key, rule in table(name).keys.items() if not rule.outside and not key.startswith("_")}
    assert not ours - set(known)


@needs_side
@pytest.mark.verl
@pytest.mark.parametrize("name", DEFAULTS)
def test_every_default_is_the_frameworks_own(name: str) -> None:
    known = DEFAULTS[name]()
    wrong = {
        key: (rule.default, known[key])
        for key, rule in table(name).keys.items()
        if rule.default is not None
        and key in known
        and not (isinstance(known[key], str) and known[key].startswith(("${", "???")))
        and not _is_equal(rule.default, known[key])
    }
    # TRL's own defaults that its classes compute or that ModelConfig sets.
    assert wrong.keys() <= (TRL_COMPUTED if name == "trl" else set()), wrong


@needs_side
@pytest.mark.verl
def test_a_variant_differs_from_the_main_class_as_stated() -> None:
    """Of RLOOConfig; PPOConfig is no class of this version."""

    def own(kind: str) -> dict[str, Any]:
        tree = ast.parse((SIDE / f"trl/trainer/{kind}_config.py").read_text(encoding="utf-8"))
        calls = {
            node.target.id: node.value.keywords
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Call)
        }
        return {
            key: next((ast.literal_eval(one.value) for one in keywords if one.arg == "default"), None)
            for key, keywords in calls.items()
        }

    grpo, rloo = own("grpo"), own("rloo")
    variant = table("trl").variants["RLOOConfig"]
    assert variant.defaults == {key: rloo[key] for key in grpo if key in rloo and grpo[key] != rloo[key]}


#: `field(default=None)` that `__post_init__` fills in, and defaults that are not constants.
TRL_COMPUTED = {"report_to", "lr_scheduler_type", "save_strategy", "eval_strategy", "adam_beta1"}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(one) == float(other)
    return word(one) == word(other) or (one == "vllm" and other == "???")


@needs_side
@pytest.mark.verl
@pytest.mark.parametrize("name", [*DEFAULTS, "openrlhf"])
def test_explain_knows_every_key(name: str) -> None:
    """Of TRL's GRPO and RLOO, verl's configuration and OpenRLHF's options."""
    if name == "openrlhf":
        file = Path(sys.prefix) / "peers/openrlhf/cli/train_ppo_ray.py"
        if not file.is_file():
            pytest.skip(f"{file} is not there")
        text = file.read_text(encoding="utf-8")
        keys = set(re.findall(r'add_argument\(\s*"--([\w.]+)"', text))
        assert len(keys) > 100
    else:
        known = DEFAULTS[name]()
        keys = {key for key, value in known.items() if not isinstance(value, dict) and "_target_" not in key}
    one, keys = table(name), keys - NESTED
    unknown = {key for key in keys if not explained(one, key) and not explained(one, key, by_prefix=True)}
    assert not unknown


#: Fields of an entry of `datasets`.
NESTED = {"columns", "data_dir", "data_files", "fraction", "name", "path", "split"}
PPO = """
num_ppo_epochs num_mini_batches total_episodes kl_coef kl_estimator cliprange cliprange_value gamma
lam vf_coef whiten_rewards response_length sft_model_path reward_model_path missing_eos_penalty stop_token
local_rollout_forward_batch_size
"""


@pytest.mark.parametrize("word", PPO.split())
def test_explain_knows_the_keys_of_ppo(word: str) -> None:
    assert explained(table("trl"), word)


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("beta", "actor.kl_loss_coef"),
        ("early stop", "trainer.early_stop.patience"),
        ("early_stopping_patience", "trainer.early_stop.patience"),
        ("llm judge", "reward.name"),
        ("completions", "trainer.log_samples"),
        ("eval_steps", "trainer.test_freq"),
        ("--n_samples_per_prompt", "rollout.n"),
        ("num-generations", "rollout.n"),
        ("init_kl_coef", "actor.kl_loss_coef"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "environment.max_turns"),
        ("max_completion_length", "data.max_response_length"),
    ],
)
def test_explain_answers_in_the_words_of_others(asked: str, first: str) -> None:
    entries = [entry for entry in entries_of(asked) if "becomes" in entry]
    assert any(entry["becomes"][0].startswith(f"{first}:") for entry in entries), entries


def test_explain_says_where_gguf_is() -> None:
    [entry] = entries_of("gguf")
    assert "--gguf-help" in entry["note"][0]


def test_a_misspelt_key_is_no_word_of_others() -> None:
    with pytest.raises(UsageError, match=r"critic\.lr"):
        entries_of("critic.lrr")


@pytest.mark.parametrize("name", [*names(), "words"])
def test_every_table_leads_to_keys_of_the_spec(name: str) -> None:
    one: KeyTable = tables()[name]
    targets = {rule.to for rule in one.keys.values() if rule.to} | set(one.formulas) | set(one.constants)
    assert not {key for key in targets if leaf_of(key) is None}
    used = {key for formula in one.formulas.values() for key in placeholders(formula)}
    assert not used - set(one.keys)
    assert not {key for key in one.aliases.values() if key not in one.keys and one.rule(key) is None}


@pytest.mark.parametrize("name", names())
def test_values_that_a_table_writes_exist_here(name: str) -> None:
    parts = {
        "algorithm.adv_estimator": ADVANTAGE_ESTIMATORS,
        "algorithm.kl_penalty": KL_ESTIMATORS,
        "actor.kl_loss_type": KL_ESTIMATORS,
        "algorithm.rollout_correction.loss_type": POLICY_LOSSES,
    }
    for rule in table(name).keys.values():
        if rule.to in parts and rule.values:
            assert set(rule.values.values()) <= set(parts[rule.to])


@pytest.mark.parametrize("framework", tables())
def test_the_fixes_of_diagnose_have_keys_of_the_table(framework: str) -> None:
    """What `fixes` says of a spec key is a key of the table, and no other has the same meaning."""
    one = tables()[framework]
    for name, text in one.fixes.items():
        if "." not in name:  # of several settings
            settings = re.findall(r"(?<=--)[\w.-]+|(?:^|(?<=\s))[\w.]+(?==)", text)
            assert settings
            assert all(one.rule(key) for key in settings if one.commands), settings
            continue
        assert leaf_of(name)
        same = [
            key
            for key, rule in one.keys.items()
            if rule.to == name and not (rule.unsupported or rule.differs)
        ]
        assert not same or text.removeprefix(one.option) in same
        assert not text or not one.commands or text.removeprefix(one.option) in one.keys


def test_a_fix_has_the_frameworks_value() -> None:
    verl, openrlhf, nemo = (tables()[name] for name in ("verl", "openrlhf", "nemo-rl"))
    assert verl.fix("actor.lr", "1e-6") == "actor_rollout_ref.actor.optim.lr=1e-6"
    assert openrlhf.fix("rollout.n", "8") == "--rollout.n_samples_per_prompt 8"
    assert nemo.fix("engine.dtype", "fp32") == "policy.precision=float32"
    assert openrlhf.fix("engine.dtype", "fp32") == ""  # has no such value
    assert openrlhf.fix("rollout.n") == "--rollout.n_samples_per_prompt"


def test_the_page_from_trl_says_what_the_table_says() -> None:
    """Each key of TRL on it leads to the spec keys beside it."""
    text = (ROOT / "docs/how-to/from-trl.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for theirs, ours in rows:
        keys, spec_keys = (re.findall(r"`([\w.]+)`", cell) for cell in (theirs, ours))
        reached = {
            target
            for key in keys
            for found in (explained(table("trl"), key), explained(table("trl"), f"trainer.{key}"))
            for _, targets, _ in found
            for target in targets
        }
        if keys != ["train_dataset"]:  # made by rlctl prepare-data
            assert set(spec_keys) <= reached, (keys, set(spec_keys) - reached)
