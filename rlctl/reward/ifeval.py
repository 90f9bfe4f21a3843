"""The 25 checks of instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), by rules of our own.

A ground truth is what a row of the public data set has: `instruction_id_list` and `kwargs`. Libraries with
these checks fetch data of NLTK at run time; sentences and words are found by regular expressions here, so
counts may differ from theirs at abbreviations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from rlctl.lazy import lazy_pattern
from rlctl.registry import GRADERS
from rlctl.reward.protocol import KnownResponses

#: A check: (response, its arguments) → whether the response follows the instruction.
Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _check(name: str) -> Callable[[Check], Check]:
    """Registers a check under the name of its instruction."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def _no_known(ground_truth: str) -> KnownResponses:
    instructions_of(ground_truth)
    return None, None


@GRADERS.register(
    label="instructions of IFEval",
    formula="1 if the response follows every instruction, else 0 (prompt-level strict accuracy)",
    source="Zhou et al. 2023, arXiv 2311.07911",
    needs={"a ground truth with `instruction_id_list` and `kwargs`"},
    known_responses=_no_known,
    score_range=(0.0, 1.0),
    data_sources=r"if_?eval\w*",
)
def ifeval(response: str, ground_truth: str) -> float:
    """1.0 if the response follows every instruction of the ground truth, else 0.0.

    Raises:
        ValueError: the ground truth has another form, or an instruction is unknown.
    """
    instructions = instructions_of(ground_truth)
    if not response.strip():
        return 0.0
    return float(all(CHECKS[name](response, **arguments) for name, arguments in instructions))


