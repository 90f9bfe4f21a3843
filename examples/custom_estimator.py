"""An advantage estimator in one file: the reward minus the best reward of the other responses to the prompt.

rlctl train --preset rloo-seq-is algorithm.adv_estimator=examples/custom_estimator.py:minus_best
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs
from rlctl.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register(
    label="Reward minus the best sibling's",
    formula="A_i = r_i − max over the other valid responses to the prompt",
    source="an example",
    needs={"group_ids"},
    experimental=True,
)
def minus_best(inputs: AdvantageInputs) -> Tensor:
    """(B,) one advantage per response; 0.0 without a valid sibling."""
    rewards = inputs.rewards
    index = torch.arange(len(rewards), device=rewards.device)
    others = (index[:, None] != index[None, :]) & inputs.valid[None, :]
    siblings = (inputs.group_ids[:, None] == inputs.group_ids[None, :]) & others
    best = torch.where(siblings, rewards[None, :], -torch.inf).amax(-1)
    return torch.where(inputs.valid & siblings.any(-1), rewards - best, 0.0)
