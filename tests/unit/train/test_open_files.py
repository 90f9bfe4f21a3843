"""The limit of open files: raised as far as the system allows, and said where that is too little."""

from __future__ import annotations

import resource

import pytest

from rlctl.run_spec.load import load_spec
from rlctl.train.open_files import allow_open_files, files_needed

VLLM = ("rollout.name=vllm",)
THOUSAND = (
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=128",
    "data.train_batch_size=1024",
    "actor.ppo_mini_batch_size=1024",
)


def spec_of(*overrides: str):
    return load_spec([], [], list(overrides)).spec


@pytest.mark.parametrize(
    ("limits", "raised", "warns"),
    [
        ((1024, 1_048_576), 4608, False),
        ((1024, resource.RLIM_INFINITY), 4608, False),
        ((1024, 4096), 4096, True),
        ((8192, 8192), None, False),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, False),
    ],
)
def test_the_limit_of_a_thousand_ranks(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int | None, warns: bool
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: given.append(new))
    warnings = allow_open_files(spec_of(*THOUSAND, *VLLM))
    assert given == ([(raised, limits[1])] if raised else [])
    assert len(warnings) == warns
    for warning in warnings:
        assert "4,608 files" in warning
        assert "allows 4,096 (ulimit -Hn)" in warning


def test_a_small_run_needs_less_than_the_usual_limit() -> None:
    assert files_needed(spec_of(*VLLM)) < 1024
    servers = "rollout.mode=server", "rollout.server.replicas=1"
    assert files_needed(spec_of(*VLLM, *servers)) - files_needed(spec_of()) == 1024
