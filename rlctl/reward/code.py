"""Grades programs by running them against the ground truth's tests in a sandbox.

The program's process never decides whether a test passes: either it only returns output or values, which this
process compares, or test code in a second sandboxed process calls the program (`sandbox/peer.py`).
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlctl.lazy import lazy_pattern
from rlctl.registry import GRADERS
from rlctl.reward.code_sources import PLAIN, CodeSource, code_source
from rlctl.reward.pool import share_of_cores
from rlctl.reward.protocol import Failure, Grade, KnownResponses, Sample, Scorer, accepted_answers
from rlctl.reward.sandbox.jail import encode, same
from rlctl.reward.sandbox.run_program import (
    MAX_OUTPUT_BYTES,
    Limits,
    NotRun,
    Step,
    check_sandbox,
    run_program,
)
from rlctl.reward.thoughts import without_thoughts

if TYPE_CHECKING:
    from rlctl.run_spec.rollout import RewardSpec

#: A fence in a line, also after text: of three marks or more, with a language and the rest of the line.
_FENCE = lazy_pattern(r"(?P<before>[^`~]*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>\w*+)(?P<rest>.*+)")
#: Tags around a program, as in the few-shot prompts of MBPP and in CodeLlama's.
_TAGGED = lazy_pattern(r"\[(?:BEGIN|PYTHON)\]")
_ANSWER_TAG = lazy_pattern(r"</?answer>", re.IGNORECASE)
_TAG_END = lazy_pattern(r"\[(?:DONE|END|/BEGIN|/PYTHON)\]")
#: HTML elements around a program; the first tag begins or ends its line, so that it is no text of a program.
_ELEMENT, _WRAPPER = (
    lazy_pattern(
        rf"(?:^[ \t]*|(?=<[^\n]{{0,200}}>[ \t]*\n))(?:<pre\b[^<>\n]*>[ \t]*)?<(?P<tag>{tags})\b[^<>\n]*>"
        r"(?P<code>(?:(?!<(?P=tag)\b).)*?)</(?P=tag)>",
        re.IGNORECASE | re.MULTILINE | re.DOTALL,
    )
    for tags in ("code|python|pre", "answer|solution|program")
)
#: Lines of a quotation in Markdown, apart from sessions (`>>>`), and the mark of each.
_QUOTATION = lazy_pattern(r"(?:^[ ]{0,3}>(?!>>).*\n?)+", re.MULTILINE)
_QUOTED = lazy_pattern(r"^[ ]{0,3}>[ ]?", re.MULTILINE)
_PYTHON = lazy_pattern(r"i?py(?:thon)?\d*", re.IGNORECASE)
#: Lines at the top level that only define: they print nothing.
_ONLY_DEFINES = lazy_pattern(
    r"\s*(?:(?:from|import|def|class|async[ \t]+def|sys\.setrecursionlimit|threading\.stack_size)\b"
    r"|[@#)\]}\"']|[\w., ]+=(?!=)|\Z)|[ \t]"
)
#: Names that a block defines at its top level; its imports and the functions and classes that it calls.
_DEFINED = lazy_pattern(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_SESSION = lazy_pattern(r"\s*>>>")
_USED = lazy_pattern(r"\bimport\b.*|(?<![.\w])\w+(?=[ \t]*\()")
#: A decimal number, short enough for Python to read.
_NUMBER = lazy_pattern(r"[+-]?(?=.{1,400}\Z)(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def _known_responses(ground_truth: str) -> KnownResponses:
    parse_tests(ground_truth)
    return None, None


@GRADERS.register(
    "code",
    label="a program that passes tests",
    formula="1 if the response's program passes all tests of the ground truth, else 0",
    needs={"tests as ground truth", "Linux on x86_64 or aarch64"},
    known_responses=_known_responses,
    score_range=(0.0, 1.0),
    data_sources=(
        r"code_?contests\w*|apps|codeforces|taco|human_?eval\w*|mbpp\w*|live_?code_?bench\w*|leetcode\w*"
    ),
)
class CodeScorer(Scorer):
    """1.0 when the response's program passes every test of its ground truth, else 0.0.

    A program that crashes or reaches its time or memory limit scores 0.0, whatever it does. A ground truth
    without tests, or with tests that pass without a program, is a `Failure`, and so is a machine that cannot
    confine a program or is too busy to run it.

    Raises:
        EnvironmentFailure: this machine cannot confine programs.
    """

    def __init__(self, spec: RewardSpec, device: object = None) -> None:
        self._timeout_s = spec.code.timeout_s
        self._memory_mb = spec.code.memory_mb
        check_sandbox(self._limits(PLAIN))

    def _limits(self, source: CodeSource) -> Limits:
        return Limits(self._timeout_s, self._memory_mb or source.memory_mb)

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Returns one grade per sample, in order; runs `share_of_cores()` programs in parallel."""
        with ThreadPoolExecutor(share_of_cores()) as threads:
            return list(threads.map(self._grade, samples))

    def _grade(self, sample: Sample) -> Grade:
        try:
            tests = parse_tests(sample.ground_truth)
        except ValueError as error:
            return Failure(f"the ground truth contains no tests: {error}")
        try:
            source = code_source(sample.data_source, sample.ground_truth)
            program = program_of(sample.without_thoughts().response, tests)
            limits = self._limits(source)
            passes = tests.pass_with(program, limits, source)
            if passes and _pass_without_a_program(sample.ground_truth, limits):
                return Failure("the tests of the ground truth pass without a program")
        except NotRun as error:
            return Failure(str(error), "machine")
        return float(passes)


