"""Rollout engines by name: what the spec refuses by capability, and an engine of the user's own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import RunFailure, SpecError
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.engines import EngineCapabilities, EngineContext, build_rollout
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.weights import PlainWeights
from rlctl.spec.load import load_spec
from rlctl.train.start import with_absolute_paths
from tests.models import naive_log_probs
from tests.unit.rollout.test_hf_rollout import TOKENIZER, make_prompts, random_model

EXAMPLE = f"{Path(__file__).parents[3]}/examples/custom_engine.py:plain_sampling"


def spec_with(*overrides: str):
    return load_spec([], [], list(overrides)).spec


def problems(*overrides: str) -> dict[str, str]:
    """key → what, of every error."""
    try:
        load_spec([], [], list(overrides))
    except SpecError as error:
        return {found.key: found.what for found in error.problems if found.severity == "error"}
    return {}


def engine_of(spec, model: Any) -> Any:
    return build_rollout(
        EngineContext(
            spec=spec,
            model_path="",
            model=model,
            tokenizer=TOKENIZER,
            device=torch.device("cpu"),
            rank=0,
            world_size=1,
            agree=lambda text: text,
            run_dir=Path(),
        )
    )


def sampled(engine: Any, seed: int = 1, n: int = 3):
    return engine.generate(
        make_prompts(("1+2=", "13+24=")), Sampling(6), n=n, step_seed=seed, num_groups_total=2
    )


def test_an_engine_of_a_file_samples_from_the_policy_it_was_given() -> None:
    model = random_model(3)
    engine = engine_of(spec_with(f"rollout.name={EXAMPLE}", "rollout.engine_params.max_rows=4"), model)
    assert engine.max_rows == 4
    rollouts = sampled(engine)
    found, mask = rollouts.rollout_log_probs, rollouts.response_mask
    torch.testing.assert_close(
        found[mask], naive_log_probs(model, rollouts)[0].float()[mask], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(sampled(engine).responses, rollouts.responses)
    assert not torch.equal(sampled(engine, seed=2).responses, rollouts.responses)
    other = random_model(4)
    engine.sync_weights(PlainWeights(other.named_parameters()), policy_version=7)
    after = sampled(engine)
    assert after.policy_version.unique().tolist() == [7]
    wanted = naive_log_probs(other, after)[0].float()
    torch.testing.assert_close(
        after.rollout_log_probs[after.response_mask], wanted[after.response_mask], rtol=1e-4, atol=1e-5
    )


def test_the_spec_reads_its_parameters_and_capabilities() -> None:
    mine = f"rollout.name={EXAMPLE}"
    assert problems(mine) == {}
    assert list(problems(mine, "rollout.engine_params.rows=4")) == ["rollout.engine_params.rows"]
    assert list(problems(mine, "rollout.engine_params.max_rows=0")) == ["rollout.engine_params.max_rows"]
    assert list(problems("rollout.engine_params.max_rows=4")) == ["rollout.engine_params.max_rows"]
    assert list(problems(mine, "rollout.mode=server")) == ["rollout.mode"]
    assert list(problems(mine, "rollout.dtype=int8")) == ["rollout.dtype"]
    assert list(problems(mine, "rollout.max_staleness=2")) == ["rollout.max_staleness"]
    assert list(problems(mine, "rollout.engine_kwargs.x=2")) == ["rollout.engine_kwargs"]
    spec = spec_with(mine, "model.lora_rank=4")
    assert not spec.syncs_adapter
    assert spec.rollout_engine.starts_with_policy


def test_checks_follow_capabilities_not_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine with vLLM's capabilities is treated as vLLM is, whatever it is called."""
    vllm = ROLLOUT_ENGINES.part("vllm")
    monkeypatch.setitem(ROLLOUT_ENGINES._parts, "other", vllm)
    for name in ("vllm", "other"):
        spec = spec_with(f"rollout.name={name}", "rollout.mode=server", "model.lora_rank=4")
        assert spec.syncs_adapter
        assert spec.has_rollout_servers
        assert list(problems(f"rollout.name={name}", "rollout.temperature=0.001")) == ["rollout.temperature"]
        assert list(problems(f"rollout.name={name}", "rollout.max_staleness=2")) == ["rollout.max_staleness"]
        assert problems(f"rollout.name={name}", "rollout.mode=server", "rollout.max_staleness=2") == {}


def test_a_plain_function_has_the_least_capabilities_and_must_return_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        textwrap.dedent('''
            class Half:
                def generate(self, *args, **kwargs): ...

            def half(context):
                """Half an engine."""
                return Half()
        ''')
    )
    spec = spec_with("rollout.name=mine.py:half")
    assert spec.rollout_engine == EngineCapabilities()
    with pytest.raises(RunFailure, match="Half has no sync_weights and no close"):
        engine_of(spec, random_model(1))
    assert with_absolute_paths(spec).rollout.name == f"{tmp_path}/mine.py:half"
