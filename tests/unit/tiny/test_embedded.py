from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.data.schema import arrow_schema
from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.files import cache_root
from rlctl.run_spec.model import PROMPT_LENGTH, RECIPE, RESPONSE_LENGTH
from rlctl.tiny.embedded import EmbeddedTask, ensure_embedded, problem, split
from tests.processes import Job

#: The real thing but for the warm start, which stops after one step.
QUICK = replace(RECIPE, taught_accuracy=0.0, target_accuracy=0.0)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTask:
    return ensure_embedded(1, tmp_path_factory.mktemp("cache"), recipe=QUICK)


def test_model_and_tokenizer_load_as_any_other(task: EmbeddedTask) -> None:
    model = AutoModelForCausalLM.from_pretrained(task.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert not model.config.tie_word_embeddings
    assert model.num_parameters() == RECIPE.num_parameters > 100_000
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id


def test_tokenizer_is_one_character_one_token_and_back(task: EmbeddedTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    for text in ("12+34=", "640", "0123456789+="):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("1 é\n2")["input_ids"]) == "1<unk><unk><unk>2"
    padded = tokenizer(["12+34=", "1="], padding=True)["input_ids"]
    assert padded[1][:4] == [tokenizer.pad_token_id] * 4


def test_chat_template_is_the_user_content(task: EmbeddedTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    chat = [{"role": "user", "content": "12+34="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "12+34="


def test_data_has_the_row_schema(task: EmbeddedTask) -> None:
    val = pq.read_table(task.val_file)
    assert val.schema.equals(arrow_schema())
    assert val.num_rows == RECIPE.num_val_prompts
    assert pq.read_table(task.train_file).num_rows == 8100 - RECIPE.num_val_prompts
    row = val.slice(0, 1).to_pylist()[0]
    assert row["data_source"] == "embedded/addition"
    assert row["prompt"] == [{"role": "user", "content": "71+63="}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "431"}


def test_built_once_per_seed_and_recipe(tmp_path: Path) -> None:
    told: list[str] = []

    def build(seed: int) -> EmbeddedTask:
        return ensure_embedded(seed, tmp_path, told.append, QUICK)

    first = build(1)
    assert [line.split(",")[0] for line in told] == ["building the embedded model", "embedded model ready"]
    told.clear()
    assert build(1) == first
    assert told == []
    assert build(2) != first
    weights = [(build(seed).model_dir / "model.safetensors").read_bytes() for seed in (1, 2)]
    assert weights[0] != weights[1]
    assert len({QUICK.key(1), QUICK.key(2), RECIPE.key(1)}) == 3


def test_same_seed_same_weights_and_global_random_state_untouched(tmp_path: Path, task: EmbeddedTask) -> None:
    before = torch.get_rng_state()
    again = ensure_embedded(1, tmp_path, recipe=QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.safetensors"
    assert (again.model_dir / name).read_bytes() == (task.model_dir / name).read_bytes()


def test_damaged_entry_is_built_anew(tmp_path: Path) -> None:
    task = ensure_embedded(1, tmp_path, recipe=QUICK)
    weights = task.model_dir / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    ensure_embedded(1, tmp_path, recipe=QUICK)
    assert weights.read_bytes() == good
    task.val_file.unlink()
    ensure_embedded(1, tmp_path, recipe=QUICK)
    assert task.val_file.exists()


def _built(cache: Path, hangs: bool) -> int:
    def note(message: str) -> None:
        print(message, flush=True)
        if hangs and "ready" in message:  # the model is saved, the entry not yet published
            time.sleep(600)

    torch.set_num_threads(1)
    ensure_embedded(1, cache, note, QUICK)
    return 0


def test_a_killed_builder_leaves_nothing_that_matters(tmp_path: Path) -> None:
    builder = Job(_built, tmp_path, True, log=tmp_path / "log")
    builder.wait_for(lambda: "ready" in builder.output)
    builder.signal(signal.SIGKILL)
    assert builder.wait() == -signal.SIGKILL
    assert list(tmp_path.glob("embedded/*.building-*"))
    task = ensure_embedded(1, tmp_path, recipe=QUICK)
    AutoModelForCausalLM.from_pretrained(task.model_dir)
    assert not list(tmp_path.glob("embedded/*.building-*"))


def test_racing_builders_build_once(tmp_path: Path) -> None:
    builders = [Job(_built, tmp_path, False, log=tmp_path / f"log-{number}") for number in range(2)]
    assert [builder.wait(120) for builder in builders] == [0, 0]
    assert sum("ready" in builder.output for builder in builders) == 1
    entry = tmp_path / "embedded" / QUICK.key(1)
    assert set(json.loads((entry / "manifest.json").read_text())) >= {"train.parquet", "model/config.json"}


def test_unusable_cache_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure, match="cannot be cached") as caught:
        ensure_embedded(1, tmp_path / "file", recipe=QUICK)
    assert "RLCTL_CACHE" in (caught.value.fix or "")


def test_a_warm_start_that_never_arrives_is_an_error_and_leaves_no_entry(tmp_path: Path) -> None:
    hopeless = replace(RECIPE, max_steps=2)
    with pytest.raises(RunFailure, match="did not reach"):
        ensure_embedded(1, tmp_path, recipe=hopeless)
    assert [path.name for path in (tmp_path / "embedded").iterdir() if path.is_dir()] == []


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("RLCTL_CACHE")
    assert cache_root().name == "rlctl"


def test_problem_is_the_reversed_sum() -> None:
    assert problem(12, 34) == ("12+34=", "640")
    assert problem(99, 99) == ("99+99=", "891")
    assert problem(10, 10) == ("10+10=", "020")


def test_split_is_disjoint_complete_and_always_the_same() -> None:
    train, val = split(512)
    assert len(val) == 512
    assert len({prompt for prompt, _ in train + val}) == 90 * 90 == len(train) + len(val)
    assert split(512) == (train, val)
    assert split(10)[1] == val[:10]
    # Pinned: a change of the order changes what everyone's validation figures mean.
    assert val[:2] == [("71+63=", "431"), ("46+48=", "490")]


def test_answers_read_backwards_are_the_sums() -> None:
    for prompt, answer in split(0)[0]:
        a, b = prompt.rstrip("=").split("+")
        assert int(answer[::-1]) == int(a) + int(b)
        assert len(prompt) == PROMPT_LENGTH
        assert len(answer) + 1 == RESPONSE_LENGTH
