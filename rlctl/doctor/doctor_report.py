"""The report of `rlctl doctor`, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: `ok`: works. `note`: worth knowing, stops nothing. `broken`: training does not work.
Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        group: `packages`, `machine` or `engines`.
        name: what was checked.
        status: see `Status`.
        found: in words, with versions, sizes and paths.
        fix: what to do; every broken check has one.
    """

    group: str
    name: str
    status: Status
    found: str
    fix: str | None = None


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
