"""A run reads its rows before its engines start: any file, mixtures, the same bytes on a resume."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from rlctl.data.read import load_rows
from rlctl.environment.byte_tokenizer import byte_tokenizer
from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train import preflight, setup
from rlctl.train.preflight import check_inputs, count_rows, local_sources, record_files
from rlctl.train.sample_and_grade import source_shares
from rlctl.train.start import with_absolute_paths


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "model_directory", lambda path: path)
    monkeypatch.setattr(setup, "policy_tokenizer", lambda *_: byte_tokenizer())


def write(path, count, **columns):
    rows = ({"question": f"{path.name} {i}?", "answer": i, **columns} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def spec_of(*overrides):
    return load_spec([], [], ["model.path=a/b", "data.train_batch_size=4", *overrides]).spec


def problems(spec):
    return [one for one in check_inputs(spec) if one.key.startswith("data.")]


def prompts_of(spec):
    """Prompts of training and validation, as a run reads them."""
    sources = local_sources(spec)
    tokenizer = setup.policy_tokenizer(spec, sources.model_path)
    with contextlib.closing(setup.EpisodeSource.of(spec, tokenizer)) as episodes:
        return setup._prompts(spec, sources, tokenizer, episodes)


def test_a_mixture_has_its_shares_and_names_them(tmp_path):
    write(tmp_path / "a.jsonl", 30)
    write(tmp_path / "b.jsonl", 10)
    spec = spec_of("data.train_files={a.jsonl: 0.5, b.jsonl: 0.5}")
    assert (problems(spec), count_rows(spec)) == ([], 40)
    train, val = prompts_of(spec)
    assert val is None
    rows = [train.row_at(position, seed=1, shuffle=True) for position in range(40)]
    assert sorted(row for row in rows if row >= 30) == sorted([*range(30, 40)] * 2)
    assert len({row for row in rows if row < 30}) == 20
    run = SimpleNamespace(train_prompts=train, ranks=SimpleNamespace(sum=lambda counts: counts))
    tasks = [SimpleNamespace(group_id=row, row=row) for row in (0, 29, 30, 5, 5)]
    assert source_shares(run, SimpleNamespace(tasks=tasks)) == {
        "data/share/a.jsonl": 0.75,
        "data/share/b.jsonl": 0.25,
    }
    named = with_absolute_paths(spec).data.train_files
    assert named == {str(tmp_path / "a.jsonl"): 0.5, str(tmp_path / "b.jsonl"): 0.5}


def test_overlong_prompts_do_not_change_the_shares(tmp_path):
    write(tmp_path / "a.jsonl", 20)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"question": "x" * (600 if i % 2 else 5), "answer": i}) + "\n" for i in range(20))
    )
    spec = spec_of("data.train_files={a.jsonl: 2, b.jsonl: 1}", "data.max_prompt_length=200")
    train, _ = prompts_of(spec)
    assert (len(train), train.num_dropped, train.mixture.counts) == (30, 10, (20, 10))


@pytest.mark.parametrize("weight", [0, -1, ".nan", ".inf", "x"])
def test_a_weight_that_is_none_is_an_error(weight):
    with pytest.raises(UsageError, match=r"b\.csv"):
        spec_of(f"data.train_files={{a.jsonl: 1, b.csv: {weight}}}")


def test_a_mixture_with_an_empty_file_is_an_error_before_anything_starts(tmp_path):
    write(tmp_path / "a.jsonl", 8)
    (tmp_path / "b.csv").write_text("question,answer\n")
    (found,) = problems(spec_of("data.train_files={a.jsonl: 1, b.csv: 1}"))
    assert (found.severity, "no rows" in found.what, found.where) == ("error", True, "b.csv")


def test_missing_answers_are_an_error_before_the_engines_start(tmp_path):
    name = write(tmp_path / "a.jsonl", 8)
    with (tmp_path / name).open("a") as file:
        file.write('{"question": "Open?"}\n')
    spec = spec_of(f"data.train_files={name}", "reward.name=maths")
    with pytest.raises(UsageError, match=r"`maths` asks for an answer .*1 of 9 rows lack it") as caught:
        prompts_of(spec)
    assert caught.value.where == "a.jsonl:9"


def test_a_resumed_run_reads_the_bytes_that_it_began_with(tmp_path):
    name = write(tmp_path / "a.jsonl", 8)
    spec, run_dir = spec_of(f"data.train_files={name}"), tmp_path / "run"
    run_dir.mkdir()
    notes = []
    began = local_sources(spec, notes.append, run_dir)
    assert "prompt: 'question'" in notes[0]
    record_files(run_dir, began)
    write(tmp_path / "a.jsonl", 3)
    assert local_sources(spec, run_dir=run_dir) == began
    assert len(load_rows(local_sources(spec).train_files[name])) == 3
    (cached,) = began.train_files[name]
    (tmp_path / cached).unlink()
    assert len(load_rows(local_sources(spec, run_dir=run_dir).train_files[name])) == 3
