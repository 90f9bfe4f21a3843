"""The logged metrics of a run's steps, for the guardrails and the summary, in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import overload


class _LoggedStep(Mapping[str, float]):
    """The metrics of one step: steps with the same keys share them, and numbers take 8 bytes each."""

    __slots__ = ("_places", "_values")

    def __init__(self, places: dict[str, int], values: array[float]) -> None:
        self._places = places
        self._values = values

    def __getitem__(self, key: str) -> float:
        return self._values[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class History(Sequence[Mapping[str, float]]):
    """The metrics of each step; about 1 KiB a step, an eighth of what dictionaries take."""

    def __init__(self, steps: Sequence[Mapping[str, float]] = ()) -> None:
        self._steps: list[_LoggedStep] = []
        self._places: dict[tuple[str, ...], dict[str, int]] = {}
        for step in steps:
            self.append(step)

    def append(self, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of the next step."""
        keys = tuple(metrics)
        places = self._places.setdefault(keys, {key: index for index, key in enumerate(keys)})
        self._steps.append(_LoggedStep(places, array("d", metrics.values())))

    @overload
    def __getitem__(self, index: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, float]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, float] | Sequence[Mapping[str, float]]:
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)
