"""Environments with one fault each."""

import os
import random
import subprocess
import tempfile
import time
from typing import ClassVar

from rlctl.environment.protocol import Outcome
from rlctl.registry import ENVIRONMENTS


class Sound:
    def reset(self, word: str) -> str:
        self._word, self._found = word, False
        return f" The word has {len(word)} letters."

    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        self._found = self._found or word == self._word
        return "right" if word == self._word else "wrong"

    def get_reward(self) -> float:
        return float(self._found)


class NoReset:
    def get_reward(self) -> float:
        return 0.0


class UntypedTool(Sound):
    def hint(self, place):  # type: ignore[no-untyped-def]
        return place


class CannotBeCreated(Sound):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class ResetRaises(Sound):
    def reset(self, word: str) -> str:
        raise ConnectionError("the game server is down")


class FlakyReset(Sound):
    def reset(self, word: str) -> str:
        if random.random() < 0.5:
            raise ConnectionError("the game server is down")
        return super().reset(word)


class ResetHangs(Sound):
    def reset(self, word: str) -> str:
        time.sleep(60)
        return ""


class ResetDiffers(Sound):
    def reset(self, word: str) -> str:
        return f"{super().reset(word)} Begin with {random.random()}."


class WantsAnotherColumn(Sound):
    def reset(self, board: str) -> str:  # type: ignore[override]
        return board


class SwallowsFailure(Sound):
    def reset(self, **row: object) -> str:  # type: ignore[override]
        self._found = False
        try:
            self._word = str(row["word"])
        except KeyError:
            self._word = ""
        return f" The word has {len(self._word)} letters."


_GUESSED: set[str] = set()


class KeepsStateInTheModule(Sound):
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        said = "again" if word in _GUESSED else super().guess(word)
        _GUESSED.add(word)
        return said


class KeepsStateOnTheClass(Sound):
    num_points: ClassVar[list[float]] = []

    def respond(self, text: str) -> str | None:
        self.num_points.append(float(text == self._word))
        return None

    def get_reward(self) -> float:
        return sum(self.num_points)


class BeginsOnce(Sound):
    has_begun = False

    def reset(self, word: str) -> str:
        if BeginsOnce.has_begun:
            raise RuntimeError("the game runs already")
        BeginsOnce.has_begun = True
        return super().reset(word)


class CachesInTheModule(Sound):
    def reset(self, word: str) -> str:
        _GUESSED.add(word)
        return super().reset(word)


class RewardsSilence(Sound):
    def get_reward(self) -> float:
        return 1.0


class RewardsEcho(Sound):
    def reset(self, word: str) -> str:
        self._points = 0.0
        return super().reset(word)

    def respond(self, text: str) -> str | None:
        self._points += "letters" in text
        return None

    def get_reward(self) -> float:
        return self._points


class RewardIsText(Sound):
    def get_reward(self) -> float:
        return "1"  # type: ignore[return-value]


class RewardRaises(Sound):
    def get_reward(self) -> float:
        return 1 / 0


class NoReward:
    def reset(self) -> None:
        pass


class ToolHangs(Sound):
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        time.sleep(60)
        return ""


class ToolRaises(Sound):
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        raise LookupError(f"{word} is not in the dictionary")


class ToolEndsItsProcess(Sound):
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        os._exit(3)


class ToolSaysNothing(Sound):
    def guess(self, word: str) -> None:  # type: ignore[override]
        """Guesses the word.

        Args:
            word: your guess.
        """


class ToolSaysTooMuch(Sound):
    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: your guess.
        """
        return "no " * 100_000


class ShowsAnswer(Sound):
    def reset(self, word: str) -> str:
        super().reset(word)
        return f" The word is {word}."


class NeverEnds(Sound):
    def respond(self, text: str) -> str | None:
        return "go on"


class ExcludedByThePolicy(Sound):
    def respond(self, text: str) -> str | None:
        self._text = text
        return None

    def get_reward(self) -> float:
        return float(getattr(self, "_text", "") or 0)


class LeavesFiles(Sound):
    def reset(self, word: str) -> str:
        tempfile.mkstemp()
        return super().reset(word)


class _LeavesProcesses:
    """Runs in the trainer's process, so that nothing ends with an episode by itself."""

    async def run(self, task, sampler):
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        await sampler.sample(task.prompt_ids)
        return Outcome("", reward=0.0)

    def close(self) -> None:
        pass


@ENVIRONMENTS.register(label="It leaves processes")
def leaves_processes(context):
    return _LeavesProcesses()
