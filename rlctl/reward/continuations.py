"""What follows a value: the rest of its sentence, and later sentences, in a closed list of forms."""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward import number_words
from rlctl.reward.foreign_statements import is_doubted
from rlctl.reward.statement_words import (
    ACCENTED,
    AFTER,
    ARITHMETIC,
    ARTICLES,
    BETWEEN,
    CHANGES,
    COMPARES,
    COPULAS,
    FRACTIONS,
    LEADS,
    LISTS,
    NAMES,
    NUMBER,
    ORDINALS,
    PARTS,
    PREPOSITIONS,
    QUANTITIES,
    UNITS,
    VERBS,
    changes,
    is_plural,
    is_unsure,
    is_word,
    tokens_of,
    without_formatting,
    words_of,
)

_FINITE = COPULAS - {"be", "been"}
_PREDICATES = words_of("predicates")
_CONFIRMS = words_of("confirms")
_REMAINS = frozenset({"remain", "remains", "remained", "follows", "works", "work"})
_NEGATED = frozenset({"do", "did", "are", "were", "have", "could", "can", "would", "will"})
_CURRENCIES = frozenset("$€£")
_REASONS = frozenset({"because", "since", "given", "due"})
_DENIES_OTHERS = frozenset({"not", "rather", "instead", "unlike"})
_FROM_NOW = lazy_pattern(r"(?:second|minute|hour|day|week|month|year)s? (?:from now|later|ago)\b")
_TIMED = words_of("timed")
_EXTREMES = frozenset({"best", "worst", "least", "most", "minimum", "maximum", "all"})
_OF_A_PART = frozenset({"for", "in", "during", "of", "on"})
_CONTINUES = frozenset(
    {"then", "some", "change", "counting", "also", "half", "more", "maybe", "it", "that", "this"}
)
_DOUBTS = "?✗✘❌✖🚫👎⛔"
CROSSES = "✗✘❌✖🚫👎⛔?<>^+≠×÷"
_SINGULAR = lazy_pattern(r"[$€£]?(?:-?[01](?:\.0+)?|0?\.\d+|0\.\d+|\d+/\d+|one|half)")
_SENTENCE_END = lazy_pattern(r"(?<=[.!?…])[\s\"')\]*$}]+(?=\S)|\n+")
#: A formula for which a value is meant: "34 integers n with 1 ≤ n ≤ 200", "34 when N is divided by 100".
FOR_WHICH = lazy_pattern(
    r",?\s+(?:with|for|where|when|such that|if|at|in|on|that satisfy|satisfying)\s+"
    r"(?:all |every |any |the )?(?:integers? )?"
    r"[$\s\\(\[{|]*(?:-?\d[\d.,]*|[A-Za-z](?![a-z]))[$\s]*(?:(?:[-+^_\d]|[()|]|\s)*(?:[=<>≤≥∈,]|\\[lg]eq?|\\in\b"
    r"|is divided by)"
    r"[^;:]*|[$)]?\s*(?=[.]?\s*\Z))"
)


def _is_content(token: str) -> bool:
    lower = token.casefold()
    return (
        is_word(token)
        and lower not in _PREDICATES
        and not (
            lower in PREPOSITIONS
            or lower in COPULAS
            or lower in ARITHMETIC
            or is_unsure(lower)
            or lower in CHANGES
        )
    )


def unit_end(tokens: list[str], value: str) -> int:
    """The number of tokens that are the unit of a value: "red apples" of "red apples left"."""
    end = 0
    while end < min(len(tokens), 5) and (_is_content(tokens[end]) or tokens[end] in COMPARES):
        end += 1
        if is_plural(tokens[end - 1].casefold()):
            while end < len(tokens) and _is_content(tokens[end]) and is_plural(tokens[end].casefold()):
                end += 1
            return end
    return end if end <= 2 and _SINGULAR.fullmatch(value.strip()) else 0


