"""Text games as environments: every reply of the policy is a move, and the game answers as the user.

    rlctl train … environment.name=examples/text_games.py:TextArena environment.max_turns=20

The data has one row per game, with a prompt and the columns that `reset` names below. A game of another
package is a class of these few lines.
"""

from __future__ import annotations

from typing import Any


class Game:
    """What games have in common; `_move` plays a text: observation, reward, whether the game is over."""

    total = 0.0

    def respond(self, text: str) -> str | None:
        """Plays a reply. The next observation, or None at the end of the game."""
        try:
            observation, reward, is_over = self._move(text)
        except Exception as error:  # on a move that the game cannot read: the policy shall see it
            return f"This move cannot be played: {error}"
        self.total += reward
        return None if is_over else observation

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self.total

    def _move(self, text: str) -> tuple[str, float, bool]:
        raise NotImplementedError


class TextArena(Game):
    """A game of TextArena for one player (`pip install textarena`)."""

    def reset(self, game: str, seed: int) -> str:
        """Columns: `game`, such as GuessTheNumber-v0, and `seed`."""
        import textarena

        self.game = textarena.make(f"{game}-raw")  # without wrappers, which repeat the whole history
        self.game.reset(num_players=1, seed=seed)
        return self._seen()

    def _move(self, text: str) -> tuple[str, float, bool]:
        is_over, _ = self.game.step(text)
        return self._seen(), float((self.game.state.rewards or {}).get(0, 0.0)) if is_over else 0.0, is_over

    def _seen(self) -> str:
        _, messages = self.game.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender != 0)  # 0: the policy's own moves


class SkyRLGym(Game):
    """An environment of SkyRL-Gym, by `init`, `step` and `close` (`pip install skyrl-gym`)."""

    def reset(
        self, prompt: list[dict[str, Any]], game: str, ground_truth: str = "", max_turns: int = 4
    ) -> str:
        """Columns: `game`, such as gsm8k_multi_turn, and `max_turns`."""
        import skyrl_gym

        extras = {"reward_spec": {"ground_truth": ground_truth}, "max_turns": max_turns, "extra_info": {}}
        self.game = skyrl_gym.make(game, env_config={}, extras=extras)
        started, _ = self.game.init(prompt)
        return "".join(message["content"] for message in started[len(prompt) :])

    def _move(self, text: str) -> tuple[str, float, bool]:
        step = self.game.step(text)
        shown = "\n".join(message["content"] for message in step["observations"])
        return shown, float(step["reward"]), bool(step["done"])


class Gymnasium(Game):
    """A game of Gymnasium whose observations and actions are texts (`pip install gymnasium`)."""

    def reset(self, game: str, seed: int) -> str:
        """Columns: `game`, a registered name, and `seed`."""
        import gymnasium

        self.game = gymnasium.make(game)
        observation, _ = self.game.reset(seed=seed)
        return str(observation)

    def _move(self, text: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self.game.step(text)
        return str(observation), float(reward), terminated or truncated
