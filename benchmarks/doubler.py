"""An environment class for rlctl and for TRL's `environment_factory`, see `benchmarks.environments`."""


class Doubler:
    """The policy has to call the tool with the number of its task."""

    def reset(self, **row) -> None:
        self.wanted, self.is_right = row["number"], False

    def double(self, number: int) -> str:
        """Doubles a number.

        Args:
            number: The number.
        """
        self.is_right = number == self.wanted
        return str(2 * number)

    def get_reward(self) -> float:
        return float(self.is_right)
