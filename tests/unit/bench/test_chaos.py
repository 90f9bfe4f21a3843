"""A killed run is compared with an uninterrupted one: exactly on a CPU, up to a tolerance on a GPU."""

from __future__ import annotations

from copy import deepcopy

import pytest

from benchmarks import chaos
from rlctl.run_spec import machine as machine_module

WHOLE = {
    "steps": [1, 2],
    "rows": [{"step": 1, "loss": 0.5, "grad_norm": float("nan")}, {"step": 2, "loss": 2000.0}],
    "weights": {"head": [0.25, -1.0]},
}


def changed(place: str, by: float) -> dict[str, object]:
    other = deepcopy(WHOLE)
    if place == "loss":
        other["rows"][0]["loss"] += by
    elif place == "large":
        other["rows"][1]["loss"] += by
    elif place == "weight":
        other["weights"]["head"][1] += by
    return other


@pytest.mark.parametrize("place", ["loss", "weight"])
def test_rounding_is_equal_on_a_gpu_only(place: str) -> None:
    assert chaos.are_equal(deepcopy(WHOLE), WHOLE, 0.0)
    assert chaos.are_equal(changed(place, 1e-5), WHOLE, chaos.TOLERANCE)
    assert not chaos.are_equal(changed(place, 1e-5), WHOLE, 0.0)
    assert not chaos.are_equal(changed(place, 0.01), WHOLE, chaos.TOLERANCE)


def test_large_values_are_compared_relative_to_their_size() -> None:
    assert chaos.are_equal(changed("large", 1.0), WHOLE, chaos.TOLERANCE)
    assert not chaos.are_equal(changed("large", 10.0), WHOLE, chaos.TOLERANCE)


def test_a_lost_or_repeated_step_is_never_equal() -> None:
    for steps in ([1], [1, 2, 2], [2, 1]):
        assert not chaos.are_equal(WHOLE | {"steps": steps}, WHOLE, chaos.TOLERANCE)
    assert not chaos.are_equal(WHOLE | {"rows": WHOLE["rows"][:1]}, WHOLE, chaos.TOLERANCE)
    assert not chaos.are_equal(WHOLE | {"weights": None}, WHOLE, chaos.TOLERANCE)


def test_which_comparison_is_chosen_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "gpus", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54"])
    monkeypatch.setattr(machine_module, "gpus_are_hidden", lambda: False)
    assert not chaos.is_exact_here()
    monkeypatch.setattr(machine_module, "gpus_are_hidden", lambda: True)
    assert chaos.is_exact_here()