def closes(tokens: list[str], value: str, *, is_subject: bool) -> bool:
    """Whether the words after a value are its unit and forms that leave it as it is."""
    words = [token.casefold() for token in tokens]
    place: int | None = unit_end(tokens, value)
    has_unit = bool(place)
    if place is not None and words[place + 1 : place + 2] == ["than"] and words[place] in COMPARES:
        place += 1
    while place is not None and place < len(tokens):
        place = _next(tokens, place, value, has_unit=has_unit, is_subject=is_subject)
    return place is not None


def _next(  # noqa: PLR0911, PLR0912
    tokens: list[str], start: int, value: str, *, has_unit: bool, is_subject: bool
) -> int | None:
    """The end of the form at `start` of the words after a value; None if there is no known form."""
    token = tokens[start].casefold()
    place = start + 1
    everything = len(tokens)
    following = tokens[place].casefold() if place < everything else ""
    is_accepted: bool | None = None  # whether all that follows is accepted
    if token in {";", ":", "—", "–"}:
        is_accepted = is_harmless(" ".join(tokens[place:]), value)
    elif token in _REASONS or (token == "as" and following):
        is_accepted = True
    elif token in _DENIES_OTHERS:
        is_accepted = everything - place <= 8 and any(map(NUMBER.match, tokens[place : place + 5]))
    elif token == "=":
        is_accepted = not any(map(is_word, tokens[place:]))
    elif token == "or" and "equivalently" in tokens[place : place + 2]:
        is_accepted = True
    elif token == "which" and following in _CONFIRMS:
        is_accepted = not any(map(changes, tokens[place:]))
    elif token == "which" and following == "is":
        is_accepted = _is_comparison({word.casefold() for word in tokens[place:]})
    if is_accepted is not None:
        return everything if is_accepted else None
    if token == "over" and start and tokens[start - 1] == "left":
        return place
    if token == "or" and following[:1].isdigit() and has_unit:  # the same value in another unit
        return place + 1
    if token == "out" and following == "of":
        return place + 2
    if token == "and" and following in _DENIES_OTHERS:
        return place
    if token[0].isdigit() and _FROM_NOW.match(" ".join(tokens[place:])):
        return place + 2
    if token == "(":
        end = tokens.index(")", place) if ")" in tokens[place:] else everything
        return end if _is_aside(tokens[place:end], value) else None
    if token == "^":
        return place + 1 if start and tokens[start - 1].casefold() in UNITS else None
    if token == "/":
        return place + 1 if following and is_word(following) else None
    if token in _NEGATED and following == "not":
        return _phrase_end(tokens, place + 1) if has_unit else None
    if token in COPULAS:
        end = _phrase_end(tokens, place)
        is_located = end == place and (following in PREPOSITIONS or following in ("", "."))
        is_known = is_located or _is_complement(
            [word.casefold() for word in tokens[place:end]], has_unit=has_unit
        )
        return end if is_known else None
    is_compared = token == "than" and not COMPARES.isdisjoint(word.casefold() for word in tokens[:start])
    if token == "and" and _ASKED.match(" ".join(tokens[place:])):
        return None
    if token in PREPOSITIONS or token == "and" or is_compared:
        end = _phrase_end(tokens, place, with_numbers=token in _TIMED or is_compared)
        return end if _is_phrase(token, tokens[place:end]) else None
    is_sign = not token[0].isalnum() and token not in CROSSES
    if token in AFTER or is_sign or (token == "off" and value[:1] in _CURRENCIES):
        return place
    if token == "times" and (not following or not is_word(following) or following in PREPOSITIONS | AFTER):
        return place
    is_verb = (is_subject and (token in _REMAINS or has_unit)) or (
        has_unit and token.endswith("ing") and following
    )
    return _phrase_end(tokens, place) if is_verb and not changes(token) else None


def _is_comparison(words: set[str]) -> bool:
    """Whether a clause after a value compares it: "which is 5 less than 32"."""
    return any(map(NUMBER.match, words)) and not any(map(changes, words - COMPARES - {"times"}))


