"""Whether a sentence states the value in it as its answer, by the text before and after the value.

A value is not stated if it is denied ("can't be 42", "42 is wrong"), doubted or supposed ("I don't think it
is 42", "if x = 42"), or a bound that stands for the answer ("is at most 42", "> 42"). Denials and bounds in
other languages are in `languages.toml`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_LANGUAGES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))


def in_languages(key: str) -> str:
    """The alternatives of a key of `languages.toml` over all languages."""
    return "|".join(one[key] for one in _LANGUAGES.values() if key in one)


#: Characters between words and a value.
_GAP = r"[\s*_\"'`]*(?:\\[(\[]|[($€£¥\[{-])*\s*"
_NOT = (
    r"(?:\w+n['’]t|\b(?:is|was|are|were|ca|could|wo|would|should|do|does|did|must|ai)nt|\bcannot|\bnever|\bnot"
    r"|\bno longer|\bhardly|\bneither|\bnor)"
)
_IS = (
    r"(?:(?<![A-Za-z])(?:is|are|was|were|be|been|being|equals?|lies?"
    rf"|{in_languages('is')})|['’]s|=|:|{in_languages('answer')})"
)
_COMPARATIVE = r"(?:less|more|fewer|greater|smaller|larger|bigger|higher|lower)"
_BOUND = (
    r"(?:(?:a little|a bit|just|slightly|somewhat|way|well|far|strictly|always|not|go)\s+)*"
    r"(?:at (?:the (?:very )?)?(?:least|most|minimum|maximum)|an? (?:minimum|maximum) of|m(?:ax|in)imally"
    rf"|upwards of|(?:from\s+)?[\d.,]+\s*(?:to|–|—)|not? {_COMPARATIVE} than|up to|over|under|above|below"
    rf"|beyond|bounded (?:(?:from )?(?:above|below) )?by|{in_languages('bound')})"
)
#: Text before a value that is not stated.
_BEFORE = (
    # "is not 42", "can't possibly be equal to 42"
    rf"{_NOT}(?:\s+(?:be|been|have|has|equal|equals?|to|exactly|simply|just|actually|really|quite|possibly"
    r"|necessarily|likely|even|the|a|value|number|answer|result|correct|right|come|work|turn|out|going|give|get"
    r"|yield|make))*\s*[:=]?",
    # "other than 42", "we reject x = 42"
    r"(?<!none )(?<!nothing )(?<!anything )\bother than|\b(?:anything but|rather than|instead of"
    r"|different from|differs from|far from|nowhere near|contrary to|as opposed to|except(?: for)?|unlike)",
    r"(?:^\W*|\b(?:we|I|can|must|should|to|so|and) )(?:reject|discard|exclude|eliminate|dismiss|rule out)"
    r"(?:\s+[a-z]\s*=|(?:\s+(?:the|value|answer|option|of))+)?",
    # "I don't think the answer is 42", "suppose x = 42"
    rf"(?:{_NOT}\s+(?:think|believe|suppose|agree|sa(?:y|ying|id)|claim|conclude|know|sure|certain|convinced|confident|true"
    r"|correct|right|possible|likely|clear|the case)|(?<!no )\bdoubt\w*|\b(?:refuse to believe|unsure|no way"
    r"|no chance|nobody|no one|if|whether|unless|suppos\w+|assum\w+|pretend|imagine|unlikely"
    r"|(?:impossible|false|wrong|incorrect|mistake) (?:that|for|to)))\b"
    r"(?:\s+(?!(?:but|so|then|hence|thus|therefore|and|because|since|while|as|why)\b)[\w'’]+){0,6}?"
    r"\s*(?:\b(?:is|was|are|were|be|equals?|being|to|say|answer)|['’]s|=)",
    rf"{_NOT}\s+(?:think|believe)(?:\s+that)?|(?:{in_languages('doubt')})[^\d.;]{{0,40}}",
    # a bound that stands for the answer, unlike "it takes at least 42 days"
    rf"(?:^\W*|{_IS}\s*|\b(?:number|value|integer|amount|anything|something|somewhere)\s+){_BOUND}",
    rf"\b(?:exceed\w*|in excess of)|(?<!no )(?<!not )\b{_COMPARATIVE} than(?: or equal to)?",
    r"\bbetween(?:\s+\S+\s+and)?",
    r"(?<![=-])[<>≤≥≠]=?|!=|\\(?:[lg]eq?|[lg]t|neq?|not\s*=|not\\in)(?:slant)?(?![a-z])",
    rf"(?:{in_languages('not_before')})",
)
_WRONG = (
    r"(?:(?:an? |the )?(?:wrong|incorrect)|false|invalid|impossible|rejected|excluded|discarded|eliminated"
    r"|dismissed|extraneous"
    r"|(?:ruled )?out\b|(?:a|an|the|my) (?:mistake|error|typo)"
    r"|not (?:right|correct|true|possible|valid|it\b|(?:the|my|our) (?:\w+ )?answer"
    r"|an? (?:\w+ )?(?:solution|answer)))"
)
_IS_WRONG = (
    r"(?:(?:(?:is|was|are|seems?|looks?|(?:must|would|has to|had to|should|can) be)(?: \w+ly)?|['’]s)"
    rf" {_WRONG}"
    r"|(?:(?:is|was|are)n['’]t|(?:can|could|would|should|might) ?(?:n['’]t|not)|can['’]t|won['’]t) (?:be )?"
    r"(?:right|correct|true|possible|valid|it\b|work|the answer|the case)|(?:can['’]t|cannot) be(?=[.!])"
    r"|(?:does|do|did)(?:n['’]t| not) (?:work|hold|fit|satisfy|make sense|check out|add up)"
    r"|fails\b|makes no sense|contradicts)"
)
#: Text after such a value.
_AFTER = (
    # "42 is not", "42 or more", next to the value
    r"(?<=[\s$)\]}*`>])(?:(?:is|was|are|can|could|would|does|should|must|will)\s*(?:n['’]t|not)\b"
    rf"|can['’]t\b|won['’]t\b|(?:is|was|are|seems?) (?:too|a wrong|the wrong)\b"
    rf"|(?:and|or) (?:above|below|up|over|{_COMPARATIVE})\b|upwards\b|at (?:most|least)\b)",
    # "42 fails", "42, which is wrong", "42 (wrong)"
    r"[\s,;(–—-]*+(?:but |and |so )?(?:(?:which|that|this|it|no|wait),?\s?)*"
    rf"(?:{_IS_WRONG}|(?:(?<=\()|(?<=[–—-] )){_WRONG})",
    r"\s*(?:≠|!=|\\neq?(?![a-z]))",
    # "42 (or maybe 43)", a calculation that is cut off
    r"\s*[,(]?\s*(?:or|and)?\s*\(?(?:maybe|perhaps|possibly|alternatively|else)\b[^.;]*\d|\s*\(or\b",
    r"\s*(?:[-+/×÷=^(]|(?<=\s)\*|\\(?:cdot|times|div)(?![a-z]))[\s.]*$",
    rf"[^\w.!?\n]*+(?:{in_languages('not_after')})",
)
_IS_DENIED = re.compile(
    rf"(?:(?<![A-Za-z])|(?=[^A-Za-z]))(?:{'|'.join(_BEFORE)}){_GAP}$",
    re.IGNORECASE,
)
_CLOSING = r"(?:\\[)\]]|[\s$)\]}*_\"'`.]|</\w+>)*+"
_IS_DENIED_AFTER = re.compile(rf"{_CLOSING}(?:{'|'.join(_AFTER)})", re.IGNORECASE)
#: A sentence that withdraws what precedes it.
_RETRACTION = re.compile(
    r"(?:\b(?:no|nope|wait|hmm+|hm|oh|oops|sorry|actually|but|however|hold on|unfortunately)\b[\s,.!:–—-]*)*"
    r"(?:\b(?:that|this|it|(?:this|that|the|my)(?: \w+)? (?:answer|result|value))\s?"
    rf"{_IS_WRONG}(?! (?:that|for|to)\b)|\bI(?:['’]ve| have)? made (?:a|an)(?: \w+)? (?:mistake|error)"
    r"|\bI was wrong|\bscratch that)|(?<=[.?] )Nop?e?\b[.!]?(?=\s*$)",
    re.IGNORECASE,
)
#: The end of a text after which a sentence begins.
_ENDED = re.compile(r"(?:\A|[.!?:;–—)\]}$>*]\s*|\n\s*)\Z")
_TAG = re.compile(r"</?[A-Za-z]\w*>")
#: A question by its word order, which states nothing.
_QUESTION = re.compile(
    r"(?:^|(?<=[.!?]\s)|(?<=\n))\s*(?:(?:so|but|then|now|wait|and),? )?"
    r"(?:is|are|was|were|does|do|did|can|could|would|will|might|may|should|what if|how about)\b"
    r"(?:[^.!?\n]|\.(?=\d))*\?",
    re.IGNORECASE,
)
#: Maximum characters before and after a value that are read.
MAX_CHARS = 120
#: Maximum blanks between two sentences.
MAX_GAP = 20


def is_asserted(before: str, after: str) -> bool:
    """Whether a sentence states a value, given the sentence's text before and after it."""
    before = _TAG.sub(" ", before[-MAX_CHARS:])
    return not (_IS_DENIED.search(before) or _IS_DENIED_AFTER.match(after[:MAX_CHARS]))


def asserted_part(text: str) -> str:
    """A text without questions, and without what one of its sentences withdraws ("No, that is wrong")."""
    text, end = _QUESTION.sub("", text), 0
    for found in _RETRACTION.finditer(text):
        if _ENDED.search(text, max(0, found.start() - MAX_GAP), found.start()):
            end = found.end()
    return text[end:]
