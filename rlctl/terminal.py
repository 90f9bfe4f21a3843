"""The console of all formatted output: no text controls the terminal. `cli.command.echo` prints plain text.

Imported inside functions, because it imports Rich.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from rlctl.errors import visible


class Console(rich.console.Console):
    """A Rich console that escapes control characters in all text that it prints (`errors.visible`)."""

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        """The segments of a renderable; control codes of Rich itself are separate segments."""
        for segment in super().render(*args, **options):
            is_safe = segment.control or segment.text.isprintable()
            yield segment if is_safe else segment._replace(text=visible(segment.text))
