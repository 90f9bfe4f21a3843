"""Sweeps of many cases: `make test` tries a sample of them, which is fixed, `make test-all` all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def swept(cases: Iterable[Any], sample: Iterable[Any], *, one: bool = False) -> list[Any]:
    """Parameters of a sweep; those that are not in the sample are marked `thorough`.

    Args:
        cases: the whole sweep.
        sample: the cases that `make test` tries; of each kind that the sweep has, some.
        one: each case is the value of one parameter, also if it is a tuple.
    """
    every, kept = list(cases), list(sample)
    assert kept, "the sample is empty"
    assert all(case in every for case in kept), "the sample is no part of the sweep"

    def left_to_test_all(case: Any) -> Any:
        values = case if isinstance(case, tuple) and not one else (case,)
        return pytest.param(*values, marks=pytest.mark.thorough)

    return [case if case in kept else left_to_test_all(case) for case in every]


def asked_for(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """Values of these parameters in those tests of the module that this session runs.

    A fixture that computes the results of many cases at once leaves out those that no test asks for.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    parameters = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    return {tuple(each[name] for name in names) for each in parameters if each.keys() >= set(names)}
