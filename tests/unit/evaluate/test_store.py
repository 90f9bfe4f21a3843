import json

import pytest

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.evaluate.samples import Response
from rlctl.evaluate.store import RESPONSES_FILE, SETTINGS_FILE, ResponseStore, prompt_hash

SETTINGS = {"model": "abc", "sampling": {"temperature": 1.0}}
A = (prompt_hash("a"), 0, 0, 1)
B = (prompt_hash("a"), 1, 0, 1)  # the same prompt, further down in the data
SAID = Response('a line\nand \u2028 "more" \ud800', False, 7)


def stored(root, *keys, settings=SETTINGS):
    with ResponseStore(root, settings) as store:
        return store.find({key: key[1:3] for key in keys})


def test_what_is_added_is_found_by_the_next_and_repeats_stay_apart(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
        store.add({B: Response("other", True, 1)})
    assert stored(tmp_path, A, B) == {(0, 0): SAID, (1, 0): Response("other", True, 1)}
    assert stored(tmp_path, A) == {(0, 0): SAID}
    assert stored(tmp_path, (A[0], 0, 0, 2)) == {}
    assert stored(tmp_path, A, settings=SETTINGS | {"model": "abd"}) == {}
    assert json.loads((store.directory / SETTINGS_FILE).read_text()) == SETTINGS


def test_what_is_forgotten_is_gone_and_the_rest_stays(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID, B: SAID})
        store.forget({A: (0, 0)})
        assert store.find({A: (0, 0), B: (1, 0)}) == {(1, 0): SAID}
        store.add({A: Response("again", False, 1)})
    assert stored(tmp_path, A, B)[0, 0].text == "again"


def test_two_at_once_add_to_one_store(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as one, ResponseStore(tmp_path, SETTINGS) as other:
        one.add({A: SAID})
        other.add({A: SAID, B: SAID})
        assert one.find({A: (0, 0), B: (1, 0)}) == {(0, 0): SAID, (1, 0): SAID}


@pytest.mark.parametrize("content", [b"not a database" * 100, None], ids=["text", "cut"])
def test_a_damaged_store_is_named(tmp_path, content):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({(prompt_hash(str(number)), number, 0, 1): SAID for number in range(1000)})
    file = store.directory / RESPONSES_FILE
    file.write_bytes(content or file.read_bytes()[:9000])
    with pytest.raises(RunFailure, match="cannot be read") as caught:
        stored(tmp_path, A)
    assert caught.value.where == str(file)
    assert "delete" in caught.value.fix


def test_a_full_disk_is_named(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
        [(pages,)] = store._rows.execute("PRAGMA page_count")
        store._rows.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(EnvironmentFailure, match="full"):
            store.add({B: Response("x" * 100_000, False, 1)})
    assert stored(tmp_path, A, B) == {(0, 0): SAID}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "evaluations").write_text("a file")
    with pytest.raises(EnvironmentFailure, match="cannot be stored"), ResponseStore(tmp_path, SETTINGS):
        pass
