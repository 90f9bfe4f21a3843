"""Environment classes in the manner of TRL's examples."""

import asyncio
import threading


class _Server:
    """Stands for a server's client."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.history = base_url, ""

    def step(self, message: str) -> str:
        self.history += message
        return self.history


class EchoToolEnv:
    def __init__(self):
        self.env = _Server(base_url="http://127.0.0.1:9")
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Sends the message, which comes back.

        Args:
            message: What to send

        Returns:
            The message that came back.
        """
        self.reward = 0.125 * len(message)
        return self.env.step(message)


class WordEnv:
    def reset(self, **kwargs) -> str | None:
        self._word, self._client = kwargs.get("word", "crane"), _Server("http://127.0.0.1:9")
        self._last_full_feedback = self._client.step("A word of 5 letters.")
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Guesses the word.

        Args:
            guess: The word, as in '[abcde]'

        Returns:
            G for a right letter in its place, X for others.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[]")
        marks = "".join("GX"[a != b] for a, b in zip(word, self._word, strict=False))
        full = self._client.step(marks if len(word) == 5 else "You attempted an invalid move")
        feedback = full[len(self._last_full_feedback) :]
        self._last_full_feedback = full
        self.done = word == self._word
        self.reward = float(self.done)
        return feedback


class CatchEnv:
    rows = 3

    def reset(self, column: int = 3, **kwargs) -> str | None:
        self.ball, self.paddle, self.row = column, 3, 0
        self.reward, self.done = 0.0, False
        return self._shown()

    def _shown(self) -> str:
        return f" ball {self.ball}, paddle {self.paddle}"

    def _fall(self, by: int) -> str:
        if self.done:
            raise ValueError("Episode is done.")
        self.paddle += by
        self.row += 1
        self.done = self.row == self.rows
        self.reward = float(self.done and self.ball == self.paddle)
        return self._shown()

    def move(self, direction: str) -> str:
        """Moves the paddle.

        Args:
            direction: Where to, either "left" or "right".

        Returns:
            What is to be seen then.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}: must be 'left' or 'right'.")
        return self._fall(-1 if direction == "left" else 1)

    def stay(self) -> str:
        """Waits for the ball.

        Returns:
            What is to be seen then.
        """
        return self._fall(0)


class BothEnv:
    """Two games in one class; a column of the row chooses."""

    words_url = "http://127.0.0.1:9"

    def __init__(self):
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "words")
        if self.active not in ("words", "catch"):
            raise ValueError(f"Unknown environment: {self.active}")
        self._game = WordEnv() if self.active == "words" else CatchEnv()
        text = self._game.reset(**kwargs)
        self.reward, self.done = 0.0, False
        return text

    def _take(self, name: str, *arguments: str) -> str:
        feedback = getattr(self._game, name)(*arguments)
        self.reward, self.done = self._game.reward, self._game.done
        return feedback

    def guess(self, guess: str) -> str:
        """Guesses the word.

        Args:
            guess: The word, as in '[abcde]'
        """
        if self.active != "words":
            raise ValueError("guess is only available in Words")
        return self._take("guess", guess)

    def stay(self) -> str:
        """Waits for the ball."""
        if self.active != "catch":
            raise ValueError("stay is only available in Catch")
        return self._take("stay")


class IncrementEnv:
    """Without a reward: the trainer's own functions score its episodes."""

    def __init__(self):
        self._counter = 0

    def reset(self) -> None:
        self._counter = 0

    def increment(self, a: int) -> int:
        """
        Adds to the counter.

        Args:
            a: What to add

        Returns:
            The counter.
        """
        self._counter += a
        return self._counter


class DriveEnv:
    """A synchronous class over an asynchronous client, with a loop of its own."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()

    async def _step(self, by: float) -> float:
        await asyncio.sleep(0)
        self._speed -= by
        return self._speed

    @staticmethod
    def _describe(speed: float) -> str:
        return f" Speed: {speed:.1f} km/h."

    def reset(self, **kwargs) -> str | None:
        self._speed = 50.0
        self.reward = 0.0
        return self._describe(self._speed)

    def observe(self) -> str:
        """
        Waits.

        Returns:
            What is to be seen.
        """
        return self._describe(self._loop.run_until_complete(self._step(10.0)))

    def lane_change(self, direction: str) -> str:
        """
        Changes the lane.

        Args:
            direction: Either "left" or "right".

        Returns:
            What is to be seen then.
        """
        self.reward = float(direction == "left")
        return self.observe()


class _Harness:
    PROMPT_SUFFIX = ""

    def __init__(self, environment_type: str = "docker"):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._task = None

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def reset(self, task: str | None = None, **kwargs) -> str:
        if task is None:
            raise ValueError("reset requires `task`")
        self._task, self._commands = task, []
        return task + self.PROMPT_SUFFIX

    async def _exec(self, command: str) -> str:
        self._commands.append(command)
        return f"ran {command}"

    @property
    def reward(self) -> float:
        if self._task is None:
            raise RuntimeError("it is no tool, and not read before the end")
        return float(self._run(self._verify()))

    async def _verify(self) -> int:
        return len(self._commands)

    def __del__(self):
        self._loop.call_soon_threadsafe(self._loop.stop)


class SandboxEnv(_Harness):
    PROMPT_SUFFIX = "\n\nYou have a single tool."

    def bash(self, command: str) -> str:
        """
        Runs a command.

        Args:
            command: The command.

        Returns:
            Its output.
        """
        return self._run(self._exec(command))


class BlocksEnv:
    """Returns content in parts, as environments with images do."""

    def reset(self, **kwargs) -> list:
        self.reward = 0.0
        return [{"type": "text", "text": "A page "}, {"type": "text", "text": "with a button."}]

    def click(self, bid: str, twice: bool = False) -> list:
        """Clicks an element.

        Args:
            bid: The element's number.
            twice: Whether to click twice.
        """
        self.reward = 0.5
        return [{"type": "text", "text": f"clicked {bid}"}]


class CoinEnv:
    """A tool has the name of the attribute, so there is no reward."""

    def reset(self, **kwargs) -> None: ...

    def reward(self, coins: int) -> str:
        """Gives coins.

        Args:
            coins: How many.
        """
        return f"gave {coins}"


class JudgedEnv:
    """Its reward is asked of a judge."""

    reward = 7.0  # `get_reward` is what counts

    async def reset(self, **kwargs) -> None: ...

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.25
