"""`samples.html`: metrics and samples on one self-contained page."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.evaluate.page.tables import SCORE_HEADINGS, drawn, render_page, score_notes, score_rows
from rlctl.evaluate.samples import EvalSample, by_question
from rlctl.evaluate.scores import RIGHT

PAGE_FILE = "samples.html"
#: Maximum bytes of text on the page, so that browsers can open it.
MAX_TEXT = 20_000_000
_HERE = Path(__file__).parent


def write_page(
    path: Path, document: Mapping[str, Any], samples: Sequence[EvalSample], *, max_text: int = MAX_TEXT
) -> None:
    """Writes the page.

    `document` is `results.json`. If the samples exceed `max_text` bytes, some are omitted, see `chosen`.
    """
    kept = chosen(samples, max_text)
    model, n = document["model"], document["sampling"]["n"]
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
        notes=[*_left_out(samples, kept), *score_notes(document)],
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
    room, kept = max_text, set()
    for place in places:
        room -= _size(samples[place])
        if room < 0:
            break
        kept.add(place)
    return [sample for place, sample in enumerate(samples) if place in kept]


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
        index, asked = group[0].question_index, group[0]
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


def _left_out(samples: Sequence[EvalSample], kept: Sequence[EvalSample]) -> list[str]:
    if len(kept) == len(samples):
        return []
    return [
        f"{len(kept):,} of {len(samples):,} responses are on this page: wrong, truncated and failed ones "
        "first, then a random sample of the others. The scores are of all responses (samples.parquet)."
    ]
