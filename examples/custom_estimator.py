"""An advantage estimator in one file: the reward minus the best reward of the prompt's other episodes.

rlctl train --preset rloo-seq-is algorithm.adv_estimator=examples/custom_estimator.py:minus_best
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.parts import ADVANTAGE_ESTIMATORS, AdvantageInputs


@ADVANTAGE_ESTIMATORS.register(
    label="Reward minus the best sibling's",
    formula="A_i = r_i − max over the other episodes of the prompt",
    source="an example",
    needs={"group_ids"},
    experimental=True,
)
def minus_best(inputs: AdvantageInputs) -> Tensor:
    """(E,) one advantage per episode; 0.0 without a sibling."""
    rewards, groups = inputs.rewards, inputs.group_ids
    itself = torch.eye(len(rewards), dtype=torch.bool, device=rewards.device)
    siblings = (groups[:, None] == groups[None, :]) & ~itself
    best = torch.where(siblings, rewards[None, :], -torch.inf).amax(-1)
    return torch.where(siblings.any(-1), rewards - best, 0.0)
