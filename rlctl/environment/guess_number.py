"""The embedded game: a number from 1 to 7 is guessed in at most three turns.

The best play needs what the environment says: halving what is left always finds the number, while the best
fixed guesses find three of seven. `rlctl.tiny.game` builds a model that can take part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.digits import whole_number
from rlctl.registry import ENVIRONMENTS
from rlctl.run_spec.model import GAME

if TYPE_CHECKING:
    from rlctl.environment.protocol import Environment, EnvironmentContext

NUMBERS = range(1, 8)
MAX_GUESSES = 3
#: What every game begins with: from 1 to 7.
PROMPT = "1+7="
#: What the environment says of a guess that is too low, and of one that is too high.
HIGHER, LOWER = "+", "="


class GuessNumber:
    """One game: an environment as a user would write it (docs/how-to/environments.md)."""

    def reset(self, secret: int) -> None:
        """Begins a game with this number."""
        self.secret = secret
        self.num_guesses = 0
        self.has_won = False

    def respond(self, text: str) -> str | None:
        """What is said of a guess; None: the game is over."""
        self.num_guesses += 1
        self.has_won = text == str(self.secret)
        if self.has_won or self.num_guesses == MAX_GUESSES or not text.isdecimal():
            return None
        number = whole_number(text)
        return HIGHER if number is not None and number < self.secret else LOWER

    def get_reward(self) -> float:
        """1 if the number was found, else 0."""
        return float(self.has_won)


@ENVIRONMENTS.register(GAME, label="Guess a number from 1 to 7 in three turns; for the embedded model")
def guess_number(context: EnvironmentContext) -> Environment:
    """The game, in this process."""
    from rlctl.environment.user_class import UserClass

    return UserClass(GAME, GuessNumber, context)