def program_of(response: str, tests: Tests | None = None) -> str:
    """The last fenced block after the thoughts that is marked as Python and is not an example of its use.

    Without one it is the last HTML element of code, then the last block without a language, or the whole text
    after the thoughts.

    Args:
        response: perhaps with thoughts.
        tests: that the program must pass. Later blocks without which it does not define what the tests call,
            or does not run anything, belong to it.
    """
    text = without_thoughts(response).replace("\r\n", "\n")
    tag = _TAGGED.search(text)
    if tag or _TAG_END.search(text):
        start = tag.end() if tag else 0
        end = _TAG_END.search(text, start)
        text = text[start : end.start() if end else len(text)]
    if ">" in text:
        text = _QUOTATION.sub(_without_marks, text)
    blocks = [(language, textwrap.dedent(code)) for language, code in _blocks(text)]
    python = [code for language, code in blocks if _PYTHON.fullmatch(language)]
    unmarked = [code for language, code in blocks if not language]
    programs = python or _elements(_ELEMENT, text) or list(filter(_USED.search, unmarked)) or unmarked
    programs = programs or _elements(_WRAPPER, text)
    return _last_program(programs or [_ANSWER_TAG.sub("", text)], tests)


def _elements(element: re.Pattern[str], text: str) -> list[str]:
    """The contents of elements: of those with several lines, else of those that call or import something."""
    found = [textwrap.dedent(one["code"]) for one in element.finditer(text)] if "</" in text else []
    return [code for code in found if "\n" in code.strip()] or list(filter(_USED.search, found))


