"""Environments of OpenEnv on a server: every reply of the policy is an action, as JSON.

    OPENENV_URL=http://127.0.0.1:8000 rlctl train … environment.name=examples/openenv_client.py:OpenEnv \
        'environment.variables=[OPENENV_URL]'

It needs `pip install openenv-core`. The data has one row per episode: a prompt that says what an action looks
like, and in the column `reset` arguments of the server's reset. The server's address is not in the data,
which must not choose what is contacted.
"""

from __future__ import annotations

import json
import os
from typing import Any


class OpenEnv:
    """One session of the server."""

    def reset(self, reset: dict[str, Any] | None = None) -> str:
        """Column `reset`: arguments of the server's reset. A refused connection excludes the episode."""
        from openenv.core import GenericEnvClient

        client = GenericEnvClient(os.environ["OPENENV_URL"], max_message_size_mb=1.0)
        self.session = client.sync().connect()
        self.total = 0.0
        return self._shown(self.session.reset(**(reset or {})))

    def respond(self, text: str) -> str | None:
        """Sends an action. The next observation, or None at the end."""
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        if not isinstance(action, dict):
            return 'Write an action as a JSON object, such as {"message": "…"}.'
        try:
            step = self.session.step(action)
        except RuntimeError as error:  # the server refuses the action: the policy shall see why
            return str(error)
        self.total += float(step.reward or 0.0)
        return None if step.done else self._shown(step)

    def get_reward(self) -> float:
        """The sum of the rewards."""
        return self.total

    def _shown(self, step: Any) -> str:
        return json.dumps(step.observation, ensure_ascii=False)
