"""Finds where a response states its answer; `rlctl.reward.maths` parses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.markup import group_end
from rlctl.reward.assertion import asserted_part, in_languages, is_asserted
from rlctl.reward.numbers import FOREIGN, SCALES, SPELLED, legible, plain
from rlctl.reward.thoughts import without_thoughts

#: Maximum characters read from one place, because patterns backtrack on long texts.
MAX_CHARS = 2000
#: Content of a box or tag that is longer than this is treated as prose.
MAX_LABELLED_CHARS = 200
#: Maximum words of an answer that is not a sentence, as in "18 dollars per day".
MAX_WORDS = 4
#: Maximum number of marks of one kind that are read: the last ones.
MAX_MARKS = 16
#: Maximum characters of a response that are read, counted from its end.
MAX_RESPONSE_CHARS = 200_000


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a response that may contain its answer."""

    text: str
    is_whole: bool  # the text is only the answer; False: prose that contains it
    is_marked: bool = False  # in a box, in a tag or after `####`; later places are not tried
    is_announced: bool = False  # after "the answer is"; later places are not tried for texts


_DIGIT = re.compile(r"\d")
#: A number, which may be π without a digit.
_NUMBER = re.compile(r"\d|\\pi(?![a-z])")
_CONTENT = re.compile(r"\w")
#: Special tokens of chat templates, written as text; the first one ends the response.
_TURN_END = re.compile(
    r"<\|(?:eot_id|im_end|im_start|endoftext|end_of_text|end|eom_id|start_header_id|user|assistant)\|>"
    r"|<\|(?:return|call)\|>|</s>|<eos>|<(?:end|start)_of_turn>|\[/?INST\]"
)
#: A line that starts another exercise, which some models write after their answer.
_NEXT_QUESTION = re.compile(
    r"^[#* \t>\-\[]*(?:Q|(?:Next |New |Another )?(?:Question|Problem|Exercise|Example)|Human|User"
    r"|Instruction)(?P<number>\s*#?\d+)?[\]*\s]*[:.](?!\d)",
    re.MULTILINE | re.IGNORECASE,
)
#: A line that starts text after the answer, such as a check or a remark.
_AFTERWORD = re.compile(
    r"^[#* \t>\-(]*(?:note\b|check\b|verif|double[- ]check|to (?:verify|check)"
    r"|let(?:'|’)?s (?:verify|check|double)|explanation\b|(?:i )?hope (?:this|that)"
    r"|let me know|P\.?S\b|disclaimer)",
    re.MULTILINE | re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:wait|actually|correction|mistake|sorry|oops|incorrect|re-?check|let me re)\b", re.IGNORECASE
)

