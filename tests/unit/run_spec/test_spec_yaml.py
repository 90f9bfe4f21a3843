"""The strict YAML reader: what it refuses, with the line, and what it must not misread."""

from __future__ import annotations

import pytest

from rlctl.run_spec.sources import MAX_BYTES, Origin, SpecSource, parse_scalar, read_value, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-7", 5e-7),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("2.", 2.0),
        ("-1", -1),
        ("010", 10),
        ("0.5_2", "0.5_2"),  # YAML 1.1 reads 0.52
        ("1_2", "1_2"),  # YAML 1.1 reads 12
        ("0.6_1.6,2.5", "0.6_1.6,2.5"),
        ("12:30:45", "12:30:45"),  # YAML 1.1 reads 45045
        ("0x1f", "0x1f"),
        ("yes", "yes"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("None", "None"),
        ("2026-01-01", "2026-01-01"),
        ("-.inf", float("-inf")),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_scalars(text, value):
    parsed = parse_scalar(text)
    assert parsed == value
    assert type(parsed) is type(value)


def read(raw: bytes) -> SpecSource:
    return read_yaml(raw, (), SpecSource(Origin("file", "spec.yaml")))


def test_leaves_carry_their_lines_and_text():
    source = read(b"# c\nactor:\n  lr: 2.10\n\n  betas: [0.9, 0.99]\ntrainer.seed: 3\nname: '5'\n")
    assert not source.problems
    assert source.leaves["actor.lr"].origin.line == 3
    assert source.leaves["actor.lr"].text == "2.10"
    assert source.leaves["actor.betas"].value == [0.9, 0.99]
    assert source.leaves["actor.betas"].origin.line == 5
    assert source.leaves["trainer.seed"].origin.line == 6
    assert source.leaves["name"].value == "5"


ALIAS_BOMB = b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        (b"actor:\n  lr: 1\n  lr: 2\n", 3, "twice (first on line 2)"),
        (b"actor:\n  lr: 1\nactor:\n  lr: 2\n", 3, "`actor` is given twice"),
        (b"actor:\n  lr: 1\nactor.lr: 2\n", 3, "`actor.lr` is given twice"),
        (b"\n" + ALIAS_BOMB, 2, "anchors"),
        (b"a: *b\n", 1, "aliases"),
        (b"a:\n  - {b: 1, c: 2}\n  - {b: 1,\n     b: 2}\n", 4, "`b` is given twice"),
        (b"a: [[{b: {c: 1, c: 2}}]]\n", 1, "`c` is given twice"),
        (b"actor:\n\tlr: 1\n", 2, "tab"),
        ("actor:\r\n\r\n\u00a0 lr: 1\r\n".encode(), 3, r"the character '\xa0' in the indentation"),
        (b"a: [1,\n  b: 2\n", 3, "from line 1 on"),
        (b"\xef\xbb\xbfactor:\n", 1, "byte-order mark"),
        (b"a: 1\nb: \xff\n", 2, "UTF-8"),
        ("a: 1".encode("utf-16"), 1, "UTF-8"),
        (b"- 1\n- 2\n", 1, "top level"),
        (b"just text\n", 1, "top level"),
        (b"a: [1, 2\nb: 3\n", 2, "flow sequence"),
        (b"a: b: c\n", 1, "mapping values are not allowed"),
        (b"a: !!python/object:os.system x\n", 1, "tag"),
        (b"a: 1\n---\nb: 2\n", 2, "single document"),
        (b"[a, b]: 1\n", 1, "key must be plain text"),
        (b"a: 1\nb: \x00\n", 2, "not readable"),
        (b"a: " + b"[" * 40 + b"]" * 40, 1, "levels deep"),
        (b"a: " + b"[" * 100_000, 1, "levels deep"),
        (b"#" * (MAX_BYTES + 1), None, "MiB"),
    ],
)
def test_faults_are_refused_with_their_line(raw, line, words):
    [problem] = read(raw).problems
    assert words in problem.what
    assert problem.where == (f"spec.yaml:{line}" if line else "spec.yaml")


def test_every_duplicate_is_reported():
    problems = read(b"a: 1\na: 2\nb: 1\nb: 2\n").problems
    assert [problem.where for problem in problems] == ["spec.yaml:2", "spec.yaml:4"]


def test_empty_documents_are_empty_specs():
    for raw in (b"", b"# nothing\n", b"---\n"):
        assert read(raw).leaves == {}


def test_values_of_arguments():
    assert read_value("[a, 1, true]").value == ["a", 1, True]
    assert read_value('["console","wandb"]').value == ["console", "wandb"]
    assert read_value('"1e3"').value == "1e3"
    assert read_value("a: b # c").value == "a: b # c"
    assert read_value("").value is None
    for text in ("{a: 1}", "[1, 2", "[*a]", "[{a: 1, a: 2}]"):
        with pytest.raises(ValueError, match=r"."):
            read_value(text)
