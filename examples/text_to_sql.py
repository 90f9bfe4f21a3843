"""Questions about a database: the policy tries queries, and its last reply is the query that counts."""

from __future__ import annotations

import sqlite3

#: What the policy's queries may do: nothing that writes, or opens a file.
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class TextToSql:
    """One question; the ground truth is a query with the right result."""

    def reset(self, tables: str, ground_truth: str) -> str:
        """Creates the tables of the row's SQL, which the policy reads with the question."""
        self.database = sqlite3.connect(":memory:")
        self.database.executescript(tables)
        self.right = self._rows(ground_truth)
        self.database.set_authorizer(self._allows)
        self.is_right = False
        return f"\n{tables}"

    def query(self, sql: str) -> str:
        """Runs a query and shows its first rows.

        Args:
            sql: One SELECT statement of SQLite.
        """
        return "\n".join(map(str, self._rows(sql)[:20]))

    def respond(self, text: str) -> None:
        """Runs the final query."""
        try:
            self.is_right = sorted(map(repr, self._rows(text))) == sorted(map(repr, self.right))
        except sqlite3.Error:
            self.is_right = False

    def get_reward(self) -> float:
        """1 if the rows are those of the right query, in any order."""
        return float(self.is_right)

    def _rows(self, sql: str) -> list[tuple[object, ...]]:
        return self.database.execute(sql).fetchmany(1000)

    @staticmethod
    def _allows(action: int, *_: object) -> int:
        return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
