"""The client of vLLM servers against a real HTTP server that answers, refuses, stops and restarts."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl import leftovers
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.rollout import server_client, weight_sync, weights
from rlctl.rollout.build_vllm import reachable, replica_settings
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.protocol import Request
from rlctl.rollout.server_access import KEY
from rlctl.rollout.shared_engine import EngineLock, LockedRollout
from rlctl.rollout.vllm_server import VLLMServerRollout
from rlctl.rollout.weights import PublishedWeights
from rlctl.run_spec.load import load_spec
from tests.unit.rollout.stub_server import (
    SAMPLING,
    Server,
    context_of,
    engine_on,
    rollout_on,
    sample,
    versions_of,
)
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model

#: How a server gets weights that are files, and which they are.
RELOAD = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [Server(), Server()]
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server_client, weight_sync):
        monkeypatch.setattr(module, "RETRY_S", 0.01)


def test_prompts_go_round_and_turns_come_back_in_order(servers: list[Server], tmp_path: Path) -> None:
    engine, model = engine_on(servers, tmp_path)
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)  # no weights yet
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=4)
    turns = sample(engine)
    assert [len(turn.token_ids) for turn in turns] == [1, 2, 3, 1, 2, 3]
    assert [float(turn.log_probs[-1]) for turn in turns] == [-0.5, -1.5, -2.5] * 2
    assert versions_of(turns) == {4}
    for server in servers:
        assert server.paths() == [*RELOAD, *["/v1/completions"] * 3]
        assert server.asked[-1][1]["repetition_penalty"] == 1.0  # never the model's own
    asked = [{body["seed"] for _, body in server.asked if "seed" in body} for server in servers]
    assert asked == [{70, 71, 72}, {80, 81, 82}]  # a server computes a prompt once
    engine.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_cache_is_reset_when_no_request_uses_it_any_more(servers: list[Server], tmp_path: Path) -> None:
    servers[0].used_blocks = 2
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=4)
    assert [server.paths().count("/reset_prefix_cache") for server in servers] == [3, 1]
    assert servers[0].paths()[-1] == "/update_weight_version"
    assert versions_of(sample(engine)) == {4}
    engine.close()


def test_a_cache_that_keeps_older_blocks_is_an_error(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers[1].used_blocks = 10**9
    engine, model = engine_on(servers, tmp_path)
    monkeypatch.setattr(weight_sync, "SYNC_S", 0.05)
    with pytest.raises(RunFailure, match="kept cached blocks of older weights") as refused:
        engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=4)
    assert refused.value.where == servers[1].url
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)
    engine.close()


def test_a_running_event_loop_does_not_matter(servers: list[Server], tmp_path: Path) -> None:
    """A notebook has one."""

    async def in_a_loop() -> int:
        engine, model = engine_on(servers, tmp_path)
        engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
        turns = sample(engine)
        engine.close()
        return len(turns)

    assert asyncio.run(in_a_loop()) == 6


@pytest.mark.parametrize(
    ("reason", "found"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), (None, "abort"), ("repetition", "abort")],
)
def test_why_a_turn_ended_is_what_the_engine_says(
    servers: list[Server], tmp_path: Path, reason: str | None, found: str
) -> None:
    """For any last token."""
    servers[0].finish_reason = servers[1].finish_reason = reason
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    turns = sample(engine)
    engine.close()
    assert {turn.finish_reason for turn in turns} == {found}
    assert [len(turn.token_ids) for turn in turns] == [1, 2, 3, 1, 2, 3]


def test_each_request_has_its_own_limit(servers: list[Server], tmp_path: Path) -> None:
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    engine.sample([Request([5], 1), Request([5, 6], 2, max_tokens=3)], SAMPLING)
    asked = {body["seed"]: body for path, body in servers[0].asked if path == "/v1/completions"}
    assert {seed: body["max_tokens"] for seed, body in asked.items()} == {1: 5, 2: 3}
    engine.close()


def test_what_a_server_lists_is_what_it_sampled_from(servers: list[Server], tmp_path: Path) -> None:
    """A response with a token whose list is not complete is not trained on."""
    kept = replace(SAMPLING, top_p=0.9, top_k=3, with_kept=True)
    servers[1].mass = lambda index: 0.9 if index == 1 else 1.0
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    turns = sample(engine, sampling=kept)
    assert servers[0].asked[-1][1]["logprobs"] == 6  # equally likely tokens may be more than three
    assert [turn.finish_reason == "abort" for turn in turns] == [False, False, False, False, True, False]
    for turn in turns:
        counts = [0 if turn.finish_reason == "abort" else 2] * len(turn.token_ids)
        assert turn.kept.counts.tolist() == counts
        assert not turn.kept.without(turn.token_ids).any()
    servers[0].mass = servers[1].mass = lambda index: 0.9
    with pytest.raises(RunFailure, match="never add up to a probability of 1"):
        sample(engine, sampling=kept)
    engine.close()


def test_experts_that_a_server_reports(servers: list[Server], tmp_path: Path) -> None:
    """A file of NumPy in base64, of all tokens but the last."""
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    sampling = replace(SAMPLING, with_experts=True)
    with pytest.raises(RunFailure, match=r"experts of 0 of \d tokens of response 1") as caught:
        sample(engine, sampling=sampling)
    assert "--enable-return-routed-experts" in str(caught.value)
    servers[0].experts = servers[1].experts = (3, 2)
    for turn in sample(engine, sampling=sampling):
        index = len(turn.token_ids) - 1
        assert turn.experts.shape[1:] == (3, 2)
        assert turn.experts.dtype == torch.int16
        assert turn.experts.unique().tolist() == [index]
    engine.close()


def test_what_a_server_lists_as_most_likely(servers: list[Server], tmp_path: Path) -> None:
    """The most likely ones first, without those that are impossible."""
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    for count, expected in ((1, [0.75]), (3, [0.75, 0.25])):
        turns = sample(engine, sampling=replace(SAMPLING, num_most_likely=count))
        assert servers[0].asked[-1][1]["logprobs"] == count
        for turn in turns:
            assert turn.most_likely.counts.tolist() == [len(expected)] * len(turn.token_ids)
            ids, log_probs = turn.most_likely.padded()
            torch.testing.assert_close(log_probs.exp(), torch.tensor(expected).expand_as(log_probs))
            last = TOKENIZER("=")["input_ids"][-1]
            assert ids.tolist() == [[last, TOKENIZER.eos_token_id][: len(expected)]] * len(turn.token_ids)
    servers[0].lists = servers[1].lists = False
    for sampling in (replace(SAMPLING, num_most_likely=3), replace(SAMPLING, top_k=3, with_kept=True)):
        with pytest.raises(RunFailure, match=r"does not list|never add up"):
            sample(engine, sampling=sampling)
    engine.close()


@pytest.mark.parametrize("code", [0, 500])
def test_a_server_that_was_away_gets_the_newest_weights_before_it_is_asked_again(
    servers: list[Server], tmp_path: Path, code: int
) -> None:
    """Once; what it has sampled before that is not used."""
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=2)
    [server] = servers[:1]
    server.asked.clear()
    server.trouble, server.weight_version = [code] * 3, "default"
    assert len(sample(engine)) == 6
    paths = server.paths()
    away = paths.index("/collective_rpc")
    assert paths[away : away + 3] == RELOAD
    assert paths.count("/collective_rpc") == 1
    assert paths.count("/v1/completions") == 6 + 6
    assert server.asked[away][1]["kwargs"]["weights_path"].endswith("/v2")


def test_a_server_that_answers_some_requests_is_asked_for_the_others(
    servers: list[Server], tmp_path: Path
) -> None:
    """However often, as a busy one may be; it is given up after three times that bring nothing."""
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    [server] = servers[:1]
    server.trouble = [500, None, 0, None, 500, 500, None, None, None, 0, 500, 500]
    turns = sample(engine)
    assert [len(turn.token_ids) for turn in turns] == [1, 2, 3, 1, 2, 3]
    assert server.paths().count("/v1/completions") == 6 + 3 + 2 + 1 + 1
    assert engine.report().num_repeated == 3 + 2 + 1 + 1
    server.trouble = [500] * 18
    with pytest.raises(RunFailure, match=r"repeatedly.*the engine says why"):
        sample(engine)
    assert server.trouble == []
    engine.close()


def test_a_server_that_fails_while_it_loads_gets_everything_again(
    servers: list[Server], tmp_path: Path
) -> None:
    """It may have been restarted: naming its weights would not give it the newest ones."""
    engine, model = engine_on(servers[:1], tmp_path)
    [server] = servers[:1]
    for path in RELOAD:
        server.asked.clear()
        server.fails_at = [path]
        engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
        before = RELOAD[: RELOAD.index(path) + 1]
        assert server.paths() == [*before, *RELOAD]
    engine.close()


def test_a_server_that_only_stumbled_is_asked_again(servers: list[Server], tmp_path: Path) -> None:
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    [server] = servers[:1]
    server.asked.clear()
    server.trouble = [500]
    assert len(sample(engine)) == 6
    assert server.paths() == ["/v1/completions"] * 7


def test_a_server_that_started_again_between_two_batches_gets_the_newest_weights(
    servers: list[Server], tmp_path: Path
) -> None:
    """It answers at once, from the weights it was started with; the user's own servers do."""
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    [server] = servers[:1]
    server.asked.clear()
    server.weight_version = "default"
    assert len(sample(engine)) == 6
    assert server.paths() == [*["/v1/completions"] * 6, *RELOAD, *["/v1/completions"] * 6]


