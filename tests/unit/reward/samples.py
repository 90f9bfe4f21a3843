"""What a reward reads of `Rollouts`."""

from types import SimpleNamespace

import torch

from rlctl.reward.build import build_reward
from rlctl.reward.protocol import Sample
from rlctl.spec.rollout import RewardSpec


def rollouts(*samples, lengths=None, extra_infos=()):
    """From (response, ground truth, data source), and response lengths in tokens (1 unless given)."""
    responses, truths, sources = zip(*samples, strict=True)
    counts = torch.tensor(lengths or [1] * len(samples))
    return SimpleNamespace(
        response_texts=responses,
        ground_truths=truths,
        data_sources=sources,
        prompt_texts=tuple(f"prompt {i}" for i in range(len(samples))),
        extra_infos=extra_infos,
        messages=(),
        responses=torch.ones(len(samples), int(counts.max()), dtype=torch.int64),
        response_mask=torch.arange(int(counts.max())) < counts[:, None],
    )


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
