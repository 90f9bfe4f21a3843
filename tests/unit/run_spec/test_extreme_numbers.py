"""No loop of the spec check or of the dry run is as long as a number of the spec.

A case may take a second of processor time: it takes a few hundredths, and a loop over 10^12 would take hours.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlctl.errors import RlctlError
from rlctl.run_spec.check import fitting_batch
from rlctl.run_spec.explain import BatchArithmetic, bands, notes
from rlctl.run_spec.keys import accepts, known_leaves
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import machine_of
from rlctl.run_spec.model_size import model_size
from rlctl.run_spec.placement import Placement

EXTREMES = (
    *(0, -1, 1, 7, 10**6 + 3, 10**12, 10**12 + 39, 10**18, 2**63 - 1, 10**30),
    *(1e-300, 1e308, -1e308, ".inf", ".nan"),
)
#: No numbers, at the place of one.
OTHERS = ("-.inf", "[1]", "[]", "{a: 1}", "true", "''")
NUMERIC = [key for key in known_leaves() if accepts(key, int) or accepts(key, float)]
#: The keys that checks divide by each other.
SIZES = (
    "data.train_batch_size",
    "actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "rollout.n",
    "rollout.tensor_model_parallel_size",
    "rollout.max_staleness",
    "rollout.max_age_updates",
    "trainer.total_training_steps",
    "data.max_response_length",
)
LARGE = [
    "-p",
    "8gpu",
    "model.path=Qwen/Qwen3-8B",
    "data.train_files=x.parquet",
    "algorithm.adv_estimator=gae",
]


@contextmanager
def ended_if_endless() -> Iterator[None]:
    def end(*_: object) -> None:
        raise AssertionError("a loop that is as long as a number of the spec")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """What the first case would import is imported."""
    spec = load_spec([], [], []).spec
    Placement(spec, model_size(spec.model), machine_of("8xh100")).problems()


def check(*overrides: str, is_large: bool = False) -> None:
    """Loads the spec and computes all that the dry run prints of it; an error of the spec is fine."""
    presets, values = (LARGE[1:2], LARGE[2:]) if is_large else ([], [])
    with ended_if_endless():
        try:
            spec = load_spec(presets, [], [*values, *overrides]).spec
        except RlctlError:
            return
        bands(spec), notes(spec), BatchArithmetic(spec, 1000)
        placement = Placement(spec, model_size(spec.model), machine_of("8xh100"))
        placement.problems(), placement.stages(), placement.seconds(), placement.suggestions()
        assert placement.gpu_parts


@pytest.mark.parametrize("key", SIZES)
def test_a_size_at_its_extremes(key: str) -> None:
    for number in (*EXTREMES, *OTHERS):
        check(f"{key}={number}")


@pytest.mark.parametrize("number", [10**12, 2**63 - 1])
def test_every_number_at_a_large_one(number: int) -> None:
    for key in NUMERIC:
        check(f"{key}={number}")


def test_every_number_at_its_extremes() -> None:
    for is_large, numbers in ((False, EXTREMES), (True, (0, 10**12, 2**63 - 1, 1e308))):
        for key, number in itertools.product(NUMERIC, numbers):
            check(f"{key}={number}", is_large=is_large)


def test_two_numbers_at_their_extremes() -> None:
    draw = random.Random(1)
    for _ in range(400):
        keys = draw.sample(SIZES, 2) if draw.random() < 0.5 else draw.sample(NUMERIC, 2)
        check(*(f"{key}={draw.choice(EXTREMES)}" for key in keys), is_large=draw.random() < 0.5)


@pytest.mark.parametrize(
    ("batch", "mini", "ranks", "fitting"),
    [
        (128, 48, 1, (128, 32)),
        (128, 256, 1, (128, 128)),
        (128, 10**12, 1, (128, 128)),
        (96, 40, 3, (96, 48)),
        (96, 35, 3, (96, 24)),
        (100, 30, 8, (104, 8)),
        (2**61 - 1, 10**12, 1, (2**61 - 1, 1)),  # a prime
        (10**12, 10**12 - 1, 1, (10**12, 10**12)),
        (10**12, 3 * 10**6, 1, (10**12, 100_000)),  # the nearest of those that are tried
    ],
)
def test_sizes_that_fit(batch: int, mini: int, ranks: int, fitting: tuple[int, int]) -> None:
    spec = load_spec().spec
    spec = spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"train_batch_size": batch}),
            "actor": spec.actor.model_copy(update={"ppo_mini_batch_size": mini}),
            "trainer": spec.trainer.model_copy(update={"n_gpus_per_node": ranks}),
        }
    )
    with ended_if_endless():
        assert fitting_batch(spec) == fitting
