"""Reads which option of a multiple choice a response chooses.

A response chooses an option if it states one letter from A to J. Marked answers (a box, a tag, a line after
`####`) come first, then announcements ("the answer is B"), then statements about an option ("B is correct"),
then a line or a text that is only an option. Each is read as a whole: an option beside another one is a
hedge, and so is an alternative that is offered later. A hedge chooses nothing, and nothing else is read then.

Every pattern takes time linear in the text: its quantifiers are possessive or bounded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from rlctl.lazy import lazy_pattern
from rlctl.markup import group_end
from rlctl.reward.answer import own_part, sentence_around
from rlctl.reward.assertion import asserted_part, is_asserted
from rlctl.reward.continuations import withdraws
from rlctl.reward.languages import in_languages

#: Maximum characters of an announced option with its text, and number of marks that are read: the last ones.
MAX_CHARS, MAX_MARKS = 400, 32
#: Characters between two contradicting answers, with a paragraph's end, after which the later one counts.
RECONSIDERED_AFTER = 200


def _any(phrases: str) -> str:
    """A pattern of any of the phrases, which commas separate, in upper or lower case."""
    return f"(?i:{'|'.join(phrase.strip() for phrase in phrases.split(','))})"


_CAPITAL = lazy_pattern(r"(?<![A-Za-z])[A-J](?![A-Za-z])")
#: LaTeX and Markdown around a letter; what remains is read as plain text.
_FORMATTING = lazy_pattern(
    r"\\(?:text\w*|math\w+|boxed|fbox|bf|rm|it|left|right|displaystyle|large|Large)(?![A-Za-z])"
    r"|\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])|[{}$`*_\"“”«»]|(?<![A-Za-z])['‘’]|['‘’](?![A-Za-z])"
    r"|</?[A-Za-z]\w{0,20}>"
)
_BLANKS = r"\s{1,4}+"
_OPENING = r"[\s(\[]{0,8}+"
_CLOSING = r"[\s)\]]{0,8}+"
#: Words after "A" that show that it is an option, not an article.
_AFTER_A = _any(
    "is, was, are, appears, matches, satisfies, corresponds"
    ", or, and, not, but, because, since, as, also, too, rather, instead, could, may, might"
    ", would, seems, looks, must, fails, it, which, for, with, by, given, while, whereas, though, unless"
    ", otherwise, works, fits, holds"
    ", oder, ou, o"
)
#: A letter that stands alone, neither a pronoun nor an article ("I think", "A cat").
_LETTER = (
    r"(?<![A-Za-z0-9À-ɏ'’\\])(?!I['’ \t]++[a-z])"
    rf"(?:(?<=[a-z][ (])|(?!A[ \t]++(?!{_AFTER_A}\b)[a-z]))"
    r"[A-J](?![A-Za-z0-9À-ɏ]|['’](?!(?:[dt][iıuü]r)\b)[A-Za-z]"
    r"|[ \t]*+[=^_+/*](?![ \t]*+\(?[A-J](?![A-Za-z])))"
)
_NOUN = _any(
    "option, choice, letter, answer, candidate, opción, letra, alternativa, opção, lettre, opzione, lettera"
    ", Buchstabe, вариант, буква"
)
_ARTICLE = r"(?:the|my|la|die|o|a(?=\s(?:letra|opção|alternativa)\b))"
#: The option that begins a text: `B`, `(B)`, `option B`, `b)`, or `b` alone or before a point.
_FIRST = lazy_pattern(
    rf"(?:[\s:=>→⇒∴–—(\[-]|\\Rightarrow|\\therefore){{0,12}}+(?:{_ARTICLE}\s{{1,4}}+)?"
    rf"(?:{_NOUN}s?\s{{0,4}}+(?i:is\b)?[\s:(]{{0,8}}+)?"
    rf"(?:(?P<capital>{_LETTER})"
    rf"|(?P<small>[a-j])(?=\)|\.(?:\s|\Z)|{_CLOSING}\Z|[ \t]*+\n)){_CLOSING}"
)
#: What follows a letter and precedes the option's text.
_LABEL_END = lazy_pattern(r"\s{0,4}+(?:(?:[.):\]–—]|-(?=\s)){1,3}+\s*+(?=\S)|,(?=\s\w)|\((?=\w))")
#: The text of an option that names other options.
_ABOUT_OPTIONS = lazy_pattern(
    _any("both, neither, all, none, only, either, each, options, statements") + r"\b"
)
_REASONS = _any(
    r"because, since, (?<!well )as(?! well as), given, due to, not, rather than, instead of, unlike, while"
    ", whereas"
)
#: Why an option is right, or which is not, directly after its letter.
_REASON = lazy_pattern(rf"\s{{0,4}}+[,;–—-]?\s{{0,4}}+{_REASONS}\b")
#: After this, a sentence explains its answer or denies others.
_EXPLAINS = lazy_pattern(
    rf"\b{_REASONS}\b"
    rf"|\b{_any('(?<!in )which, where, so, over, is wrong, although, though, despite, if, when')}\b"
    rf"|\b{_any('from, among, of(?! [A-J](?![A-Za-z]))')}(?![A-Za-z])"
    r"|[,;–—-] ?(?=[A-J]\b[^.;,]{0,40}\b(?:is|are|was|were|can(?:no|')t|does|do|fails?|violates?|contradicts?"
    r"|gives?|has|would|could|will)\b)|\band (?=[A-J]\b (?:is|can|does|fails?|has|would|will)\b)"
)
_CONJUNCTION = _any(
    "or, and, also, possibly, maybe, perhaps, probably, alternatively, either, both, else, even, then, plus"
    ", kidding, as well as, along with, together with, options?, choices?"
    ", in which case, unless, oder, und, ou, et, o, y, e, или, и, або, та, atau, dan, hoặc, và, veya, ve"
    ", lub, albo, oraz, of, en, eller, och, og, nebo, sau, și, vagy, tai, au, ή, και, i"
)
#: The same in scripts without spaces between words or with marks after letters, and signs.
_JOINING = (
    r"(?:[/|&+,;…\\~<>≻≈=→或和と、وأو]|または|もしくは|(?:이나|과|와)(?=\s)|또는|혹은|या|और|अथवा|অথবা|หรือ|และ|یا|או"
    r"|\.\.\.)"
)
#: Another option in the text of an answer: joined to it, next to it, or with a label as in a list.
_OTHER = lazy_pattern(
    rf"(?:\b{_CONJUNCTION}\b|{_JOINING})[\s,(\[:]{{0,8}}+"
    rf"(?:{_any('option, choice, answer, letter, the, is, its, it, it.s, was, even')}{_BLANKS}){{0,4}}+"
    rf"{_OPENING}(?P<joined>{_LETTER})"
    rf"|\A[\s()\[\].,;:–—-]{{0,12}}+(?P<next>{_LETTER})(?=\s*+(?:[).,;:/&|\]]|\Z|{_LETTER}))"
    rf"|(?:(?<=\s)|(?<=\()|(?<=[.;,]))(?P<label>{_LETTER})[).:]"
    rf"|(?:\b{_CONJUNCTION}\b|[/|&+,;]|\A)[\s,]{{0,4}}+\((?P<bracketed>[a-j])\)"
)
#: What joins options, though before a value it denies it.
_JOINS = lazy_pattern(r"\bunless\b(?! not)|[<>=≈→≻]+", re.IGNORECASE)
_OFFER = _any(
    "but, and, or, also, maybe, perhaps, possibly, alternatively, else, otherwise, either, just kidding, even"
    ", too, then"
)
#: A later offer of an option: "Or B.", "maybe also B", "it could be B".
_OFFERED = lazy_pattern(
    rf"(?:(?:\A|(?<=[.!?;:…,(\n)–—-])|(?<=\bbut)|(?<=\band))\s{{0,8}}+(?:{_OFFER}[\s,.]{{1,4}}+){{1,4}}+"
    rf"|\b{_any('could, might, may')}"
    rf"(?:{_BLANKS}{_any('also, equally, just as well, as well, well, even')}){{0,2}}+{_BLANKS}be{_BLANKS}"
    rf"|(?<![A-J][ ,])\b{_any('or, also')}{_BLANKS})"
    rf"(?:{_any('it, the, answer, option, choice, is, could, may, might, be, possibly, maybe, even, also')}"
    rf"{_BLANKS}){{0,5}}+{_OPENING}(?P<letter>{_LETTER}){_CLOSING}"
    rf"(?=[.,;:!?)\n–—-]|\Z|{_any('is, too, as well, also, could, might, may, would, works?, instead')}\b)"
)
_ADVERB = _any(
    "also, equally, too, just as, as well, probably, possibly, likely, definitely, clearly, indeed, certainly"
    ", both, the, a, an, my, our"
)
_RIGHT = _any(
    "correct, right, best, answer, final answer, acceptable, plausible, valid, true, possible, fine"
)
#: An option that is called right; not "B is true, but …".
_CALLED_RIGHT = lazy_pattern(
    rf"(?P<letter>{_LETTER}){_CLOSING}"
    rf"(?:{_any('is, was, are, seems, looks')}"
    r"|(?i:must|could|may|might|would|has to|appears to)(?: also| equally| well)? be)"
    rf"(?:{_BLANKS}{_ADVERB}\b){{0,4}}+{_BLANKS}{_RIGHT}\b"
    rf"(?!,?\s{{0,4}}+{_any('but, however, yet, though, although, only, for, if, of, that, in, about')}\b)"
    rf"|(?P<works>{_LETTER}){_CLOSING}(?:{_any('works, fits, holds, qualifies, is')}"
    rf"{_BLANKS}(?i:too|as well|also)|(?i:otherwise))\b"
    rf"|\b(?i:so (?:is|does)){_BLANKS}(?P<likewise>{_LETTER}){_CLOSING}(?=[.,;!?\n]|\Z)"
    rf"|(?P<worked>{_LETTER}){_CLOSING}{_any('works, holds, fits, it is')}(?=[.!\n]|\Z)"
    rf"|\b(?i:only){_BLANKS}(?P<sole>{_LETTER}){_CLOSING}"
    rf"{_any('works, fits, holds, is, satisfies, can, remains')}\b"
    rf"|(?P<fits>{_LETTER}){_CLOSING}"
    rf"(?:{_any('fits, works, matches')}{_BLANKS}{_any('best, perfectly')}"
    rf"|{_any('is the only, is the one')}\b"
    r"(?! (?i:wrong|incorrect|false|bad|one (?:wrong|that is (?:not|wrong)))))\b"
    rf"|\b{_any('it is, it.s')}{_BLANKS}(?P<cleft>{_LETTER}){_BLANKS}(?i:that)\b"
    rf"|(?:^|(?<=[.;!?\n]))[\s(\[]{{0,8}}+(?P<judged>{_LETTER})[\s).:\]–—-]{{1,6}}+"
    r"(?i:yes|correct|true|right|✓|✔|✅)(?![A-Za-z])",
    re.MULTILINE,
)
_IS_WORDS = _any("is, was, (?:will|would|should|must|has to|have to|seems to|appears to) be, remains, equals")
_IS = rf"(?:['’]s\b|[\s\"']{{0,8}}+(?:{_IS_WORDS}\b[ \t]*+[:=]?|[:=→–—]|-(?=\s)))"
_SURE = _any(
    "indeed, therefore, thus, hence, clearly, likely, most likely, probably, definitely, obviously, simply"
    ", just, actually, then, certainly"
)
_ANSWER = _any(
    "answers?, ans, final, antwort, choices?, options?, letter, solution, selection, correct(?: one)?"
    ", right one, best one, pick, guess"
)
#: An announced answer; the option follows. A noun alone must be followed by the option itself.
_ANNOUNCED = lazy_pattern(
    r"(?<!wrong )(?<!incorrect )(?<!false )(?<!worst )(?<!bad )(?<!second )(?<!third )"
    rf"\b{_ANSWER}\b{_IS}(?:\s{{0,4}}+{_SURE}\b,?){{0,3}}+"
    rf"|\b(?i:answers?\b|ans\.)(?={_BLANKS}(?:{_NOUN}{_BLANKS})?{_OPENING}{_LETTER})"
    rf"|(?i:{in_languages('answer')})(?:\s{{0,4}}+(?:{in_languages('is')})|[\s:：]){{1,4}}+"
    r"|(?<![不别勿])[选選](?![项項])[择擇]?[\s:：]{0,8}+"
    r"|(?:选项|選項)[是为為][\s:：]{0,8}+|(?:[Cc]họn|ตอบ)[\s:：]{1,8}+"
)
_CHOOSE = _any(
    "choose, chose, choosing, select, selecting, pick, picking"
    ", go(?:ing)? (?:with|for), went (?:with|for), opt for, settle on, vote for"
    ", must be, has to be, left with, leaves, leaving"
)
_SO = _any(
    "so, thus, hence, therefore, it's, it is, that's, that is, this is, i[.]e[.], think, believe, guess, say"
)
#: An option that is chosen, or concluded.
_CHOSEN = lazy_pattern(
    rf"(?<!not )(?<!n't )\b{_CHOOSE}\b(?={_BLANKS}(?:(?:{_NOUN}|the){_BLANKS})?{_OPENING}{_LETTER})"
    rf"|\b{_SO},?(?={_BLANKS}{_OPENING}(?:[a-j](?=\.?\s*\Z)|"
    rf"{_LETTER}{_CLOSING}(?:[.,;!?\n]|\Z|(?i:or|and)\b|{_REASONS}\b)))"
)
#: Words that add an option to others.
_ADDED = lazy_pattern(r"\b(?i:also|equally|too|as well|so (?:is|does))\b")
#: "Not B but A", "isn't B, it's A".
_NOT_BUT = lazy_pattern(
    rf"(?i:\bnot|n't){_BLANKS}{_OPENING}(?:{_NOUN}{_BLANKS})?{_LETTER}{_CLOSING}[,;.–—-]?\s{{0,4}}+"
    rf"{_any('but, rather, it.s, it is, instead')}(?:{_BLANKS}{_any('rather, it.s, it is, instead')})?"
    rf"(?={_BLANKS}{_OPENING}(?:{_NOUN}{_BLANKS})?{_LETTER})"
)
#: "both A and B", "either A or B".
_SEVERAL = lazy_pattern(rf"\W{{0,8}}+{_any('both, either, between')}\W{{1,8}}+{_LETTER}")
#: An option and a conjunction, before another one: "A and" of "A and B are correct".
_BESIDE = lazy_pattern(rf"({_LETTER})[)\]]?\s{{0,4}}+(?:and|or|nor|,|&|/|\+)\s{{0,4}}+[(\[]?\Z")
#: An option with a comma that begins a text.
_BEGUN = lazy_pattern(rf"\W{{0,8}}+({_LETTER})\)?\s{{0,4}}+[,;]")
#: Words by which such a sentence denies its options: "A, B, and D are incorrect."
_DENIES = lazy_pattern(
    r"n['’]t\b|\b(?i:wrong|incorrect|false|invalid|impossible|not|out|eliminated|excluded|fail|fails)\b"
)
#: Text before an option that is only supposed to be right.
_SUPPOSED = lazy_pattern(r"\b(?i:assum\w+|suppos\w+|if|whether|imagine|pretend|unless|let)\b[^,;]{0,40}\Z")
_MENTIONED = lazy_pattern(rf"\b(?i:choice|option)(?={_BLANKS}{_OPENING}{_LETTER})")
_BRACKETED = lazy_pattern(rf"\((?={_LETTER}\))")
_CORRECTION = lazy_pattern(
    r"\b"
    + _any(
        "wait, actually, no, nope, but, however, instead, correction, mistake, mistaken, sorry, oops"
        r", second thought, reconsider\w*, re-?check\w*, let me, wrong, incorrect, final, finally, kidding"
        r", conclu\w+, overall, in the end"
    )
    + r"\b"
)
#: A line that begins with an option's label, as in a list of the options.
_LISTED = lazy_pattern(rf"^[ \t(\[]{{0,4}}+(?:({_LETTER})|([a-j])(?=[).]))[ \t]*+[).:\]]", re.MULTILINE)
_TAG = lazy_pattern(r"<answer>", re.IGNORECASE)
_TAG_END = lazy_pattern(r"</answer>", re.IGNORECASE)
_BOX = lazy_pattern(
    r"\\(?:boxed|fbox)\s{0,8}+(?:\{|(?P<bare>[A-Ja-j](?![A-Za-z])|\\\w{1,10}\{[^{}]{0,40}\}))"
)
_HASHES = lazy_pattern(r"(?<!#)####++[ \t]*+\n?(?P<line>[^\n]{1,200})")
#: Text between two marks that makes them one answer.
_BETWEEN_MARKS = lazy_pattern(
    r"(?:[\s,;.:/|&+$()\[\]\\!{}-]"
    rf"|\b{_any('or, and, also, maybe, perhaps, possibly, alternatively, either, else, both')}\b"
    rf"|\b{_any('text, quad')}\b){{0,80}}+"
)
_SENTENCE_END = lazy_pattern(r"[.!?]['\")\]]?\s+(?=\S)|\n\s*\n")
#: The value of an option, between its letter and what is said about it.
_VALUE = lazy_pattern(r"\A\W{0,20}+\d[\d.,/]*+")
_VALUE_IN_BRACKETS = lazy_pattern(r"\A[\s)\]]{0,8}+\([^()]{1,40}\)")


@dataclass(frozen=True, slots=True)
class _Statement:
    """What a part of a response says about the chosen option."""

    start: int  # of the words that announce it
    end: int  # of the letter
    letter: str | None  # None: several options


def chosen_option(response: str) -> str | None:
    """The letter of the option that a response chooses; None when it names none, or several."""
    text = asserted_part(own_part(response, evidence=_CAPITAL))
    statements = _marked_answers(text)
    if not statements:
        text = _without_formatting(text)
        statements = _announcements(text) or _statements_of_right(text)
    if not statements:
        return _by_position(text)
    chosen = _agreed(text, statements)
    if chosen is None or _is_contradicted(text[chosen.end :], chosen.letter):
        return None
    if withdraws(text[chosen.end :]):
        return None
    begun = _BEGUN.match(text)  # "A, but B is also correct"
    is_hedge = begun and begun[1] != chosen.letter and not _DENIES.search(_SENTENCE_END.split(text, 1)[0])
    return None if is_hedge else chosen.letter


def _without_formatting(text: str) -> str:
    return _FORMATTING.sub(" ", text)


def _marked_answers(text: str) -> list[_Statement]:
    """What boxes, tags and lines after `####` state and is not denied; those side by side are one answer."""
    answers: list[_Statement] = []
    for start, end, content in sorted(_marks(text)):
        before, after = sentence_around(text, start, end)
        if (answers and start < answers[-1].end) or not is_asserted(before, after):
            continue  # a box within a tag; a denied answer
        letters = _letters_of_mark(content)
        if not letters:
            continue
        if answers and _BETWEEN_MARKS.fullmatch(text, answers[-1].end, start):
            letters.add(answers.pop().letter)
        answers.append(_Statement(start, end, letters.pop() if len(letters) == 1 else None))
    return answers


def _marks(text: str) -> Iterator[tuple[int, int, str]]:
    """Starts, ends and contents of boxes, tags, and lines after `####`."""
    tag_ends = [match.start() for match in _TAG_END.finditer(text)]
    for tag in _last(_TAG, text):
        closing = bisect_left(tag_ends, tag.end())
        end = tag_ends[closing] if closing < len(tag_ends) else len(text)
        yield tag.start(), min(len(text), end + len("</answer>")), text[tag.end() : end]
    for box in _last(_BOX, text):
        if box["bare"]:
            yield box.start(), box.end(), box["bare"]
        else:
            limit = min(len(text), box.end() + MAX_CHARS)
            end = group_end(text, box.end(), limit) or limit
            yield box.start(), min(len(text), end + 1), text[box.end() : end]
    for line in _last(_HASHES, text):
        yield line.start(), line.end(), line["line"]


def _last(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(pattern.finditer(text))[-MAX_MARKS:]


def _letters_of_mark(content: str) -> set[str | None]:
    """The option that the content of a mark states; None for several; no element if it is about no option."""
    content = _without_formatting(content).strip()
    if _is_option(content):
        return {_option_in(content)}
    statements = _announcements(content) or _statements_of_right(content)
    if not statements:
        return set()
    chosen = _agreed(content, statements)
    is_single = chosen is not None and not _is_contradicted(content[chosen.end :], chosen.letter)
    return {chosen.letter if chosen is not None and is_single else None}


def _is_option(phrase: str) -> bool:
    """Whether a phrase is an option: its letter alone, with others, or with a label's end and its text."""
    first = _FIRST.match(phrase)
    if first is None or len(phrase) > MAX_CHARS:
        return False
    rest = phrase[first.end() :]
    is_alone = not rest.strip(" .!") or _REASON.match(rest) is not None
    return is_alone or _has_label(first, phrase) or _names_others(first, phrase)


