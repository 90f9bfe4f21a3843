"""Training engines by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.engine.engines import TrainContext, build_training_engine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, SpecError
from rlctl.run_spec.load import load_spec

EXAMPLE = f"{Path(__file__).parents[3]}/examples/custom_training_engine.py:plain_adamw"


@pytest.mark.parametrize("option", ["zero_stage=2", "offload=optimizer", "sequence_parallel=2"])
def test_options_of_deepspeed_are_errors_with_another_engine(option: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec([], [], [f"engine.name={EXAMPLE}", f"engine.{option}", "trainer.n_gpus_per_node=2"])
    key = f"engine.{option.partition('=')[0]}"
    found = {one.key: one for one in refused.value.problems if "does not read this option" in one.what}
    assert "engine.name: deepspeed" in found[key].fix


def test_an_unknown_engine_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="'deepspeed'"):
        load_spec([], [], ["engine.name=megatron"])


def test_what_is_no_engine_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(context):\n    return object()\n")
    ranks = Ranks(0, 1, torch.device("cpu"))
    context = TrainContext(None, ranks, {}, temperature=1.0)
    with pytest.raises(RunFailure, match=r"object has no plan and no backward.* and no policy") as refused:
        build_training_engine(f"{tmp_path}/mine.py:build", context)
    assert "engine.name" in refused.value.where