def test_no_server_loads_weights_while_another_rank_still_samples(
    servers: list[Server], tmp_path: Path
) -> None:
    """The main rank has finished its batch and releases the engine; the other rank's thread still samples its
    batch."""
    [server], model = servers[:1], random_model(1)
    meeting, said = threading.Barrier(2), ["", ""]

    def agree(rank: int, text: str) -> str:
        said[rank] = text
        meeting.wait(120)
        first = next(filter(None, said), "")
        meeting.wait(120)
        return first

    def on_rank(rank: int) -> VLLMServerRollout:
        context = context_of(model, rank=rank, agree=partial(agree, rank))
        return rollout_on([server], context, tmp_path / "weights")

    engines, lock = [on_rank(0), on_rank(1)], EngineLock()
    trainers = [engines[0], LockedRollout(engines[1], lock, first=True)]
    ahead = LockedRollout(engines[1], lock, first=False)

    def sync(version: int) -> None:
        weights = [PlainWeights(model.state_dict().items())] * 2
        with ThreadPoolExecutor(2) as ranks:
            list(ranks.map(lambda rank: trainers[rank].sync_weights(weights[rank], version), range(2)))

    sync(1)
    server.asked.clear()
    server.may_answer.clear()
    with ThreadPoolExecutor(2) as threads:
        sampling = threads.submit(sample, ahead)
        assert server.is_asked.wait(60)
        syncing = threads.submit(sync, 2)
        time.sleep(0.3)
        assert set(server.paths()) == {"/v1/completions"}
        server.may_answer.set()
        assert versions_of(sampling.result(120)) == {1}
        syncing.result(120)
    assert server.paths()[-3:] == RELOAD


