"""Rules about the length of responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped
from rlctl.diagnose.rule import Detection, Rule
from rlctl.diagnose.signals import change_evidence, evidence_over, lasting_change, rises
from rlctl.diagnose.table import RunLog, Series
from rlctl.metric_names import OVERLONG, key_pattern

_TERM = "reward/<term>/mean"
#: Factor by which responses shrink, and tokens at the end from which the first row alone counts as the start.
SHRINK, FEW_TOKENS = 5.0, 10.0
#: Mean tokens of responses that are nearly empty: an end-of-sequence token is one.
EMPTY = 2.0
#: Factor by which responses grow without a gain.
GROWTH = 2.0
#: Share of its largest value by which a reward of a sum moves.
TERM_MOVE = 0.1


class _TermMove(NamedTuple):
    """A reward of a sum, before and after the length changed."""

    term: str
    by: float  # its change
    evidence: Evidence


_Moves = list[_TermMove]


def _moved_terms(run: RunLog, since: int) -> tuple[_Moves, _Moves]:
    """The rewards of a sum that rose and that fell after a step, the largest change first."""
    moves = []
    score = run.table.series(th.SCORE).values
    for key in run.table.matching(_TERM):
        match = key_pattern(_TERM).fullmatch(key)
        series = run.table.series(key)
        before = series.values[series.steps < since]
        after = series.values[series.steps >= since]
        is_sum = np.array_equal(series.values, score)
        if match is None or match["term"] == OVERLONG or is_sum or not len(before) or not len(after):
            continue
        start = float(np.median(before))
        end = float(np.median(after))
        if abs(end - start) > TERM_MOVE * np.abs(series.values).max():
            moves.append(
                _TermMove(match["term"], end - start, change_evidence(key, start, end, series.steps))
            )
    moves.sort(key=lambda move: -abs(move.by))
    return [move for move in moves if move.by > 0.0], [move for move in moves if move.by < 0.0]


def _collapse(series: Series) -> tuple[float, float, int] | None:
    """Length at the start and at the end of a collapse, and the first step after the last long response."""
    values = series.values
    if len(values) < th.MIN_STEPS:
        return None
    width = min(th.WINDOW, len(values) // 2)
    newest = values[-width:]
    end = float(np.median(newest))
    typical = float(np.median(values[:width]))
    start = max(typical, float(values[0])) if end < FEW_TOKENS else typical
    is_over = newest.max() < start / 2.0
    if start < SHRINK * max(end, 1.0) or not is_over:
        return None
    long = np.flatnonzero(values > (start * end) ** 0.5)
    return start, end, int(series.steps[min(int(long[-1]) + 1, len(values) - 1)])


def _against_collapse(
    run: RunLog, since: int, risen: list[_TermMove], lost: list[_TermMove]
) -> Iterator[Fix]:
    if risen and lost:
        yield fix.by_hand(f"pay {risen[0].term} only to responses that also earn {lost[0].term}")
    yield fix.resume_before(since)
    yield from fix.slower(run, 10.0)
    yield fix.by_hand("read stored responses: a reward that short responses earn too needs a lower limit")


@Rule(
    "length-collapse",
    needs=(th.LENGTH,),
    uses=(*th.REWARDS, _TERM),
    thresholds=f"— / ÷ {SHRINK:g} and the reward gains / ÷ {SHRINK:g}; < {EMPTY:g} tokens, unless learned³",
)
def length_collapse(run: RunLog) -> Detection | None:
    """Responses do not shrink to a few tokens."""
    series = run.table.series(th.LENGTH)
    collapse = _collapse(series)
    if collapse is None:
        newest = float(np.median(series.values[-th.WINDOW :]))
        if newest >= EMPTY or run.has_learned:
            return None
        seen = evidence_over(series.steps[-th.WINDOW :], th.LENGTH, f"{newest:.2g} tokens (median)")
        cause = "the first token is the end: a wrong template or stop token, or the policy has collapsed"
        check = fix.by_hand(
            "read stored responses with their tokens; compare the chat template and the stop tokens"
        )
        return Detection(
            severity="critical",
            what=f"responses are nearly empty: {newest:.2g} tokens",
            evidence=(seen,),
            cause=cause,
            fixes=(check,),
        )
    start, end, since = collapse
    risen, lost = _moved_terms(run, since)
    seen = change_evidence(th.LENGTH, start, end, series.steps)
    message = f"responses collapse from {start:.3g} to {end:.2g} tokens by step {since:,}"
    if lost:
        message += f", and lose {' and '.join(move.term for move in lost[:2])}"
    if risen:
        message += f"; {risen[0].term} pays for it"
    gains = (run.has_learned or run.has_gained) and not lost
    severity: Severity = "warning" if gains else "critical"
    evidence = (seen, *(move.evidence for move in (*lost[:2], *risen[:1])))
    fixes = tuple(_against_collapse(run, since, risen, lost))
    before = series.steps[series.steps < since]
    onset = int(before[-1]) + 1 if len(before) else since
    return Detection(severity, message, evidence, fixes=fixes, since=onset)


@Rule(
    "length-growth",
    needs=(th.LENGTH, th.SCORE),
    uses=(*th.REWARDS, _TERM),
    min_steps=th.MOVE_STEPS,
    thresholds=f"— / × {GROWTH:g}, and the reward does not gain / —",
    fixes=(
        fix.length_penalty,
        fix.by_hand("average the loss over tokens, so that long wrong responses do not weigh less per token"),
    ),
)
def length_growth(run: RunLog) -> Detection | Skipped | None:
    """Responses grow only with the reward."""
    series = run.table.series(th.LENGTH)
    change = lasting_change(series)
    if change is None or change.end < GROWTH * change.start or run.has_learned:
        return None
    if run.has_gained or rises(run.table, th.SCORE):
        return None
    seen = change_evidence(th.LENGTH, change.start, change.end, series.steps)
    message = f"responses grow from {change.start:.3g} to {change.end:.3g} tokens, and the reward does not"
    return Detection("warning", message, (seen,), since=change.since)