def _has_label(first: re.Match[str], phrase: str) -> bool:
    return first[0].rstrip().endswith((")", "]")) or _LABEL_END.match(phrase, first.end()) is not None


def _option_in(phrase: str) -> str | None:
    """The option that a phrase begins with; None if it begins with none, or names others too."""
    first = _FIRST.match(phrase)
    return None if first is None or _names_others(first, phrase) else _letter_of(first)


def _letter_of(first: re.Match[str]) -> str:
    return str(first["capital"] or first["small"]).upper()


def _names_others(first: re.Match[str], phrase: str) -> bool:
    """Whether the text after an option, up to its explanation, names another option."""
    letter = _letter_of(first)
    rest = phrase[first.end() :]
    if _has_label(first, phrase):
        option_text = rest.lstrip(" .):]-–—")
        if _ABOUT_OPTIONS.match(option_text):  # "D. Both A and B"
            return letter in _CAPITAL.findall(option_text)
    explanation = _EXPLAINS.search(rest)
    answer = rest[: explanation.start()] if explanation else rest
    for other in _OTHER.finditer(answer):
        start, end = other.span(other.lastgroup or 0)
        before = _JOINS.sub("", answer[:start])
        if answer[start:end].upper() != letter and is_asserted(before, rest[end:]):
            return True
    return False


