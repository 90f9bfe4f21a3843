from __future__ import annotations

import math
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch

from rlctl.engine.ranks import Ranks
from rlctl.errors import SpecError
from rlctl.run_spec.algorithm import ActorSpec
from rlctl.run_spec.keys import changes
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.run_dir import open_run_dir
from rlctl.train import start
from rlctl.train.preflight import check_inputs
from rlctl.train.resume import refuse_unsafe
from rlctl.train.settings import actor_schedule, critic_schedule, lr_at
from rlctl.train.start import start_run, with_absolute_paths
from rlctl.train.stream import places_of


def rate(update: int, total: int, *, peak: float, warmup: int, kind: str) -> float:
    return lr_at(update, total, ActorSpec(lr=peak, lr_warmup_steps=warmup), kind)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_reaches_the_peak_on_its_last_update(kind: str) -> None:
    rates = [rate(u, 20, peak=2.0, warmup=4, kind=kind) for u in range(6)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0


def test_decays() -> None:
    assert rate(999, 20, peak=3.0, warmup=0, kind="constant") == 3.0
    assert rate(10, 20, peak=3.0, warmup=0, kind="linear") == pytest.approx(1.5)
    assert rate(10, 20, peak=3.0, warmup=0, kind="cosine") == pytest.approx(1.5)
    assert rate(5, 20, peak=1.0, warmup=0, kind="cosine") == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    for kind in ("linear", "cosine"):
        rates = [rate(u, 20, peak=1.0, warmup=3, kind=kind) for u in range(3, 30)]
        assert all(a >= b for a, b in pairwise(rates))
        assert rates[16] > 0.0  # the last of the 20 updates still moves
        assert rates[17:] == pytest.approx([0.0] * 10)
    assert rate(0, 0, peak=1.0, warmup=0, kind="linear") == 1.0
    assert rate(3, 3, peak=1.0, warmup=3, kind="linear") == 1.0  # all warm-up: nothing left to decay over


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("held", [0, 3])
def test_the_rate_decays_over_the_updates_that_the_run_makes(kind: str, held: int) -> None:
    """Ten batches; the policy makes 2 mini-batches × 2 epochs of each but those of the critic's warm-up."""
    run = spec(
        "algorithm.adv_estimator=gae",
        "algorithm.rollout_correction.bypass_mode=false",
        f"trainer.critic_warmup={held}",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=2",
        "actor.lr=3.0",
        f"actor.lr_scheduler_type={kind}",
        "actor.lr_warmup_steps=0",
        "critic.lr_warmup_steps=0",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_epochs=3",
        "critic.lr=2.0",
    )
    for rates, peak, updates in [
        (actor_schedule(run, 10), 3.0, (10 - held) * 2 * 2),
        (critic_schedule(run, 10), 2.0, 10 * 1 * 3),
    ]:
        assert rates(0) == peak
        assert rates(updates // 2) == pytest.approx(peak / 2)
        assert rates(updates - 1) > 0.0  # the last update still moves
        assert rates(updates) == pytest.approx(0.0, abs=1e-12)


def test_both_warm_up_over_their_own_updates() -> None:
    run = spec(
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=3",
        "actor.lr=3.0",
        "actor.lr_warmup_steps=2",
        "critic.lr=2.0",
        "critic.lr_warmup_steps=4",
    )
    actor, critic = actor_schedule(run, 10), critic_schedule(run, 10)
    assert [actor(u) for u in range(3)] == pytest.approx([1.5, 3.0, 3.0])
    assert [critic(u) for u in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize(("batch", "mini"), [(16, 16), (16, 8), (16, 4), (8, 8)])
def test_mini_batches_hold_the_same_prompts_on_any_number_of_ranks(batch: int, mini: int) -> None:
    sizes = [f"data.train_batch_size={batch}", f"actor.ppo_mini_batch_size={mini}"]
    of_batch = load_spec([], [], sizes).spec
    device = torch.device("cpu")
    alone = places_of(of_batch, Ranks(0, 1, device))
    assert alone == list(range(batch))
    for world_size in (1, 2, 4):
        mine = [places_of(of_batch, Ranks(rank, world_size, device)) for rank in range(world_size)]
        assert sorted(chain(*mine)) == alone
        share = mini // world_size
        for k in range(batch // mini):
            together = sorted(place for rank in mine for place in rank[k * share : (k + 1) * share])
            assert together == alone[k * mini : (k + 1) * mini]


def spec(*overrides: str) -> RunSpec:
    pinned = ["actor.lr=5e-4", "actor.lr_scheduler_type=constant", "trainer.total_training_steps=240"]
    return load_spec([], [], [*pinned, "actor.ppo_micro_batch_size_per_gpu=512", *overrides]).spec


def test_an_option_that_is_left_out_is_a_change() -> None:
    before = spec("engine.deepspeed.zero_optimization.overlap_comm=true", "data.chat_template_kwargs.mode=x")
    key = "engine.deepspeed.zero_optimization.overlap_comm"
    assert changes(before, spec()) == {key: (True, None), "data.chat_template_kwargs.mode": ("x", None)}
    with pytest.raises(SpecError):
        refuse_unsafe(before, spec())


def test_safe_changes_are_shown() -> None:
    lines = refuse_unsafe(
        spec(), spec("trainer.total_training_steps=999", "actor.ppo_micro_batch_size_per_gpu=4")
    )
    assert lines == [
        "actor.ppo_micro_batch_size_per_gpu: 512 → 4",
        "trainer.total_training_steps: 240 → 999",
    ]
    assert refuse_unsafe(spec(), spec()) == []


def test_a_critic_warm_up_of_the_whole_run_is_refused_before_it_starts() -> None:
    gae = ("algorithm.adv_estimator=gae", "trainer.total_training_steps=5")
    assert check_inputs(spec(*gae, "trainer.critic_warmup=4")) == []
    [problem] = check_inputs(spec(*gae, "trainer.critic_warmup=5"))
    assert (problem.key, problem.fix) == ("trainer.critic_warmup", "use less than 5")


def test_a_masked_value_must_be_given_again(tmp_path: Path) -> None:
    """Some parameters have keys or values like those of secrets."""
    mapping = ("data.chat_template_kwargs.judge_token=x", "data.chat_template_kwargs.commit=" + "a1" * 20)
    given = spec(*mapping, "data.chat_template_kwargs.version=" + "a1" * 20)
    with open_run_dir(tmp_path, resume=False) as run:
        run.write_spec(given.model_dump(mode="json"))
    recorded = load_spec(files=[tmp_path / "spec.yaml"]).spec
    keys = [f"data.chat_template_kwargs.{name}" for name in ("judge_token", "version")]
    assert [problem.key for problem in check_inputs(recorded)] == keys
    assert check_inputs(given) == []
    with pytest.raises(SpecError, match="judge_token"):
        start_run(recorded, resume=None, note=print)
    assert refuse_unsafe(recorded, given) == []


def test_rank_0_of_a_launcher_downloads_when_the_others_can_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def run_rank(*given: object) -> int:
        order.append("joins")
        given[-1]()  # type: ignore[operator]
        return 0

    monkeypatch.setattr(start, "local_sources", lambda *_: order.append("downloads"))
    monkeypatch.setattr(start, "run_rank", run_rank)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    two = spec("trainer.n_gpus_per_node=2", f"trainer.run_dir={tmp_path / 'run'}")
    assert start.start_run(two, resume=None, note=print) == (tmp_path / "run", 0)
    assert order == ["joins", "downloads"]


def test_a_resumed_run_may_have_its_servers_elsewhere() -> None:
    server = ["rollout.name=vllm", "rollout.mode=server", "rollout.server.weights_dir=/shared"]
    before = spec(*server, "rollout.server.urls=[http://node1:8000]")
    after = spec(*server, "rollout.server.urls=[http://node7:8000]", "rollout.gpu_memory_utilization=0.8")
    assert len(refuse_unsafe(before, after)) == 2


@pytest.mark.parametrize(
    "override",
    [
        "actor.lr=1e-3",
        "rollout.max_staleness=2",
        "trainer.seed=2",
        "data.train_batch_size=64",
        "rollout.temperature=0.7",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1,algorithm.rollout_correction.x",
    ],
)
def test_unsafe_changes_are_refused(override: str) -> None:
    if override.endswith(".x"):
        after = spec(
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2",
        )
    else:
        after = spec(override)
    with pytest.raises(SpecError) as caught:
        refuse_unsafe(spec(), after)
    problem = caught.value.problems[0]
    old, new = changes(spec(), after)[problem.key]
    assert repr(old) in problem.what
    assert repr(new) in problem.what


def test_total_steps_are_not_safe_where_the_learning_rate_depends_on_them() -> None:
    before = spec("actor.lr_scheduler_type=linear")
    after = spec("actor.lr_scheduler_type=linear", "trainer.total_training_steps=999")
    with pytest.raises(SpecError, match="total_training_steps"):
        refuse_unsafe(before, after)


def test_paths_that_exist_become_absolute_and_all_else_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "adapter", "critic", "ref", "teacher", "scorer"):
        (tmp_path / name).mkdir()
    for name in ("a.parquet", "b.parquet", "mine.py"):
        (tmp_path / name).touch()
    spec = RunSpec.model_validate(
        {
            "model": {"path": "model", "lora_adapter_path": "adapter", "lora_rank": 8},
            "critic": {"path": "critic"},
            "ref": {"path": "ref"},
            "algorithm": {"teacher": {"path": "teacher"}},
            "reward": {
                "model": {"path": "scorer"},
                "terms": [{"name": "mine.py:grade", "params": {"path": "model"}}],
            },
            "data": {
                "train_files": ["a.parquet", "?.parquet", "organisation/set"],
                "val_files": ["gone.parquet"],
            },
        }
    )
    found = with_absolute_paths(spec)
    assert found.model.path == str(tmp_path / "model")
    assert found.model.lora_adapter_path == str(tmp_path / "adapter")
    others = [found.critic.path, found.ref.path, found.algorithm.teacher.path, found.reward.model.path]
    assert others == [str(tmp_path / name) for name in ("critic", "ref", "teacher", "scorer")]
    assert found.data.train_files == [
        str(tmp_path / "a.parquet"),
        str(tmp_path / "?.parquet"),
        "organisation/set",
    ]
    assert found.data.val_files == ["gone.parquet"]
    assert found.reward.terms[0].name == f"{tmp_path}/mine.py:grade"
    assert found.reward.terms[0].params == {"path": "model"}, "a parameter of the user is not a path"
    assert with_absolute_paths(RunSpec()) == RunSpec()
