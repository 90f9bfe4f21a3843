"""Adapters on their way to servers: the base once, A and B every time, both again to one that lost them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.rollout import server_client
from rlctl.rollout.build_vllm import reachable
from rlctl.rollout.vllm_server import VLLMServerRollout
from tests.unit.rollout.stub_server import Server, engine_on, sample, versions_of


@dataclass
class Adapted:
    """A policy with LoRA that records its calls."""

    model: Any
    asked: list[str] = field(default_factory=list)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        self.asked.append("merged" if merged else "base")
        return iter(self.model.state_dict().items())

    def adapter(self) -> Adapted:
        self.asked.append("adapter")
        return self

    def save(self, directory: Path) -> None:
        (directory / "adapter_config.json").write_text("{}")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(server_client, "RETRY_S", 0.01)
    one = Server()
    one.lora = {"max_lora_rank": 8}
    yield one
    one.shutdown()
    one.server_close()


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> Iterator[VLLMServerRollout]:
    engine, model = engine_on([server], tmp_path, "model.lora_rank=2", has_adapters=True)
    engine.policy = Adapted(model)
    yield engine
    engine.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_base_goes_once_and_each_adapter_replaces_the_last(
    engine: VLLMServerRollout, server: Server
) -> None:
    names = []
    for version in (1, 2, 2):  # an update may be withheld
        engine.sync_weights(engine.policy, policy_version=version)
        assert versions_of(sample(engine)) == {version}
        [name] = server.adapters
        assert server.asked[-1][1]["model"] == name
        assert (Path(name) / "adapter_config.json").exists()
        names.append(name)
    assert len(set(names)) == 3
    assert engine.policy.asked == ["adapter", "base", "adapter", "adapter"]
    changes = [path for path in server.paths() if path != "/v1/completions"]
    assert changes == [
        *("/collective_rpc", "/reset_prefix_cache", "/v1/load_lora_adapter", "/update_weight_version"),
        *("/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/update_weight_version")
        * 2,
    ]


def test_a_server_that_lost_its_adapter_gets_the_base_and_the_adapter(
    engine: VLLMServerRollout, server: Server
) -> None:
    engine.sync_weights(engine.policy, policy_version=1)
    kept = list(server.adapters)
    for when in ("while it samples", "between two syncs"):
        server.adapters.clear()  # and all weights: it was restarted
        server.weight_version = "default"
        server.asked.clear()
        if when == "while it samples":
            assert len(sample(engine, n=1)) == 2
            assert server.adapters == kept
        else:
            engine.sync_weights(engine.policy, policy_version=2)
            assert len(server.adapters) == 1
        reloads = [body for path, body in server.asked if path == "/collective_rpc"]
        assert reloads
        assert all(body["kwargs"]["weights_path"].endswith("/v1") for body in reloads)


def test_a_server_that_only_stumbled_keeps_what_it_has(engine: VLLMServerRollout, server: Server) -> None:
    engine.sync_weights(engine.policy, policy_version=1)
    server.asked.clear()
    server.trouble = [500]
    sample(engine, n=1)
    assert set(server.paths()) == {"/v1/completions"}


def test_a_server_that_refuses_the_adapter_names_the_remedy(
    engine: VLLMServerRollout, server: Server
) -> None:
    server.lora = None
    with pytest.raises(UsageError, match="LoRA is not enabled") as caught:
        engine.sync_weights(engine.policy, policy_version=1)
    assert "rollout.merge_lora=true" in str(caught.value.fix)
    assert caught.value.where == server.url


@pytest.mark.parametrize(
    ("lora", "takes_new"), [(None, True), ({"max_lora_rank": 4}, True), ({"max_lora_rank": 8}, False)]
)
def test_servers_started_without_adapters_are_refused_before_a_run(
    server: Server, lora: dict[str, Any] | None, takes_new: bool
) -> None:
    reachable([server.url], seconds=60, lora_rank=8)
    server.lora, server.takes_new_adapters = lora, takes_new
    reachable([server.url], seconds=60)
    with pytest.raises(EnvironmentFailure, match="not accept adapters of rank 8") as caught:
        reachable([server.url], seconds=60, lora_rank=8)
    assert server.url in str(caught.value.where)
    for option in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "--enable-lora", "rollout.merge_lora=true"):
        assert option in str(caught.value.fix)