def _without_marks(quotation: re.Match[str]) -> str:
    """The lines of a quotation that has a fence, without the marks of quotation."""
    return _QUOTED.sub("", quotation[0]) if "```" in quotation[0] or "~~~" in quotation[0] else quotation[0]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Languages and contents of fenced blocks; a block without a closing fence ends with the text.

    A fence may follow text in its line. A line that begins with a fence of at least as many marks ends a
    block, and begins the next one if it names a language; so does a fence at the end of a line of the block.
    """
    fence = ""
    language = ""
    lines = list[str]()
    for line in text.split("\n"):
        mark = _FENCE.match(line) if "```" in line or "~~~" in line else None
        is_fence = mark is not None and (not fence or mark["fence"].startswith(fence))
        if mark is None or not is_fence:
            lines.append(line)
            continue
        before = mark["before"]
        closes = mark["fence"] * (not mark["language"])
        inline, closing, _ = mark["rest"].partition(mark["fence"])
        if fence and before.strip() and mark["language"]:  # marks within a text of the program
            lines.append(line)
        elif fence:
            yield language, "\n".join([*lines, before if before.strip() else ""])
            fence, language, lines = ("", "", []) if closes else (mark["fence"], mark["language"], [])
        elif closing:  # a block of one line
            is_language = _PYTHON.fullmatch(mark["language"])
            yield mark["language"] if is_language else "", ("" if is_language else mark["language"]) + inline
        else:
            fence = mark["fence"]
            language = mark["language"]
            lines = []
    if fence:
        yield language, "\n".join(lines)


def _last_program(blocks: Sequence[str], tests: Tests | None) -> str:
    """The last block that is no session and uses no function or class that only an earlier block defines.

    Later blocks are joined to it if the `tests` need them. Decided by the words of the text: parsing code
    that a model wrote can end the process.
    """
    place = 0
    earlier = set[str]()
    for index, code in enumerate(blocks):
        defined = set(_DEFINED.findall(code))
        used = set(re.findall(r"\w+", " ".join(_USED.findall(re.sub(r"#.*", "", code)))))
        if not (used - defined) & earlier and not _SESSION.match(code):
            place = index
        earlier |= defined
    program = blocks[place]
    for code in blocks[place + 1 :]:
        if tests is not None and not _SESSION.match(code) and _lacks(program, code, tests):
            program = f"{program}\n\n{code}"
    return program


def _lacks(program: str, code: str, tests: Tests) -> bool:
    """Whether a program needs a later block: it only defines, or the tests call what the block defines."""
    if isinstance(tests, ScriptTests):
        return all(map(_ONLY_DEFINES.match, program.splitlines()))
    added = set(_DEFINED.findall(code)) - set(_DEFINED.findall(program))
    return any(re.search(rf"\b{name}\b", tests.text) for name in added)


@lru_cache(maxsize=1024)
def _pass_without_a_program(ground_truth: str, limits: Limits) -> bool:
    """Whether an empty program passes, for example because no code calls the function with the asserts."""
    return parse_tests(ground_truth).pass_with("", limits, PLAIN)


@dataclass(frozen=True, slots=True)
class ScriptTests:
    """Inputs of a script and the outputs that it must print; lines are compared word by word."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def pass_with(self, program: str, limits: Limits, source: CodeSource) -> bool:
        """Runs one process per input until one fails; each has the whole time limit."""
        prelude = source.prelude(program)
        for given, wanted in zip(self.inputs, self.outputs, strict=True):
            most = MAX_OUTPUT_BYTES + 4 * len(wanted)
            outcome = run_program(program, limits, prelude=prelude, stdin=given, max_output=most)
            if outcome.exit_code != 0 or not _same_text(outcome.stdout, wanted):
                return False
        return True