def _is_phrase(joint: str, tokens: list[str]) -> bool:
    """Whether the words after a preposition or "and" leave the value before it as it is."""
    phrase = {token.casefold() for token in tokens if token != "May"}
    if joint == "and" and phrase & _CONTINUES:
        return False
    if joint == "at" and phrase & _EXTREMES:
        return False
    if joint in _OF_A_PART and phrase & ORDINALS and phrase & PARTS - ORDINALS:
        return False
    if joint in {"of", "than"} and phrase in ({"that"}, {"this"}):  # another value, changed
        return False
    if joint == "than" and not phrase:
        return True
    changes = phrase & (ARITHMETIC - ARTICLES - FRACTIONS) or phrase & CHANGES or any(map(is_unsure, phrase))
    return not changes and (bool(tokens) or joint in AFTER)


def _phrase_end(tokens: list[str], start: int, *, with_numbers: bool = False) -> int:
    """The end of the phrase that begins at `start`: up to a preposition, a copula, a number or a sign."""
    end = start
    while end < len(tokens):
        token = tokens[end].casefold()
        is_part = is_word(token) or token in {"-", "'", "’"}
        if token[0].isdigit() or token[0] in "$€£":
            is_part = end > start or with_numbers
        if (
            not is_part
            or token in _FINITE
            or token in _REASONS
            or (token in PREPOSITIONS and token not in ARTICLES)
        ):
            break
        if token in {"than", "and"} | _DENIES_OTHERS:
            break
        end += 1
    return end


def _is_complement(words: list[str], *, has_unit: bool) -> bool:
    """Whether the words after "27 is" call it the answer, or say what was done with it."""
    if words[:1] in (["a"], ["an"]):
        return False
    known = NAMES | ARTICLES | AFTER | LEADS | QUANTITIES
    if has_unit:  # "27 beans are green"
        return bool(words) and not any(map(changes, words))
    return bool(words) and (all(word in known for word in words) or words[0] in VERBS)


_ASIDES = (
    {"i", "e"}
    | PREPOSITIONS
    | ARTICLES
    | NAMES
    | AFTER
    | QUANTITIES
    | BETWEEN
    | VERBS
    | UNITS
    | {"and", "than", "rounded"}
)


def _is_aside(tokens: list[str], value: str) -> bool:
    """Whether a bracket after a value leaves it as it is: "(not 28)", "(27 cents)", "(twenty-seven)"."""
    spelled = number_words.in_figures(" ".join(tokens)).strip()
    if spelled.isdecimal() and not any(map(str.isdecimal, tokens)):
        return spelled == re.sub(r"[,\s$€£]", "", value)
    words = [token.casefold() for token in tokens if is_word(token) and token != "May"]
    if "than" in words:
        words = [word for word in words if word not in COMPARES]
    if words[:1] and words[0] in _DENIES_OTHERS | _REASONS | {"as"}:
        return True
    if words[:3] == ["it", "is", "not"]:
        return any(map(NUMBER.match, tokens))
    is_calculation = len(tokens) > 2 and not words
    names = {token.casefold() for token in tokens if token[0].isupper()}
    known = _ASIDES | names
    is_known = all(
        len(word) == 1 or word in known or is_plural(word) or number_words.is_number(word, "english")
        for word in words
    )
    has_numbers = len(words) > 1 and any(map(NUMBER.match, tokens))
    is_changed = "if" in words or any(map(changes, words))
    return is_calculation or (bool(words) and (is_known or has_numbers) and not is_changed)


def is_harmless(text: str, value: str) -> bool:
    """Whether each sentence after an answer in prose is a known form that leaves it as it is.

    That is a closing phrase, a reason, a check, a calculation, or the same value again.
    """
    own = NUMBER.search(value)
    for sentence in filter(str.strip, _SENTENCE_END.split(text)):
        tokens = tokens_of(without_formatting(sentence).casefold())
        words = list(filter(is_word, tokens))
        numbers = NUMBER.findall(sentence)
        if _POLITE.match(sentence):
            continue
        if any(word in CHANGES or word.endswith(("n't", "n’t")) for word in words):
            return False
        is_same = own is not None and numbers[-1:] == [own[0]]
        if _ASKED.match(sentence) and not is_same:
            return False
        is_calculation = (
            len(numbers) > 1 and "=" in sentence and not any(token in CROSSES for token in tokens)
        )
        is_known = is_same or is_calculation or _EXPLAINS.match(sentence) or not words
        if not is_known or not set(tokens).isdisjoint(_DOUBTS):
            return False
        if numbers and not words and not is_same and not is_calculation:
            return False
    return True


