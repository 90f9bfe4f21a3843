"""A custom diagnosis rule: responses that are shorter than the task needs.

rlctl diagnose RUN --rules examples/custom_rule.py:short_answers
"""

import numpy as np

from rlctl.parts import Detection, Evidence, Rule, RunLog, by_hand

LEAST = 20.0


@Rule(
    "short-answers",
    signal="`response_length/mean`",
    thresholds=f"— / < {LEAST:g} tokens / —",
    source="this task: an answer with its steps has 20 tokens or more",
    needs=("response_length/mean",),
    cause="the prompt asks for one word, or the reward pays for short answers",
    fixes=lambda run: (by_hand("ask for the steps in the prompt"),),
    sure=("medium", "the log does not show the responses"),
)
def short_answers(run: RunLog) -> Detection | None:
    """Responses are long enough to hold their steps."""
    lengths = run.table.series("response_length/mean")
    middle = float(np.median(lengths.values))
    if middle >= LEAST:
        return None
    steps = int(lengths.steps[0]), int(lengths.steps[-1])
    seen = Evidence("response_length/mean", f"{middle:.3g} (median)", *steps)
    return Detection("warning", f"responses have {middle:.3g} tokens", (seen,))
