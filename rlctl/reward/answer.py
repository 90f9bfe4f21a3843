"""Where in a response the answer stands. What it means is `rlctl.reward.maths`' business."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.reward.numbers import legible, plain

#: Characters read of one place; patterns backtrack on long texts.
MAX_CHARS = 2000
#: Characters of a response that are looked at, from its end.
MAX_RESPONSE_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of a response that holds its answer.

    Attributes:
        text: the piece.
        is_whole: it is nothing but the answer; False: it is prose around it.
    """

    text: str
    is_whole: bool


#: What ends an answer: a chat template's marks, as text.
_TURN_END = re.compile(
    r"<\|(?:eot_id|im_end|im_start|endoftext|end_of_text|end|eom_id|start_header_id|user|assistant)\|>"
    r"|</s>|<eos>|<(?:end|start)_of_turn>|\[/?INST\]"
)
#: A line that begins the next exercise of a model that goes on after its answer.
_NEXT_QUESTION = re.compile(
    r"^[#*\s>\-\[]*(?:Q|(?:Next |New |Another )?(?:Question|Problem|Exercise|Example)|Human|User|Instruction)"
    r"(?P<number>\s*#?\d+)?[\]*\s]*[:.](?!\d)",
    re.MULTILINE | re.IGNORECASE,
)
#: A line that begins what comes after the answer: a check, a remark.
_AFTERWORD = re.compile(
    r"^[#*\s>\-(]*(?:note\b|check\b|verif|double[- ]check|to (?:verify|check)|let(?:'|’)?s (?:verify|check|double)"
    r"|explanation\b|(?:i )?hope (?:this|that)|let me know|P\.?S\b|disclaimer)",
    re.MULTILINE | re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:wait|actually|correction|mistake|sorry|oops|incorrect|re-?check|let me re)\b", re.IGNORECASE
)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASH = re.compile(r"####+(?!#)[ \t]*(?:\n\s*)?(?P<line>[^\n]*)")
#: `#### Step 2` and `#### 2. Add them up` are headings.
_HEADING = re.compile(r"\s*(?:\d+[.):]\s+\S|\**[A-Za-z]+[a-z ]*\d*\**\s*:?\**\s*$|[A-Za-z]{2,})")
_TAG = re.compile(r"<answer>(?P<text>.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_JOINT = r"[\"'*_`\s]*"
_IS = re.compile(
    r"\banswers?(?:\s+(?:to|for|of)\b[^.\n:]{0,100}?)?"
    + _JOINT
    + r"(?:\bis\b|\bwas\b|\b(?:would|will|should|must) be\b|\bequals\b|=)(?!\s+(?:not|in|wrong|correct)\b)"
    + _JOINT
    + r":?|答案(?:是|为|：|:)",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"(?:^|(?<=[\s*#_(\"'{.]))(?:(?:final|correct)\s+)?(?:answer|ans)(?:\s*\([^)\n]*\))?"
    + _JOINT
    + r":"
    + _JOINT
    + r"|^[#*_ ]*(?:the\s+)?(?:final\s+)?answer[*_ ]*\n|^[*_ ]*A[*_ ]*[:.]"
    + _JOINT,
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"(?<!\bapprox)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bvs)(?<!\be\.g)(?<!\bi\.e)[.!?][\"')*\]$]*\s+(?=\S)|\n+"
)
#: A main clause that has not come to its number: "20 cups in the final meal, the total number of cups".
_BROKEN_OFF = re.compile(r",\s+[A-Za-z']+\s+[A-Za-z']+\s+[^\d,.!?]*[A-Za-z]\s*$")
_DANGLING = re.compile(r"[-+*/×÷=^(]\s*$")


def places(response: str) -> Iterator[Place]:
    """Where the answer may stand, the likeliest first.

    Explicit marks win over prose, and later ones over earlier ones. What a model writes after its answer,
    such as the next exercise of a few-shot prompt, does not count.
    """
    text = _own_part(legible(response[-MAX_RESPONSE_CHARS:]))
    explicit = sorted([*_boxes(text), *_hashes(text), *_tags(text)], key=lambda found: -found[0])
    yield from (Place(found[:MAX_CHARS], True) for _, found in explicit if found.strip())
    for start, rest, is_label in _announcements(text):
        yield from _announced(rest, is_label)
    yield from _conclusion(text)


def _own_part(text: str) -> str:
    """The response proper: thoughts before it and other exercises after it removed."""
    text = re.sub(r"<<[^<>\n]*>>", "", text.rpartition("</think>")[2].replace("\r\n", "\n"))
    end = next((m.start() for m in _TURN_END.finditer(text) if text[: m.start()].strip()), len(text))
    text = text[:end]
    starts = list(_NEXT_QUESTION.finditer(text))
    if starts and not text[: starts[0].start()].strip():  # it repeats the question, or numbers its steps
        starts = [] if starts[0]["number"] else starts[1:]
    for start in starts:
        if re.search(r"\d", text[: start.start()]):
            text = text[: start.start()]
            break
    return text


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    for match in _BOX.finditer(text):
        depth, end = 1, match.end()
        while end < len(text) and depth and end - match.end() < MAX_CHARS:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield match.start(), text[match.end() : end - 1 if depth == 0 else end].partition("\n\n")[0]


def _hashes(text: str) -> Iterator[tuple[int, str]]:
    """Lines after `####` that are no headings; none after a paragraph that goes on with something else."""
    last_end = None
    for match in _HASH.finditer(text):
        line = match["line"].strip()
        is_last = not text[match.end() :].strip()
        if not line or (_HEADING.match(line) and not is_last):
            continue
        between = "" if last_end is None else text[last_end : match.start()]
        if between.strip() and not _CORRECTION.search(between):
            return
        last_end = match.end()
        yield match.start(), line


def _tags(text: str) -> Iterator[tuple[int, str]]:
    for match in _TAG.finditer(text):
        yield match.start(), match["text"]


def _announcements(text: str) -> list[tuple[int, str, bool]]:
    """(position, what follows, whether after a label) of every "the answer is" and "Answer:", last first."""
    found = [(m.end(), text[m.end() :], False) for m in _IS.finditer(text)]
    found += [(m.end(), text[m.end() :], True) for m in _LABEL.finditer(text)]
    return sorted(found, key=lambda entry: -entry[0])


def _announced(rest: str, is_label: bool) -> Iterator[Place]:
    rest = rest.lstrip()
    first = _SENTENCE_END.split(rest[:MAX_CHARS], maxsplit=1)[0].strip()
    if not first:
        return
    if not is_label:
        yield Place(first, False)
    elif len(re.findall(r"[A-Za-z]{2,}", plain(first))) <= 4 and "=" not in first:
        yield Place(first, True)
    else:  # reasoning that begins with "Answer:"
        yield from _conclusion(rest)


def _conclusion(text: str) -> Iterator[Place]:
    """The last sentence with a number in it; nothing of a text that breaks off."""
    cut = next(
        (m.start() for m in _AFTERWORD.finditer(text) if re.search(r"\d", text[: m.start()])), len(text)
    )
    tail = text[:cut][-MAX_CHARS:]
    if _DANGLING.search(plain(tail)):
        return
    sentences = [s for s in _SENTENCE_END.split(tail) if s and s.strip()]
    for place, sentence in enumerate(reversed(sentences)):
        if re.search(r"\d", sentence) or MATHS.search(sentence):
            if place == 0 and _BROKEN_OFF.search(sentence):
                return
            yield Place(sentence, False)
            return
        if place == 0 and len(sentence.split()) > 3 and sentence.rstrip()[-1].isalnum():
            return


MATHS = re.compile(
    r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<![\\\d$])\$(?![\s$])([^$\n]*[^\s$\\])\$(?!\d)", re.DOTALL
)
