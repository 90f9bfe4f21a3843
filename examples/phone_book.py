"""A class as an environment: the policy must look something up, and then answer."""

from __future__ import annotations


class PhoneBook:
    """One question about a number that only the tool knows."""

    def reset(self, extensions: dict[str, str], ground_truth: str) -> str:
        """Begins an episode with columns of its row; the text is appended to the prompt."""
        self.extensions, self.right = extensions, ground_truth
        self.is_right = False
        return " Look the number up, then answer with the number only."

    def look_up(self, name: str) -> str:
        """Looks up an extension.

        Args:
            name: First name.
        """
        return self.extensions.get(name, f"{name} is not in the book")

    def respond(self, text: str) -> None:
        """Reads the reply without a call; None ends the episode."""
        self.is_right = text.strip() == self.right

    def get_reward(self) -> float:
        """1 for the right number."""
        return float(self.is_right)
