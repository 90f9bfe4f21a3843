"""Each part of the log-ratio is planted alone and must be recovered within its interval."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.algos.segments import to_host
from rlctl.batch import Episode, ModelInputs, Task, TokenBatch, TokenSequence
from rlctl.mismatch.dumped import DumpedStep, Kept, WeightsScorer, spread_over
from rlctl.mismatch.ratio_split import RatioSplit, split, split_of_run
from rlctl.run_spec.load import load_spec
from rlctl.train.step_metrics import ratio_metrics, ratio_sums
from tests.unit.mismatch.test_who_sampled import sampled
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model

RC = "algorithm.rollout_correction.bypass_mode"


def changed(model: Any, by: float = 0.05) -> Any:
    other, draw = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * weight.std() * torch.randn(weight.shape, generator=draw))
    return other


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Directories of versions 0 and 1."""
    found = []
    for version, model in enumerate((random_model(1), changed(random_model(1)))):
        directory = tmp_path_factory.mktemp(f"v{version}")
        model.save_pretrained(directory)
        TOKENIZER.save_pretrained(directory)
        found.append(str(directory))
    return found


def spec_of(path: str, *overrides: str) -> Any:
    given = [f"model.path={path}", "engine.dtype=fp32", "data.train_files=[none.parquet]", *overrides]
    return load_spec([], [], given).spec


def dumped_of(batch: TokenBatch, trained: Tensor) -> DumpedStep:
    inputs = ModelInputs(batch.token_ids, batch.sampled, batch.lengths, batch.columns.get("kept"))
    return DumpedStep(1, inputs, batch.units.sequence, batch.versions, batch.rollout_log_probs, trained)


def split_by(paths: list[str], spec: Any, batch: TokenBatch, trained: int) -> RatioSplit:
    """The split of a batch that version `trained` is trained on."""
    scorers = [WeightsScorer(spec, path) for path in paths]
    scored = dumped_of(batch, batch.rollout_log_probs)
    dumped = replace(scored, trained=scorers[trained].score(scored).log_probs)
    weights = [Kept(f"v{version}", version, path) for version, path in enumerate(paths)]
    found = split_of_run(spec, [dumped], weights, [[scorer.score(dumped)] for scorer in scorers])
    assert found is not None
    assert sum(part.share for part in found.parts) == pytest.approx(1.0, abs=1e-6)
    return found


def assert_alone(found: RatioSplit, name: str) -> None:
    """The part's interval includes all of the log-ratio, those of the others nothing of it."""
    for part in found.parts:
        wanted = 1.0 if part.name == name else 0.0
        assert part.low - 1e-3 <= wanted <= part.high + 1e-3, part
    assert found.parts[0].name == name
    assert found.parts[0].share == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_engine_alone(paths: list[str], dtype: str) -> None:
    batch = TokenBatch.of(sampled(random_model(1), 0, 1, dtype=dtype))
    found = split_by(paths, spec_of(paths[0]), batch, trained=0)
    assert_alone(found, "engine")
    assert "one precision" in found.fix


def test_staleness_alone(paths: list[str]) -> None:
    batch = TokenBatch.of(sampled(random_model(1), 0, 1))
    assert_alone(split_by(paths, spec_of(paths[0]), batch, trained=1), "staleness")


@pytest.mark.parametrize("cut", [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5}])
def test_the_kept_set_alone(paths: list[str], cut: dict[str, float]) -> None:
    batch = TokenBatch.of(sampled(random_model(1), 0, 1, temperature=0.9, **cut))
    given = [f"rollout.{name}={value}" for name, value in cut.items()]
    found = split_by(paths, spec_of(paths[0], "rollout.temperature=0.9", *given), batch, trained=0)
    assert_alone(found, "kept set")
    assert found.parts[0].mean < 0  # the trainer gives the kept tokens less
    exact = TokenBatch.of(sampled(random_model(1), 0, 1, with_kept=True, **cut))
    spec = spec_of(paths[0], *given, "rollout.exact_sampling=true")
    assert split_by(paths, spec, exact, trained=0).size < 1e-5


