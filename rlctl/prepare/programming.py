"""Reads data sets of programming problems: HumanEval, MBPP, APPS and LiveCodeBench, in their own columns.

The ground truths are tests in the forms that the grader `code` runs (docs/how-to/code-rewards.md).
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from rlctl.data.literals import listed
from rlctl.data.records import (
    RowError,
    Values,
    check_text,
    given_answer,
    kind_of,
    lookup,
    parse_messages,
    text_of,
)
from rlctl.data.schema import Message, Row
from rlctl.errors import first_line

#: Maximum bytes of the tests of one problem, after decompression.
MAX_TEST_BYTES = 256 << 20
#: All that a pickled text consists of.
_TEXT_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def humaneval(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A function's head, and `check(candidate)` with asserts; the ground truth also calls it."""
    test = given_answer(lookup(values, answer_key), answer_key)
    name = lookup(values, "entry_point")
    if not isinstance(name, str) or not name.isidentifier():
        raise RowError(f"column 'entry_point' is {name!r}, not the name of a function")
    head = given_answer(lookup(values, prompt_key), prompt_key)
    if f"check({name})" not in test:
        test = f"{test.rstrip()}\n\ncheck({name})\n"
    return _row(f"Complete this function:\n\n```python\n{head.rstrip()}\n```", test)


def mbpp(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A task in words, and a list of asserts; only the first is shown, because it names the function."""
    tests = listed(lookup(values, answer_key))
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise RowError(f"column {answer_key!r} is not a list of asserts")
    imports = values.get("test_imports") or []
    setup = [*imports, text_of(values.get("test_setup_code"))] if isinstance(imports, list) else []
    task = given_answer(lookup(values, prompt_key), prompt_key)
    truth = check_text("\n".join([*filter(None, setup), *tests])) if tests else ""
    shown = f"\n\nIt must pass tests such as:\n\n```python\n{tests[0]}\n```" if tests else ""
    return _row(f"{task}{shown}", truth)


def apps(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A problem, and JSON with `inputs`, `outputs` and perhaps `fn_name`; no answer if there are no tests."""
    tests = _json(lookup(values, answer_key), answer_key) or {}
    if not isinstance(tests, dict):
        raise RowError(f"column {answer_key!r} is {kind_of(tests)}, not an object with inputs and outputs")
    name = tests.get("fn_name")
    inputs = tests.get("inputs")
    given = {"inputs": inputs, "outputs": tests.get("outputs")} | ({"fn_name": name} if name else {})
    truth = json.dumps(given, ensure_ascii=False) if inputs else ""
    return _row(_asked(values, prompt_key), truth)


def live_code_bench(values: Values, prompt_key: str, answer_key: str) -> Row:
    """A problem with public and private tests; both are in the ground truth."""
    tests: list[Any] = []
    for column in (answer_key, "private_test_cases"):
        found = _json(values.get(column), column) or []
        tests += found if isinstance(found, list) else [found]
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        raise RowError("a test case is not an object with input and output")
    metadata = _json(values.get("metadata"), "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    given = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    if any(test.get("testtype") == "functional" for test in tests):
        if not name:
            raise RowError("the tests call a function, and the metadata has no 'func_name'")
        given["fn_name"] = name
    truth = json.dumps(given, ensure_ascii=False) if tests else ""
    return _row(_asked(values, prompt_key), truth)


def _row(question: str, truth: str) -> Row:
    return Row("", (Message("user", check_text(question)),), check_text(truth), ability="code")


def _asked(values: Values, prompt_key: str) -> str:
    """The problem, and its starter code or how it reads its input."""
    *_, last = parse_messages(lookup(values, prompt_key))
    starter = text_of(values.get("starter_code")).strip()
    if starter:
        return f"{last.content}\n\nComplete this code:\n\n```python\n{starter}\n```"
    return f"{last.content}\n\nRead from standard input and write to standard output."


def _json(value: Any, column: str) -> Any:
    """JSON in a text; also as LiveCodeBench compresses it: a pickled text of JSON, zlib, Base64.

    Raises:
        RowError: it is neither.
    """
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if value.lstrip()[0] in "[{":
            raise RowError(f"column {column!r} is not JSON: {error}") from None
    try:
        unpack = zlib.decompressobj()
        pickled = unpack.decompress(base64.b64decode(value, validate=True), MAX_TEST_BYTES)
        if not unpack.eof:
            raise ValueError(f"it has more than {MAX_TEST_BYTES >> 20} MiB, or is cut off")
        # Read without the module pickle, which would run code.
        opcodes = [(code.name, text) for code, text, _ in pickletools.genops(pickled)]
        texts = [text for name, text in opcodes if name not in _TEXT_OPCODES]
        return json.loads(texts[0] if len(texts) == 1 and isinstance(texts[0], str) else "")
    except (ValueError, RecursionError, binascii.Error, zlib.error) as error:
        message = f"column {column!r} is neither JSON nor a compressed text of JSON"
        raise RowError(f"{message}: {first_line(error)}") from error