@lru_cache(maxsize=1024)
def instructions_of(ground_truth: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each instruction; raises `ValueError` as `ifeval`."""
    value = json.loads(ground_truth)
    if not isinstance(value, Mapping) or not isinstance(value.get("instruction_id_list"), list):
        raise ValueError('the ground truth is not {"instruction_id_list": […], "kwargs": […]}')
    names = [str(name) for name in value["instruction_id_list"]]
    given = value.get("kwargs") or [{}] * len(names)
    given = json.loads(given) if isinstance(given, str) else given
    if not names or len(given) != len(names):
        raise ValueError(f"{len(names)} instructions and {len(given)} arguments")
    found = []
    for name, arguments in zip(names, given, strict=True):
        if name not in CHECKS:
            raise ValueError(f"there is no check of the instruction {name!r}")
        kept = {key: one for key, one in (arguments or {}).items() if one is not None}
        try:
            CHECKS[name]("a", **kept)
        except TypeError as error:
            raise ValueError(f"the arguments of {name}: {error}") from None
        found.append((name, kept))
    return found


def _holds(count: int, relation: str, number: float) -> bool:
    """Whether `count` is in a relation to a number: `at least`, or `less than`."""
    if relation not in {"at least", "less than"}:
        raise ValueError(f"there is no relation {relation!r}")
    return count >= number if relation == "at least" else count < number


# --- words ------------------------------------------------------------------------------------------


@_check("keywords:existence")
def _existence(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), response, re.IGNORECASE) for word in keywords)


@_check("keywords:frequency")
def _frequency(response: str, keyword: str, frequency: float, relation: str = "at least") -> bool:
    return _holds(len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency)


@_check("keywords:forbidden_words")
def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(_has_word(response, word) for word in forbidden_words)


def _has_word(response: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) is not None


@_check("keywords:letter_frequency")
def _letters(response: str, letter: str, let_frequency: float, let_relation: str = "at least") -> bool:
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


@_check("change_case:capital_word_frequency")
def _capital_words(response: str, capital_frequency: float, capital_relation: str = "at least") -> bool:
    words = re.findall(r"\w+(?:['’-]\w+)*", response)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


# --- language and case ------------------------------------------------------------------------------


@_check("language:response_language")
def _language(response: str, language: str) -> bool:
    return _is_in(response, language)


@_check("change_case:english_capital")
def _capital(response: str) -> bool:
    return response.isupper() and _is_in(response, "en")


@_check("change_case:english_lowercase")
def _lowercase(response: str) -> bool:
    return response.islower() and _is_in(response, "en")


def _is_in(response: str, language: str) -> bool:
    """Whether a text is in a language, named by its ISO 639-1 code; texts without a language are in all."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # else it draws at random
    try:
        return bool(detect(response) == language)
    except LangDetectException:
        return True


@_check("punctuation:no_comma")
def _no_comma(response: str) -> bool:
    return "," not in response


# --- length -----------------------------------------------------------------------------------------

#: Dots that end no sentence: of abbreviations, initials and numbers.
_NO_END = lazy_pattern(
    r"\b(?:[Mm]rs?|[Mm]s|[Dd]r|[Pp]rof|[Ss]t|[Vv]s|e\.g|i\.e)\.(?=\s)"
    r"|\b(?:etc|Inc|Ltd|Co|Fig|Vol|a\.m|p\.m|U\.S)\.(?=\s+[a-z\d])"
    r"|\b[A-Z]\.(?=\s?[A-Z])|(?<=\d)\.(?=\d)"
)
_END = lazy_pattern(
    r"\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|fig|no|vol|e\.g|i\.e|a\.m|p\.m|u\.s)\.(?=\s+[^\s])"
    r"|\b[A-Z]\.(?=\s*[A-Z])|(?<=\d)\.(?=\d)",
    re.IGNORECASE,
)
_END = lazy_pattern(r"[.!?…。！？]+[\"'”’)\]*_]*(?=\s|$)|[。！？]")


def count_sentences(text: str) -> int:
    """Number of sentences: an end is a mark before white space; what follows the last one counts."""
    parts = _END.split(_NO_END.sub(lambda found: found[0].replace(".", " "), text))
    return sum(any(letter.isalnum() for letter in part) for part in parts)


@_check("length_constraints:number_sentences")
def _sentences(response: str, num_sentences: float, relation: str = "at least") -> bool:
    return _holds(count_sentences(response), relation, num_sentences)


@_check("length_constraints:number_words")
def _words(response: str, num_words: float, relation: str = "at least") -> bool:
    return _holds(len(re.findall(r"\w+", response)), relation, num_words)


@_check("length_constraints:number_paragraphs")
def _paragraphs(response: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = parts[1:-1]
    ends = [part for part in {0: parts[0], len(parts) - 1: parts[-1]}.values() if part.strip()]
    return all(part.strip() for part in inner) and len(inner) + len(ends) == num_paragraphs


@_check("length_constraints:nth_paragraph_first_word")
def _first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in response.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"“‘*_(").lower()
    return re.split(r"[.,?!'\":;)*_”’]", word)[0] == first_word.lower()


# --- content and format -----------------------------------------------------------------------------


@_check("detectable_content:number_placeholders")
def _placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\]\n]*\]", response)) >= num_placeholders


@_check("detectable_content:postscript")
def _postscript(response: str, postscript_marker: str) -> bool:
    forms = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    form = forms.get(postscript_marker.strip(), re.escape(postscript_marker.strip().lower()))
    return re.search(form, response.lower()) is not None


@_check("detectable_format:number_bullet_lists")
def _bullets(response: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-).+$", response, re.MULTILINE)) == num_bullets


@_check("detectable_format:constrained_response")
def _constrained(response: str) -> bool:
    return any(answer in response for answer in _ANSWERS)


@_check("detectable_format:number_highlighted_sections")
def _highlights(response: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", response)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


@_check("detectable_format:multiple_sections")
def _sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@_check("detectable_format:json_format")
def _json(response: str) -> bool:
    text = re.sub(r"^\s*```(?:json)?|```\s*$", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@_check("detectable_format:title")
def _title(response: str) -> bool:
    return any(title.strip("<> \t") for title in re.findall(r"<<[^\n]+>>", response))


# --- combinations, beginning and end ----------------------------------------------------------------


@_check("combination:two_responses")
def _two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    said = [part for part in parts if part]
    return len(said) == 2 and said[0] != said[1]


@_check("combination:repeat_prompt")
def _repeats(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_check("startend:end_checker")
def _ends(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_check("startend:quotation")
def _quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'
