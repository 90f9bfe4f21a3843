"""`samples.html`: metrics and samples on one page; metrics as table rows, for the terminal too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.evaluate.samples import EvalSample, by_question
from rlctl.evaluate.scores import RIGHT
from rlctl.html_page import render
from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN

PAGE_FILE = "samples.html"
#: Maximum bytes of text on the page, so that browsers can open it.
MAX_TEXT = 20_000_000
SCORE_HEADINGS = ("", "stderr", "95 % interval")
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table of metrics."""

    name: str  # `avg@8`, `pass@4`, …
    cells: tuple[str, ...]  # cell texts, one per heading
    #: value, low and high to draw; low and high are None without an interval; None: no plot
    range: tuple[float, float | None, float | None] | None = None


def score_rows(score: Mapping[str, Any], n: int) -> list[TableRow]:
    """Table rows with the metrics of one data source.

    `score` is an entry of `scores` in `results.json`; `n` is the number of responses per question.
    """
    rows = []
    for name in score:
        if name == "avg" or name.startswith(("pass@", "maj@")):
            shown = f"avg@{n}" if name == "avg" else name
            missing = "no answers to vote on" if name.startswith("maj@") else "too few graded samples"
            missing = "too many grader errors" if score["is_withheld"] else missing
            rows.append(_figure_row(shown, score[name], missing=missing))
    return [
        *rows,
        _figure_row("truncated", score["truncated_fraction"], ".1%"),
        _figure_row("mean length", score["mean_length"], ".1f"),
        _figure_row("grader errors", score["grader_error_fraction"], ".1%"),
    ]


def _figure_row(
    name: str, figure: Mapping[str, Any] | None, number: str = ".3f", missing: str = ""
) -> TableRow:
    if figure is None:
        return TableRow(name, ("—", "", missing))
    value = figure["value"]
    low = figure["low"]
    high = figure["high"]
    interval = "—" if low is None or high is None else f"{low:{number}} – {high:{number}}"
    is_share = all(0.0 <= end <= 1.0 for end in (value, low, high) if end is not None)
    drawn = (value, low, high) if is_share and name != "mean length" else None
    return TableRow(name, (f"{value:{number}}", stderr_text(figure["stderr"], number), interval), drawn)


