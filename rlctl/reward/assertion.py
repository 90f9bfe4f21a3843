"""Whether a sentence states the value in it as its answer, by the text before and after the value.

A value is not stated if it is denied ("can't be 42", "42 is wrong"), doubted or supposed ("I don't think it
is 42", "if x = 42"), or a bound that stands for the answer ("is at most 42", "> 42"). Denials and bounds in
other languages are in `languages.toml`.
"""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.languages import in_languages

#: Characters between words and a value.
_GAP = r"[\s*_\"'`]*(?:\\[(\[]|[($€£¥\[{-])*\s*"
_NOT = (
    r"(?:\w+n['’]t|\b(?:is|was|are|were|ca|could|wo|would|should|do|does|did|must"
    r"|ai)nt|\bcannot|\bnever|\bnot"
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
#: What somebody else says, who is probably wrong; not "Anna would get 42", "students answered 42 questions",
#: "you would expect 42 heads".
_PEOPLE = (
    r"\b(?:(?:many|most|some|several|few|other|careless|naive|hasty)\s+)*"
    r"(?:people|persons|students|solvers|readers|beginners|novices|others|many|most|some|you|someone"
    r"|somebody)"
)
_MANY = r"\b(?:many|most|some)\s+(?:people|students|solvers|readers)"
_GAVE = r"(?:got|had|thought|wrote|said|answered|believed|put|chose|picked)"
_OTHERS = rf"(?:{_PEOPLE}|\bone|\b(?:a|my|his|her) (?:friend|classmate|colleague|student|beginner|reader))"
_OFTEN = (
    r"(?:(?:might|may|would|could|will|often|commonly|typically|usually|frequently|sometimes|first"
    r"|at first|also|be tempted to|are tempted to|mistakenly|wrongly)\s+){0,3}"
)
_OPINES = r"(?:think|believe|sa(?:y|id)|claim|guess|assume|conclude|argue|suppose|thought|believed)s?"
_GIVES = rf"(?:{_OPINES}|answer|get|give|pick|choose|select|put|write|report)(?:s|ed)?"
_OFTEN_GIVES = rf"(?:often|commonly|typically|usually|frequently|sometimes|mistakenly|wrongly)\s+{_GIVES}"
_HASTY = r"\b(?:naive|careless|hasty|sloppy|inattentive|confused)\s+(?:\w+\s+)?"
_MISTAKENLY = r"(?:mistakenly|wrongly|incorrectly|naively|erroneously|falsely)"
_SAID = (
    r"\s*(?:[,:]\s*)?(?:(?:that|it|the|a|an|answer|option|value|result|number|solution|correct|right"
    r"|choice)\s+"
    r"|(?:is|was|be|to be|would be|should be|must be|equals)\s+|(?:it|that|answer)['’]s\s+|[a-z]\s*=\s*){0,6}"
    r"(?:(?:it|that|answer)['’]s|is|was|be|=|:)?"
)
_SOURCE = (
    r"(?:page|eq(?:uation|\.)|figure|table|section|chapter|problem|exercise|example|question|step|line|note)"
)
#: Text before a value that is not stated.
_BEFORE = (
    # "is not 42", "can't possibly be equal to 42"
    rf"{_NOT}(?:\s+(?:be|been|have|has|equal|equals?|to|exactly|simply|just|actually|really|quite|possibly"
    r"|necessarily|likely|even|the|a|value|number|answer|result|correct|right|come"
    r"|work|turn|out|going|give|get"
    r"|yield|make))*\s*[:=]?",
    # "other than 42", "we reject x = 42"
    r"(?<!none )(?<!nothing )(?<!anything )\bother than|(?:^\W*|\b(?:is|are|choose"
    r"|pick|accept) )anything other than"
    r"|\b(?:anything but|rather than|instead of"
    r"|different from|differs from|far from|nowhere near|contrary to|as opposed to|except(?: for)?|unlike)",
    r"(?:^\W*|\b(?:we|I|can|must|should|to|so|and) )(?:reject|discard|exclude|eliminate|dismiss|rule out)"
    r"(?:\s+[a-z]\s*=|(?:\s+(?:the|value|answer|option|of))+)?",
    # "I don't think the answer is 42", "suppose x = 42"
    rf"(?:{_NOT}\s+(?:think|believe|suppose|agree|sa(?:y|ying|id)|claim|conclude|know"
    rf"|sure|certain|convinced|confident|true"
    r"|correct|right|possible|likely|clear|the case)|(?<!no )\bdoubt\w*"
    r"|\b(?:refuse to (?:believe|say)|unsure|no way"
    r"|no chance|nobody|no one|if|whether|unless|suppos\w+|assum\w+|pretend|imagine|unlikely"
    r"|(?:impossible|false|wrong|incorrect|mistake) (?:that|for|to)))\b"
    r"(?:\s+(?!(?:but|so|then|hence|thus|therefore|and|because|since|while|as|why)\b)[\w'’]+){0,6}?"
    r"\s*(?:\b(?:is|was|are|were|be|equals?|being|to|say|answer)|['’]s|=)",
    rf"{_NOT}\s+(?:think|believe)(?:\s+that)?|(?:{in_languages('doubt')})[^\d.;]{{0,40}}",
    # a bound that stands for the answer, unlike "it takes at least 42 days"
    rf"(?:^\W*|{_IS}\s*|\b(?:number|value|integer|amount|anything|something|somewhere)\s+){_BOUND}",
    rf"\b(?:exceed\w*|in excess of)|(?<!no )(?<!not )\b{_COMPARATIVE} than(?: or equal to)?",
    r"\bbetween(?:\s+\S+\s+and)?",
    r"\b(?:close to|almost|nearly|not far from|just (?:under|over|below|above|shy of)"
    r"|(?:multiples?|factors?|divisors?) of|divisible by|divides"
    r"|(?:common|typical|frequent|usual) (?:mistake|error|trap|misconception|wrong answer)\b[^.;\n]{0,60})",
    # "many people think it is 42", "you might say 42", "the previous answer was 42"
    rf"(?:{_OTHERS}\s+{_OFTEN}{_OPINES}|{_HASTY}\b[^.;\n\d]{{0,40}}?\b{_GIVES}|\b{_MISTAKENLY}\s+{_GIVES}"
    rf"|{_PEOPLE}\s+{_OFTEN_GIVES}|{_MANY}\s+(?:would|might|may)\s+(?:answer|pick|choose|select)){_SAID}",
    # "I used to think it was 42", "I originally wrote 42"
    rf"(?:\bused to (?:think|believe|say)|\b(?:initially|originally|at first),?\s+I\s+{_GAVE}"
    rf"|\bI\s+(?:initially|originally|first)\s+{_GAVE}){_SAID}",
    r"\banswers?\s+(?:used to be|had been|was (?:originally|initially|previously|formerly|supposed to be))",
    r"\b(?:(?:previous|earlier|former|old|prior|outdated)\s+(?:answer|guess|estimate"
    r"|attempt)s?\s*(?:was|is|:)"
    r"|(?:initial|original|first|preliminary)\s+(?:answer|guess|estimate|attempt)\s+was)",
    r"\brefuse to (?:say|answer|accept)",
    r"\b(?:tempting|easy) to (?:\w+ ){1,3}(?:is|be)?",
    rf"\b(?:see (?:also )?|refer to (?:the )?|answers?\b[^.\n\d]{{0,40}}\b(?:on"
    rf"|in) (?:the )?){_SOURCE}|\brefer to",
    # "the answer ends in 42", "for example, 42", "let's try 42", "given that the total is 42"
    r"\b(?:answer|result|value)\s+(?:(?:starts|begins|ends)\s+(?:with|in)|contains|has)|in the ballpark of",
    r"(?:\bfor (?:example|instance)|\be\.g\.|\bsuch as),?(?:\s+\$?[a-z]\$?\s*=)?",
    r"^\W*(?:let(?:['’]s| us) )?(?:try|test|check|consider|plug in)(?:\s+\$?[a-z]\$?\s*=)?",
    r"\bgiven that\b[^,.;\n\d]{0,60}\b(?:is|are|equals)",
    r"\b(?:probability|chance|odds|likelihood) that (?:it|this|that|the (?:answer"
    r"|value|result)|[a-z]) (?:is|was|equals|=)",
    r"^\W*(?:no|pas|mai|jamais|nunca|kein\w*|ne|nu|nem|ei)\s+",
    r"\blet\s+(?:us\s+say\s+)?\$?[a-z]\$?\s*(?:=|\b(?:be|equal)\b)",
    r"\\(?:[bx]?cancel|sout|st)\s*\{\s*",
    r"\b(?:wrong|incorrect|false|invalid|worst|bad) (?:answer|option|choice|value|result|solution)s?\s*"
    r"(?:(?:is|was|are|would be)\b:?|:)",
    r"(?<![=-])[<>≤≥≠]=?|!=|\\(?:[lg]eq?|[lg]t|neq?|not\s*=|not\\in)(?:slant)?(?![a-z])",
    r"\\(?:lnot|neg)(?![a-z])|¬",
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
    r"|(?:is|was) (?:only |just |merely )?an? (?:upper|lower) bound\b"
    rf"|(?:and|or) (?:above|below|up|over|{_COMPARATIVE})\b|upwards\b|at (?:most|least)\b)",
    # "42 fails", "42, which is wrong", "42 (wrong)"
    r"[\s,;(–—-]*+(?:but |and |so )?(?:(?:which|that|this|it|he|she|they|I|no|wait),?\s?)*"
    rf"(?:{_IS_WRONG}|(?:(?<=\()|(?<=[–—-] )){_WRONG})",
    r"\s*(?:≠|!=|\\neq?(?![a-z]))",
    # "42 (or maybe 43)", a calculation that is cut off
    r"\s*[,(]?\s*(?:or|and)?\s*\(?(?:maybe|perhaps|possibly|alternatively|else)\b[^.;]*\d|\s*\(or\b",
    r"[\s,]*\bor (?:so|thereabouts)\b|-?ish\b",
    # "42 off", "42 with 60% probability and 43 with 40%"
    r"[\s,]*(?:plus or minus|give or take)\b|\s*,\s*(?:wrong|incorrect)\s*[!.]",
    r"\s*,?\s*only (?:if|when)\b",
    # "42 is a trap", "42 seems right but isn't", "42, with 43 as a backup"
    r"(?<=[\s$)\]}*`>])(?:is|was) (?:an?|the) (?:(?:common|typical|usual|frequent"
    r"|classic|popular|tempting) )?"
    r"(?:wrong|incorrect|trap|distractor|red herring|misconception|mistake|error|decoy)\b",
    r"(?<=[\s$)\]}*`>])(?:may |might |could )?(?:seem|look|appear|sound)s?\b[^.;\n\d]{0,30}"
    r"\b(?:but|yet|though|although)\b"
    r"[^.;\n\d]{0,30}(?:n['’]t|\bnot|\bwrong|\bincorrect)\b",
    r"\s*,?\s*(?:with|and)\s+-?\d[\d.,]*\s+(?:as|is|being)\s+(?:an?|the|my)"
    r"\s+(?:backup|alternative|second|fallback|runner)",
    r"\s*(?:,|\()?\s*(?:with|at)\s+(?:a\s+)?[\d.]+\s*\\?(?:%|percent)[^.\n]*\d\s*\\?(?:%|percent)",
    r"\s*[,(]\s*(?:though|although|but) (?:it|that|this) (?:may|might|could)\b[^.;]*\d",
    # "42 if we include Tom, else 41", "42 (41)", "42 or 57"
    r"[^.;\n]*\b(?:else|otherwise)\b[^.;\n]*\d|[^.;\n]*\d[^.;\n]*\botherwise\b"
    r"|\s*\(\s*[$€£]?-?\d[\d.,]*\s*\)",
    r"[\s,]*\bor\s+(?:(?:also|even)\s+)?[($€£\\-]*-?\d",
    r"(?:[\s,]|\\[,;: ])*\\(?:text\w*|mbox|mathrm)\s*\{[\s,]*or\s*\}\s*-?\d",
    r"[$)\]}*]{0,3}\?(?!\d)",
    r"\s*if\b[^.;\n]*[,;]\s*(?:and\s+)?[$\\(]*-?\d[^.;\n]*\bif\b",
    r"\s*(?:[-+/×÷=^(]|(?<=\s)\*|\\(?:cdot|times|div)(?![a-z]))[\s.]*$",
    rf"[^\w.!?\n]*+(?:{in_languages('not_after')})",
)
_IS_DENIED = lazy_pattern(
    rf"(?:(?<![A-Za-z])|(?=[^A-Za-z]))(?:{'|'.join(_BEFORE)}){_GAP}$",
    re.IGNORECASE,
)
_CLOSING = r"(?:\\[)\]]|[\s$)\]}*_\"'`.]|</\w+>)*+"
_IS_DENIED_AFTER = lazy_pattern(rf"{_CLOSING}(?:{'|'.join(_AFTER)})", re.IGNORECASE)
#: A sentence that withdraws what precedes it.
_RETRACTION = lazy_pattern(
    r"(?:\b(?:no|nope|wait|hmm+|hm|oh|oops|sorry|actually|but|however|hold on|unfortunately)\b"
    r"[\s,.!:–—-]*+){0,6}+"
    r"(?:\b(?:that|this|it|(?:this|that|the|my)(?: \w+)? (?:answer|result|value))\s?"
    rf"{_IS_WRONG}(?! (?:that|for|to)\b)|\bI(?:['’]ve| have)? made (?:a|an)(?: \w+)? (?:mistake|error)"
    r"|\bI was wrong|\bscratch that)|(?<=[.?] )Nop?e?\b[.!]?(?=\s*$)",
    re.IGNORECASE,
)
#: A sentence by which someone else is wrong: "He is mistaken."
_SOMEONE_IS_WRONG = lazy_pattern(
    r"\b(?:he|she|they|the (?:(?:text)?book|solution|(?:answer )?key|manual|author|teacher|student"
    r"|solver|website|calculator)"
    r"|(?-i:[A-Z])[a-z]+|(?:my|his|her|our|your|their) \w+)(?: (?:is|are|was|were)|['’](?:s|re))"
    r" (?:wrong|mistaken|incorrect)(?! (?:that|for|to)\b)",
    re.IGNORECASE,
)
_WRONG_WORDS = ("wrong", "mistaken", "incorrect")
#: Runs of lower-case letters of which each withdrawing sentence has at least one.
_TRACES = (
    *("wrong", "correct", "right", "mistake", "error", "false", "invalid", "possible", "reject", "exclude"),
    *(
        "discard",
        "eliminate",
        "dismiss",
        "extraneous",
        "typo",
        "scratch",
        "nope",
        "nop.",
        "not",
        "n't",
        "n’t",
    ),
    *(" out", "fails", "no sense", "contradicts"),
)
#: The end of a text after which a sentence begins.
_ENDED = lazy_pattern(r"(?:\A|[.!?:;–—)\]}$>*]\s*|,\s*(?:but|yet)\s+|\n\s*)\Z")
_TAG = lazy_pattern(r"</?[A-Za-z]\w*>")
#: A question by its word order, which states nothing.
_QUESTION = lazy_pattern(
    r"(?:^|(?<=[.!?]\s)|(?<=\n))\s*(?:(?:so|but|then|now|wait|and),? )?"
    r"(?:is|are|was|were|does|do|did|can|could|would|will|might|may|should|what if|how about)\b"
    r"(?:[^.!?\n]|\.(?=\d))*\?",
    re.IGNORECASE,
)
#: A sentence that ends with a value and a question mark: "The answer is 42?"
_DOUBTED = lazy_pattern(
    r"(?:^|(?<=[.!?]\s)|(?<=\n))(?:[^.!?\n]|\.(?=\d))*+(?:(?<=[\d)\]}$*])|(?<=\b[A-J]))\?"
)
#: A last sentence that names another answer: "Alternatively, 57.", "Wait, it's 57.", "Or it could be B."
_ANOTHER = lazy_pattern(
    r"(?<=[\d$)\]}*A-Ja-z])[\s*_)\]}$\"']*(?:\.{1,3}|[!?;,—–]|\n)[\s*_\"'(]*"
    r"(?:(?P<corrects>(?:(?:no|wait|hmm+|oops|sorry|actually|rather|correction|I mean(?:t)?|scratch that"
    r"|on second thought|hold on|my bad|wait a (?:minute|second|moment)|(?:just )?(?:kidding|joking)"
    r"|jk|ha(?:ha)+|lol|(?:my )?(?:mistake|apologies)|I misspoke|strike that"
    r"|I take (?:that|it) back|forget (?:that|it)|never ?mind"
    r"|let me correct (?:that|this|it|myself))\b[\s,:.!—–-]*)+)"
    r"|(?=(?:it|that|this|the (?:correct |right |final )?answer)\s+(?:could|might|may)\b"
    r"[^.\n]{0,40}\b(?:also|equally|as well|too)\b)"
    r"|(?:(?:or|alternatively|perhaps|maybe|possibly|otherwise|else|then again|if not)\b[\s,:]*)+)"
    r"(?:(?:it|that|this|the (?:correct |right |final )?answer|they)"
    r"(?:['’]s|\s+(?:is|could|might|may|would|should|are))"
    r"(?:\s+(?:also|equally|as well))?(?:\s+be)?\s+)?"
    r"(?:(?:maybe|perhaps|possibly|even|also|just|actually)\s+)*"
    r"[($*_€£\\\[]*(?:boxed\{)?(?P<value>-?[\d.,]*\d|[A-J]\b)[^\w=+*/^]*(?:[a-z]+\s?){0,2}[^\w=+*/^]*\Z",
    re.IGNORECASE,
)
#: A last sentence or clause that accepts another value too: "43 works as well", "I prefer 43".
_ACCEPTED_TOO = lazy_pattern(
    r"(?<![\w.,\\^])(?P<value>-?\d[\d.,]*(?<=\d))[$*)\]}\s]*+(?:[a-z]+\s+){0,2}?"
    r"(?:also (?:accepted|acceptable|possible|correct|right|valid|fine)\b"
    r"|(?:can|could|may|might|would|should) (?:also|equally|just as well|as well) (?:be|work|fit|do)\b"
    r"|can(?:not|['’]t) be (?:excluded|ruled out|dismissed|discarded)\b"
    r"|(?:is|are|was|works?|fits?|holds?|satisf(?:y|ies)|solves?|qualif(?:y|ies)"
    r"|(?:can|could|may|might|would|should)(?: \w+)? (?:be|work|fit|do))\b"
    r"(?:(?!\bnot\b|n['’]t\b|\b(?:wrong|incorrect|im|least)\b)[^.\n\d]){0,40}?\b(?:too|also|as well"
    r"|equally|acceptable|accepted|plausible|possible|defensible|conceivable|arguable"
    r"|an? (?:option|alternative|possibility)|another)\b"
    r"|(?:has its|is (?:just as|equally|arguably)) [a-z]+\b"
    r"|also\s+(?:works?|fits?|holds?|counts?|qualif\w+|satisf\w+|solves?)\b)[^\d]*\Z"
    r"|\b(?:argue for|I (?:also )?(?:prefer|favou?r)|I(?:['’]d| would) rather (?:say"
    r"|go with)|lean towards?)\s+"
    r"(?P<preferred>-?\d[\d.,]*(?<=\d))[^\d]*\Z",
    re.IGNORECASE,
)
#: A last question that offers another value: "or was it 43?"
_OR_ELSE = lazy_pattern(
    r"\b(?:or|maybe|perhaps)\s+[^.!?\n\d]{0,30}(?:-?\d[\d.,]*|\b(?-i:[A-J])\b)[^.!?\n]{0,20}\?\s*\Z",
    re.IGNORECASE,
)
#: A cross at the end, which marks an answer as wrong.
_CROSSED = lazy_pattern(r"[✗✘❌✖🚫]\s*\Z")
_LAST_NUMBER = lazy_pattern(r"(?<![\w.,\\^])(-?\d[\d.,]*(?<=\d))[^\d]*\Z")
_CONCLUDES = lazy_pattern(
    r"\b(?:only|so|thus|hence|therefore|that|conclude|answer is)\b[\s,:$*({\[]*\Z", re.IGNORECASE
)
#: Commands that are a space or around words in a formula.
_SPACING = lazy_pattern(r"\\[,;:! ]|\\q?quad(?![a-z])|~|\\(?:text\w*|mbox|mathrm)\s*\{([^{}]*)\}")
#: Maximum characters before and after a value that are read.
MAX_CHARS = 120
#: Maximum blanks between two sentences.
MAX_GAP = 20


def is_asserted(before: str, after: str) -> bool:
    """Whether a sentence states a value, given the sentence's text before and after it."""
    before = _TAG.sub(" ", before[-MAX_CHARS:])
    after = after[:MAX_CHARS]
    if "\\" in after:
        after = _SPACING.sub(lambda found: f" {found[1] or ''}", after)
    return not (_IS_DENIED.search(before) or _IS_DENIED_AFTER.match(after))


def asserted_part(text: str) -> str:
    """A text without questions, and without what one of its sentences withdraws ("No, that is wrong").

    Nothing is left if its last sentence names another answer ("The answer is 42. Or 57.").
    """
    if _CROSSED.search(text):
        return ""
    if "?" in text and _OR_ELSE.search(text, max(0, len(text) - MAX_CHARS)):
        return ""
    text = _DOUBTED.sub("", _QUESTION.sub("", text)) if "?" in text else text
    end = 0
    another = _ANOTHER.search(text, max(0, len(text) - MAX_CHARS))
    if another and not _ends_with(text[: another.start() + 1], another["value"]):
        return text[another.end("corrects") :] if another["corrects"] else ""
    accepted = _ACCEPTED_TOO.search(text, max(0, len(text) - MAX_CHARS))
    if accepted and _is_another(text[: accepted.start()], accepted["value"] or accepted["preferred"]):
        return ""
    lower = text.lower()
    if not any(map(lower.__contains__, _TRACES)):  # cheaper than the search for sentences
        return text
    retractions = list(_RETRACTION.finditer(text))
    if any(map(lower.__contains__, _WRONG_WORDS)):
        retractions += _SOMEONE_IS_WRONG.finditer(text)
    for retraction in retractions:
        if _ENDED.search(text, max(0, retraction.start() - MAX_GAP), retraction.start()):
            end = max(end, retraction.end())
    return text[end:]


def _ends_with(text: str, value: str) -> bool:
    """Whether the last number or letter of a text is this value."""
    return re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|[.,]\d)\W*$", text) is not None


def _is_another(before: str, value: str) -> bool:
    """Whether a value is not the last number before it, nor concluded from it: "so only 14 is possible"."""
    numbers = _LAST_NUMBER.search(before)
    return numbers is not None and numbers[1] != value and not _CONCLUDES.search(before)
