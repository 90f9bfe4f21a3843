"""Finds where a response states its answer; `rlctl.reward.maths` parses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.lazy import lazy_pattern
from rlctl.markup import group_end
from rlctl.reward.assertion import asserted_part, is_asserted
from rlctl.reward.continuations import is_harmless, leaves_mark
from rlctl.reward.languages import Language, in_languages, language_of, may_announce, with_decimal_points
from rlctl.reward.number_words import SPELLED, in_figures
from rlctl.reward.numbers import (
    FOREIGN,
    SCALES,
    calculate,
    legible,
    measure,
    plain,
    replaced,
    replacements,
)
from rlctl.reward.statements import is_announcement
from rlctl.reward.thoughts import without_thoughts

#: Maximum characters read from one place, because patterns backtrack on long texts.
MAX_CHARS = 2000
#: Content of a box or tag that is longer than this is treated as prose.
MAX_LABELLED_CHARS = 200
#: Maximum words of an answer that is not a sentence, as in "18 dollars per day".
MAX_WORDS = 4
#: Maximum number of marks of one kind that are read: the last ones.
MAX_MARKS = 16
#: Characters at the end of a response by which its language is recognised.
MAX_LANGUAGE_CHARS = 500
#: Characters of a response that are read, after its thoughts: the last ones. Some patterns take time that is
#: quadratic in them.
MAX_RESPONSE_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a response that may contain its answer."""

    text: str
    is_whole: bool  # the text is only the answer; False: prose that contains it
    is_marked: bool = False  # in a box, in a tag or after `####`; later places are not tried
    is_announced: bool = False  # after "the answer is"; later places are not tried for texts
    rest: str = ""  # what follows a marked answer, if it announces an answer again


_DIGIT = lazy_pattern(r"\d")
#: A number, which may be π without a digit.
_NUMBER = lazy_pattern(r"\d|\\pi(?![a-z])")
_CONTENT = lazy_pattern(r"\w")
#: Special tokens of chat templates, written as text; the first one ends the response.
_TURN_END = lazy_pattern(
    r"<\|(?:eot_id|im_end|im_start|endoftext|end_of_text|end|eom_id|start_header_id|user|assistant)\|>"
    r"|<\|(?:return|call)\|>|</s>|<eos>|<(?:end|start)_of_turn>|\[/?INST\]"
)
#: A line that starts another exercise, which some models write after their answer.
_NEXT_QUESTION = lazy_pattern(
    r"^[#* \t>\-\[]*(?:Q|(?:Next |New |Another )?(?:Question|Problem|Exercise|Example)|Human|User"
    r"|Instruction)(?P<number>\s*#?\d+)?[\]*\s]*[:.](?!\d)",
    re.MULTILINE | re.IGNORECASE,
)
#: A line that starts text after the answer, such as a check or a remark.
_AFTERWORD = lazy_pattern(
    r"^[#* \t>\-(]*(?:note\b|check\b|verif|double[- ]check|to (?:verify|check)"
    r"|let(?:'|’)?s (?:verify|check|double)|explanation\b|(?:i )?hope (?:this|that)"
    r"|let me know|P\.?S\b|disclaimer)",
    re.MULTILINE | re.IGNORECASE,
)
_CORRECTION = lazy_pattern(
    r"\b(?:wait|actually|correction|mistake|sorry|oops|incorrect|re-?check|let me re)\b", re.IGNORECASE
)

