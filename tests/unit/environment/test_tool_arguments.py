"""Arguments of tools are checked against the type hints of their functions."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from rlctl.environment.tool_arguments import arguments_of, problem_of


class Tools:
    def plain(self, n: int, x: float, name: str, flag: bool) -> None: ...

    def optional(self, n: int = 3, note: str | None = None, hidden: int = None) -> None: ...  # noqa: RUF013

    def nested(self, items: list[int], table: dict[str, float], way: Literal["up", "down"]) -> None: ...

    def none(self) -> None: ...

    def anything(self, value, **more) -> None: ...

    def named_as_the_model(self, copy: int, model_dump: str) -> None: ...

    def odd(self, value: Tools) -> None: ...


FINE = {"n": 1, "x": 2.5, "name": "a", "flag": True}
LISTS = {"items": [1, 2], "table": {"a": 1}, "way": "up"}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("plain", FINE),
        ("plain", FINE | {"n": 3.0, "x": 3}),
        ("optional", {}),
        ("optional", {"n": 1, "note": None, "hidden": None}),
        ("nested", LISTS),
        ("nested", LISTS | {"items": []}),
        ("none", {}),
        ("anything", {"value": [None, {}], "other": 1}),
        ("named_as_the_model", {"copy": 1, "model_dump": "x"}),
        ("odd", {"value": 1}),
    ],
)
def test_what_fits(tool: str, arguments: dict[str, Any]) -> None:
    assert problem_of(arguments_of(getattr(Tools, tool)), arguments) == ""


@pytest.mark.parametrize(
    ("tool", "arguments", "named"),
    [
        ("plain", FINE | {"n": "1"}, "n: "),
        ("plain", FINE | {"n": 1.5}, "n: "),
        ("plain", FINE | {"n": True}, "n: "),
        ("plain", FINE | {"n": None}, "n: "),
        ("plain", FINE | {"x": "2.5"}, "x: "),
        ("plain", FINE | {"name": 4}, "name: "),
        ("plain", FINE | {"flag": "yes"}, "flag: "),
        ("plain", FINE | {"flag": 1}, "flag: "),
        ("plain", FINE | {"other": 1}, "other: "),
        ("plain", {"x": 1.0, "name": "a", "flag": True}, "n: "),
        ("optional", {"n": None}, "n: "),
        ("nested", LISTS | {"items": ["1"]}, "items.0: "),
        ("nested", LISTS | {"items": "1"}, "items: "),
        ("nested", LISTS | {"table": {"a": "b"}}, "table.a: "),
        ("nested", LISTS | {"way": "left"}, "way: "),
        ("none", {"n": 1}, "n: "),
        ("anything", {}, "value: "),
    ],
)
def test_what_does_not_fit_is_named(tool: str, arguments: dict[str, Any], named: str) -> None:
    problem = problem_of(arguments_of(getattr(Tools, tool)), arguments)
    assert problem.startswith(f"wrong arguments: {named}")
