"""Every key in the tables is one of the framework's, and every default is its own.

verl's configuration and TRL's classes are read where `make verl` installed them; nothing of them is run.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from typing import Any

import pytest
import yaml

from rlctl.convert.table import KeyTable, names, placeholders, table, word
from rlctl.diagnose.fixes import KEYS, _keys_elsewhere
from rlctl.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.keys import leaf_of
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


@pytest.mark.parametrize("name", names())
def test_every_table_leads_to_keys_of_the_spec(name: str) -> None:
    one: KeyTable = table(name)
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


@pytest.mark.parametrize("framework", names())
def test_the_fixes_of_diagnose_name_the_same_keys(framework: str) -> None:
    num_named = 0
    for key in KEYS:
        rules = [
            (other, rule)
            for other, rule in table(framework).keys.items()
            if rule.to == key and not rule.unsupported
        ]
        named = _keys_elsewhere(key).get(framework, "").removeprefix("--")
        is_probability = (framework, key) == ("prime-rl", "actor.clip_ratio_high")  # no bound of a ratio
        assert named or is_probability or all(rule.differs for _, rule in rules), (key, rules)
        assert not (named and rules) or named in dict(rules), (key, named)
        num_named += bool(named and rules)
    assert num_named
