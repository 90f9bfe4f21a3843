"""What a long preparation tells whoever watches."""

from __future__ import annotations


class Progress:
    """Told what is going on; this one keeps it to itself."""

    def phase(self, name: str, total: int) -> None:
        """Something begins.

        Args:
            name: of the phase.
            total: what `advance` will add up to.
        """

    def advance(self, amount: int, rows: int = 0) -> None:
        """Some of it is done.

        Args:
            amount: bytes of input while reading, rows in the other phases.
            rows: rows among it, where `amount` is bytes.
        """
