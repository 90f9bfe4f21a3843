"""Converts the columns of data sets to the row schema: known layouts, how to recognise and to read them.

Every layout names the columns that it reads, so `--prompt-key` and `--answer-key` work with all of them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from itertools import chain
from typing import Any, cast

from rlctl.data.literals import listed
from rlctl.data.records import (
    RowError,
    Values,
    check_last_turn,
    check_media,
    checked_extra,
    episode_columns,
    extra_of,
    given_answer,
    is_conversation,
    is_integer,
    kind_of,
    lookup,
    parse_answer,
    parse_messages,
    parse_row,
    source_named,
    text_of,
    with_columns,
)
from rlctl.data.schema import Message, Row
from rlctl.digits import whole_number
from rlctl.errors import UsageError
from rlctl.markup import group_end
from rlctl.prepare.blocks import Record
from rlctl.prepare.layouts import LAYOUT_TABLE
from rlctl.prepare.programming import apps, humaneval, live_code_bench, mbpp
from rlctl.prepare.sources import Source, read_records
from rlctl.registry import DATA_RECIPES, is_builtin
from rlctl.user_code import call_problem, is_file_function, line_in_user_code

ANSWER_MARK = "####"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^a-zA-Z\s])|\\(?:boxed|fbox)\s+")
#: The problem inside the instructions that DAPO-Math-17k puts around every problem.
_DAPO_PROBLEM = re.compile(r"\ASolve the following[^\n]*\n\n(.+?)\n\nRemember to put [^\n]*\Z", re.DOTALL)


#: (record, prompt_key, answer_key) → row without the recipe's additions, perhaps without data source and
#: question; raises RowError
Reader = Callable[[Values, str, str], Row]


def _answered(ability: str = "", truth_of: Callable[[str], str] = str.strip) -> Reader:
    """Reads any prompt and any answer, in which `truth_of` finds the ground truth."""

    def read(values: Values, prompt_key: str, answer_key: str) -> Row:
        prompt = parse_messages(lookup(values, prompt_key))
        name = f"column {(column_of(values, answer_key) or answer_key)!r}"
        answer = parse_answer(lookup(values, answer_key), name)
        return Row("", prompt, truth_of(answer) if answer else "", answer=answer, ability=ability)

    return read


_plain = _answered()


def _final_number(solution: str) -> str:
    """The number after the last `####`, without thousands separators."""
    _, mark, tail = solution.rpartition(ANSWER_MARK)
    number = tail.strip().replace(",", "")
    if not mark:
        raise RowError(f"the answer has no {ANSWER_MARK!r}")
    try:
        finite = Decimal(number).is_finite()
    except InvalidOperation:
        finite = False
    if not finite:
        raise RowError(f"what follows {ANSWER_MARK!r} is not a number: {tail.strip()[:50]!r}")
    return number


def _countdown(values: Values, prompt_key: str, answer_key: str) -> Row:
    """Numbers, and a target to reach with them; the ground truth contains both, as JSON."""
    numbers = listed(lookup(values, prompt_key))
    target = lookup(values, answer_key)
    if isinstance(target, str) and target.strip().isdecimal():  # of a table of texts
        target = whole_number(target.strip())
    if not isinstance(numbers, list) or not numbers or not all(map(is_integer, numbers)):
        raise RowError(f"column {prompt_key!r} is not a list of whole numbers")
    if not is_integer(target):
        raise RowError(f"column {answer_key!r} is {kind_of(target)}, not a whole number")
    question = f"Using the numbers {numbers}, create an equation that equals {target}."
    truth = json.dumps({"numbers": numbers, "target": target})
    return Row("", (Message("user", question),), truth, answer=str(target), ability="math")


def _multiple_choice(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A question with choices, which get letters; the ground truth is the letter of the correct one."""
    labels, texts = _choices(listed(lookup(values, "choices|options")))
    *before, last = parse_messages(lookup(values, prompt_key))
    choice = _chosen(lookup(values, answer_key), labels, texts)
    lettered = "\n".join(f"{LETTERS[i]}. {text}" for i, text in enumerate(texts))
    messages = (*before, Message(last.role, f"{last.content}\n\n{lettered}"))
    return Row("", messages, LETTERS[choice], answer=texts[choice])


