"""A batch with other values of its fields and columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlctl.batch import FIXED_FIELDS, TokenBatch


def changed(batch: TokenBatch, **values: Any) -> TokenBatch:
    """`batch` with these fields and columns; None: without the column."""
    fields = {name: value for name, value in values.items() if name in FIXED_FIELDS}
    columns = {name: value for name, value in values.items() if name not in FIXED_FIELDS}
    return replace(batch, **fields).with_columns(**columns)