def _statement_after(text: str, start: int, end: int) -> _Statement | None:
    """What the announcement at `text[start:end]` states; None if no option follows it, or a denied one."""
    several = _SEVERAL.match(text, end)
    if several:
        return _Statement(start, several.end(), None)
    first = _FIRST.match(text, end, end + MAX_CHARS)
    if first is None:
        return None
    at = first.start(first.lastgroup or 0)
    if text[at] == "a" and text[at + 1 : at + 2] not in {")", "."}:  # an article
        return None
    before, after = sentence_around(text, at, at + 1)
    if _CAPITAL.search(_EXPLAINS.split(after, maxsplit=1)[0]) is None:
        after = _VALUE_IN_BRACKETS.sub("", after)
    if not (is_asserted(before, after) and is_asserted("", _VALUE.sub("", after))):
        return None
    label = _LABEL_END.match(text, first.end())
    sentence_end = _SENTENCE_END.search(text, label.end() if label else first.end(), end + MAX_CHARS)
    phrase_end = sentence_end.start() + 1 if sentence_end else end + MAX_CHARS
    return _Statement(start, at + 1, _option_in(text[at:phrase_end]))


def _announcements(text: str) -> list[_Statement]:
    return _statements(text, [*_last(_NOT_BUT, text), *_last(_ANNOUNCED, text)])


