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


@pytest.mark.parametrize("cut", [1, 5, 70_000])
def test_a_torn_last_line_is_cut_and_the_rest_kept(tmp_path, cut):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
        whole = (store.directory / RESPONSES_FILE).read_bytes()
        store.add({B: Response("x" * 150_000, False, 1)})
    file = store.directory / RESPONSES_FILE
    file.write_bytes(file.read_bytes()[:-cut])
    assert stored(tmp_path, A, B) == {(0, 0): SAID}
    assert file.read_bytes() == whole
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({B: SAID})
    assert len(stored(tmp_path, A, B)) == 2


def test_half_of_the_first_line_is_cut(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
    file = store.directory / RESPONSES_FILE
    file.write_bytes(file.read_bytes()[:-1])
    assert stored(tmp_path, A) == {}
    assert file.read_bytes() == b""


def test_what_is_forgotten_is_gone_and_the_rest_stays(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID, B: SAID})
        store.forget({A: (0, 0)})
        assert store.find({A: (0, 0), B: (1, 0)}) == {(1, 0): SAID}
        store.add({A: Response("again", False, 1)})
    assert stored(tmp_path, A, B)[0, 0].text == "again"


def test_two_at_once_are_refused_and_others_are_not(tmp_path):
    with (
        ResponseStore(tmp_path, SETTINGS),
        ResponseStore(tmp_path, SETTINGS | {"engine": "vllm"}),
        pytest.raises(RunFailure, match="another process"),
        ResponseStore(tmp_path, SETTINGS),
    ):
        pass
    assert stored(tmp_path, A) == {}


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"prompt": "a"}', None], ids=["text", "list", "fields", "type"]
)
def test_a_damaged_line_is_named(tmp_path, line):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
    file = store.directory / RESPONSES_FILE
    damaged = line or file.read_text().replace('"num_tokens": 7', '"num_tokens": "7"').strip()
    file.write_text(file.read_text() + damaged + "\n")
    with pytest.raises(RunFailure, match="cannot be read") as caught:
        stored(tmp_path, A)
    assert caught.value.where == f"{file}:2"
    assert "delete" in caught.value.fix


def test_a_full_disk_is_named(tmp_path):
    with ResponseStore(tmp_path, SETTINGS) as store:
        store.add({A: SAID})
        whole, store._append = store._append, open("/dev/full", "a", encoding="utf-8")  # noqa: PTH123, SIM115
        with pytest.raises(EnvironmentFailure, match="No space left"):
            store.add({B: SAID})
        store._append = whole
    assert stored(tmp_path, A, B) == {(0, 0): SAID}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "evaluations").write_text("a file")
    with pytest.raises(EnvironmentFailure, match="cannot be stored"), ResponseStore(tmp_path, SETTINGS):
        pass
