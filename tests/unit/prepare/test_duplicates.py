"""Exact and near duplicates against slow, obvious ways of finding them."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import UsageError
from rlctl.prepare import duplicates
from rlctl.prepare.duplicates import normalise, repeated, signatures
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How many now?", "how  many\nNOW"),
        ("So, Ann has 3 pens. How many?", "so Ann has 3 pens how many"),
        ("ﬁve ½ Ｘ", "five 1⁄2 x"),
        ("Straße", "STRASSE"),
        ("Wait... what?. Now .", "wait what now"),
        pytest.param("." * 100_000 + " a", "a", id="many marks"),
        ("2³ × 1½ − 3", "2^3 * 1 1/2 - 3"),
    ],
)
def test_what_does_not_count(one, other):
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 + 4?", "3 - 4?"),
        ("2*(3+4)", "2*3+4"),
        ("What is 5!", "What is 5"),
        ("3.5 litres", "35 litres"),
        ("at 6:30", "at 630"),
        ("f'(x)", "f(x)"),
        pytest.param("." * 100_000 + "a", "a", id="many marks"),
        ("What is 2³?", "What is 23?"),
        ("2½ cups", "21/2 cups"),
    ],
)
def test_what_makes_another_question(one, other):
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize("sorted_rows", [1, 7, 1 << 22])
def test_repeated_is_what_a_dictionary_finds(monkeypatch, sorted_rows):
    monkeypatch.setattr(duplicates, "SORTED_ROWS", sorted_rows)
    chance = np.random.default_rng(0)
    for size in (0, 1, 2, 50, 1000):
        pool = chance.integers(0, 2**64, max(1, size // 3), dtype=np.uint64)
        keys = chance.choice(pool, size).astype(np.uint64)
        first = {}
        expected = [(i, first[key]) for i, key in enumerate(keys.tolist()) if first.setdefault(key, i) != i]
        later, earlier = repeated(keys)
        assert list(zip(later.tolist(), earlier.tolist(), strict=True)) == expected


def edited(text, chance, share):
    words = text.split()
    for place in range(len(words)):
        if chance.random() < share:
            words[place] = "".join(chance.choices("abcdefghij", k=5))
    return " ".join(words)


@pytest.fixture(scope="module")
def texts():
    chance = random.Random(0)
    base = [" ".join("".join(chance.choices("klmnopqrst", k=5)) for _ in range(40)) for _ in range(60)]
    return base + [edited(text, chance, share) for text in base for share in (0.01, 0.05, 0.1, 0.3, 0.6)]


def shingles(text):
    data = text.encode()
    return {data[i : i + 8] for i in range(len(data) - 7)}


def near(texts, tmp_path, is_left=None):
    bands, signature = signatures(texts)
    files = []
    for place in range(bands.shape[1]):
        files.append(tmp_path / f"band{place}")
        files[-1].write_bytes(np.ascontiguousarray(bands[:, place]).tobytes())
    (tmp_path / "signature").write_bytes(signature.tobytes())
    left = np.ones(len(texts), bool) if is_left is None else is_left
    later, earlier = duplicates.nearly_repeated(files, tmp_path / "signature", left)
    return dict(zip(later.tolist(), earlier.tolist(), strict=True))


@pytest.mark.slow
def test_near_duplicates_against_all_pairs(texts, tmp_path):
    sets = [shingles(text) for text in texts]

    def similarity(i, j):
        return len(sets[i] & sets[j]) / len(sets[i] | sets[j])

    found = near(texts, tmp_path)
    best = [max((similarity(i, j) for j in range(i)), default=0.0) for i in range(len(texts))]
    assert all(row > other and similarity(row, other) > 0.65 for row, other in found.items())
    sure = [i for i, value in enumerate(best) if value >= 0.9]
    assert len(sure) > 50
    assert set(sure) <= set(found)
    assert not [i for i in found if best[i] < 0.65]
    border = [i for i, value in enumerate(best) if value >= duplicates.SIMILARITY]
    assert sum(i in found for i in border) >= 0.9 * len(border)


def test_near_duplicates_do_not_depend_on_how_much_is_held_in_memory(texts, tmp_path, monkeypatch):
    expected = near(texts, tmp_path)
    monkeypatch.setattr(duplicates, "COMPARED_PAIRS", 13)
    monkeypatch.setattr(duplicates, "READ_ROWS", 11)
    # a group that crosses a boundary is compared with the same first row, so the same rows are found
    assert set(near(texts, tmp_path)) == set(expected)


def test_rows_that_are_out_take_no_part(texts, tmp_path):
    is_left = np.ones(len(texts), bool)
    is_left[:60] = False
    found = near(texts, tmp_path, is_left)
    assert found
    assert min(found.values()) >= 60


def test_texts_of_any_length_have_signatures():
    bands, signature = signatures(["", "a", "12345678", "ü" * 5000])
    assert bands.shape == (4, duplicates.BANDS)
    assert signature.shape == (4, duplicates.NUM_VALUES)
    assert [part.shape[0] for part in signatures([])] == [0, 0]


def request_for(tmp_path, rows, **options):
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    return PrepareRequest((str(source),), tmp_path / "out", val_fraction=0, check_graders=False, **options)


def manifest(tmp_path):
    return json.loads((tmp_path / "out/manifest.json").read_text())


def test_more_than_a_few_duplicates_are_refused_with_both_ways_out(tmp_path):
    rows = [*gsm8k_rows(copies=10), *gsm8k_rows(copies=1)]
    with pytest.raises(UsageError, match=r"6 rows of 66 \(9.1%\)") as caught:
        prepare(request_for(tmp_path, rows))
    assert "in.jsonl:61 repeats" in str(caught.value)
    assert "--duplicates drop" in caught.value.fix
    assert "--duplicates keep" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_a_few_are_kept_and_counted(tmp_path):
    rows = [*gsm8k_rows(copies=10), gsm8k_rows()[0]]
    summary = prepare(request_for(tmp_path, rows))
    assert summary.counts["train"] == 61
    assert summary.report["duplicates"] == {"rows": 1, "word_for_word": 1, "conflicting": 0}
    assert "duplicates" in [finding["code"] for finding in manifest(tmp_path)["report"]["findings"]]


def test_dropping_keeps_the_first_and_tells_of_other_answers(tmp_path):
    first = gsm8k_rows(copies=3)
    again = {"question": first[0]["question"].upper(), "answer": "#### 99"}
    summary = prepare(request_for(tmp_path, [*first, again, *first[:3]], duplicates="drop"))
    assert summary.counts["duplicates_dropped"] == 4
    assert summary.counts["train"] == 18
    assert summary.report["duplicates"] == {"rows": 4, "word_for_word": 3, "conflicting": 1}
    (conflict,) = [f for f in manifest(tmp_path)["report"]["findings"] if f["code"] == "conflicting-answers"]
    assert conflict["examples"] == [f"{tmp_path}/in.jsonl:19 and {tmp_path}/in.jsonl:1"]


@pytest.mark.parametrize(("policy", "kept"), [("off", 4), ("count", 4), ("drop", 2)])
def test_near_duplicates_by_policy(tmp_path, policy, kept):
    long = (
        "Ann has three pens and two pencils in a box and buys four more pens at the shop around the corner "
    )
    other = "A train leaves at noon and travels for three hours at ninety kilometres an hour towards the sea "
    rows = [
        {"question": f"{text}{end}", "answer": "#### 1"} for text in (long, other) for end in ("today", "now")
    ]
    summary = prepare(request_for(tmp_path, rows, near_duplicates=policy))
    assert summary.counts["train"] == kept
    assert summary.counts["near_duplicates_dropped"] == 4 - kept
    assert ("near_duplicates" in summary.report) == (policy != "off")
    if policy != "off":
        assert summary.report["near_duplicates"]["rows"] == 2


@given(st.text("aB .,;:?!-\n\t\u00a0\u2003é", max_size=30))
def test_white_space_of_any_kind_and_amount_is_one_space(text):
    spaced = " ".join(text.split())
    assert normalise(text) == normalise(spaced) == normalise(f"\n{spaced}  ")
    assert "  " not in normalise(text)
