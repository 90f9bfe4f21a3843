"""A text game as an environment: every reply is a move, and the game answers as the user."""

from __future__ import annotations

import random


class Hunt:
    """A game as packages have them: `reset` and `step` (observation, reward, whether it is over)."""

    def reset(self, seed: int) -> str:
        """Hides a number."""
        self.number, self.moves = random.Random(seed).randint(1, 20), 0
        return "A number from 1 to 20 is hidden."

    def step(self, move: str) -> tuple[str, float, bool]:
        """Plays a guess; raises `ValueError` on what is no number."""
        guess, self.moves = int(move), self.moves + 1
        if guess == self.number:
            return "Found.", 1.0, True
        return "Higher." if guess < self.number else "Lower.", 0.0, self.moves == 5


class HuntGame:
    """The adapter: these lines fit every game of this kind."""

    def reset(self, seed: int) -> str:
        """Begins the game of a row."""
        self.game, self.total = Hunt(), 0.0
        return self.game.reset(seed)

    def respond(self, text: str) -> str | None:
        """Plays a reply; None at the end of the game."""
        try:
            observation, reward, is_over = self.game.step(text)
        except ValueError:
            return "Write a number and nothing else."
        self.total += reward
        return None if is_over else observation

    def get_reward(self) -> float:
        """The sum of the game's rewards."""
        return self.total
