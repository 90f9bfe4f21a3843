"""When a request to a server of a model may be repeated. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

#: Statuses of a server that is busy or restarts; 529: overloaded, of some services.
BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, also as a date; None: it does not."""
    text = headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