def score_notes(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields notes on how to read the metrics; `document` is `results.json`."""
    scores = document["scores"]
    n = document["sampling"]["n"]
    if any(score["data_source"] == DATA_SOURCE for score in scores):
        yield WRITTEN
    num_overlong = document["data"]["num_overlong_prompts"]
    if num_overlong:
        yield f"{num_overlong} questions were excluded: their prompts are too long"
    num_aborted = document["data"].get("num_aborted_responses")
    if num_aborted:
        were = "response was" if num_aborted == 1 else "responses were"
        yield (
            f"{num_aborted:,} {were} ended by the engine before the policy or the length limit, and "
            "excluded; the same command samples them again"
        )
    open_ones = [score for score in scores if score["is_withheld"]]
    for score in open_ones:
        yield (
            f"{score['data_source']}: {score['num_grader_errors']:,} of {score['num_samples']:,} responses "
            "could not be graded, more than reward.max_error_fraction "
            f"({document['reward']['max_error_fraction']:g}): no score. Correct the grader, then --regrade"
        )
    if document.get("score_range") is None and len(scores) > len(open_ones):
        yield (
            "the range of the reward is not known: its intervals are Student's, which miss rare other "
            "rewards, and there is none where all questions have the same; declare reward.score_range: [0, 1]"
        )
    timeouts = document["timeouts"]
    if timeouts:
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(timeouts.items()))
        count = sum(timeouts.values())
        made = "1 response made its" if count == 1 else f"{count:,} responses made their"
        yield f"{made} grading fail ({kinds}), scored as wrong"
    num_short = scores[-1]["num_short"]
    if num_short and not open_ones:
        yield (
            f"{num_short:,} questions have fewer than {n} graded samples: avg and maj use the graded ones, "
            "pass@k only questions with k or more"
        )
    if document["grader_errors"]:
        first = document["grader_errors"][0].strip().splitlines()[-1]
        excluded = "" if open_ones else "samples the grader failed on are excluded, not scored 0; "
        yield f"{excluded}the grader's first failure: {first}"
    changed = document.get("regraded")
    if changed:
        yield (
            f"grades changed: {changed['num_changed']:,}; of these {changed['now_right']:,} are right now, "
            f"{changed['now_wrong']:,} wrong, {changed['now_failed']:,} fail, "
            f"{changed['no_longer_failed']:,} no longer fail"
        )
    elif document["num_stored"]:
        yield f"{document['num_stored']:,} responses were already stored (--fresh samples them again)"


def stderr_text(stderr: float | None, number: str = ".3f") -> str:
    """Formats a standard error; — if it is unknown."""
    return "—" if stderr is None else f"{stderr:{number}}"


def render_page(template: str, **values: Any) -> str:
    """Renders a template of this directory with its style; see `rlctl.html_page.render`."""
    style = (_HERE / "samples.css").read_text(encoding="utf-8")
    return render(_HERE / template, style=style, **values)


def drawn(row: TableRow, *, left: float, scale: float, zero: bool = False) -> dict[str, Any]:
    """Template values of a row, with plot coordinates `left + scale * x` for its value and interval."""
    plot = None
    if row.range is not None:
        value, low, high = (None if end is None else round(left + scale * end, 2) for end in row.range)
        has_interval = low is not None and high is not None
        plot = {"value": value, "low": low if has_interval else None, "high": high, "zero": zero}
    label = ", ".join(cell for cell in row.cells if cell)
    return {"name": row.name, "cells": row.cells, "plot": plot, "label": label}


def write_page(
    path: Path, document: Mapping[str, Any], samples: Sequence[EvalSample], *, max_text: int = MAX_TEXT
) -> None:
    """Writes the page.

    `document` is `results.json`. If the samples exceed `max_text` bytes, some are omitted, see `chosen`.
    """
    kept = chosen(samples, max_text)
    notes = list(score_notes(document))
    if len(kept) < len(samples):
        notes.insert(
            0,
            f"{len(kept):,} of {len(samples):,} responses are on this page: wrong, truncated and failed ones "
            "first, then a random sample of the others. The scores are of all responses (samples.parquet).",
        )
    model = document["model"]
    n = document["sampling"]["n"]
    tables = []
    for score in document["scores"]:
        rows = [drawn(row, left=4.0, scale=192.0) for row in score_rows(score, n)]
        amount = f"{score['num_questions']:,} questions, {score['num_samples']:,} responses"
        about = {"name": score["data_source"], "amount": amount, "conclusion": ""}
        tables.append(about | {"axis": ("0", "1"), "rows": rows})
    text = render_page(
        "samples.html.j2",
        title=f"{model['path']}, step {model['step']}" if model["run_dir"] else model["path"],
        about=_about(document),
        notes=notes,
        headings=SCORE_HEADINGS,
        tables=tables,
        scripts=[(_HERE / "samples.js").read_text(encoding="utf-8")],
        data={"questions": _questions(samples, kept)},
    )
    path.write_bytes(text.encode("utf-8", "replace"))


def chosen(samples: Sequence[EvalSample], max_text: int) -> list[EvalSample]:
    """Selects the samples for the page, in their original order.

    If all exceed `max_text` bytes, samples are added up to that size: first those that failed, were truncated
    or are wrong, then right ones, each group in random order with a fixed seed.
    """
    if sum(map(_size, samples)) <= max_text:
        return list(samples)
    places = list(range(len(samples)))
    random.Random(0).shuffle(places)
    places.sort(key=lambda place: _outcome(samples[place]) == "right" and not samples[place].truncated)
    text_left = max_text
    kept = set()
    for place in places:
        text_left -= _size(samples[place])
        if text_left < 0:
            break
        kept.add(place)
    return [sample for index, sample in enumerate(samples) if index in kept]


def _size(sample: EvalSample) -> int:
    """Bytes of prompt, response and ground truth."""
    texts = (sample.prompt, sample.response, sample.ground_truth)
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


def _outcome(sample: EvalSample) -> str:
    if sample.reward is None:
        return "error"
    return "right" if sample.reward >= RIGHT else "wrong"


def _questions(samples: Sequence[EvalSample], kept: Sequence[EvalSample]) -> list[dict[str, Any]]:
    """The kept samples by question, with counts over all samples of the question."""
    everything = Counter(sample.question_index for sample in samples)
    right = Counter(sample.question_index for sample in samples if _outcome(sample) == "right")
    questions = []
    for group in by_question(kept):
        responses = [
            {
                "sample": sample.sample_index,
                "text": sample.response,
                "outcome": _outcome(sample),
                "reward": sample.reward,
                "answer": sample.answer,
                "truncated": sample.truncated,
                "tokens": sample.num_tokens,
            }
            for sample in group
        ]
        index = group[0].question_index
        asked = group[0]
        question = {"index": index, "source": asked.data_source, "prompt": asked.prompt}
        question |= {"truth": asked.ground_truth, "responses": responses}
        questions.append(question | {"right": right[index], "of": everything[index]})
    return questions


def _about(document: Mapping[str, Any]) -> list[str]:
    sampling = document["sampling"]
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    terms: Iterable[Mapping[str, Any]] = document["reward"]["terms"] or [document["reward"]]
    return [
        ", ".join(document["data"]["files"]),
        f"{sampling['n']} responses per question, {how}, top-p {sampling['top_p']:g}",
        f"at most {sampling['max_response_length']:,} tokens",
        f"graded by {' + '.join(term['name'] for term in terms)}",
        document["written"],
    ]
