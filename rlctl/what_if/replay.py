"""Evaluates a grid of settings in one pass over dumped rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.errors import UsageError
from rlctl.what_if.chunks import advantages_of, pooled
from rlctl.what_if.setting_sums import SettingSums
from rlctl.what_if.settings import Setting
from rlctl.what_if.step import Step
from rlctl.what_if.summary import summarized
from rlctl.what_if.tradeoff import Tradeoff

_NO_WEIGHT = CorrectionRules(WeightRule(None))


def replay(
    steps: Iterable[Step],
    settings: Sequence[Setting],
    *,
    estimator: str = "rloo",
    groups_per_batch: int | None = None,
    mean_per_sequence: bool = False,
) -> Tradeoff:
    """Evaluates every setting on every step.

    Weights are normalised by their mean over a mini-batch. A dump often contains only a few rows per step, so
    consecutive steps are pooled until they contain as many groups as a mini-batch.

    Args:
        steps: read once; only the steps of one pool are in memory.
        settings: with unique names; equal rules are computed once.
        estimator: the run's `algorithm.adv_estimator`; computes the advantages if the dump has none.
        groups_per_batch: prompt groups of one optimizer step; None: the mean number per dumped step.
        mean_per_sequence: whether the loss first averages over the tokens of each sequence.

    Raises:
        UsageError: no response has finite log-probs of both policies.
    """
    named: dict[CorrectionRules, list[Setting]] = {}
    for setting in settings:
        named.setdefault(setting.rules, []).append(setting)
    rules = [*named, *({_NO_WEIGHT} - named.keys())]
    sums = SettingSums(rules)

    def with_advantages() -> Iterator[Step]:
        for step in steps:
            found = advantages_of(step, estimator, sums.notes)
            if mean_per_sequence:
                found = found / np.maximum(step.lengths, 1)
            sums.num_steps += 1
            yield replace(step, advantages=found)

    for batch in pooled(with_advantages(), groups_per_batch or 1):
        sums.add(batch)
    num_groups, num_sequences, _ = sums.moments.counts.sum(1)
    if not num_sequences:
        raise UsageError("the dump contains no response with finite log-probs of both policies")
    groups = groups_per_batch or float(num_groups / sums.num_steps)
    names = [named.get(rule, []) for rule in rules]
    return summarized(sums, names, rules.index(_NO_WEIGHT), groups)