@dataclass(frozen=True, slots=True)
class CallTests:
    """Steps that run after the program, and the expected values of the `eval` steps."""

    steps: tuple[Step, ...]
    values: tuple[Any, ...]
    #: compare values as JSON: tuples are lists, keys are text
    as_json: bool

    @property
    def text(self) -> str:
        """The code that calls the program."""
        return "\n".join(code for _, code in self.steps)

    def pass_with(self, program: str, limits: Limits, source: CodeSource) -> bool:
        """Runs all steps in one process, which returns the values; they are compared here."""
        prelude = source.prelude(program)
        most = MAX_OUTPUT_BYTES // 16 + 32 * len(json.dumps(self.values))
        outcome = run_program(program, limits, prelude=prelude, steps=self.steps, max_output=most)
        if len(outcome.values) != len(self.values):
            return False
        wanted = [self.values]
        if self.as_json and all(isinstance(v, list) and v[0] == "list" and len(v) == 2 for v in self.values):
            wanted.append(tuple(value for _, value in self.values))  # APPS puts every value in a list
        try:
            found = [_as_json(value) for value in outcome.values] if self.as_json else outcome.values
            return any(all(map(same, found, values)) for values in wanted)
        except (RecursionError, TypeError, ValueError):  # nested too deep, or not written by `encode`
            return False


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Test code that runs in a separate process and calls the program."""

    text: str

    def pass_with(self, program: str, limits: Limits, source: CodeSource) -> bool:
        """Runs the program and the tests in two processes; the process of the tests decides."""
        prelude = source.prelude(f"{program}\n{self.text}")
        return run_program(program, limits, prelude=prelude, tests=self.text).passed


Tests = ScriptTests | CallTests | CodeTests


@lru_cache(maxsize=1024)  # the responses to a prompt share one ground truth
def parse_tests(ground_truth: str) -> Tests:
    """Parses tests in one of three forms; see docs/how-to/code-rewards.md.

    Raises:
        ValueError: the ground truth has none of these forms.
    """
    if ground_truth.lstrip().startswith("["):
        return _assert_tests("\n".join(accepted_answers(ground_truth)))
    if ground_truth.lstrip().startswith("{"):
        try:
            values = json.loads(ground_truth, parse_int=_integer)
        except ValueError as error:
            raise ValueError(f"it starts like JSON, but {error}") from None
        return _json_tests(values)
    return _assert_tests(ground_truth)


def _json_tests(values: dict[str, Any]) -> Tests:
    inputs = values.get("inputs")
    outputs = values.get("outputs")
    name = values.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("`inputs` and `outputs` must be lists")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return ScriptTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"`fn_name` is {name!r}")
    if all(isinstance(text, str) for text in [*inputs, *outputs]):  # JSON, one line per argument
        inputs = [[json.loads(line) for line in text.split("\n")] for text in inputs]
        outputs = [json.loads(text, parse_int=_integer) for text in outputs]
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("with `fn_name` every input is the list of arguments of one call")
    # In many data sets the function is a method of `class Solution`.
    found = f"{name} if '{name}' in globals() else Solution().{name}"
    calls: list[Step] = [("eval", f"({found})(*{arguments!r})") for arguments in inputs]
    return CallTests(tuple(calls), tuple(_as_json(encode(value)) for value in outputs), as_json=True)


def _integer(digits: str) -> int:
    """As `int`, which refuses more than 4300 digits."""
    return int(digits) if len(digits) < 4000 else int(Decimal(digits))


def _text(lines: Any) -> str:
    """Text of standard input or output, which some data sets give as a list of lines."""
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return "\n".join(lines)
    if not isinstance(lines, str):
        raise ValueError("without `fn_name` every input and output is the text of standard input and output")
    return lines


def _assert_tests(text: str) -> CallTests | CodeTests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"neither JSON nor Python: {error}") from None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("it contains no assert")
    equations = {index: found for index, one in enumerate(tree.body) if (found := _equation(one))}
    if all(
        index in equations and _is_plain_call(equations[index][0])
        for index, one in enumerate(tree.body)
        if not isinstance(one, ast.Import | ast.ImportFrom)
    ):
        steps: list[Step] = [
            ("eval", ast.unparse(equations[index][0])) if index in equations else ("exec", ast.unparse(one))
            for index, one in enumerate(tree.body)
        ]
        values = tuple(encode(ast.literal_eval(wanted)) for _, wanted in equations.values())
        return CallTests(tuple(steps), values, as_json=False)
    for place, (asked, wanted) in equations.items():
        tree.body[place] = ast.Assert(ast.Call(ast.Name("_rlctl_same", ast.Load()), [asked, wanted], []))
    return CodeTests(ast.unparse(ast.fix_missing_locations(tree)))


def _equation(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The expression and the literal of `assert EXPRESSION == LITERAL`, in either order; else None."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            return next(((a, b) for a, b in ((left, right), (right, left)) if _is_literal(b)), None)
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        encode(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _is_plain_call(node: ast.expr) -> bool:
    """Whether an expression only calls the program's functions with literals.

    Such an expression contains no test logic, so the program's process may evaluate it.
    """
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            given = [*args, *(keyword.value for keyword in keywords)]
            return all(map(_is_literal, given)) and _is_plain_call(func)
        case ast.Attribute(value=value):
            return _is_plain_call(value)
    return isinstance(node, ast.Name)


def _same_text(found: str, wanted: str) -> bool:
    """Whether texts have the same words in every line; numbers written as floats are compared as numbers."""
    lines = [line.split() for line in found.rstrip().split("\n")]
    wanted_lines = [line.split() for line in wanted.rstrip().split("\n")]
    return list(map(len, lines)) == list(map(len, wanted_lines)) and all(
        map(_same_word, chain.from_iterable(lines), chain.from_iterable(wanted_lines))
    )


def _same_word(printed: str, wanted: str) -> bool:
    if printed == wanted:
        return True
    # Two integers are equal only as text: the binary number 011 is not 11.
    if not all(map(_NUMBER.fullmatch, (printed, wanted))) or (printed + wanted).strip("+-0123456789") == "":
        return False
    return same(*(float(word) if set(word) & set(".eE") else int(word) for word in (printed, wanted)))


def _as_json(code: Any) -> Any:
    """Converts an encoded value (see `encode`) as a round trip through JSON would; it stays encoded."""
    match code:
        case ["list" | "tuple", *items]:
            return ["list", *map(_as_json, items)]
        case ["dict", *pairs]:
            texts = [
                [key if isinstance(key, str) else json.dumps(key), _as_json(item)] for key, item in pairs
            ]
            return ["dict", *sorted(texts, key=lambda pair: json.dumps(pair[0]))]
    return code
