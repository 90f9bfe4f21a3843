"""What `rlctl doctor` found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: `ok` works; `note` is worth knowing and stops nothing; `broken` keeps a run from working.
Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        group: what it belongs to, such as `engines`.
        name: what was looked at.
        status: see `Status`.
        found: in words, with versions, sizes and paths.
        fix: what to do about it; every broken thing has one.
    """

    group: str
    name: str
    status: Status
    found: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at, in order."""

    checks: list[Check]

    @property
    def broken(self) -> list[Check]:
        """What keeps a run from working."""
        return [check for check in self.checks if check.status == "broken"]

    def as_data(self) -> dict[str, Any]:
        """For JSON: `works`, and every check's fields."""
        return {"works": not self.broken, "checks": [asdict(check) for check in self.checks]}
