"""`rlctl train --model --data --reward`: what the flags mean, and what is inferred."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.batch import Turn
from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.environment.build import EpisodeSource
from rlctl.errors import SpecError, UsageError
from rlctl.model_files import load_reader
from rlctl.rollout.protocol import Request, Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.flags import Flags
from rlctl.run_spec.load import LoadedSpec, dump_spec, load_spec
from rlctl.run_spec.machine import MACHINES, Machine
from rlctl.train.infer import INFERRED, load_with_flags
from tests.own_model import save_tiny_qwen2

CPU = replace(MACHINES["1xh100"], name="cpu", gpus=0)
CONTEXT = 512
#: Without the key of episodes with several turns.
INFERRED_ALWAYS = {*INFERRED} - {"environment.context_length"}


def write(path: Path, questions: list[str]) -> Path:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
        for question in questions
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return Path(save_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny", context=CONTEXT))


@pytest.fixture
def data(tmp_path) -> Path:
    return write(tmp_path / "sums.parquet", [f"What is 1 + 1? ({index})" for index in range(200)])


def load(flags: Flags, *values: str, presets=(), files=(), machine: Machine = CPU) -> LoadedSpec:
    return load_with_flags(flags, list(presets), list(files), list(values), machine, fetch=False)


def test_three_flags_are_a_spec_that_needs_no_machine(model, data, tmp_path) -> None:
    loaded = load(Flags(str(model), [str(data)], ["maths"]))
    spec = loaded.spec
    assert (spec.model.path, spec.data.train_files, spec.reward.name) == (str(model), [str(data)], "maths")
    assert {key for key, origin in loaded.origins.items() if origin.layer == "inferred"} == INFERRED_ALWAYS
    assert (spec.data.train_batch_size, spec.ppo_mini_batch_size) == (16, 16)
    assert spec.trainer.total_training_steps == 200 // 16
    assert spec.data.max_prompt_length % 64 == 0
    written = tmp_path / "spec.yaml"
    written.write_text(dump_spec(spec))
    assert load_spec(files=[written]).spec == spec  # a resumed run infers nothing


@pytest.mark.parametrize("key", INFERRED)
@pytest.mark.parametrize("source", ["argument", "file", "preset"])
def test_every_inferred_value_can_be_set(key, source, model, data, tmp_path) -> None:
    section, _, name = key.partition(".")
    own = tmp_path / "own.yaml"
    own.write_text(f"{section}: {{{name}: 8}}\n")
    given = {
        "argument": {"values": [f"{key}=8"]},
        "file": {"values": [], "files": [own]},
        "preset": {"values": [], "presets": [str(own)]},
    }[source]
    loaded = load(Flags(str(model), [str(data)], ["maths"]), *given.pop("values"), **given)
    assert loaded.origins[key].layer != "inferred"
    assert getattr(getattr(loaded.spec, section), name) == 8


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 40, 63, 64, 129, 1000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_rows_is_at_least_one_batch(num_rows, ranks, model, tmp_path) -> None:
    data = write(tmp_path / "few.parquet", ["1 + 1"] * num_rows)
    if num_rows < ranks:
        return  # no batch can be shared
    spec = load(Flags(str(model), [str(data)], ["maths"]), f"trainer.n_gpus_per_node={ranks}").spec
    batch, steps = spec.data.train_batch_size, spec.trainer.total_training_steps
    assert 1 <= batch <= num_rows
    assert batch % ranks == 0
    assert steps == num_rows // batch


def test_steps_are_those_of_the_users_batch_and_epochs(model, data) -> None:
    flags = Flags(str(model), [str(data)], ["maths"])
    spec = load(flags, "data.train_batch_size=50", "trainer.total_epochs=3").spec
    assert (spec.trainer.total_training_steps, spec.ppo_mini_batch_size) == (12, 50)


def test_prompts_are_not_cut_and_both_limits_fit_the_context(model, tmp_path) -> None:
    flags = Flags(str(model), [str(write(tmp_path / "d.parquet", ["1 + 1", "word " * 300]))], ["maths"])
    spec = load(flags, machine=MACHINES["1xh100"]).spec
    assert spec.data.max_prompt_length + spec.data.max_response_length <= CONTEXT
    assert spec.data.max_response_length == CONTEXT // 2
    short = Flags(str(model), [str(write(tmp_path / "s.parquet", ["1 + 1"]))], ["maths"])
    assert load(short).spec.data.max_prompt_length == 64


#: The template of the test's model has a switch for thoughts.
PLAIN = "data.chat_template_kwargs.enable_thinking=false"
LECTURER = """
class Lecturer:
    def reset(self, **row) -> str:
        return "{more}"

    def ask(self, question: str) -> str:
        \"\"\"Asks.

        Args:
            question: {about}
        \"\"\"
        return "no"
