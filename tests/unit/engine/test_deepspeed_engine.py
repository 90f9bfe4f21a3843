"""One optimizer step is one optimizer step, however it is cut: stages, ranks, micro-batches."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models import naive_log_probs, tiny_batch, tiny_model
from tests.processes import on_ranks, on_ranks_each
from tests.sweeps import asked_for, swept
from tests.unit.engine import engine_jobs

FSDP = engine_jobs.FSDP
STAGES = (0, 1, 2, 3, FSDP)
CASES = [(stage, "fp32", micro) for stage in STAGES for micro in (1, 8)]
CASES += [(3, "fp32", 2)]
CASES += [(stage, "bf16", 4) for stage in STAGES]
#: Every stage in both precisions.
SAMPLE = [*[(stage, "fp32", 1) for stage in STAGES], *[(stage, "bf16", 4) for stage in STAGES]]


@pytest.fixture(scope="module")
def by_world_size(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("matrix")
    asked = asked_for(request, "stage", "dtype", "micro")  # they are compared with those of the whole batch
    asked |= {case for (case,) in asked_for(request, "case")}
    cases = CASES if asked - set(SAMPLE) else [case for case in CASES if case in asked]
    found = {}
    for count in (1, 2):
        results = on_ranks(count, engine_jobs.matrix, cases, where=where)
        for case in cases:
            for name, tensor in results[0][case]["weights"].items():
                for other in results[1:]:
                    assert torch.equal(tensor, other[case]["weights"][name]), (case, name, "ranks differ")
        found[count] = results[0]
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def mean_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "dtype", "micro"), CASES)
def test_same_weights_however_cut(by_world_size, world_size: int, stage: int, dtype: str, micro: int) -> None:
    wanted = by_world_size[1][stage % 2, "fp32", 8]  # odd stages are tied: another model
    got = by_world_size[world_size][stage, dtype, micro]
    moved = distance(wanted["start"], wanted["weights"])
    assert moved > 1e-2
    if dtype == "fp32":
        assert distance(got["weights"], wanted["weights"]) < 2e-5
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    else:  # Adam turns the sign of a gradient near zero into a full step: compare means
        assert mean_distance(got["weights"], wanted["weights"]) < 0.1 * mean_distance(
            wanted["start"], wanted["weights"]
        )
        assert got["norms"] == pytest.approx(wanted["norms"], rel=0.05)


def test_gradients_are_summed_over_ranks_in_float32(tmp_path: Path) -> None:
    """Stage 1 sums each rank's gradients before those of the ranks; stages 2 and 3 sum each micro-batch's."""
    by_stage = on_ranks_each(2, engine_jobs.gradients, [(stage,) for stage in (1, 2, 3)], where=tmp_path)
    wanted = {name: gradient.double() for name, gradient in by_stage[1,][0].items()}
    norm = sum(float(gradient.square().sum()) for gradient in wanted.values()) ** 0.5
    for stage in (2, 3):
        for found in by_stage[stage,]:
            errors = [float((gradient - wanted[name]).square().sum()) for name, gradient in found.items()]
            assert sum(errors) ** 0.5 < 1e-6 * norm  # in bf16: 1e-3


def test_a_perturbation_reaches_every_rank_and_is_undone_exactly(tmp_path: Path) -> None:
    """Stages 1 and 3 change the same weights in the same way on both ranks."""
    cases = [(1, "fp32"), (3, "fp32"), (3, "bf16")]
    by_stage = on_ranks_each(2, engine_jobs.perturbation, cases, where=tmp_path)
    for case in cases:
        for name in ("log_probs", "weights"):
            before, within, after = by_stage[case][0][name]
            assert torch.equal(before, after)
            assert (within - before).abs().mean() > 1e-3
            assert all(map(torch.equal, by_stage[case][0][name], by_stage[case][1][name]))
    one, three = (by_stage[stage, "fp32"][0]["weights"][1] for stage in (1, 3))
    assert torch.equal(one, three)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", swept(CASES, SAMPLE, one=True))
def test_skipped_step_changes_nothing(by_world_size, world_size: int, case) -> None:
    got = by_world_size[world_size][case]
    assert got["applied"] == (True, False, True)
    assert got["untouched"]


@pytest.fixture(scope="module")
def steps_in_step(tmp_path_factory: pytest.TempPathFactory):
    where, cases = tmp_path_factory.mktemp("in-step"), [(stage,) for stage in (0, 2, 3, FSDP)]
    return {n: on_ranks_each(n, engine_jobs.in_step, cases, where=where) for n in (1, 2)}


@pytest.mark.parametrize("stage", [0, 2, 3, FSDP])
def test_ranks_with_fewer_passes_stay_in_step(steps_in_step, stage: int) -> None:
    [(wanted, _)] = steps_in_step[1][stage,]
    (first, layouts), (second, others) = steps_in_step[2][stage,]
    assert layouts == others
    for name, weight in wanted.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, rtol=0, atol=2e-5)


SAVED = [*((stage, "fp32") for stage in STAGES), (2, "bf16"), (FSDP, "bf16")]


@pytest.fixture(scope="module")
def saved_engines(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("saved")
    cases = [(*case, str(where)) for case in SAVED]
    return {n: on_ranks_each(n, engine_jobs.save_and_load, cases, where=where) for n in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", SAVED)
def test_fresh_engine_goes_on_where_the_saved_one_was(saved_engines, case, world_size: int) -> None:
    [ranks] = [found for key, found in saved_engines[world_size].items() if key[:2] == case]
    for saved, loaded, wanted, got, norms in ranks:
        assert distance(saved, loaded) == 0.0
        assert distance(wanted, got) == 0.0
        assert distance(saved, wanted) > 1e-3
        assert norms[0] == norms[1]


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 2), (3, 2), (3, 4), (FSDP, 2), (FSDP, 4)])
def test_export_is_a_plain_model_that_the_ranks_write_together(
    tmp_path: Path, stage: int, world_size: int
) -> None:
    cases = [(stage, str(tmp_path / name), share) for name, share in (("one", 2**30), ("shared", 1000))]
    results = on_ranks_each(world_size, engine_jobs.export, cases, where=tmp_path)
    for _, at, share in cases:
        directory, weights = Path(at), results[stage, at, share][0]
        model, loading = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        ours = dict(model.named_parameters())
        assert not any(loading.values()), loading
        assert ours.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(ours[name], tensor), name
        assert model.generation_config.temperature == 0.6
    (one, shared) = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "shared"))
    assert one == ["config.json", "generation_config.json", "model.safetensors"]
    if world_size == 1:
        assert shared == one
        return
    numbers = [f"model-{n:05d}-of-{world_size:05d}.safetensors" for n in range(1, world_size + 1)]
    assert shared == sorted([*one[:2], *numbers, "model.safetensors.index.json"])
    index = json.loads((tmp_path / "shared" / "model.safetensors.index.json").read_text())
    serial = load_file(tmp_path / "one" / "model.safetensors")
    assert index["weight_map"].keys() == serial.keys()  # tied weights under the same name
    found = {number: load_file(tmp_path / "shared" / number) for number in numbers}
    for name, tensor in serial.items():
        assert torch.equal(found[index["weight_map"][name]][name], tensor)
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in found.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) < 0.8 * sum(sizes) if world_size == 2 else max(sizes) < 0.6 * sum(sizes)


def test_an_export_after_one_that_was_killed_leaves_nothing_of_it(tmp_path: Path) -> None:
    left, _ = on_ranks(2, engine_jobs.export_again, str(tmp_path / "model"), where=tmp_path)
    assert left == ["model-00001-of-00002.safetensors", "rank-1/model.part.safetensors"]
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # the second soft-caps the output of its head
def test_chunked_head_trains_the_same(tmp_path: Path, kind: str) -> None:
    found = {
        (stage, world_size): results[0]
        for world_size, stages in ((1, (0, 3)), (2, (3, FSDP)))
        for (stage, _), results in on_ranks_each(
            world_size, engine_jobs.chunked, [(stage, kind) for stage in stages], where=tmp_path
        ).items()
    }
    for whole, pieces in found.values():
        assert distance(whole, pieces) < 2e-5
    assert distance(found[3, 1][0], found[3, 2][0]) < 2e-5
    assert distance(found[3, 1][0], found[FSDP, 2][0]) < 2e-5
    if kind == "gemma2":  # the other model is another one at stage 3
        assert distance(found[0, 1][0], found[3, 1][0]) < 2e-5


@pytest.fixture(scope="module")
def bad_gradients(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("bad")
    cases = list(itertools.product(STAGES, (0.0, 1.0)))
    return {n: on_ranks_each(n, engine_jobs.bad_gradient, cases, where=where) for n in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_bad_gradient_never_reaches_the_weights(
    bad_gradients, stage: int, world_size: int, grad_clip: float
) -> None:
    said, before, after = bad_gradients[world_size][stage, grad_clip][0]
    if said != "applied=False":  # under ZeRO without clipping only the rank that owns the part knows
        assert "some ranks only" in said
        assert (world_size, grad_clip) == (2, 0.0)
        return
    assert distance(before, after) == 0.0


def test_trained_policy_is_the_one_that_samples(tmp_path: Path) -> None:
    batch = tiny_batch(tiny_model(), engine_jobs.ROWS, seed=1)
    wanted, _ = naive_log_probs(tiny_model(), batch)
    stages = [(stage,) for stage in (0, 3, FSDP)]
    for stage, [(first, second)] in on_ranks_each(1, engine_jobs.dropout, stages, where=tmp_path).items():
        assert torch.equal(first, second), stage
        torch.testing.assert_close(first, wanted.float().detach(), rtol=1e-4, atol=1e-5)


def test_loading_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = on_ranks(1, engine_jobs.load_nothing, str(tmp_path / "empty"), where=tmp_path)[0]
    assert said != "loaded"
    assert str(tmp_path) in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_smaller_than_a_bf16_digit_are_not_lost(world_size: int, tmp_path: Path) -> None:
    """From float32 copies of rounded weights, no step below half of a digit would change any weight."""
    stages = [(stage,) for stage in (1, 2, 3, FSDP)]
    for stage, results in on_ranks_each(world_size, engine_jobs.small_step, stages, where=tmp_path).items():
        for same, changed in results:
            assert same, stage
            assert 0.01 < changed < 0.5, stage