def _choices(value: Any) -> tuple[list[str], list[str]]:
    """Returns labels and texts of choices: a list of texts, {text, label} lists or {label: text}."""
    texts = value
    labels = None
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), list):
            texts = value["text"]
            labels = value.get("label")
        else:
            labels = [label for label, text in value.items() if text is not None]  # a struct has nulls
            texts = [value[label] for label in labels]
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS):
        raise RowError(f"the choices are not a list of 2 to {len(LETTERS)} texts")
    if labels is None:
        labels = list(LETTERS[: len(texts)])
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise RowError("each choice needs exactly one label")
    return [str(label) for label in labels], [given_answer(text, "a choice") for text in texts]


def _chosen(answer: Any, labels: Sequence[str], texts: Sequence[str]) -> int:
    """Index of the correct choice, given by its label, else its number from 0, or its whole text."""
    if is_integer(answer) and str(answer) not in labels:
        if 0 <= answer < len(texts):
            return answer
        raise RowError(f"the answer is choice {answer}, counted from 0, of {len(texts)}")
    text = given_answer(answer, "the answer").strip()
    for names in (labels, texts):
        if list(names).count(text) == 1:
            return list(names).index(text)
    place = whole_number(text)
    if place is not None and 0 <= place < len(texts):
        return place
    raise RowError(f"the answer {text[:50]!r} is not one of the choices {', '.join(labels)}")


def last_boxed(solution: str) -> str:
    r"""Content of the last `\boxed{…}` or `\fbox{…}`, with balanced braces; also of `\boxed 2`.

    Raises:
        RowError: there is no box, its brace is never closed, or it is empty.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise RowError(r"the solution has no \boxed{}")
    start = boxes[-1].end()
    if solution[start : start + 1] == "{":
        end = group_end(solution, start + 1)
        if end is None:
            raise RowError(r"the last \boxed{ of the solution is never closed")
        content = solution[start + 1 : end]
    else:
        content = re.split(r"[\s$]", solution[start:], maxsplit=1)[0]
    if not content.strip():
        raise RowError(r"the last \boxed{} of the solution is empty")
    return content.strip()


def _verl(values: Values, prompt_key: str, answer_key: str) -> Row:
    """verl's five columns; all of `extra_info` is kept, and further columns join it."""
    parsed = parse_row(values, prompt_key, answer_key)
    return replace(parsed, extra=checked_extra(dict(parsed.extra)))


def _dapo_math(values: Values, prompt_key: str, answer_key: str) -> Row:
    """verl's columns, with the same instructions around every problem; the `question` excludes them."""
    parsed = _verl(values, prompt_key, answer_key)
    problem = _DAPO_PROBLEM.match(parsed.prompt[-1].content)
    return replace(parsed, ability="math", question=problem[1] if problem else parsed.question)


