"""Which grader `auto` takes for a row: by the name of its data source."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

GraderName = Literal["exact", "maths", "multiple_choice", "countdown"]
#: `code` runs programs in a sandbox instead of comparing texts.
SourceGrader = GraderName | Literal["code"]

#: A part of a source's name, as in `openai/gsm8k` or `allenai/ai2_arc`, and who grades its rows.
_SOURCES: list[tuple[SourceGrader, str]] = [
    ("exact", r"embedded/addition"),
    ("countdown", r"countdown\w*"),
    ("code", r"codecontests|code_contests|apps|codeforces|taco|humaneval|mbpp|livecodebench|leetcode\w*"),
    ("multiple_choice", r"mmlu|gpqa|arc|hellaswag|commonsense_?qa|openbook_?qa|aqua|aqua_rat|sciq|medmcqa"),
    ("maths", r"gsm8k|gsm|math\w*|aime\d*|amc\d*|numina\w*|olympiad\w*|minerva|deepscaler|orz|svamp|asdiv"),
    ("maths", r"multiarith|polaris|omni_math"),
]
_PATTERNS = [
    (grader, re.compile(rf"(?:^|[/_.\- ])(?:{names})(?:$|[/_.\- ])", re.IGNORECASE))
    for grader, names in _SOURCES
]


def grader_for(data_source: str) -> SourceGrader:
    """Who grades rows of this source when the spec says `auto`; `maths` when nothing is known of it."""
    return _registered(data_source) or "maths"


def knows_source(data_source: str) -> bool:
    """Whether a grader is registered for this source; rows of others are graded as mathematics."""
    return _registered(data_source) is not None


@lru_cache(maxsize=1024)
def _registered(data_source: str) -> SourceGrader | None:
    return next((grader for grader, pattern in _PATTERNS if pattern.search(data_source)), None)