"""
AGENT = """
import json, urllib.request

def agent(task, base_url, api_key):
    messages = [{"role": "system", "content": "s" * 200}, *task["prompt"]]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers))
"""


class Silent:
    """An engine whose turns are over at once."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def sample(self, requests: list[Request], sampling: Sampling) -> list[Turn]:
        self.read += [request.token_ids for request in requests]
        end = torch.tensor([0])
        return [Turn(end, torch.zeros(1), end, "stop") for _ in requests]


def first_length(model: Path, name: str, data: Path) -> int:
    """Tokens that the first turn of the longest row reads, as a run samples it."""
    tokenizer, _ = load_reader(str(model), trust_remote_code=False)
    rows = PromptDataset(load_rows([str(data)]), tokenizer, max_prompt_length=9999, filter_overlong=False)
    source, engine = EpisodeSource(EnvironmentSpec(name=name), tokenizer, 99999), Silent()
    try:
        source.sample(engine, [(task, 0) for task in rows.all_tasks()], Sampling(8), 0)
    finally:
        source.close()
    return max(map(len, engine.read))


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    return Path(save_tiny_qwen2(tmp_path_factory.mktemp("large") / "tiny", context=8192))


@pytest.mark.parametrize(("more", "about"), [(0, 300), (150, 0), (400, 300)])
def test_the_prompt_limit_holds_what_the_environment_adds(more, about, large, tmp_path) -> None:
    data = write(tmp_path / "d.parquet", [f"What is {n} + 1?" for n in range(20)])
    (tmp_path / "own.py").write_text(LECTURER.format(more="m" * more, about="a" * about + "."))
    name = f"{tmp_path}/own.py:Lecturer"
    loaded = load(Flags(str(large), [str(data)]), f"environment.name={name}")
    needed = first_length(large, name, data)
    assert needed <= loaded.spec.data.max_prompt_length < needed + 64
    assert str(needed) in (loaded.origins["data.max_prompt_length"].name or "")


def test_an_agents_own_prompt_counts(large, tmp_path) -> None:
    data = write(tmp_path / "d.parquet", [f"What is {n} + 1?" for n in range(20)])
    (tmp_path / "own.py").write_text(AGENT)
    name = f"{tmp_path}/own.py:agent"
    spec = load(Flags(str(large), [str(data)]), f"environment.name={name}").spec
    needed = first_length(large, name, data)
    assert needed > 200
    assert needed <= spec.data.max_prompt_length < needed + 64


def test_an_environment_that_fails_is_said_to(large, tmp_path) -> None:
    data = write(tmp_path / "d.parquet", ["What is 1 + 1?"] * 20)
    broken = LECTURER.format(more="m", about="a").replace('return "m"', 'raise ValueError("closed")')
    (tmp_path / "own.py").write_text(broken)
    loaded = load(Flags(str(large), [str(data)]), f"environment.name={tmp_path}/own.py:Lecturer")
    assert "ValueError: closed" in (loaded.origins["data.max_prompt_length"].name or "")


