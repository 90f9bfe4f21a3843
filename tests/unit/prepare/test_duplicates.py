"""Duplicates against slow, obvious ways of finding them."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.errors import UsageError
from rlctl.prepare.duplicates import nearly_repeated, normalise, repeated
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


def test_repeated_is_what_a_dictionary_finds():
    chance = np.random.default_rng(0)
    for size in (0, 1, 2, 50, 1000):
        pool = chance.integers(0, 2**64, max(1, size // 3), dtype=np.uint64)
        keys = chance.choice(pool, size).astype(np.uint64)
        first = {}
        expected = [(i, first[key]) for i, key in enumerate(keys.tolist()) if first.setdefault(key, i) != i]
        later, earlier = repeated(keys)
        assert list(zip(later.tolist(), earlier.tolist(), strict=True)) == expected


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
    assert summary.counts["duplicates_dropped"] == 3
    assert summary.counts["train"] == 19
    assert summary.report["duplicates"] == {"rows": 3, "word_for_word": 3, "conflicting": 1}
    (conflict,) = [f for f in manifest(tmp_path)["report"]["findings"] if f["code"] == "conflicting-answers"]
    assert conflict["examples"] == [f"{tmp_path}/in.jsonl:19 and {tmp_path}/in.jsonl:1"]


@given(st.text("aB .,;:?!-\n\t\u00a0\u2003é", max_size=30))
def test_white_space_of_any_kind_and_amount_is_one_space(text):
    spaced = " ".join(text.split())
    assert normalise(text) == normalise(spaced) == normalise(f"\n{spaced}  ")
    assert "  " not in normalise(text)


def jaccard(one: str, other: str) -> float:
    sets = [{text[at : at + 8] for at in range(max(1, len(text) - 7))} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_are_those_of_their_true_similarity() -> None:
    """Far from the limit of 0.8 the estimate finds what the sets say."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(300)]
    texts = [" ".join(draw.choices(words, k=40)) for _ in range(30)]
    texts += [text.replace(text.split()[20], "another", 1) for text in texts[:15]]  # 0.9
    texts += [" ".join(text.split()[:20] + draw.choices(words, k=20)) for text in texts[15:30]]  # 0.35
    assert all(jaccard(texts[30 + place], texts[place]) > 0.85 for place in range(15))
    assert all(jaccard(texts[45 + place], texts[15 + place]) < 0.6 for place in range(15))
    later, first = nearly_repeated(enumerate(texts))
    assert later == list(range(30, 45))
    assert first == list(range(15))


@pytest.mark.parametrize("policy", ["count", "drop", "off"])
def test_what_is_done_with_near_duplicates(tmp_path, policy) -> None:
    rows = gsm8k_rows()
    like = rows[2] | {"question": rows[2]["question"] + " Tell me."}
    source = write_jsonl(tmp_path / "in.jsonl", [*rows, like, rows[0]])
    done = prepare(
        PrepareRequest(
            (str(source),), tmp_path / "out", duplicates="keep", near_duplicates=policy, val_fraction=0.0
        )
    )
    assert done.counts.get("near_duplicates_dropped", 0) == (policy == "drop")
    assert done.report.get("near_duplicates", {"rows": 0})["rows"] == (policy != "off")