def in_flight(policies: list[Any], batch: TokenBatch, change_at: int, *, recomputes: bool) -> TokenBatch:
    """The batch as if the weights changed after `change_at` tokens of every response.

    The reference implementation: token by token, with transformers' cache.
    """
    versions, log_probs = [], []
    for ids, scored in zip(
        torch.split(batch.token_ids, batch.lengths.tolist()),
        torch.split(batch.sampled, batch.lengths.tolist()),
        strict=True,
    ):
        cache, prompt = None, int((~scored).sum())
        for place in range(len(ids) - 1):
            version = int(place + 1 - prompt >= change_at)
            with torch.no_grad():
                if recomputes:
                    logits = policies[version](ids[None, : place + 1]).logits[0, -1]
                else:
                    found = policies[version](
                        ids[None, place : place + 1], past_key_values=cache, use_cache=True
                    )
                    cache, logits = found.past_key_values, found.logits[0, -1]
            if scored[place + 1]:
                versions.append(version)
                log_probs.append(logits.log_softmax(-1)[ids[place + 1]])
    return replace(batch, versions=torch.tensor(versions), rollout_log_probs=torch.stack(log_probs))


@pytest.fixture(scope="module")
def policies() -> list[Any]:
    return [random_model(1), changed(random_model(1), 0.3)]


@pytest.fixture(scope="module")
def mixed_paths(policies: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for version, model in enumerate(policies):
        directory = tmp_path_factory.mktemp(f"mixed{version}")
        model.save_pretrained(directory)
        TOKENIZER.save_pretrained(directory)
        found.append(str(directory))
    return found


def test_the_cache_alone(mixed_paths: list[str], policies: list[Any]) -> None:
    """Every response begins with the old weights and is trained with those that sampled most of it."""
    sampled_batch = TokenBatch.of(sampled(policies[0], 0, 1))
    batch = in_flight(policies, sampled_batch, 1, recomputes=False)
    fresh = in_flight(policies, sampled_batch, 1, recomputes=True)
    new = batch.versions == 1
    gap = (fresh.rollout_log_probs - batch.rollout_log_probs)[new]
    assert gap.abs().mean() > 0.01
    found = split_by(mixed_paths, spec_of(mixed_paths[0]), batch, trained=1)
    parts = {part.name: part for part in found.parts}
    assert parts["cache"].size == pytest.approx(float(gap.abs().sum()) / len(new), rel=1e-3)
    assert parts["engine"].size < 1e-5
    recomputed = split_by(mixed_paths, spec_of(mixed_paths[0]), fresh, trained=1)
    assert {part.name for part in recomputed.parts} == {"staleness", "engine"}
    assert_alone(recomputed, "staleness")


def test_shares_and_intervals_are_those_of_a_ratio_of_sums() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4000, generator=draw)
    b = 2 * b
    found = split({"a": a, "b": b}, a + b, torch.arange(400).repeat_interleave(10))
    assert found is not None
    first, second = found.parts
    assert (first.name, second.name) == ("b", "a")
    assert first.share == pytest.approx(0.8, abs=0.03)
    assert first.low < 0.8 < first.high
    assert first.high - first.low == pytest.approx(2 * 1.96 * math.sqrt(2 * 0.2 * 0.8 / 4000), rel=0.5)
    assert split({"a": a}, torch.zeros(4000), torch.zeros(4000)) is None


# --- what a step knows -------------------------------------------------------------------------------


def metrics_of(
    batch: TokenBatch, trained: Tensor, *overrides: str, probed: float | None = None
) -> dict[str, float]:
    spec = load_spec([], [], ["model.path=embedded", *overrides]).spec
    found = ratio_metrics(to_host(ratio_sums(batch, trained, spec)), spec, probed)
    return {name.rpartition("/")[2]: value for name, value in found.items()}


