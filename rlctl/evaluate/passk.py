"""pass@k without bias."""

from __future__ import annotations


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of the n responses, drawn without replacement, hold a right one.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), 1 − C(n−c, k) / C(n, k), as the
    product of the chances that each further draw is wrong too: exact, no factorials, no overflow.

    Args:
        n: responses sampled.
        c: right ones among them.
        k: how many may be tried.

    Raises:
        ValueError: not 1 ≤ k ≤ n, or not 0 ≤ c ≤ n. There is no unbiased estimate for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} responses: k must be between 1 and n")
    if not 0 <= c <= n:
        raise ValueError(f"{c} right responses out of {n}")
    all_wrong = 1.0
    for draw in range(k):
        all_wrong *= max(0, n - c - draw) / (n - draw)
    return 1.0 - all_wrong