def _trl(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A prompt and an answer column, and perhaps `ability` and `style`."""
    parsed = _plain(values, prompt_key, answer_key)
    ability = values.get("ability")
    style = values.get("style")
    if not ability and not style:
        return parsed
    return replace(parsed, ability=text_of(ability), style=text_of(style) or "rule")


def _generic(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A prompt and perhaps an answer, which no record needs unless the user names its column."""
    is_usual = answer_key == LAYOUTS["generic"].answer_key
    if is_usual and column_of(values, answer_key) is None and column_of(values, prompt_key):
        values = {**values, "answer": None}
    reply = values.get("completion")
    if isinstance(reply, list):
        values = {**values, "completion": reply_of(reply)}
    return _trl(values, prompt_key, answer_key)


def reply_of(completion: list[Any]) -> Any:
    """The content of a completion that is a list of one message; other lists stay as they are."""
    only = completion[0] if len(completion) == 1 else None
    return only["content"] if isinstance(only, Mapping) and "content" in only else completion


def _alpaca(values: Values, prompt_key: str, answer_key: str) -> Row:
    """An instruction, perhaps with an input, and the output."""
    parsed = _plain(values, prompt_key, answer_key)
    input_text = text_of(values.get("input")).strip()
    if not input_text:
        return parsed
    *before, last = parsed.prompt
    return replace(parsed, prompt=(*before, replace(last, content=f"{last.content}\n\n{input_text}")))


def _conversation(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A conversation whose last message, the reply, is the answer."""
    *before, last = parse_messages(lookup(values, prompt_key))
    if last.role != "assistant" or not before:
        return Row("", (*before, last), "")
    answer = parse_answer(last.content, "the last message")
    return Row("", tuple(before), answer.strip(), answer=answer)


def _ends_with_reply(values: Values) -> bool:
    """Whether a record is a conversation that ends with a reply, and has no other answer."""
    column = column_of(values, LAYOUTS["conversation"].prompt_key)
    if column is None or column_of(values, LAYOUTS["generic"].answer_key) or "prompt" in values:
        return False
    try:
        messages = parse_messages(values[column])
    except RowError:
        return False
    return len(messages) > 1 and messages[-1].role == "assistant"


def _openrlhf(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A prompt, a label and an optional `datasource`."""
    source = source_named(values, "datasource") if "datasource" in values else ""
    return replace(_plain(values, prompt_key, answer_key), data_source=source)


@dataclass(frozen=True, slots=True)
class Layout:
    """One column layout. `auto` selects only among the built-in ones."""

    read: Reader
    #: prompt_key, answer_key: columns read; a dot selects a nested value, `|` separates alternatives
    prompt_key: str
    answer_key: str
    #: whether the values have the form of its records
    has_form: Callable[[Values], bool] = lambda _: True
    columns: Sequence[str] = ()  # columns that its records have
    one_of: Sequence[str] = ()  # columns of which they have at least one
    data_source: str = ""  # of rows from records that name none; "": the file's name
    instruction: str = ""  # follows the question, unless the user gives another one
    #: columns whose content is in the prompt and the ground truth, and which `extra_info` does not repeat
    in_truth: Sequence[str] = ()

    def recognises(self, values: Values) -> bool:
        """Whether a record has this layout."""
        has_one = not self.one_of or any(name in values for name in self.one_of)
        return values.keys() >= {*self.columns} and has_one and self.has_form(values)


def _is_verl(values: Values) -> bool:
    return values.keys() >= {"prompt", "data_source"} and isinstance(values.get("reward_model"), Mapping)


_READERS: dict[str, Reader] = {
    "gsm8k": _answered("math", _final_number),
    "dapo-math": _dapo_math,
    "verl": _verl,
    "countdown": _countdown,
    "multiple-choice": _multiple_choice,
    "humaneval": humaneval,
    "mbpp": mbpp,
    "apps": apps,
    "livecodebench": live_code_bench,
    "orz": _answered("math"),
    "aime": _answered("math"),
    "math": _answered("math", last_boxed),
    "alpaca": _alpaca,
    "conversation": _conversation,
    "openrlhf": _openrlhf,
    "trl": _trl,
    "generic": _generic,
}
#: Form of a layout's records, where their columns are not enough to recognise them.
_FORMS: dict[str, Callable[[Values], bool]] = {
    "gsm8k": lambda values: ANSWER_MARK in str(values.get("answer")),
    "dapo-math": lambda values: _is_verl(values) and str(values["data_source"]).startswith("math_dapo"),
    "verl": _is_verl,
    "countdown": lambda values: isinstance(listed(values.get("nums", values.get("numbers"))), list),
    "multiple-choice": lambda values: isinstance(
        listed(values.get("choices") or values.get("options")), list | Mapping
    ),
    "orz": lambda values: isinstance(values.get("1"), Mapping),
    "aime": lambda values: isinstance(values.get("answer"), str | int | float | list),
    "math": lambda values: r"\boxed" in str(values.get("solution")),
    "conversation": _ends_with_reply,
}


def _table() -> Iterator[tuple[str, Layout]]:
    for name, fields in LAYOUT_TABLE["layouts"].items():
        layout = fields | {"instruction": LAYOUT_TABLE["instructions"].get(fields.get("instruction"), "")}
        yield name, Layout(_READERS[name], has_form=_FORMS.get(name, lambda _: True), **layout)


#: Built-in layouts, the more specific first: `auto` selects the first that recognises the record.
LAYOUTS = dict(_table())


@cache
def layout_named(name: str) -> Layout:
    """The layout of a built-in recipe, of an installed package's, or of a user's `file.py:function`.

    Raises:
        UsageError: there is none, or the function returns something else.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    if not is_file_function(name) and name not in set(DATA_RECIPES):
        known = ", ".join([*LAYOUTS, *DATA_RECIPES])
        fix = f"one of {known}, or path/to/file.py:function"
        raise UsageError(f"no data recipe `{name}`", where=DATA_RECIPES.key, fix=fix)
    layout = DATA_RECIPES[name]()
    if not isinstance(layout, Layout):
        raise UsageError(f"it returned {type(layout).__name__}, not a Layout", where=name)
    for field in ("prompt_key", "answer_key", "data_source", "instruction"):
        value = getattr(layout, field)
        if not isinstance(value, str):
            raise UsageError(f"{field} of its Layout is {kind_of(value)}, not text", where=name)
    problem = call_problem(layout.read, {}, "", "")
    if problem:
        message = f"its `read` is called with a record, prompt_key and answer_key: {problem}"
        raise UsageError(message, where=name, fix="def read(values, prompt_key, answer_key)")
    return layout


def _read(layout: Layout, values: Values, prompt_key: str, answer_key: str) -> Row:
    """The row that a layout makes of a record; what a user's function returns is checked, and parsed as data.

    Raises:
        RowError: the record cannot be read, the user's function fails, or it returns something else.
    """
    if is_builtin(layout.read):
        return layout.read(values, prompt_key, answer_key)
    try:
        row = layout.read(values, prompt_key, answer_key)
    except RowError:
        raise
    except Exception as error:
        line = line_in_user_code(error) or layout.read.__module__
        raise RowError(f"the recipe fails: {type(error).__name__}: {error} ({line})") from error
    if not isinstance(row, Row):
        raise RowError(f"the recipe returned {'null' if row is None else type(row).__name__}, not a Row")
    if not isinstance(row.extra, Mapping):
        raise RowError(f"extra is {kind_of(row.extra)}, not a mapping")
    prompt: Any = row.prompt
    if isinstance(prompt, list | tuple):
        prompt = [asdict(message) if isinstance(message, Message) else message for message in prompt]
    texts = ("data_source", "ability", "style", "split", "question", "answer")
    return replace(
        row,
        prompt=parse_messages(prompt),
        ground_truth=parse_answer(row.ground_truth, "the ground truth", reads_literals=False),
        extra=checked_extra(extra_of(row.extra)),
        **cast(Any, {name: text_of(getattr(row, name)) for name in texts}),
    )


#: Columns that readers look for, besides those that the layouts name.
_OTHER_NAMES = (
    *("choices", "options", "data_source", "datasource", "ability", "style", "extra_info", "reward_model"),
    *("system", "environment", "tools", "starter_code", "metadata", "test_imports", "test_setup_code"),
)


def _known_names() -> dict[str, str]:
    """Name in lower case → name of a column that a layout reads."""
    keys = [f"{layout.prompt_key}|{layout.answer_key}".split("|") for layout in LAYOUTS.values()]
    columns = [[*layout.columns, *layout.one_of, *layout.in_truth] for layout in LAYOUTS.values()]
    names = chain(_OTHER_NAMES, *keys, *columns)
    return {name.lower(): name for name in names if "." not in name}


_KNOWN = _known_names()


@lru_cache(maxsize=4096)
def _renamed(names: tuple[str, ...]) -> dict[str, str]:
    """Column → name that layouts read it by, for columns that differ from it in case or outer spaces.

    Raises:
        RowError: two columns would have one name.
    """
    columns: dict[str, str] = {}
    for name in names:
        known = _KNOWN.get(name.strip().lower(), name)
        if known == name:
            continue
        others = [column for column, target in columns.items() if target == known]
        other = known if known in names else next(iter(others), None)
        if other:
            raise RowError(f"the columns {other!r} and {name!r} differ only in case: rename one of them")
        columns[name] = known
    return columns


def with_known_names(values: Values) -> Values:
    """The record with the names that layouts read beside those in another case: `Question`, `ANSWER`."""
    renamed = _renamed(tuple(values))
    return {**values, **{known: values[name] for name, known in renamed.items()}} if renamed else values


def names_column(problem: str) -> bool:
    """Whether a row cannot be used because the recipe reads other columns than the file has."""
    return "no column" in problem or "the prompt is" in problem


def column_of(values: Values, key: str) -> str | None:
    """The column, of the alternatives in a key, that a record is read by; None: it has none of them."""
    return _column_of(tuple(values), key)


@lru_cache(maxsize=4096)
def _column_of(names: tuple[str, ...], key: str) -> str | None:
    return next((name for name in key.split("|") if name.partition(".")[0] in names), None)


def columns_read(recipe: Recipe, values: Values) -> tuple[str | None, str | None]:
    """The columns of a record that a resolved recipe reads as prompt and answer, by their own names."""
    return _columns_read(recipe.prompt_key or "", recipe.answer_key or "", tuple(values))


@lru_cache(maxsize=4096)
def _columns_read(prompt_key: str, answer_key: str, names: tuple[str, ...]) -> tuple[str | None, str | None]:
    own = {known: name for name, known in _renamed(names).items()}
    prompt, answer = (_column_of((*names, *own), key) for key in (prompt_key, answer_key))
    return own.get(prompt or "", prompt), own.get(answer or "", answer)


@lru_cache(maxsize=4096)
def _carried_names(
    recipe: str, prompt_key: str, answer_key: str, names: tuple[str, ...]
) -> tuple[str | None, tuple[str, ...]]:
    """The prompt's column if `extra_info` has it unless it is a conversation, and all other columns of it."""
    renamed = _renamed(names)
    prompt, answer = _columns_read(prompt_key, answer_key, names)
    elsewhere = {"extra_info", "data_source", "environment", "tools", *layout_named(recipe).in_truth}
    if answer and renamed.get(answer, answer) == "answer":
        elsewhere.add("answer")
    if prompt and renamed.get(prompt, prompt) in {"prompt", "question", *elsewhere}:
        elsewhere.add(renamed.get(prompt, prompt))
        prompt = None
    carried = (name for name in names if name != prompt and renamed.get(name, name) not in elsewhere)
    return prompt if prompt in names else None, tuple(carried)


#: Usual names of the columns of question and answer, in lower case; the likeliest first.
_USUAL_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "text", "messages")
_USUAL_ANSWERS = ("answer", "ground_truth", "solution", "target", "label", "output", "response", "completion")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options for converting records to rows. None: the default of the layout, see `LAYOUTS`."""

    name: str = "auto"  # of the layout, or `path/to/file.py:function`
    #: column of the prompt; a dot selects a nested value, `|` separates alternatives
    prompt_key: str | None = None
    answer_key: str | None = None  # column of the answer
    #: data source of the rows, which selects the grader; default: the record's, else the layout's, else the
    #: file's name
    data_source: str | None = None
    system_prompt: str | None = None  # precedes the conversation, in place of its own system message
    instruction: str | None = None  # follows the text of the last message
    source_key: str | None = None  # column that names each record's data source
    #: a prompt may end with a message of the assistant, which the response continues
    continue_final_message: bool = False

    def resolve(self, sources: Iterable[Source] = ()) -> Recipe:
        """Returns a copy with the defaults of the layout filled in.

        `auto` becomes the layout of the first record with columns in `sources`; without one, `generic`.

        Raises:
            UsageError: both a data source and a column of data sources are given, or there is no such recipe.
        """
        name = self.name
        if name == "auto":
            records = (record.values for source in sources for record in read_records(source))
            name = recognise(next(filter(None, records), {}))
        if name == "conversation" and self.continue_final_message:
            name = "generic"
        if self.data_source and self.source_key:
            raise UsageError("--data-source and --source-key exclude each other", fix="give one of them")
        layout = layout_named(name)
        return replace(
            self,
            name=name,
            prompt_key=self.prompt_key or layout.prompt_key,
            answer_key=self.answer_key or layout.answer_key,
            instruction=layout.instruction if self.instruction is None else self.instruction,
        )

    def options_for(self, columns: Iterable[str]) -> str:
        """Options that name the columns of question and answer, if `columns` has others of usual names."""
        lower = {column.strip().lower(): column for column in columns}
        own_keys = {*f"{self.prompt_key}|{self.answer_key}".split("|")}
        options = {
            option: lower[name]
            for option, usual in {"--answer-key": _USUAL_ANSWERS, "--prompt-key": _USUAL_PROMPTS}.items()
            if (name := next(filter(lower.get, usual), None))
        }
        is_new = len(options) == 2 and not own_keys.issuperset(options.values())
        return " ".join(f"{option} {shlex.quote(column)}" for option, column in options.items() if is_new)

    def to_row(self, values: Mapping[str, Any], source: str, index: int) -> Row:
        """Converts a record of a file, for `source` see `Source.name`, to a row; `self` must be resolved.

        Raises:
            RowError: the record lacks a column, or a column has an invalid value.
        """
        check_media(values)
        layout = layout_named(self.name)
        record = values
        values = with_known_names(values)
        parsed = _read(layout, values, self.prompt_key or "", self.answer_key or "")
        messages = parsed.prompt
        check_last_turn(messages, continue_final_message=self.continue_final_message)
        if self.instruction:
            position = len(messages) - 1 - (messages[-1].role == "assistant")
            asked = replace(messages[position], content=f"{messages[position].content}\n{self.instruction}")
            messages = (*messages[:position], asked, *messages[position + 1 :])
        starts = messages[0].role == "system"
        if self.system_prompt:
            messages = (Message("system", self.system_prompt), *messages[starts:])
        elif not starts and (system := text_of(values.get("system"))).strip():
            messages = (Message("system", system), *messages)
        own = (self.data_source or "") if self.source_key is None else source_named(values, self.source_key)
        if not own and "data_source" in values and not parsed.data_source:
            own = source_named(values, "data_source")
        extra = checked_extra(self._carried(record, values, dict(parsed.extra)) | episode_columns(values))
        stored = extra.get("index")
        question, answer = (text_of(extra.get(name)) for name in ("question", "answer"))
        return Row(  # `replace` takes several times as long
            data_source=own or parsed.data_source or layout.data_source or source,
            prompt=messages,
            ground_truth=parsed.ground_truth,
            ability=parsed.ability,
            style=parsed.style,
            split=parsed.split,
            index=index if stored is None else stored,
            question=parsed.question or question or _question(parsed.prompt),
            answer=answer or parsed.answer,
            extra=extra,
        )

    def _carried(self, record: Values, values: Values, extra: dict[str, Any]) -> dict[str, Any]:
        """Fields of `extra_info`: all columns of a record that the row does not store elsewhere.

        `values` is the record with the names that layouts read.
        """
        if self.name in {"verl", "dapo-math"}:  # `parse_row` has kept them
            return extra
        carried = values.get("extra_info")
        if isinstance(carried, Mapping):
            extra = extra_of(carried) | extra
        prompt, names = _carried_names(self.name, self.prompt_key or "", self.answer_key or "", tuple(record))
        if prompt and not is_conversation(record[prompt]):
            names = (*names, prompt)
        return with_columns(extra, record, names)

    def read(self, record: Record, source: str, index: int) -> tuple[Row | None, str]:
        """Returns the record's row and "", or None and why it cannot be used; arguments as in `to_row`."""
        if record.values is None:
            return None, record.problem
        try:
            return self.to_row(record.values, source, index), ""
        except RowError as error:
            return None, str(error)

    def question(self, record: Record, source: str) -> str:
        """Returns the record's question, also if it has no usable answer; arguments as in `to_row`.

        Raises:
            RowError: it has no question.
        """
        if record.values is None:
            raise RowError(record.problem)
        row, _ = self.read(record, source, 0)
        if row is None:
            return _question(parse_messages(lookup(record.values, self.prompt_key or "")))
        return row.question


def _question(prompt: Sequence[Message]) -> str:
    """The messages without system messages, separated by empty lines; all if there are no others."""
    asked = [message.content or message.other for message in prompt if message.role != "system"]
    return "\n\n".join(asked or [message.content for message in prompt])


def recognise(values: Mapping[str, Any]) -> str:
    """Returns the name of the first layout that recognises a record."""
    try:
        values = with_known_names(values)
    except RowError:  # reported where the record is read
        return "generic"
    return next(name for name, layout in LAYOUTS.items() if layout.recognises(values))


def read_rows(source: Source, recipe: Recipe | None = None) -> Iterator[tuple[Record, Row | None, str]]:
    """Yields every record of a file with its row and ""; or with None and the reason if it cannot be used.

    Without a (resolved) recipe, the first record with columns determines it.
    """
    for index, record in enumerate(read_records(source)):
        if recipe is None and record.values:
            recipe = Recipe(recognise(record.values)).resolve()
        row, problem = (recipe or Recipe("generic").resolve()).read(record, source.name, index)
        yield record, row and replace(row, where=record.where), problem
