"""Trainer and rollout engine compute the same log-probs, for every architecture that has a preset.

`benchmarks/parity.py` compares vLLM in the same way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from benchmarks.parity import FAMILIES, LIMIT_FP32, hf_gap, in_words, save
from tests.integration.test_model_families import FAMILIES as WITH_PRESETS
from tests.integration.test_model_families import MIXTURES


def test_every_architecture_is_compared() -> None:
    compared = {CONFIG_MAPPING[kind] for kind, _ in FAMILIES.values()}
    assert compared == {config_class for config_class, _ in (WITH_PRESETS | MIXTURES).values()}


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_agree(family: str, tmp_path: Path) -> None:
    gap = hf_gap(save(family, tmp_path), "fp32", replays="num_experts_per_tok" in FAMILIES[family][1])
    assert gap.largest < LIMIT_FP32, in_words(gap, "fp32")
    assert gap.mean_log_prob < 0
    assert gap.replayed_largest is None or gap.replayed_largest < LIMIT_FP32
