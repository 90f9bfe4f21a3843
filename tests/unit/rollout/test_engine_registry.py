"""Rollout engines by name: what the spec refuses by capability, and an engine of the user's own."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.batch import Turn
from rlctl.errors import RunFailure, SpecError
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.engines import (
    EngineCapabilities,
    EngineContext,
    build_rollout,
    engine_outside_training,
    spec_outside_training,
)
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.protocol import Request, Sampling
from rlctl.run_spec.load import load_spec
from rlctl.train.start import with_absolute_paths
from tests.unit.rollout.test_hf_rollout import TOKENIZER, make_requests, random_model, values_of

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


REQUESTS = make_requests(("1+2=", "13+24="))


def assert_sampled_by(turns: list[Turn], requests: list[Request], model: Any) -> None:
    """Log-probs are the model's of these tokens."""
    for request, turn in zip(requests, turns, strict=True):
        prompt = list(request.token_ids)
        with torch.no_grad():
            text = torch.tensor([prompt + turn.token_ids.tolist()])
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, turn.token_ids[:, None]).squeeze(1)
        torch.testing.assert_close(turn.log_probs, wanted, rtol=1e-4, atol=1e-5)
        assert (turn.token_ids[-1] == TOKENIZER.eos_token_id) == (turn.finish_reason == "stop")
        assert turn.finish_reason == "stop" or len(turn.token_ids) == request.limit(Sampling(6))


def test_an_engine_of_a_file_samples_from_the_policy_it_was_given() -> None:
    model = random_model(3)
    engine = engine_of(spec_with(f"rollout.name={EXAMPLE}", "rollout.engine_params.max_rows=4"), model)
    assert engine.max_rows == 4
    requests = [
        replace(request, max_tokens=limit) for request, limit in zip(REQUESTS, (None, 2) * 3, strict=True)
    ]
    turns = engine.sample(requests, Sampling(6))
    assert_sampled_by(turns, requests, model)
    assert values_of(engine.sample(requests, Sampling(6))) == values_of(turns)
    assert values_of(engine.sample(requests[1:2], Sampling(6)))[0][0] == turns[1].token_ids.tolist()
    others = [replace(request, seed=request.seed + 1) for request in requests]
    assert values_of(engine.sample(others, Sampling(6))) != values_of(turns)
    other = random_model(4)
    engine.sync_weights(PlainWeights(other.named_parameters()), policy_version=7)
    after = engine.sample(requests, Sampling(6))
    assert {version for turn in after for version in turn.versions.tolist()} == {7}
    assert_sampled_by(after, requests, other)


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
                def sample(self, *args, **kwargs): ...

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


def test_an_engine_that_takes_other_arguments_is_refused(tmp_path: Path) -> None:
    """As those written for an earlier interface do."""
    file = tmp_path / "old.py"
    file.write_text(
        textwrap.dedent('''
            class Old:
                def sample(self, prompts, sampling, *, n): ...
                def sync_weights(self, policy, policy_version): ...
                def close(self): ...

            def old(context):
                """An engine."""
                return Old()
        ''')
    )
    with pytest.raises(RunFailure, match="missing a required") as caught:
        engine_of(spec_with(f"rollout.name={file}:old"), random_model(1))
    assert caught.value.fix == "def sample(self, requests, sampling)"


TOO_FEW = '''
    import torch
    from rlctl.batch import Turn

    class TooFew:
        def sample(self, requests, sampling):
            ids = torch.tensor([1])
            return [Turn(ids, -torch.ones(1), ids, "stop") for _ in requests[1:]]

        def sync_weights(self, policy, policy_version):
            list(policy.weights())

        def close(self): ...

    def too_few(context):
        """Leaves out a turn."""
        return TooFew()
'''


def test_what_an_engine_samples_is_checked_outside_training_too(tmp_path: Path) -> None:
    """As `rlctl evaluate` and `rlctl diagnose mismatch` use it."""
    file = tmp_path / "few.py"
    file.write_text(textwrap.dedent(TOO_FEW))
    spec = spec_outside_training(spec_with(), f"{file}:too_few")
    model = random_model(1)
    with (
        engine_outside_training(
            spec, "m", TOKENIZER, lambda: model, max_prompt_length=8, max_response_length=8
        ) as engine,
        pytest.raises(RunFailure, match=r"TooFew\.sample returned list of 1 instead of a list of 2 turns"),
    ):
        engine.sample(REQUESTS[:2], Sampling(8))


def test_an_engine_that_samples_in_flight_needs_its_methods(tmp_path: Path) -> None:
    file = tmp_path / "flying.py"
    file.write_text(
        textwrap.dedent(TOO_FEW)
        + textwrap.dedent('''
            from rlctl.registry import ROLLOUT_ENGINES
            from rlctl.rollout.engines import EngineCapabilities

            in_both = frozenset({"colocated"})
            @ROLLOUT_ENGINES.register(
                label="says that it samples in flight",
                capabilities=EngineCapabilities(samples_in_flight=in_both, samples_while_training=in_both),
            )
            def flying(context):
                """It does not."""
                return TooFew()
        ''')
    )
    spec = spec_with(f"rollout.name={file}:flying", "rollout.in_flight=true", "rollout.max_staleness=1")
    with pytest.raises(RunFailure, match="TooFew has no sample_in_flight and no cancel_requests"):
        engine_of(spec, random_model(1))