def test_ranks_that_a_launcher_started_infer_the_same(large, tmp_path, monkeypatch) -> None:
    """Each infers for itself, and what `reset` returns may differ between processes."""
    data = write(tmp_path / "d.parquet", ["What is 1 + 1?"] * 20)
    (tmp_path / "own.py").write_text(LECTURER.format(more="m" * 500, about="a"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loaded = load(Flags(str(large), [str(data)]), f"environment.name={tmp_path}/own.py:Lecturer")
    assert loaded.spec.data.max_prompt_length < 500
    assert "without what the environment adds" in (loaded.origins["data.max_prompt_length"].name or "")


def test_an_episode_has_room_for_its_turns(large, tmp_path) -> None:
    data = write(tmp_path / "d.parquet", ["What is 1 + 1?"] * 20)
    (tmp_path / "own.py").write_text(LECTURER.format(more="m", about="a"))
    name = f"environment.name={tmp_path}/own.py:Lecturer"

    def length(*values: str) -> tuple[int | None, int]:
        spec = load(Flags(str(large), [str(data)]), PLAIN, *values).spec
        turns = spec.environment.max_turns * spec.data.max_response_length
        return spec.environment.context_length, spec.data.max_prompt_length + turns

    found, wanted = length(name, "environment.max_turns=3")
    assert found == wanted
    assert length(name, "environment.max_turns=1000")[0] == 8192
    assert length(name, "environment.context_length=700")[0] == 700
    budget = "actor.ppo_max_token_len_per_gpu=1000"
    assert length(name, budget, "environment.max_turns=1000")[0] == 1000
    assert length()[0] is None


def test_a_response_holds_the_longest_answer(large, tmp_path) -> None:
    answer = "a" * 900
    rows = [{"prompt": f"Copy it. {n}", "ground_truth": answer if n == 3 else "2"} for n in range(20)]
    data = tmp_path / "copies.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for machine in (CPU, MACHINES["1xh100"]):
        loaded = load(Flags(str(large), [str(data)], ["exact"]), PLAIN, machine=machine)
        assert 900 < loaded.spec.data.max_response_length <= 2048
        assert "900" in (loaded.origins["data.max_response_length"].name or "")


def test_the_response_limit_is_that_of_the_reward(model, data) -> None:
    def limit(*rewards: str, path: str = "a/b", machine: Machine = MACHINES["1xh100"]) -> int:
        return load(Flags(path, [str(data)], rewards), machine=machine).spec.data.max_response_length

    assert limit("exact") == 256
    assert limit("maths") == 1024
    assert limit("exact", "code=0.5") == 2048
    assert limit("maths", machine=CPU) == 256
    assert limit("exact", machine=CPU) == 256
    assert limit("multiple_choice", machine=CPU) == 512
    assert limit("code", machine=CPU) == 2048


def test_a_thinking_model_gets_a_long_response(data) -> None:
    flags, machine = Flags("qwen3-8b", [str(data)], ["maths"]), MACHINES["8xh100"]
    assert load(flags, machine=machine).spec.data.max_response_length == 1024
    thinks = load(flags, "data.chat_template_kwargs.enable_thinking=true", machine=machine).spec
    assert thinks.data.max_response_length == 8192


def test_micro_batches_grow_with_the_device_and_are_constant_on_cpus(data) -> None:
    def size(model: str, machine: Machine, *values: str) -> int:
        flags = Flags(model, [str(data)], ["maths"])
        return load(flags, *values, machine=machine).spec.actor.ppo_micro_batch_size_per_gpu

    assert size("qwen3-0.6b", CPU) == size("qwen3-8b", CPU) == 8
    small, large = (size("qwen3-0.6b", MACHINES[name]) for name in ("1x24gb", "1xh200"))
    assert 1 <= small < large
    assert size("qwen3-0.6b", MACHINES["1xh100"], "data.max_response_length=8192") < large
    budget = load(Flags("qwen3-0.6b", [str(data)], ["maths"]), presets=["1gpu-80gb"])
    assert "actor.ppo_micro_batch_size_per_gpu" not in {
        key for key, origin in budget.origins.items() if origin.layer == "inferred"
    }


def test_a_models_name_is_its_preset(data) -> None:
    spec = load(Flags("qwen3-8b", [str(data)], ["maths"])).spec
    assert spec.model.path == "Qwen/Qwen3-8B"
    assert spec.data.chat_template_kwargs == {"enable_thinking": False}
    assert load(Flags("Qwen/Qwen3-8B", [str(data)], ["maths"])).spec.data.chat_template_kwargs == {}
    # the model of the flag is stronger than that of an example, whose other values stay
    other = load(Flags("qwen3-0.6b", [str(data)]), presets=["smollm2-135m-sums"]).spec
    assert (other.model.path, other.data.max_response_length) == ("Qwen/Qwen3-0.6B", 10)


def test_several_rewards_are_a_weighted_sum(model, data, tmp_path) -> None:
    own = tmp_path / "style.py"
    own.write_text("def brief(response):\n    return 1.0\n")
    terms = load(Flags(str(model), [str(data)], ["maths", f"{own}:brief=0.2"])).spec.reward.terms
    assert [(term.name, term.weight) for term in terms] == [("maths", 1.0), (f"{own}:brief", 0.2)]
    [weighted] = load(Flags(str(model), [str(data)], ["maths=0.5"])).spec.reward.terms
    assert (weighted.name, weighted.weight) == ("maths", 0.5)
    file = tmp_path / "own.yaml"
    file.write_text("reward: {terms: [{name: exact}, {name: maths}]}\n")
    spec = load(Flags(str(model), [str(data)], ["code"]), files=[file]).spec
    assert [term.name for term in spec.reward.all_terms] == ["code"]


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (Flags(model="a/b"), "model.path=c/d"),
        (Flags(data=["x.parquet"]), "data.train_files=y.parquet"),
        (Flags(reward=["maths"]), "reward.name=exact"),
        (Flags(reward=["maths"]), "reward.terms=[{name: exact}]"),
        (Flags(reward=["maths", "exact"]), "reward.name=exact"),
    ],
)
def test_a_flag_and_its_key_are_one_too_many(flags, value) -> None:
    with pytest.raises(UsageError, match="set the same"):
        load(flags, value)