def _statements_of_right(text: str) -> list[_Statement]:
    """Options that are chosen, concluded, or called right, in order."""
    found = _statements(text, _last(_CHOSEN, text))
    for match in _last(_CALLED_RIGHT, text):
        start, end = match.span(match.lastgroup or 0)
        before, after = sentence_around(text, start, end)
        if is_asserted(before, after) and not _SUPPOSED.search(before):
            beside = _BESIDE.search(before)
            is_one_of_several = (beside and beside[1] != text[start:end]) or _ADDED.search(match[0])
            letter = None if is_one_of_several else text[start:end]
            found.append(_Statement(match.start(), match.end(), letter))
    return sorted(found, key=lambda statement: statement.end)


def _statements(text: str, announcements: list[re.Match[str]]) -> list[_Statement]:
    spans = sorted({match.span() for match in announcements})
    statements = (_statement_after(text, *span) for span in spans)
    return [statement for statement in statements if statement is not None]


def _agreed(text: str, statements: list[_Statement]) -> _Statement | None:
    """The last statement, if the earlier ones agree with it or are corrected before it; else None."""
    *earlier, last = statements
    for one in earlier:
        between = text[one.end : last.end]
        is_reconsidered = len(between) > RECONSIDERED_AFTER and "\n" in between
        if one.letter != last.letter and not is_reconsidered and not _CORRECTION.search(between):
            return None
    return None if last.letter is None else last


