"""Graders of the golden runs."""


def share(response: str, ground_truth: str) -> float:
    """Fraction of the letters that are at most the ground truth in the alphabet."""
    return sum(letter <= ground_truth for letter in response) / max(len(response), 1)


def whole(response: str, ground_truth: str) -> float:
    """1 or 0, so that groups without spread exist."""
    return float(share(response, ground_truth) > 0.4)


def failing(response: str, ground_truth: str) -> float:
    """Fails on some responses."""
    if response.endswith(("c", "g", "m")):
        raise ValueError(f"no grade for {response}")
    return share(response, ground_truth)
