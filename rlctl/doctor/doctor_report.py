"""The report of `rlctl doctor`, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: `ok`: works. `note`: worth knowing, stops nothing. `broken`: training does not work.
Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    group: str  # `packages`, `machine` or `engines`
    name: str  # what was checked
    status: Status  # see `Status`
    found: str  # in words, with versions, sizes and paths
    fix: str | None = None  # what to do; every broken check has one


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All checks, in order."""

    checks: list[Check]

    @property
    def broken(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == "broken"]

    def as_data(self) -> dict[str, Any]:
        """For JSON: `works`, and every check's fields."""
        return {"works": not self.broken, "checks": [asdict(check) for check in self.checks]}