def _is_contradicted(rest: str, letter: str | None) -> bool:
    """Whether the text after an answer offers another option, or states another answer."""
    rest = _without_formatting(rest)
    for match in (*_last(_OFFERED, rest), *_last(_CALLED_RIGHT, rest)):
        start, end = match.span(match.lastgroup or 0)
        if rest[start:end] != letter and is_asserted(*sentence_around(rest, start, end)):
            return True
    return any(statement.letter != letter for statement in _announcements(rest))


def _by_position(text: str) -> str | None:
    """The option that the first or last line consists of, else the only one that is mentioned as such."""
    lines = [line.strip() for line in _without_list(text).splitlines() if line.strip()]
    for line in (*lines[:1], *lines[-1:]):
        if not _is_option(line):
            continue
        letter = _option_in(line)
        others = [other for other in lines if other is not line]
        letters = {letter, *(_option_in(other) for other in others if _is_option(other))}
        is_denied = letter is not None and not is_asserted("", line.partition(letter)[2])
        if not is_denied:
            is_single = len(letters) == 1 and not _is_contradicted("\n".join(others), letter)
            return letter if is_single else None
    for mention in (_MENTIONED, _BRACKETED):
        letters = {statement.letter for statement in _statements(text, _last(mention, text))}
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def _without_list(text: str) -> str:
    """A text without a list of at least three options at its start, one a line."""
    end = 0
    expected = ord("A")
    for label in _LISTED.finditer(text):
        letter = (label[1] or label[2]).upper()
        if ord(letter) != expected or text[end : label.start()].strip():
            break
        line_end = text.find("\n", label.end())
        end = len(text) if line_end < 0 else line_end
        expected += 1
    return text[end:] if expected - ord("A") >= 3 else text
