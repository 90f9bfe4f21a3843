"""One notch tighter: every bound half as far from ρ = 1, in log ρ."""

from __future__ import annotations

import math
from dataclasses import replace

from rlctl.algos.rules import RejectRule, WeightRule


def tighter_weight(rule: WeightRule) -> WeightRule:
    """[lower, upper] becomes [√lower, √upper]."""
    return replace(rule, lower=math.sqrt(rule.lower), upper=math.sqrt(rule.upper))


def tighter_criterion(rule: RejectRule) -> RejectRule:
    """The same criterion with the band of ρ it accepts half as wide in log ρ.

    k3 = ρ − 1 − log ρ is not symmetric: its upper side is halved exactly, the lower side follows.
    """
    if rule.statistic == "ratio":
        lower, upper = (None if bound is None else math.sqrt(bound) for bound in (rule.lower, rule.upper))
    elif rule.statistic == "k1":
        lower, upper = (None if bound is None else bound / 2 for bound in (rule.lower, rule.upper))
    elif rule.statistic == "k2":
        lower, upper = rule.lower, None if rule.upper is None else rule.upper / 4
    else:
        _, highest = rule.band()
        upper = rule.upper if math.isinf(highest) else math.sqrt(highest) - 1 - math.log(highest) / 2
        lower = rule.lower
    return replace(rule, lower=lower, upper=upper)
