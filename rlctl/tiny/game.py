"""The model that plays the embedded game, `rlctl.environment.guess_number`, and its data.

It has the architecture and the vocabulary of the embedded model. Its warm start teaches how to take part, one
digit per turn, and nothing else: it guesses at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data.schema import Message, Row, write_rows
from rlctl.environment.guess_number import NUMBERS, PROMPT, GuessNumber
from rlctl.files import cache_root, cached_directory
from rlctl.run_spec.model import EOS, GAME, RECIPE
from rlctl.tiny.embedded import EmbeddedTask, build_files, ensure_embedded, paths

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

#: Shows the message, and the end of the policy's turns.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}{{% endfor %}}"
)
_VERSION = 1  # to be raised when a change alters what is built
#: Of the warm start: games per step, and steps.
_BATCH_SIZE, _NUM_STEPS = 128, 150


def embedded_task(spec: RunSpec, note: Callable[[str], None] | None = None) -> EmbeddedTask:
    """The embedded model and data of a run: the game's, or the addition's; see `ensure_embedded`."""
    build = ensure_game if spec.environment.name == GAME else ensure_embedded
    return build(spec.trainer.seed, note=note)


def ensure_game(
    seed: int, cache_dir: Path | None = None, note: Callable[[str], None] | None = None
) -> EmbeddedTask:
    """Like `ensure_embedded`, for the game (a few seconds once)."""
    told = note or (lambda _: None)

    def build(directory: Path) -> None:
        files = paths(directory)
        for split, path, count in (("train", files.train_file, 16), ("test", files.val_file, 1)):
            write_rows(path, split, [_row(secret, index) for index, secret in enumerate([*NUMBERS] * count)])
        told("building the game's model, once (a few seconds)")
        told(f"the game's model is ready, {build_files(files.model_dir, seed, RECIPE, teach, CHAT_TEMPLATE)}")

    def teach(model: Any) -> str:
        from rlctl.tiny.model import imitate

        draw = random.Random(seed)
        loss = imitate(model, lambda: [_random_game(draw) for _ in range(_BATCH_SIZE)], _NUM_STEPS, RECIPE)
        return f"loss {loss:.2f}"

    entry = (cache_dir or cache_root()) / "embedded" / f"game-{_VERSION}-{RECIPE.key(seed)}"
    return paths(cached_directory(entry, build, what="the game's model"))


def _row(secret: int, index: int) -> Row:
    return Row(GAME, (Message("user", PROMPT),), str(secret), index=index, extra={"secret": secret})


def _random_game(draw: random.Random) -> list[tuple[str, bool]]:
    """A game of random guesses: text, and whether the policy wrote it."""
    game = GuessNumber()
    secret = draw.choice(NUMBERS)
    spoken = [(PROMPT, False)]
    game.reset(secret)
    while True:
        guess = str(draw.choice(NUMBERS))
        spoken.append((guess, True))
        answer = game.respond(guess)
        if answer is None:
            return spoken
        spoken.append((answer, False))