#: A box, also without braces: `\boxed 42`, up to the end of the formula, line or sentence.
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s*\{|\s*(?=[-+.]?\d|\\[A-Za-z])(?P<bare>(?:[^$\n\\.]|\.(?=\d)|\\[^)\]])+))"
)
#: A sign before a box: `$x=-\\boxed{5}$`. After white space at the start of a line it is a bullet.
_SIGN = re.compile(r"(?:[=$]|\\[\[(])\s*(-|\\pm)\s*\Z|^(-)\Z", re.MULTILINE)
#: Text between boxes that form one answer: "\\boxed{1} and \\boxed{2}".
_BETWEEN = re.compile(
    r"(?:[\s,;.$]|\\[,;:! ()\[\]]|\\q?quad|\\text\w*\s*\{\W*(?:and|or)?\W*\}"
    r"|\(?\b(?:and|or|maybe|perhaps|possibly|else)\b|\b[a-z](?:_\w)?\s*=)*"
)
#: Text before and after a box that is an operand: `2\boxed{7}`, `\boxed{7}^2`, `\boxed{7}$ million`.
_OPERATOR = re.compile(
    r"(?:\d|[\d)}]\s*[+*/×÷^]\s*|\\(?:cdot|times|div)\s*"
    r"|\\(?:sqrt|[dtc]?frac)\s*(?:\[\w+\]|\{[^{}]*\})?\s*\{[^{}]*)\Z"
)
_OPERAND_OF = re.compile(
    r"\s*(?:[-+*/×÷^]\s*[({]*\s*-?\d|\\(?:cdot|times|div|pi|sqrt|[dtc]?frac)(?![a-z])(?!\s*\\text)"
    rf"|(?<!\s)[A-Za-z](?![A-Za-z]))|(?:[\s~$]|\\[)\]]|\\text\w*\s*\{{)*(?:{'|'.join(SCALES)})s?\b"
)
_HASH = re.compile(r"####+(?!#)[ \t]*(?:\n\s*)?(?P<line>[^\n]*)")
#: `#### Step 2` and `#### 2. Add them up` are headings.
_HEADING = re.compile(r"\s*(?:\d+[.):]\s+\S|\**[A-Za-z]+[a-z ]*\d*\**\s*:?\**\s*$|[A-Za-z]{2,})")
_TAG = re.compile(r"<answer>(?P<text>.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(rf"[^\W\d_]{{2,}}|{FOREIGN}+")
_JOINT = r"[\"'*_`\s]*"
_IS = re.compile(
    r"(?<!\bif )(?<!\bif the )(?<!whether )(?<!whether the )\banswers?(?:\s+(?:to|for|of)\b[^.\n:]{0,100}?)?"
    + _JOINT
    + r"(?:\bis\b|\bwas\b|\b(?:would|will|should|must) be\b|\bequals\b|=)(?!\s+(?:in|wrong|correct)\b)"
    + _JOINT
    + rf":?|(?:{in_languages('answer')})\s*(?:{in_languages('is')}|[—–-])?[\s:*]*(?=[$\\]*-?\d|[$\\])",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"(?:^|(?<=[\s*#_(\"'{.]))(?:(?:final|correct)\s+)?(?:answer|ans)(?:\s*\([^)\n]*\))?"
    + _JOINT
    + r":"
    + _JOINT
    + rf"|(?:{in_languages('answer')}){_JOINT}:{_JOINT}"
    + r"|^[#*_ ]*(?:the\s+)?(?:final\s+)?answer[*_ ]*\n|^[*_ ]*A[*_ ]*[:.]"
    + _JOINT,
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(
    r"(?<!\bapprox)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bvs)(?<!\be\.g)(?<!\bi\.e)"
    r"(?:[.?]|!(?!\s*(?:\$|\\[)\]])))[\"')*\]$]*\s+(?!\\[\])])(?=\S)|\n+"  # not the factorial in $5!$
)
#: A sentence that is cut off before its number: "20 cups in the final meal, the total number of cups".
_BROKEN_OFF = re.compile(r",\s+[A-Za-z']+\s+[A-Za-z']+\s+[^\d,.!?]*[A-Za-z]\s*$")
_DANGLING = re.compile(r"[-+*/×÷·=^(]\s*$")


#: Formulas in prose: \\( \\), \\[ \\], $$ $$, and $ $ where the dollar signs are not currency.
MATHS = re.compile(
    r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<![\\\d$])\$(?![\s$])([^$\n]*[^\s$\\])\$(?!\d)"
    r"|(?<![\\\d$])\$ ([^$\n]+) \$(?!\d)",
    re.DOTALL,
)


def places(response: str) -> Iterator[Place]:
    """Yields the places that may contain the answer, the most likely first.

    Explicit marks come before prose, and later marks before earlier ones. Text after the answer, such as the
    next exercise of a few-shot prompt, is ignored.
    """
    text = asserted_part(own_part(response))
    found: list[str] = []
    since = denied = 0  # where the sentence of the last denied answer begins, and where that answer ends
    for start, end, answer in sorted([*_boxes(text), *_hashes(text), *_tags(text)], reverse=True):
        before, after = sentence_around(text, start, end)
        if start < since:
            break
        if is_asserted(before, after) and not (text[start] == "\\" and _is_operand(before, after)):
            found.append(answer)
        elif not denied:
            since, denied = start - len(before), end
    text = text[denied:]
    for answer in found:
        if len(answer) <= MAX_LABELLED_CHARS:
            yield Place(answer, True, is_marked=bool(_CONTENT.search(answer)))
        else:
            yield from _conclusion(answer)
    announced = [(m.start(), m.end(), False) for m in _last(_IS, text)]
    announced += [(m.start(), m.end(), True) for m in _last(_LABEL, text)]
    for start, end, is_label in sorted(announced, reverse=True):
        before, after = sentence_around(text, start, end)
        if not is_asserted(before + text[start:end], ""):
            text = text[end + len(after) :]
            break
        yield from _announced(text[end:], is_label)
    if _is_terse(text) and not _DANGLING.search(plain(text)):
        yield Place(text, True)
    yield from _conclusion(text)


def _is_operand(before: str, after: str) -> bool:
    """Whether a box is an operand, by the text before and after it; not within an equation."""
    return "=" not in after and bool(_OPERATOR.search(before) or _OPERAND_OF.match(after))


def sentence_around(text: str, start: int, end: int) -> tuple[str, str]:
    """The text before and after `text[start:end]` in its sentence."""
    before = text[max(0, start - MAX_LABELLED_CHARS) : start]
    return _SENTENCE_END.split(before)[-1], _SENTENCE_END.split(text[end : end + MAX_LABELLED_CHARS])[0]


def own_part(response: str, evidence: re.Pattern[str] = _DIGIT) -> str:
    """Removes thoughts before the response and further exercises after it; applies `legible`.

    A further exercise is removed only if a match of `evidence` precedes it.
    """
    text = legible(without_thoughts(response)[-MAX_RESPONSE_CHARS:].replace("\r\n", "\n"))
    text = re.sub(r"<<[^<>\n]*>>", "", text).strip()
    end = next((m.start() for m in _TURN_END.finditer(text) if m.start() > 0), len(text))
    text = text[:end]
    starts = list(_NEXT_QUESTION.finditer(text))
    if starts and starts[0].start() == 0:  # the response repeats the question, or numbers its steps
        starts = [] if starts[0]["number"] else starts[1:]
    first = _first(evidence, text)
    return text[: next((m.start() for m in starts if m.start() > first), len(text))]


def _last(mark: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(mark.finditer(text))[-MAX_MARKS:]


def _first(pattern: re.Pattern[str], text: str) -> int:
    """Start of the first match, or the text's length."""
    found = pattern.search(text)
    return found.start() if found else len(text)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Starts, ends and contents of boxes; boxes side by side, or joined by "and" or a comma, are one."""
    boxes: list[tuple[int, int, str]] = []
    for match in _last(_BOX, text):
        limit = match.end() + MAX_CHARS
        if match["bare"] is not None:
            content, end = match["bare"].strip(), match.end()
        elif closing := group_end(text, match.end(), limit):
            content, end = text[match.end() : closing], closing + 1
        else:  # without a closing brace
            content = text[match.end() : limit].partition("\n\n")[0]
            end = match.end() + len(content)
            content = content or match[0]  # cut off: no earlier box is the answer
        before = text[max(boxes[-1][1] if boxes else 0, match.start() - MAX_LABELLED_CHARS) : match.start()]
        if sign := _SIGN.search(before):
            content = f"{sign[1] or sign[2]}{content}"
        start = match.start()
        if boxes and "\n\n" not in before and _BETWEEN.fullmatch(before):
            start, _, others = boxes.pop()
            content = others if content in others.split(", ") else f"{others}, {content}"
        boxes.append((start, end, content))
    return boxes


def _hashes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields starts, ends and texts of lines after `####` that are not headings.

    Stops when text without a correction such as "wait" lies between such a line and the next `####`.
    """
    last_end = None
    for match in _HASH.finditer(text):
        line = match["line"].strip()
        if not line or (_HEADING.match(line) and match.end() < len(text.rstrip())):
            continue
        if last_end is not None:
            between = text[last_end : match.start()]
            if between.strip() and not _CORRECTION.search(between):
                return
        last_end = match.end()
        yield match.start(), match.end(), line


def _tags(text: str) -> Iterator[tuple[int, int, str]]:
    for match in _last(_TAG, text):
        yield match.start(), match.end(), match["text"].strip()


def _announced(rest: str, is_label: bool) -> Iterator[Place]:
    start = rest.lstrip()[:MAX_CHARS]
    formula = MATHS.match(start)
    formula_end = formula.end() if formula else 0
    first = (start[:formula_end] + _SENTENCE_END.split(start[formula_end:], maxsplit=1)[0]).strip()
    if not first or _DANGLING.search(plain(first)):
        return
    if not is_label:
        yield Place(first, False, is_announced=True)
    elif _is_terse(first) and "=" not in first and (not first[0].isalpha() or first in start.splitlines()):
        yield Place(first, True, is_announced=True)
    else:  # reasoning that begins with "Answer:"
        yield from _conclusion(rest)


def _is_terse(text: str) -> bool:
    """Whether a text is an answer, perhaps with its unit, rather than a sentence."""
    return (
        len(text) <= MAX_LABELLED_CHARS and "\n" not in text and len(_WORD.findall(plain(text))) <= MAX_WORDS
    )


def _conclusion(text: str) -> Iterator[Place]:
    """Yields the last sentence with a number or formula; nothing if the text is cut off."""
    first_digit = _first(_DIGIT, text)
    cut = next((m.start() for m in _AFTERWORD.finditer(text) if m.start() > first_digit), len(text))
    tail = text[:cut][-MAX_CHARS:]
    if _DANGLING.search(plain(tail)):
        return
    sentences = [sentence for sentence in _SENTENCE_END.split(tail) if sentence.strip()]
    number = _NUMBER if _NUMBER.search(tail) else SPELLED
    for place, sentence in enumerate(reversed(sentences)):
        if number.search(sentence) or MATHS.search(sentence):
            if place > 0 or not _BROKEN_OFF.search(sentence):
                yield Place(sentence, False)
            return
        if place == 0 and len(sentence.split()) > 3 and sentence.rstrip()[-1].isalnum():
            return
