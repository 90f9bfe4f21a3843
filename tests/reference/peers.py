"""What other frameworks do to one response, written down from what they document, and 1,000 responses.

Each rule takes the log-ratios log π_train − log π_rollout of one response's tokens and its advantage, and
gives a weight and a decision per token. Plain loops; nothing of this project is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

#: (log-ratio of every token, advantage) → (weight of every token, kept or not).
Rule = Callable[[list[float], float], tuple[list[float], list[bool]]]


def thousand() -> list[list[float]]:
    """Log-ratios of 1,000 responses of 1 to 400 tokens.

    Small noise on every token, a drift per response, one token in 200 far off and one in 5,000 very far,
    as engines of different precision and stale weights produce together. Multiples of 2⁻¹².
    """
    rng = np.random.RandomState(20260101)  # its streams never change
    responses = []
    for _ in range(1000):
        length = int(np.clip(np.exp(rng.normal(4.0, 1.0)), 1, 400))
        ratios = rng.normal(0.0, 0.05, length) + rng.normal(0.0, 0.004)
        far = rng.random_sample(length) < 0.005
        ratios = ratios + far * rng.normal(0.0, 1.2, length)
        ratios = ratios + (rng.random_sample(length) < 0.0002) * rng.normal(0.0, 8.0, length)
        responses.append((np.round(ratios * 4096) / 4096).tolist())
    return responses


#: Of the 1,000: negative for two of five, zero for one of five.
ADVANTAGES = [(-1.0, 0.5, -0.25, 1.0, 0.0)[row % 5] for row in range(1000)]


def _exp(value: float) -> float:
    return math.exp(min(max(value, -20.0), 20.0))


def _all(count: int, passed: bool) -> list[bool]:
    return [passed] * count


def trl(mode: str, clip_max: float = 3.0) -> Rule:
    """TRL `vllm_importance_sampling_mode` (GRPOConfig, 1.16): `{token,sequence}_{truncate,mask}`, no lower
    bound. A masked ratio becomes the weight 0; nothing leaves the denominator."""
    level, bound = mode.split("_")

    def rule(ratios: list[float], advantage: float) -> tuple[list[float], list[bool]]:
        each = [math.exp(r) for r in ratios]
        if level == "sequence":
            each = [math.exp(sum(ratios))] * len(ratios)
        bounded = [min(w, clip_max) if bound == "truncate" else w * (w <= clip_max) for w in each]
        return bounded, _all(len(ratios), True)

    return rule


def openrlhf(kind: str, low: float = 0.5, high: float = 5.0) -> Rule:
    """OpenRLHF `--algo.advantage.is_correction_type`: `tis` clamps on both sides, `icepop` zeroes,
    `seq-mask-tis` zeroes by the geometric mean and leaves token ratios unbounded."""

    def rule(ratios: list[float], advantage: float) -> tuple[list[float], list[bool]]:
        each = [math.exp(r) for r in ratios]
        if kind == "tis":
            return [min(max(w, low), high) for w in each], _all(len(ratios), True)
        if kind == "icepop":
            return [w if low <= w <= high else 0.0 for w in each], _all(len(ratios), True)
        mean = math.exp(sum(ratios) / len(ratios))
        return each, _all(len(ratios), low <= mean <= high)

    return rule


def slime(kind: str, low: float = 0.0, high: float = 2.0) -> Rule:
    """slime `--use-tis` (`--tis-clip-low 0`, `--tis-clip 2`): clamped, or zeroed by its IcePop function."""

    def rule(ratios: list[float], advantage: float) -> tuple[list[float], list[bool]]:
        each = [math.exp(r) for r in ratios]
        if kind == "tis":
            return [min(max(w, low), high) for w in each], _all(len(ratios), True)
        return [w if low <= w <= high else 0.0 for w in each], _all(len(ratios), True)

    return rule


def skyrl(kind: str) -> Rule:
    """SkyRL `off_policy_correction`, one part at a time, at its documented thresholds."""

    def rule(ratios: list[float], advantage: float) -> tuple[list[float], list[bool]]:
        count, each = len(ratios), [_exp(r) for r in ratios]
        product, mean = _exp(sum(ratios)), _exp(sum(ratios) / count)
        if kind == "token":
            return [min(w, 2.0) for w in each], _all(count, True)
        if kind == "sequence":
            return [min(product, 5.0)] * count, _all(count, True)
        kept = {
            "geometric": _all(count, 0.99 <= mean <= 1.01),
            "product": _all(count, 0.5 <= product <= 2.0),
            "outlier": _all(count, all(1e-4 <= w <= 100 for w in each)),
            "token_mask": [0.5 <= w <= 2.0 for w in each],
        }[kind]
        return [1.0] * count, kept

    return rule


def off_policy(delta: float) -> Rule:
    """TRL `off_policy_mask_threshold`, slime `--use-opsm --opsm-delta`: the mask of DeepSeek-V3.2. A response
    is dropped where its advantage is negative and the mean of log π_rollout − log π_train exceeds δ."""

    def rule(ratios: list[float], advantage: float) -> tuple[list[float], list[bool]]:
        mean = sum(-r for r in ratios) / len(ratios)
        return [1.0] * len(ratios), _all(len(ratios), not (advantage < 0 and mean > delta))

    return rule


#: By the names `rlctl.what_if.settings.frameworks` uses.
RULES: dict[str, Rule] = {
    "TRL sequence_mask": trl("sequence_mask"),
    "TRL sequence_truncate": trl("sequence_truncate"),
    "TRL token_mask": trl("token_mask"),
    "TRL token_truncate": trl("token_truncate"),
    "OpenRLHF tis": openrlhf("tis"),
    "OpenRLHF icepop": openrlhf("icepop"),
    "OpenRLHF seq-mask-tis": openrlhf("seq-mask-tis"),
    "slime TIS": slime("tis"),
    "slime IcePop": slime("icepop"),
    "SkyRL token TIS": skyrl("token"),
    "SkyRL sequence TIS": skyrl("sequence"),
    "SkyRL geometric mask": skyrl("geometric"),
    "SkyRL product mask": skyrl("product"),
    "SkyRL outlier mask": skyrl("outlier"),
    "SkyRL token mask": skyrl("token_mask"),
    "TRL off-policy mask": off_policy(0.5),  # the threshold its documentation suggests; off by default
    "slime OPSM": off_policy(1e-4),
}