def test_wrong_flags_are_errors_of_the_spec(model, data) -> None:
    for flags in (
        Flags(str(model), [str(data)], ["mathz"]),
        Flags(str(model), [str(data)], ["maths", "maths"]),
        Flags(str(model)),
    ):
        with pytest.raises(SpecError):
            load(flags)


@pytest.mark.parametrize(
    "flags", [Flags(reward=["maths"]), Flags(model="embedded"), Flags(data=["x.parquet"])]
)
def test_the_embedded_model_keeps_its_values(flags) -> None:
    loaded = load(flags)
    assert loaded.spec.is_embedded
    assert not [key for key, origin in loaded.origins.items() if origin.layer == "inferred"]


def test_a_model_and_a_preset_with_data_are_enough(model, data, tmp_path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"data: {{train_files: {data}}}\nreward: {{name: exact}}\n")
    loaded = load(Flags(str(model)), files=[file], presets=["grpo"])
    assert (loaded.spec.reward.name, loaded.spec.algorithm.adv_estimator) == ("exact", "grpo")
    assert loaded.origins["data.train_batch_size"].layer == "inferred"


def test_missing_data_are_left_to_the_checks_of_files(model) -> None:
    loaded = load(Flags(str(model), ["gone.parquet"], ["maths"]))
    assert not [key for key, origin in loaded.origins.items() if origin.layer == "inferred"]


def test_the_words_of_the_flags_start_the_same_run() -> None:
    flags = Flags("a/b", ["x.parquet", "y z.parquet"], ["maths", "f.py:g=0.5"])
    assert flags.words() == [
        *("--model", "a/b", "--data", "x.parquet", "--data", "y z.parquet"),
        *("--reward", "maths", "--reward", "f.py:g=0.5"),
    ]