_POLITE = lazy_pattern(
    r"\W*(?:(?:I hope|hope|let me know|feel free|if you|please|is there|would you|do you|have a|thank)\b"
    r"|it can(?:not|['’]t) be anything else\b|nothing else (?:works|fits)\b"
    r"|no other (?:solution|value|answer)s? (?:exists?|works?|fits?)\b"
    r"|(?:that|this|it) is (?:right|correct|it|(?:the|our|my) (?:\w+ )?(?:answer|solution|result))\W*\Z"
    r"|(?:well done|(?:great|good|nice|excellent) (?:job|work|question|problem)|congratulations|cheers|great"
    r"|nice|perfect|excellent|awesome|wonderful|fantastic|amazing|bravo|hooray|yay|easy|simple|okay|ok"
    r"|all done|there (?:you|we) (?:go|have it)|that['’]s (?:it|all|the answer)|solved|finished"
    r"|case closed|good luck|enjoy)\W*\Z"
    r"|(?:yes|correct|right|done|qed|verified)\W*\Z|(?:example|question|problem) \d+\W*\Z)",
    re.I,
)
_EXPLAINS = lazy_pattern(
    rf"\W*(?:{'|'.join(LISTS['following']['explains'].split()).replace('-', ' ')})\b", re.I
)
#: A later sentence that says what is asked: the answer before it is another quantity ("We need boys.").
_ASKED = lazy_pattern(
    r"\W*(?:(?:and|so|but|yet|while|whereas|now|here|what)\W+)*"
    r"(?:we|I|you|they|one|the (?:question|problem|task|exercise|prompt))\b[^.\n]{0,20}?"
    r"\b(?:needs?|needed|wants?|wanted|seeks?|asks?|asked|asking|look(?:ing)? for|requires?|requested"
    r"|must find|(?:have|has) to find|should find|are after|is about)\b",
    re.I,
)
_WITHDRAWS = words_of("withdraws", "following")
_WITHDRAWAL = lazy_pattern(
    rf"(?:\A|[.!?\n])[\s*_]*(?:wait\b|hmm+|nope\b|no[,.!]|no\s*[—–-]|not\b(?! doubt))"
    rf"|\b(?:{'|'.join(_WITHDRAWS)}|hold on|not the (?:final )?answer"
    r"|should(?: have| ha[sd])? be(?:en)?|(?:actually|wait|hmm+|no|nope|however|but)[,.!]?"
    r" (?:no\b|not\b|let me re|(?:it|that|this|the answer)(?:['’]s| is| should| can|n't)|-?\d)"
    r"|let me (?:re|correct|fix)"
    r"|I (?:made|forgot|misread|meant|miss|double[- ]count)\w*"
    r"|(?:does|do|is|are|was|ca|wo)n['’]t (?:right|valid|check|satisf|work)\w*"
    r"|does not (?:check|satisf|work|hold)\w*|(?:is|was) not (?:right|valid|correct|true)|that was)\b",
    re.I,
)


def withdraws(text: str) -> bool:
    """Whether the text after a box, a tag or `####` takes the answer back."""
    return _WITHDRAWAL.search(text) is not None


def leaves_mark(sentence: str, later: str, content: str) -> bool:
    """Whether the text after a marked answer leaves it as it is.

    Args:
        sentence: the rest of the mark's own sentence, which must be a known form.
        later: what follows; known forms up to the paragraph's end, then anything that takes nothing back.
        content: of the mark.
    """
    if withdraws(sentence + later):
        return False
    if ACCENTED.search(sentence):
        return not is_doubted(sentence)
    tokens = tokens_of(without_formatting(FOR_WHICH.sub(" ", sentence)))
    paragraph = later.partition("\n\n")[0] if not later.startswith("\n") else ""
    return closes(tokens, content, is_subject=True) and is_harmless(paragraph, content)