#: A box, also without braces: `\boxed 42`, up to the end of the formula, line or sentence.
_BOX = lazy_pattern(
    r"\\(?:boxed|fbox|framebox)(?:\s*\{|\s*(?=[-+.]?\d|\\[A-Za-z])(?P<bare>(?:[^$\n\\.]|\.(?=\d)|\\[^)\]])+))"
)
#: A sign before a box: `$x=-\\boxed{5}$`. After white space at the start of a line it is a bullet.
_SIGN = lazy_pattern(r"(?:[=$]|\\[\[(])\s*(-|\\pm)\s*\Z|^(-)\Z", re.MULTILINE)
#: Text between boxes that form one answer: "\\boxed{1} and \\boxed{2}".
_BETWEEN = lazy_pattern(
    r"(?:[\s,;.$]|\\[,;:! ()\[\]]|\\q?quad|\\text\w*\s*\{\W*(?:and|or)?\W*\}"
    r"|\(?\b(?:and|or|maybe|perhaps|possibly|else)\b|\b[a-z](?:_\w)?\s*=)*"
)
#: Text before and after a box that is an operand: `2\boxed{7}`, `\boxed{7}^2`, `\boxed{7}$ million`.
_OPERATOR = lazy_pattern(
    r"(?:\d|(?<![A-Za-z\\])[A-Za-z]|\\(?:[lr]?vert|lfloor|lceil)\s*|[_^]\s*\{?|\d\s*\(|(?<=0)\.|[\d)}]\s*[+*/×÷^]\s*|[\d)}][-−]|\$[^$\n]{0,80}[\d)}A-Za-z]\s*[-−]\s*|\\(?:cdot|times|div)\s*"
    r"|\\(?:sqrt|[dtc]?frac)\s*(?:\[\w+\]|\{[^{}]*\})?\s*\{[^{}]*"
    r"|\\(?:log|ln|lg|exp|(?:arc)?(?:sin|cos|tan))(?:_(?:\w|\{\w{1,4}\}))?\s*(?:\\left\s*)?\(?\s*)\Z"
)
_OPERAND_OF = lazy_pattern(
    r"\.?\d|(?:,|\{,\})\d|(?:\\[,!: ]|~)\d{3}(?!\d)|(?:st|nd|rd|th)\b|'+\s*\$"
    r"|(?:[\s$;|&,]|\\[ ,;:!()\[\]]|\\(?:mid|vert|q?quad)(?![a-z])|\b(?:and|or)\b)++-?\d[\d.]*[\s$.)\]]*\Z"
    r"|\{\s*-?\d|!(?=\s*(?:\$|\\[)\]]))|\s*(?:[-+*/×÷^]\s*[({]*\s*-?\d|\\(?:cdot|times|div|pi|sqrt|[dtc]?frac)(?![a-z])(?!\s*\\text)"
    r"|(?:[-+*/×÷^]|\\(?:cdot|times|div))\s*(?:\\f?box(?:ed)?\b|[b-zA-HJ-Z](?![A-Za-z]))"
    r"|(?:[<>≤≥]|\\(?:[lg]eq?|[lg]t)(?![a-z]))\s*[a-zA-Z](?![A-Za-z])|(?:\\pm(?![a-z])|[±:])\s*\d"
    rf"|(?<!\s)[A-Za-z](?![A-Za-z]))|(?:[\s~$]|\\[)\]]|\\text\w*\s*\{{)*(?:{'|'.join(SCALES)})s?\b"
)
_AROUND = replacements("around", re.IGNORECASE)
_HASH = lazy_pattern(r"####+(?!#)[ \t]*(?:\n\s*)?(?P<line>[^\n]*)")
#: `#### Step 2` and `#### 2. Add them up` are headings.
_HEADING = lazy_pattern(r"\s*(?:\d+[.):]\s+\S|\**[A-Za-z]+[a-z ]*\d*\**\s*:?\**\s*$|[A-Za-z]{2,})")
_TAG = lazy_pattern(r"<answer>(?P<text>.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_WORD = lazy_pattern(rf"[^\W\d_]{{2,}}|{FOREIGN}+")
_JOINT = r"[\"'*_`\s]*"
_IS_IN_ENGLISH = (
    r"(?<!\bif )(?<!\bif the )(?<!whether )(?<!whether the )\banswers?(?:\s+(?:to|for|of)\b[^.\n:]{0,100}?)?"
    + _JOINT
    + r"(?:\bis\b|\bwas\b|\b(?:would|will|should|must) be\b|\bequals\b|=)(?!\s+(?:in|wrong|correct)\b)"
    + _JOINT
    + ":?"
)
_IS_ELSEWHERE = rf"(?:{in_languages('answer')})\s*(?:{in_languages('is')}|[—–-])?[\s:*]*(?=[$\\]*-?\d|[$\\])"
_LABEL_IN_ENGLISH = (
    r"(?:^|(?<=[\s*#_(\"'{.]))(?:(?:final|correct)\s+)?(?:answer|ans)(?:\s*\([^)\n]*\))?"
    + _JOINT
    + r":"
    + _JOINT
    + r"|^[#*_ ]*(?:the\s+)?(?:final\s+)?answer[*_ ]*\n|^[*_ ]*A[*_ ]*[:.]"
    + _JOINT
)
_LABEL_ELSEWHERE = rf"(?:{in_languages('answer')}){_JOINT}:{_JOINT}"
_FLAGS = re.IGNORECASE | re.MULTILINE
#: Announcements and labels of the answer, by whether other languages than English are read.
_IS = {
    False: lazy_pattern(_IS_IN_ENGLISH, _FLAGS),
    True: lazy_pattern(f"{_IS_IN_ENGLISH}|{_IS_ELSEWHERE}", _FLAGS),
}
_LABEL = {
    False: lazy_pattern(_LABEL_IN_ENGLISH, _FLAGS),
    True: lazy_pattern(f"{_LABEL_IN_ENGLISH}|{_LABEL_ELSEWHERE}", _FLAGS),
}
_SENTENCE_END = lazy_pattern(
    r"(?<!\bapprox)(?<!\bmin)(?<!\bmax)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bvs)(?<!\be\.g)(?<!\bi\.e)"
    r"(?:[.?]|!(?!\s*(?:\$|\\[)\]])))[\"')*\]$]*\s+(?!\\[\])])(?=\S)|\n+"  # not the factorial in $5!$
)
#: A derivation in lines, which may be broken before a relation.
_DERIVATION = lazy_pattern(
    r"\\begin\s*\{((?:align(?:ed|at)?|gather(?:ed)?|split|eqnarray|multline|equation)\*?)\}"
    r"(?:\[\w\])?(?:\{\d\})?(.*?)"
    r"\\end\s*\{\1\}",
    re.DOTALL,
)
#: Text that Markdown or HTML strikes out.
_STRUCK_OUT = lazy_pattern(
    r"(?<!~)~~(?![~\s])[^~\n]{1,200}+~~(?!~)|<(del|strike|s)>[^<>\n]{1,200}+</\1>", re.IGNORECASE
)
#: A line across the page in Markdown, and the mark of a quotation or, before bold text, of an item; before a
#: number `>` is a bound and `-` a sign.
_RULE = lazy_pattern(r"^[ \t]*(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$", re.MULTILINE)
_QUOTED = lazy_pattern(r"^[ ]{0,3}(?:>[ ](?=[A-Z*#_]|\\boxed\b)|-[ ]+(?=\*\*))", re.MULTILINE)
_LINE_END = lazy_pattern(r"\\\\(?:\[[^\]]*\])?")
_RELATION = lazy_pattern(r"\s*(?:[=<>≤≥≈]|\\(?:approx|[lg]eq?|equiv|sim)(?![a-z]))")
_ARROW = lazy_pattern(
    r"\s*(?:\\(?:implies|Rightarrow|Longrightarrow|iff|Leftrightarrow|therefore)(?![a-z])|=>)\s*"
)
_ASSIGNMENT = lazy_pattern(r"\s*[A-Za-z](?:_\w)?\s*=[^=]*")
_SENTENCE = lazy_pattern(r"(?:[^\n.?!]|[.?!](?!\s))+[.?!]?\s*|[\n.?!]\s*")
#: What other languages write otherwise than English.
_FOREIGN_NUMBER = lazy_pattern(r"\d[., ]\d")
#: A sentence that is cut off before its number: "20 cups in the final meal, the total number of cups".
_BROKEN_OFF = lazy_pattern(r",\s+[A-Za-z']+\s+[A-Za-z']+\s+[^\d,.!?]*[A-Za-z]\s*$")
#: Text after an answer that gives its reason.
_REASON = lazy_pattern(
    r",?\s+(?:(?:because|since)\s|as (?:required|desired|expected|claimed|needed|wanted|stated)\b).*",
    re.DOTALL | re.IGNORECASE,
)
_DANGLING = lazy_pattern(r"[-+*/×÷·=^(]\s*$")


#: Formulas in prose: \\( \\), \\[ \\], $$ $$, and $ $ where the dollar signs are not currency.
MATHS = lazy_pattern(
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
    language = language_of(text[-MAX_LANGUAGE_CHARS:])
    text = in_english_notation(text, language)
    marks = _marked(text)
    if marks.answers and not _is_left(text, marks.end, marks.answers[0]):
        return
    text = text[marks.denied_end :]
    for answer in marks.answers:
        content = replaced(answer, _AROUND)
        if len(content) <= MAX_LABELLED_CHARS:
            yield Place(content, True, is_marked=bool(_CONTENT.search(content)), rest=marks.rest)
        else:
            yield from _conclusion(content, language)
    is_foreign = may_announce(text)
    announced = [(m.start(), m.end(), False) for m in _last(_IS[is_foreign], text)]
    announced += [(m.start(), m.end(), True) for m in _last(_LABEL[is_foreign], text)]
    for start, end, is_label in sorted(announced, reverse=True):
        before, after = sentence_around(text, start, end)
        if not is_asserted(before + text[start:end], "") or not is_announcement(before + text[start:end]):
            text = text[end + len(after) :]
            break
        later = text[end + len(after) :][:MAX_CHARS]
        is_whole = not later.lstrip().startswith("=")  # not "5! = 120"
        if is_whole and _is_answer(after, is_label=is_label) and not is_harmless(later, after):
            return
        if language_of(before + text[start:end] + after, language).is_known:
            yield from _announced(text[end:], is_label, language)
    if _is_terse(text) and not _DANGLING.search(plain(text)) and language_of(text).is_known:
        yield Place(text, True)
    yield from _conclusion(text, language)


def _is_left(text: str, end: int, content: str) -> bool:
    """Whether the text after a mark that ends at `end` leaves its answer as it is."""
    _, sentence = sentence_around(text, end, end)
    return leaves_mark(sentence, text[end + len(sentence) :], content)


def _is_answer(announced: str, *, is_label: bool) -> bool:
    """Whether a sentence after an announcement is the answer, not reasoning or the letter of an option."""
    is_brief = len(announced.split()) <= MAX_WORDS
    if is_label:
        return is_brief and _DIGIT.search(announced) is not None
    return _DIGIT.search(announced) is not None or (is_brief and _WORD.search(announced) is not None)


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marked answers of a text."""

    answers: list[str]  # the last first; none before a denied one
    end: int = 0  # of the last of them
    rest: str = ""  # what follows it, if that announces an answer again
    denied_end: int = 0  # of the last denied answer


def _marked(text: str) -> _Marks:
    """What boxes, tags and lines after `####` state."""
    answers: list[str] = []
    last_end = since = denied = 0  # `since`: where the sentence of the last denied answer begins
    for start, end, answer in sorted([*_boxes(text), *_hashes(text), *_tags(text)], reverse=True):
        before, after = sentence_around(text, start, end)
        if start < since:
            break
        is_part = text[start] == "\\" and (_is_operand(before, after) or _is_unequal(before, answer, after))
        if is_asserted(before, after) and not is_part:
            last_end = last_end or end
            answers.append(answer)
        elif not denied:
            since = start - len(before)
            denied = end
    is_repeated = bool(answers) and _IS[True].search(text, last_end) is not None
    return _Marks(answers, last_end, text[last_end:] if is_repeated else "", denied)


def in_english_notation(text: str, language: Language) -> str:
    """A text whose numbers are written as in English: with decimal points, and with figures instead of words.

    Args:
        language: of the text; its sentences may be in others.
    """
    if language.name == "english" and (text.isascii() or not _FOREIGN_NUMBER.search(text)):
        return text
    return "".join(_sentence_in_english(sentence, language) for sentence in _SENTENCE.findall(text))


def _sentence_in_english(sentence: str, language: Language) -> str:
    own = language_of(sentence, language)
    if own.name != "english" and not _DIGIT.search(sentence):
        return in_figures(sentence, own.name)
    return with_decimal_points(sentence) if own.has_decimal_comma else sentence


def _is_operand(before: str, after: str) -> bool:
    """Whether a box is an operand, by the text before and after it; not a blank: 3 + □ = 7."""
    is_absolute = _BAR_BEFORE.search(before) and _BAR_AFTER.match(after)
    return bool(is_absolute or _OPERAND_OF.match(after) or ("=" not in after and _OPERATOR.search(before)))


#: Bars of an absolute value around a box.
_BAR_BEFORE, _BAR_AFTER = (
    lazy_pattern(r"(?:^|[^|])(?:\\left\s*)?\|\s*\Z"),
    lazy_pattern(r"\s*(?:\\right\s*)?\|(?!\|)"),
)
#: A side of an equation before and after a box.
_LEFT_SIDE = lazy_pattern(r"([^=$\n:;,]{1,80})=\s*\Z")
_RIGHT_SIDE = lazy_pattern(r"\s*=\s*([^=$\n:;,]{1,80})")


def _is_unequal(before: str, answer: str, after: str) -> bool:
    r"""Whether a box is a side of an equation whose other side has another value: $46 = \boxed{64}$."""
    value = measure(plain(answer))
    sides = [_LEFT_SIDE.search(before), _RIGHT_SIDE.match(after)]
    others = [calculate(plain(side[1]).strip(" .")) for side in sides if side]
    is_term = _OPERATOR.search(before) is not None  # a blank: 3 + □ = 10
    return (
        value is not None
        and not is_term
        and any(other is not None and not value.rounds(other) for other in others)
    )


def sentence_around(text: str, start: int, end: int) -> tuple[str, str]:
    """The text before and after `text[start:end]` in its sentence."""
    before = text[max(0, start - MAX_LABELLED_CHARS) : start]
    return _SENTENCE_END.split(before)[-1], _SENTENCE_END.split(text[end : end + MAX_LABELLED_CHARS])[0]


def own_part(response: str, evidence: re.Pattern[str] = _DIGIT) -> str:
    """Removes thoughts before the response and further exercises after it; applies `legible`.

    A further exercise is removed only if a match of `evidence` precedes it.
    """
    text = legible(without_thoughts(response)[-MAX_RESPONSE_CHARS:].replace("\r\n", "\n"))
    text = _STRUCK_OUT.sub("", re.sub(r"<<[^<>\n]*>>", "", text))
    text = _QUOTED.sub("", _RULE.sub("", text)).strip()
    if "\\begin" in text:
        text = _DERIVATION.sub(_last_line, text)
    end = next((m.start() for m in _TURN_END.finditer(text) if m.start() > 0), len(text))
    text = text[:end]
    starts = list(_NEXT_QUESTION.finditer(text))
    if starts and starts[0].start() == 0:  # the response repeats the question, or numbers its steps
        starts = [] if starts[0]["number"] else starts[1:]
    first = _first(evidence, text)
    return text[: next((m.start() for m in starts if m.start() > first), len(text))]


def _last_line(derivation: re.Match[str]) -> str:
    """The last line of a derivation, with its beginning; all lines of a system of equations."""
    lines: list[str] = []
    for line in filter(str.strip, _LINE_END.split(derivation[2].replace("&", ""))):
        shown = _ARROW.sub("", line, count=1).strip() if _ARROW.match(line) else line.strip()
        if lines and _RELATION.match(shown):
            lines[-1] = f"{lines[-1]} {shown}"
        else:
            lines.append(shown)
    assigned = {line.partition("=")[0].strip() for line in lines if _ASSIGNMENT.fullmatch(line)}
    is_system = len(assigned) == len(lines) > 1
    if is_system or (len(lines) > 1 and "boxed" in derivation[2]):
        return r"\begin{aligned}" + r" \\ ".join(lines) + r"\end{aligned}"
    return lines[-1] if lines else ""


def _last(mark: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(mark.finditer(text))[-MAX_MARKS:]


def _first(pattern: re.Pattern[str], text: str) -> int:
    """Start of the first match, or the text's length."""
    match = pattern.search(text)
    return match.start() if match else len(text)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Starts, ends and contents of boxes; boxes side by side, or joined by "and" or a comma, are one."""
    boxes: list[tuple[int, int, str]] = []
    for match in _last(_BOX, text):
        limit = match.end() + MAX_CHARS
        if match["bare"] is not None:
            content = match["bare"].strip()
            end = match.end()
        elif closing := group_end(text, match.end(), limit):
            content = text[match.end() : closing]
            end = closing + 1
        else:  # without a closing brace
            content = text[match.end() : limit].partition("\n\n")[0]
            end = match.end() + len(content)
            content = content or match[0]  # cut off: no earlier box is the answer
        before = text[max(boxes[-1][1] if boxes else 0, match.start() - MAX_LABELLED_CHARS) : match.start()]
        sign = _SIGN.search(before)
        if sign:
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


def _announced(rest: str, is_label: bool, language: Language) -> Iterator[Place]:
    start = rest.lstrip()[:MAX_CHARS]
    formula = MATHS.match(start)
    formula_end = formula.end() if formula else 0
    first = (start[:formula_end] + _SENTENCE_END.split(start[formula_end:], maxsplit=1)[0]).strip()
    brief = _REASON.sub("", first)
    has_reason = brief != first and _is_terse(brief) and bool(_CONTENT.search(brief))
    first = brief if has_reason else first
    if not first or _DANGLING.search(plain(first)):
        return
    if not is_label:
        yield Place(first, False, is_announced=True)
    elif (
        _is_terse(first)
        and "=" not in first
        and (has_reason or not first[0].isalpha() or first in start.splitlines())
    ):
        yield Place(first if formula_end else first.rstrip("!"), True, is_announced=True)
    else:  # reasoning that begins with "Answer:"
        yield from _conclusion(rest, language)


def _is_terse(text: str) -> bool:
    """Whether a text is an answer, perhaps with its unit, rather than a sentence."""
    return (
        len(text) <= MAX_LABELLED_CHARS and "\n" not in text and len(_WORD.findall(plain(text))) <= MAX_WORDS
    )


def _conclusion(text: str, language: Language) -> Iterator[Place]:
    """Yields the last sentence with a number or formula.

    Nothing if the text is cut off, or the sentence is in a language whose denials are not known.
    """
    first_digit = _first(_DIGIT, text)
    cut = next((m.start() for m in _AFTERWORD.finditer(text) if m.start() > first_digit), len(text))
    tail = text[:cut][-MAX_CHARS:]
    if _DANGLING.search(plain(tail)):
        return
    sentences = [sentence for sentence in _SENTENCE_END.split(tail) if sentence.strip()]
    number = _NUMBER if _NUMBER.search(tail) else SPELLED
    for index, sentence in enumerate(reversed(sentences)):
        if number.search(sentence) or MATHS.search(sentence):
            is_whole = index > 0 or not _BROKEN_OFF.search(sentence)
            later = "\n".join(sentences[len(sentences) - index :])
            if is_whole and is_harmless(later, sentence) and language_of(sentence, language).is_known:
                yield Place(sentence, False)
            return
        if index == 0 and len(sentence.split()) > 3 and sentence.rstrip()[-1].isalnum():
            return
