"""What a reward reads of episodes."""

import torch

from rlctl.batch import Episode, Task, TokenSequence, Turn
from rlctl.reward.build import build_reward
from rlctl.reward.protocol import Sample
from rlctl.run_spec.rollout import RewardSpec


def episodes(*samples, lengths=None, extra_infos=None):
    """From (response, ground truth, data source), and response lengths in tokens (1 unless given)."""
    found = []
    for place, (response, truth, source) in enumerate(samples):
        ones = torch.ones(lengths[place] if lengths else 1, dtype=torch.int64)
        turn = Turn(ones, ones.float(), ones, "stop")
        extra = extra_infos[place] if extra_infos else {}
        task = Task((2, 3), f"prompt {place}", place, place, source, truth, extra)
        found.append(Episode(task, 0, (TokenSequence.of_turn(task.prompt_ids, turn),), response))
    return found


def pairs(*texts):
    """Samples from (response, ground truth)."""
    return [Sample(response, truth) for response, truth in texts]


def built(max_response_length=16, **section):
    """The reward of this spec section."""
    return build_reward(
        RewardSpec.model_validate(section),
        max_response_length=max_response_length,
        device=torch.device("cpu"),
    )
