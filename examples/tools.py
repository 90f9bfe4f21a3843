"""Tools without a class: functions with type hints and a docstring that describes each argument."""

from __future__ import annotations

#: Of one unit in metres.
METRES = {"m": 1.0, "km": 1000.0, "mile": 1609.344, "foot": 0.3048, "inch": 0.0254}


def convert(value: float, unit: str, to: str) -> float:
    """Converts a length.

    Args:
        value: The length in `unit`.
        unit: Its unit: m, km, mile, foot or inch.
        to: The unit of the result.
    """
    return value * METRES[unit] / METRES[to]


async def units() -> list[str]:
    """Lists the units that `convert` knows."""
    return sorted(METRES)