def episode_of(turns: list[list[int]]) -> Episode:
    """Two tokens of a prompt, and after each turn one that was not sampled; turns are given by versions."""
    sizes = [len(versions) for versions in turns]
    sampled = [False, False, *(flag for size in sizes for flag in [True] * size + [False])]
    count = sum(sizes)
    sequence = TokenSequence(
        token_ids=torch.full((len(sampled),), 3),
        sampled=torch.tensor(sampled),
        log_probs=torch.full((count,), -1.0),
        versions=torch.tensor([version for versions in turns for version in versions], dtype=torch.int64),
        turns=torch.arange(len(turns)).repeat_interleave(torch.tensor(sizes)),
    )
    return Episode(Task(prompt_ids=(3, 3), text=""), 0, (sequence,), "")


def columns(
    lengths: list[int], versions: list[int], age: int, gaps: list[float]
) -> tuple[TokenBatch, Tensor]:
    """Episodes of sampled tokens only, whose trained log-probs are `gaps` above those of the engine."""
    total, count = sum(lengths), len(lengths)
    recorded = torch.tensor(versions)
    batch = TokenBatch(
        token_ids=torch.zeros(total, dtype=torch.int64),
        sampled=torch.ones(total, dtype=torch.bool),
        lengths=torch.tensor(lengths),
        owners=torch.arange(count),
        group_ids=torch.arange(count),
        members=torch.zeros(count, dtype=torch.int64),
        prompt_weights=torch.ones(count),
        rollout_log_probs=torch.full((total,), -1.0),
        versions=recorded,
        turns=torch.zeros(total, dtype=torch.int64),
        rewards=torch.zeros(total),
    )
    return batch.with_columns(age=age - recorded), torch.full((total,), -1.0) + torch.tensor(gaps)


def test_a_step_splits_what_it_knows() -> None:
    # Of version 4, which is trained: fresh tokens, and one behind tokens of version 2.
    batch, trained = columns([2, 3], [4, 4, 2, 2, 4], 4, [0.1, -0.1, 0.5, -0.5, 0.3])
    found = metrics_of(batch, trained, f"{RC}=false")
    total = (2 * 0.01 + 2 * 0.25 + 0.09) / 5
    assert found["engine"] == pytest.approx(0.01, rel=1e-4)
    assert found["cache"] == pytest.approx((0.09 - 0.01) / 5, rel=1e-4)
    assert sum(found.values()) == pytest.approx(total, rel=1e-4)
    assert "kept_set" not in found


def test_without_fresh_tokens_the_probe_is_the_engine() -> None:
    batch, trained = columns([2], [2, 2], 4, [0.5, -0.5])
    assert metrics_of(batch, trained, f"{RC}=false") == {}
    found = metrics_of(batch, trained, f"{RC}=false", probed=0.05)
    assert found == {"engine": 0.05, "staleness": pytest.approx(0.2, rel=1e-4)}


def test_truncation_is_apart_from_the_engine_only_with_a_probe() -> None:
    batch, trained = columns([2], [4, 4], 4, [-0.3, -0.3])
    given = (f"{RC}=false", "rollout.top_p=0.9")
    assert set(metrics_of(batch, trained, *given)) == {"staleness"}
    found = metrics_of(batch, trained, *given, probed=0.01)
    assert found == {"engine": 0.01, "kept_set": pytest.approx(0.08, rel=1e-4), "staleness": 0.0}


def test_in_bypass_mode_only_the_first_update_is_at_the_sampling_policy() -> None:
    batch, trained = columns([1, 1], [4, 4], 4, [0.1, 0.7])
    found = metrics_of(batch, trained, f"{RC}=true", "data.train_batch_size=2", "actor.ppo_mini_batch_size=1")
    assert found["engine"] == pytest.approx(0.01, rel=1e-4)
    assert found["staleness"] == pytest.approx(0.24, rel=1e-3)