@pytest.mark.parametrize("hangs", ["is_awake", "engine_works"])
@pytest.mark.parametrize("moment", ["sampling", "syncing"])
def test_a_server_that_hangs_is_named(servers: list[Server], tmp_path: Path, moment: str, hangs: str) -> None:
    """The whole server, or its engine alone: then the server still answers what needs no engine."""
    engine, model = engine_on(servers, tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    engine._client.answer_timeout = 1.0
    getattr(servers[1], hangs).clear()
    sync = partial(engine.sync_weights, PlainWeights(model.state_dict().items()), policy_version=2)
    with pytest.raises(RunFailure, match="engine has not answered for") as caught:
        sync() if moment == "syncing" else sample(engine)
    getattr(servers[1], hangs).set()
    assert caught.value.where == servers[1].url
    engine.close()


def test_an_engine_too_busy_for_a_probe_works_while_it_produces_tokens(
    servers: list[Server], tmp_path: Path
) -> None:
    """Its responses may take longer than `answer_timeout`."""
    [server] = servers[:1]
    engine, model = engine_on([server], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    engine._client.answer_timeout = 0.8
    server.engine_works.clear()
    produced = itertools.count()

    def tokens() -> int:
        if (number := next(produced)) == 12:  # checks, four of which fit into the timeout
            server.engine_works.set()
        return number

    server.tokens = tokens
    assert len(sample(engine)) == 6
    engine.close()


def test_a_sync_that_one_server_loses_half_way_leaves_no_mixture(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server has the new weights, the second has stopped permanently: nothing is sampled from
    either."""
    engine, model = engine_on(servers, tmp_path)
    engine._client._start_timeout = 0.3
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    servers[1].shutdown()
    servers[1].server_close()
    with pytest.raises(RunFailure, match="does not answer any more") as caught:
        engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=2)
    assert caught.value.where == servers[1].url
    assert "/collective_rpc" in servers[0].paths()[-3:]
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)
    engine.close()


def test_what_a_server_refuses_is_said_and_not_tried_again(servers: list[Server], tmp_path: Path) -> None:
    engine, model = engine_on(servers[:1], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    servers[0].trouble = [400, 400]
    with pytest.raises(RunFailure, match="the engine says why") as caught:
        sample(engine, n=1)
    assert caught.value.where == servers[0].url
    assert servers[0].paths().count("/v1/completions") <= 2  # once per request


def test_weights_that_are_incomplete_are_not_served(servers: list[Server], tmp_path: Path) -> None:
    engine, model = engine_on(servers, tmp_path)
    some = list(model.state_dict().items())
    with pytest.raises(RunFailure, match="is missing"):
        engine.sync_weights(PlainWeights(some[1:]), policy_version=1)
    assert servers[0].asked == []
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)


@pytest.mark.parametrize("shard_bytes", [2**30, 2000])
def test_only_two_versions_are_kept_and_each_is_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", shard_bytes)
    model = random_model(1)
    versions = PublishedWeights(model, TOKENIZER, tmp_path)
    for version in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.125)
        path = versions.write(model.state_dict().items(), version)
    assert versions.latest() == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["v2", "v3"]
    again = AutoModelForCausalLM.from_pretrained(path)
    for (name, ours), theirs in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_weights_of_killed_runs_are_cleared_away(tmp_path: Path) -> None:
    dead = tmp_path / f"rlctl-weights-{leftovers._host()}-999999999-abc"
    elsewhere = tmp_path / "rlctl-weights-another.host-999999999-abc"
    for directory in (dead, elsewhere):
        directory.mkdir()
    PublishedWeights(random_model(1), TOKENIZER, tmp_path)
    assert not dead.exists()
    assert elsewhere.exists()


def test_weights_of_a_run_in_another_container_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may share a name and their shared memory, and yet not see one another's processes."""
    theirs = PublishedWeights(random_model(1), TOKENIZER, tmp_path)
    monkeypatch.setattr(leftovers, "_lives", lambda _: False)
    PublishedWeights(random_model(1), TOKENIZER, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    theirs.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_server_nobody_started_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match="no vLLM server answers") as caught:
        reachable(["http://127.0.0.1:9"], seconds=0.05)
    assert "http://127.0.0.1:9" in str(caught.value.where)


@pytest.mark.parametrize(
    ("mode", "option"),
    [("raw_logprobs", "--logprobs-mode"), (None, "VLLM_SERVER_DEV_MODE=1"), ("", "see its log")],
)
def test_a_server_started_otherwise_than_a_run_needs_is_refused(
    servers: list[Server], mode: str | None, option: str
) -> None:
    urls = [server.url for server in servers]
    reachable([f"{url}/" for url in urls], seconds=60)
    servers[1].logprobs_mode = mode
    with pytest.raises(EnvironmentFailure) as caught:
        reachable(urls, seconds=60)
    assert urls[1] in str(caught.value.where)
    assert option in str(caught.value.fix)


def test_a_server_with_another_key_is_named(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    servers[1].key = "the key"
    urls = [server.url for server in servers]
    with pytest.raises(EnvironmentFailure, match="another key") as caught:
        reachable(urls, seconds=60)
    assert urls[1] in str(caught.value.where)
    monkeypatch.setenv(KEY, "the key")
    reachable(urls, seconds=60)


def test_servers_without_a_gpu_beside_the_trainers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    servers = ["rollout.name=vllm", "rollout.mode=server", "rollout.tensor_model_parallel_size=2"]
    fits = load_spec([], [], [*servers, "trainer.n_gpus_per_node=2"]).spec
    assert replica_settings(fits).first_gpu == 2
    with pytest.raises(UsageError, match="needs 4 GPUs and the servers 2, but 4 are visible"):
        replica_settings(load_spec([], [], [*servers, "trainer.n_gpus_per_node=4"]).spec)


def test_servers_of_a_run_take_its_adapters() -> None:
    on_servers = ["rollout.name=vllm", "rollout.mode=server"]
    settings = replica_settings(load_spec([], [], [*on_servers, "model.lora_rank=3"]).spec)
    assert settings.options["max_lora_rank"] == 8
    assert "--enable-lora" in settings.arguments("model")
    assert "--enable-lora" not in replica_settings(load_spec([], [], on_servers).spec).arguments("model")