IN_FLIGHT = (
    "rollout.name=vllm",
    "rollout.mode=server",
    "rollout.in_flight=true",
    "rollout.max_staleness=1",
)
#: Versions of the sampled tokens of each turn; the first two are of one sequence, the last has no token.
TURNS = [[1, 1, 2, 2], [2, 2, 3], [3, 3, 3], [2, 3], [1], []]


@pytest.mark.parametrize(
    ("cache", "count"),
    [
        ("keep", 6),  # the 2s and the 3 of the first sequence (5), and the 3 behind a 2 (1)
        ("clear", 4),  # a later turn is computed anew: its 2s, like the first tokens of a turn, are fresh
        ("recompute", 0),
    ],
)
def test_tokens_behind_keys_and_values_of_older_weights_are_counted(cache: str, count: int) -> None:
    batch = TokenBatch.of([episode_of(TURNS[:2]), *(episode_of([turn]) for turn in TURNS[2:])])
    batch = batch.with_columns(age=4 - batch.versions)
    found = metrics_of(
        batch, batch.rollout_log_probs + 0.1, f"{RC}=false", *IN_FLIGHT, f"rollout.stale_cache={cache}"
    )
    assert found["stale_cache_fraction"] == pytest.approx(count / sum(map(len, TURNS)))


def test_older_weights_after_newer_ones_read_no_older_cache() -> None:
    """A second turn is sampled by a server that gets the newest weights last; only its last token counts."""
    batch = TokenBatch.of([episode_of([[3, 3], [2, 2, 3]])])
    batch = batch.with_columns(age=4 - batch.versions)
    for cache in ("keep", "clear"):
        given = (f"{RC}=false", *IN_FLIGHT, f"rollout.stale_cache={cache}")
        found = metrics_of(batch, batch.rollout_log_probs, *given)
        assert found["stale_cache_fraction"] == pytest.approx(1 / 5)


def test_only_sampling_in_flight_has_a_stale_cache() -> None:
    batch, trained = columns([2], [2, 2], 4, [0.5, -0.5])
    assert "stale_cache_fraction" not in metrics_of(batch, trained, f"{RC}=false")
    nothing, trained = columns([0], [], 4, [])
    found = metrics_of(nothing, trained, f"{RC}=false", *IN_FLIGHT, "rollout.stale_cache=keep")
    assert found == {"stale_cache_fraction": 0.0}


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_a_step_sum_to_the_mean_square(seed: int) -> None:
    """Also where other tokens happen to be closer than fresh ones, so that a part is negative."""
    draw = torch.Generator().manual_seed(seed)
    ages = torch.randint(0, 3, (6,), generator=draw).tolist()
    versions = [4 - age for age in ages for _ in range(4)]
    versions[2:4] = [4, 4]
    scales = torch.tensor([1.0 if version == 4 else 0.2 for version in versions])
    gaps = scales * torch.randn(24, generator=draw)
    batch, trained = columns([4] * 6, versions, 4, gaps.tolist())
    settings = ("rollout.in_flight=true", "rollout.name=vllm", "rollout.stale_cache=keep")
    settings += ("rollout.mode=server", "rollout.max_staleness=1", f"{RC}=false")
    for overrides, probed in (((), None), (("rollout.top_p=0.9",), 0.01), (settings, None)):
        found = metrics_of(batch, trained, *overrides, probed=probed)
        parts = [found[name] for name in ("engine", "kept_set", "cache", "staleness") if name in found]
        square = float((trained - batch.rollout_log_probs).double().square().mean())
        assert sum(parts) == pytest.approx(square, rel=1e-6), overrides
        assert min(parts) < 0.0 or seed


@pytest.mark.parametrize("number", [0, 1, 15, 16, 17, 25, 31, 32, 100])
def test_rows_are_spread_over_the_dump(number: int) -> None:
    chosen = spread_over(range(number), 16)
    assert len(chosen) == len(set(chosen)) == min(number, 16)
    gaps = [b - a for a, b in pairwise([*chosen, number])]
    assert not gaps or max(gaps) - min(gaps) <= 1
