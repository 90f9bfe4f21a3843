"""Each contradiction is found, once, at the right key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from rlctl.errors import SpecError
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec import check_rollout
from rlctl.run_spec.base import Section
from rlctl.run_spec.check import CHECKS, NO_EFFECT, Recorded
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.sources import all_presets

RC = "algorithm.rollout_correction."
IN_FLIGHT = ("rollout.name=vllm", "rollout.mode=server", "rollout.in_flight=true")
PACED = ("rollout.beyond_max_age=pace",)
SLOW_SYNC = ("rollout.sync_every=3", "rollout.max_staleness=1")
GAE = "algorithm.adv_estimator=gae"
#: Those without parameters that must be given.
LOSSES = [part.name for part in POLICY_LOSSES.parts() if part.name not in {"dispo", "dro"}]
REAL = ("model.path=a/b", "data.train_files=t.parquet")


def problems_of(*overrides: str) -> dict[str, str]:
    """Key → severity of everything found."""
    try:
        problems = load_spec(["rloo-seq-is"], [], list(overrides)).warnings
    except SpecError as error:
        problems = error.problems
    assert all(problem.fix for problem in problems)
    return {problem.key: problem.severity for problem in problems}


@pytest.mark.parametrize(
    ("override", "read_with"),
    [
        ("critic.lr=1e-4", ["algorithm.adv_estimator=gae"]),
        ("critic.betas=[0.9,0.9]", ["algorithm.adv_estimator=gae"]),
        ("algorithm.norm_adv_by_std_in_grpo=false", ["algorithm.adv_estimator=grpo"]),
        ("algorithm.lam=0.9", ["algorithm.adv_estimator=gae"]),
        ("actor.clip_ratio=0.1", [f"{RC}loss_type=ppo_clip"]),
        ("actor.clip_ratio=0.1", [f"{RC}loss_type=ppo_clip", "actor.clip_ratio_low=0.1"]),
        ("actor.tau_pos=2", [f"{RC}loss_type=sapo"]),
        ("model.lora_alpha=8", ["model.lora_rank=4"]),
        ("model.target_modules=[q_proj]", ["model.lora_rank=4"]),
        ("actor.kl_loss_coef=0.1", ["actor.use_kl_loss=true"]),
        (
            "algorithm.kl_ctrl.horizon=5",
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        ),
        ("algorithm.filter_groups.curriculum=true", ["algorithm.filter_groups.enable=true"]),
        ("algorithm.filter_groups.max_num_gen_batches=3", ["algorithm.filter_groups.enable=true"]),
        ("data.val_files=[v.parquet]", [*REAL, "trainer.test_freq=5"]),
        ("trainer.guardrails.ess_floor=0.2", ["trainer.guardrails.mode=act"]),
        ("reward.model.batch_size=2", ["reward.name=model", "reward.model.path=m"]),
        ("reward.code.timeout_s=3", ["reward.name=code"]),
        ("reward.code.timeout_s=3", ["reward.name=auto"]),
        ("reward.overlong.penalty_factor=2", ["reward.overlong.buffer_length=2"]),
        ("rollout.server.max_restarts=1", ["rollout.name=vllm", "rollout.mode=server"]),
        (f"{RC}rollout_rs_threshold=2", [f"{RC}rollout_rs=token_k1"]),
    ],
)
def test_a_key_without_effect_is_a_warning(override, read_with):
    off = {"trainer.guardrails": "trainer.guardrails.mode=off", "reward.code": "reward.name=exact"}
    key = override.partition("=")[0]
    unread = [off[start] for start in off if key.startswith(start)]
    assert problems_of(override, *unread) == {key: "warning"}
    assert key not in problems_of(override, *read_with)


def test_the_fix_of_a_key_without_effect_names_the_key_that_would_read_it():
    [unread] = load_spec([], [], ["actor.kl_loss_coef=0.1"]).warnings
    assert unread.fix == "leave it out, or set actor.use_kl_loss: true"


def test_of_a_preset_only_its_users_keys_can_be_without_effect(tmp_path):
    preset = tmp_path / "mine.yaml"
    preset.write_text("critic:\n  lr: 1e-4\n")
    assert [one.key for one in load_spec([str(preset)]).warnings] == ["critic.lr"]
    for shipped in all_presets():  # `critic.lr` of the embedded model among them
        with contextlib.suppress(SpecError):
            found = load_spec([shipped], [], ["algorithm.adv_estimator=rloo"]).warnings
            assert not [one for one in found if one.what.startswith(NO_EFFECT) and "critic" in one.key]


def test_defaults_are_clean():
    assert problems_of() == {}
    assert problems_of(*REAL) == {}


FILTER = "algorithm.filter_groups.enable=true"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.ppo_epochs=2"], {"actor.ppo_epochs": "warning"}),
        (["actor.ppo_epochs=2", f"{RC}bypass_mode=false", f"{RC}loss_type=ppo_clip"], {}),
        (["actor.ppo_epochs=2", f"{RC}bypass_mode=false"], {"actor.ppo_epochs": "warning"}),
        ([f"{RC}rollout_is=null"], {"actor.ppo_mini_batch_size": "warning"}),
        ([f"{RC}rollout_is=null", "actor.ppo_mini_batch_size=null"], {}),
        (
            [f"{RC}rollout_is=null", f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=2"],
            {},
        ),
        ([f"{RC}loss_type=ppo_clip"], {f"{RC}rollout_is": "warning"}),
        ([f"{RC}loss_type=ppo_clip", f"{RC}rollout_is=null"], {}),
        ([f"{RC}rollout_is_threshold=2_3"], {f"{RC}rollout_is_threshold": "warning"}),
        ([f"{RC}rollout_is_threshold=0.5"], {f"{RC}rollout_is_threshold": "error"}),
        ([f"{RC}rollout_rs=token_k1"], {f"{RC}rollout_rs_threshold": "error"}),
        ([f"{RC}rollout_rs_threshold=2"], {f"{RC}rollout_rs_threshold": "warning"}),
        (["rollout.n=1"], {"rollout.n": "error"}),
        (["rollout.n=1", "algorithm.adv_estimator=gae"], {}),
        (
            ["algorithm.gamma=0.9", "algorithm.lam=0.9"],
            dict.fromkeys(("algorithm.gamma", "algorithm.lam"), "warning"),
        ),
        (["rollout.mode=server"], {"rollout.mode": "error"}),
        (["rollout.name=vllm", "rollout.mode=server"], {}),
        (["rollout.name=vllm", "rollout.dtype=int8"], {"rollout.dtype": "error"}),
        (
            ["rollout.name=vllm", "rollout.tensor_model_parallel_size=2"],
            {"rollout.tensor_model_parallel_size": "error"},
        ),
        (
            ["rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            {"rollout.tensor_model_parallel_size": "error"},
        ),
        (
            ["rollout.name=vllm", "rollout.tensor_model_parallel_size=3", "trainer.n_gpus_per_node=4"],
            {"rollout.tensor_model_parallel_size": "error"},
        ),
        (["rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=4"], {}),
        (["rollout.name=vllm", "rollout.mode=server", "rollout.tensor_model_parallel_size=3"], {}),
        (
            ["rollout.name=vllm", "rollout.engine_kwargs.distributed_executor_backend=ray"],
            {"rollout.engine_kwargs.distributed_executor_backend": "error"},
        ),
        (
            [
                *("rollout.name=vllm", "rollout.mode=server"),
                "rollout.engine_kwargs.distributed_executor_backend=ray",
            ],
            {},
        ),
        (["rollout.server.replicas=2"], {"rollout.server.replicas": "warning"}),
        (
            ["rollout.name=vllm", "rollout.mode=server", "rollout.server.urls=[http://a:1]"],
            {"rollout.server.weights_dir": "warning"},
        ),
        (
            ["rollout.name=vllm", "rollout.mode=server", "rollout.server.urls=[a:1]"],
            {"rollout.server.urls": "error", "rollout.server.weights_dir": "warning"},
        ),
        (["rollout.temperature=0.009"], {"rollout.temperature": "warning"}),
        (["rollout.name=vllm", "rollout.temperature=0.01"], {"rollout.temperature": "warning"}),
        (["rollout.name=vllm", "rollout.temperature=0.009"], {"rollout.temperature": "error"}),
        (["rollout.max_staleness=1"], {}),
        (["rollout.max_staleness=2"], {"rollout.max_staleness": "warning"}),
        (["rollout.max_staleness=2", f"{RC}bypass_mode=false", f"{RC}loss_type=ppo_clip"], {}),
        (["rollout.max_staleness=1", "rollout.staleness=1"], {"rollout.staleness": "error"}),
        (["rollout.max_staleness=1", "rollout.name=vllm"], {"rollout.max_staleness": "error"}),
        ([*IN_FLIGHT, "rollout.max_staleness=1"], {}),
        ([*IN_FLIGHT], {"rollout.in_flight": "error"}),
        (["rollout.max_staleness=1", "rollout.in_flight=true"], {"rollout.in_flight": "error"}),
        ([*IN_FLIGHT, *PACED, "rollout.max_staleness=1", "rollout.max_age_updates=2"], {}),
        (["rollout.max_age_updates=2", "rollout.max_staleness=1"], {}),
        (["rollout.max_age_updates=2"], {"rollout.max_age_updates": "warning"}),
        ([*PACED, "rollout.max_age_updates=2", "rollout.sync_every=2"], {"rollout.beyond_max_age": "error"}),
        ([*PACED], {"rollout.beyond_max_age": "warning"}),
        (["rollout.stale_cache=keep"], {"rollout.stale_cache": "warning"}),
        (
            [*IN_FLIGHT, "rollout.max_staleness=1", "actor.routing_replay=true"],
            {"actor.routing_replay": "error"},
        ),
        (
            [*IN_FLIGHT, "rollout.max_staleness=1", "model.lora_rank=4", "model.target_modules=[q_proj]"],
            {"rollout.in_flight": "error"},
        ),
        (
            [*IN_FLIGHT, *PACED, *SLOW_SYNC, "rollout.max_age_updates=1"],
            {"rollout.max_age_updates": "error"},
        ),
        (
            ["rollout.max_staleness=2", f"{RC}rollout_is=null", "actor.ppo_mini_batch_size=null"],
            {"rollout.max_staleness": "warning"},
        ),
        (["engine.offload=optimizer"], {"engine.offload": "error"}),
        (["engine.offload=all", "engine.zero_stage=2"], {"engine.offload": "error"}),
        (["engine.offload=optimizer", "engine.zero_stage=1"], {}),
        (["engine.offload=all", "engine.zero_stage=3"], {}),
        (["actor.ppo_max_token_len_per_gpu=4"], {"actor.ppo_max_token_len_per_gpu": "error"}),
        ([GAE, "critic.ppo_max_token_len_per_gpu=4"], {"critic.ppo_max_token_len_per_gpu": "error"}),
        (["critic.ppo_max_token_len_per_gpu=4"], {"critic.ppo_max_token_len_per_gpu": "warning"}),
        ([GAE, "actor.ppo_max_token_len_per_gpu=4096", "critic.ppo_max_token_len_per_gpu=4096"], {}),
        (["actor.ppo_mini_batch_size=256"], {"actor.ppo_mini_batch_size": "error"}),
        (["actor.ppo_mini_batch_size=48"], {"actor.ppo_mini_batch_size": "error"}),
        (["trainer.n_gpus_per_node=3"], {"actor.ppo_mini_batch_size": "error"}),
        (["trainer.n_gpus_per_node=2", "trainer.nnodes=2"], {}),
        (["actor.ppo_mini_batch_size=null", "trainer.nnodes=3"], {"data.train_batch_size": "error"}),
        (["rollout.top_p=0.9"], {"rollout.top_p": "warning"}),
        (["rollout.top_k=50"], {"rollout.top_k": "warning"}),
        (["rollout.min_p=0.1"], {"rollout.min_p": "warning"}),
        (["rollout.top_p=0.9", "rollout.exact_sampling=true"], {}),
        (["rollout.exact_sampling=true"], {"rollout.exact_sampling": "warning"}),
        ([FILTER], {}),
        ([FILTER, "algorithm.filter_groups.metric=acc"], {}),
        ([FILTER, "rollout.staleness=1"], {"algorithm.filter_groups.enable": "error"}),
        (
            [FILTER, "algorithm.adv_estimator=reinforce_plus_plus"],
            {"algorithm.filter_groups.enable": "error"},
        ),
        ([FILTER, "actor.entropy_coeff=0.01"], {"algorithm.filter_groups.enable": "warning"}),
        (["algorithm.filter_groups.curriculum=true"], {"algorithm.filter_groups.curriculum": "warning"}),
        (
            ["rollout.top_p=0.9", "rollout.exact_sampling=true", "rollout.name=vllm"],
            {"rollout.exact_sampling": "error"},
        ),
        (["rollout.top_p=0.9", "rollout.top_k=20", "rollout.exact_sampling=true", "rollout.name=vllm"], {}),
        (["actor.routing_replay=true"], {}),
        (["actor.routing_replay=true", "rollout.name=vllm"], {}),
        (["rollout.top_k=0"], {"rollout.top_k": "error"}),
        (["rollout.temperature=0.01"], {"rollout.temperature": "warning"}),
        (["rollout.temperature=0.7"], {}),
        (["model.path=a/b"], {"data.train_files": "error"}),
        (["data.train_files=t.parquet"], {"data.train_files": "warning"}),
        (["trainer.test_freq=10"], {}),
        ([*REAL, "trainer.test_freq=10"], {"trainer.test_freq": "error"}),
        ([*REAL, "trainer.test_freq=10", "data.val_files=v.parquet"], {}),
        ([*REAL, "data.val_files=v.parquet"], {"data.val_files": "warning"}),
        (["trainer.save_freq=0", "trainer.test_freq=0"], {}),
        ([*REAL, "actor.lr=1e-3"], {"actor.lr": "warning"}),
        (["actor.lr=1e-3"], {}),
        (
            ["model.attn_implementation=flash_attention_2", "engine.dtype=fp32"],
            {"model.attn_implementation": "error"},
        ),
        (["model.attn_implementation=flash_attention_2", "engine.dtype=bf16"], {}),
        (["actor.lr=0"], {"actor.lr": "warning"}),
        (["trainer.total_training_steps=10"], {"actor.lr_warmup_steps": "warning"}),
    ],
)
def test_contradictions(overrides, expected):
    assert problems_of(*overrides) == expected


EST = "algorithm.adv_estimator="
IN_REWARD, IN_LOSS = "algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true"


def test_only_k1_has_the_gradient_of_the_kl_in_the_reward():
    [found] = load_spec([], [], [IN_REWARD, "algorithm.kl_penalty=low_var_kl"]).warnings
    assert "k3 does not have the KL's gradient" in found.what
    assert found.fix == "use k1"


def test_experts_are_replayed_from_engines_that_report_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def engine(context): ...\n")
    with pytest.raises(SpecError, match="does not report which experts compute a token"):
        load_spec([], [], ["actor.routing_replay=true", f"rollout.name={own}:engine"])
    load_spec([], [], [f"rollout.name={own}:engine"])


def test_repeated_passes_without_weights_are_not_blamed_on_weights():
    overrides = ["actor.ppo_epochs=2", f"{RC}loss_type=reinforce"]
    (what,) = [p.what for p in load_spec([], [], overrides).warnings if p.key == "actor.ppo_epochs"]
    assert "no ratio" in what
    assert "weights" not in what


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_groups_need_siblings(estimator):
    found = problems_of(f"{EST}{estimator}", "rollout.n=1")
    alone = {"gae", "remax", "reinforce_plus_plus"}
    assert found == ({} if estimator in alone else {"rollout.n": "error"})
    assert problems_of(f"{EST}{estimator}") == {}


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGE_ESTIMATORS if name != "gae"])
@pytest.mark.parametrize("asked", ["critic.enable=true", "critic.path=a/b", "trainer.critic_warmup=3"])
def test_estimators_without_values_get_no_critic(estimator, asked):
    assert problems_of(f"{EST}{estimator}", asked) == {asked.partition("=")[0]: "error"}
    assert problems_of(GAE, asked) == {}
    assert problems_of(f"{EST}{estimator}", "critic.enable=false") == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([GAE, "critic.enable=false"], {"critic.enable": "error"}),
        ([GAE, "critic.enable=true"], {}),
        ([GAE, "critic.ppo_mini_batch_size=48"], {"critic.ppo_mini_batch_size": "error"}),
        ([GAE, "critic.ppo_mini_batch_size=32"], {"critic.ppo_mini_batch_size": "error"}),
        ([GAE, "critic.ppo_mini_batch_size=128", "trainer.n_gpus_per_node=2"], {}),
        (["critic.ppo_mini_batch_size=48"], {"critic.ppo_mini_batch_size": "warning"}),
        ([GAE, "trainer.critic_warmup=139"], {}),
        ([GAE, "trainer.critic_warmup=159"], {"actor.lr_warmup_steps": "warning"}),
        ([GAE, "critic.lr_warmup_steps=320"], {"critic.lr_warmup_steps": "warning"}),
        ([GAE, "critic.lr_warmup_steps=320", "critic.ppo_epochs=2"], {}),
        (["critic.lr_warmup_steps=320"], {"critic.lr_warmup_steps": "warning"}),
        ([GAE, "algorithm.gamma=0.9", "algorithm.lam=0.9"], {}),
        (
            [f"{EST}reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.lam=0.9"],
            {"algorithm.lam": "warning"},
        ),
        (["algorithm.gamma_per=turn"], {"algorithm.gamma_per": "warning"}),
        ([GAE, "algorithm.gamma_per=turn", "algorithm.lam=0.9"], {"algorithm.lam": "warning"}),
    ],
)
def test_critic_and_discount(overrides, expected):
    assert problems_of(*overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([IN_REWARD], {}),
        ([IN_LOSS], {}),
        ([IN_REWARD, "algorithm.kl_ctrl.kl_coef=0"], {"algorithm.kl_ctrl.kl_coef": "error"}),
        ([IN_LOSS, "actor.kl_loss_coef=0"], {"actor.kl_loss_coef": "error"}),
        *[
            ([f"{key}={value}"], {key: "warning"})
            for key, value in {
                "algorithm.kl_ctrl.kl_coef": 0,
                "algorithm.kl_penalty": "k3",
                "actor.kl_loss_coef": 0,
                "actor.kl_loss_type": "k1",
            }.items()
        ],
        *[
            ([IN_REWARD, "algorithm.kl_ctrl.kl_coef=0.1", f"algorithm.kl_penalty={kind}"], found)
            for kind, found in {
                "k1": {},
                "k2": {"algorithm.kl_penalty": "warning"},
                "k3": {"algorithm.kl_penalty": "warning"},
            }.items()
        ],
        ([IN_LOSS, "actor.kl_loss_coef=0.1"], {}),
        (["ref.path=a/b"], {"ref.path": "error"}),
        ([IN_LOSS, "ref.path=a/b"], {}),
        ([IN_REWARD, "ref.path=a/b"], {}),
        (["algorithm.kl_ctrl.type=adaptive"], {"algorithm.kl_ctrl.type": "error"}),
        ([IN_LOSS, "algorithm.kl_ctrl.type=adaptive"], {"algorithm.kl_ctrl.type": "error"}),
        ([IN_REWARD, "algorithm.kl_ctrl.type=adaptive"], {}),
        ([IN_REWARD, IN_LOSS], {"actor.use_kl_loss": "warning"}),
        ([IN_LOSS, "actor.kl_loss_type=k1"], {"actor.kl_loss_type": "warning"}),
        *[([IN_LOSS, f"actor.kl_loss_type={kind}"], {}) for kind in ("k2", "k3", "unbiased", "sequence")],
        ([IN_LOSS, "ref.path=embedded"], {"ref.path": "error"}),
        ([GAE, "critic.path=embedded"], {"critic.path": "error"}),
    ],
)
def test_kl_penalties(overrides, expected):
    assert problems_of(*overrides) == expected


@pytest.mark.parametrize(
    ("loss", "number", "has_effect"),
    [
        *[(loss, "clip_ratio_low=0.1", True) for loss in ("ppo_clip", "cispo", "dppo")],
        *[(loss, "clip_ratio_high=0.3", True) for loss in ("ppo_clip", "cispo", "dppo")],
        *[(loss, "clip_ratio_high=0.3", False) for loss in ("reinforce", "sapo")],
        ("sapo", "clip_ratio_low=0.1", False),
        *[(loss, "clip_ratio_c=3", loss in {"ppo_clip", "dppo", "bapo"}) for loss in LOSSES],
        *[(loss, "tau_pos=2", loss == "sapo") for loss in LOSSES],
        *[(loss, "tau_neg=2", loss == "sapo") for loss in LOSSES],
        *[(loss, "dppo_divergence=kl", loss == "dppo") for loss in LOSSES],
    ],
)
def test_numbers_of_another_loss_have_no_effect(loss, number, has_effect):
    narrow = ["actor.clip_ratio=4e-4"] if loss == "gspo" else []
    is_chosen = ["actor.ppo_mini_batch_size=null", f"{RC}rollout_is=null", f"{RC}loss_type={loss}", *narrow]
    key = f"actor.{number.partition('=')[0]}"
    assert problems_of(*is_chosen, f"actor.{number}") == ({} if has_effect else {key: "warning"})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.clip_ratio=0.2"], {"actor.clip_ratio": "warning"}),
        (["actor.clip_ratio=4e-4"], {}),
        (["actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=4e-4"], {}),
        (["actor.clip_ratio_low=3e-4"], {"actor.clip_ratio": "warning"}),
        (["actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=0.3"], {"actor.clip_ratio_high": "warning"}),
    ],
)
def test_gspo_wants_a_narrow_clip(overrides, expected):
    assert problems_of(f"{RC}rollout_is=null", f"{RC}loss_type=gspo", *overrides) == expected


@pytest.mark.parametrize("loss", LOSSES)
def test_stale_data_want_correction(loss):
    """Weights or rejection, or a loss with a ratio of its own."""
    stale = ["rollout.staleness=2", "actor.ppo_mini_batch_size=null", f"{RC}loss_type={loss}"]
    narrow = ["actor.clip_ratio=4e-4"] if loss == "gspo" else []
    expected = {"rollout.staleness": "warning"} if loss == "reinforce" else {}
    assert problems_of(*stale, *narrow, f"{RC}rollout_is=null") == expected
    rejecting = [f"{RC}rollout_is=null", f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=2"]
    assert problems_of(*stale, *narrow, *rejecting) == {}
    assert problems_of(*stale, *narrow) == ({} if loss == "reinforce" else {f"{RC}rollout_is": "warning"})
    # In decoupled mode the ratio is that to π_old, which is as new as π_θ.
    decoupled = [*stale, *narrow, f"{RC}bypass_mode=false"]
    assert problems_of(*decoupled, f"{RC}rollout_is=null") == {"rollout.staleness": "warning"}
    assert problems_of(*decoupled, f"{RC}rollout_is=token") == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.name=model"], {"reward.model.path": "error"}),
        (["reward.name=model", "reward.model.path=a/b"], {}),
        (["reward.terms=[{name: exact}, {name: model}]"], {"reward.model.path": "error"}),
        (["reward.terms=[{name: exact}, {name: model}]", "reward.model.path=a/b"], {}),
        (["reward.model.path=a/b"], {"reward.model.path": "warning"}),
        (["reward.terms=[]"], {"reward.terms": "error"}),
        (["reward.terms=null"], {}),
        (["reward.name=exact", "reward.terms=[{name: maths}]"], {"reward.name": "warning"}),
        (["reward.name=my/reward.py:grade"], {}),
        (["reward.terms=[{name: exact}, {name: exact, weight: 2}]"], {"reward.terms": "error"}),
        (["reward.terms=[{name: 'a.py:f'}, {name: 'b.py:f'}]"], {"reward.terms": "error"}),
        (["reward.terms=[{name: 'a.py:f'}, {name: 'b.py:g'}]"], {}),
        (["reward.name=a.py:overlong"], {"reward.name": "error"}),
        (["reward.terms=[{name: exact}, {name: maths, weight: 0}]"], {"reward.terms": "warning"}),
        (["reward.overlong.buffer_length=7"], {"reward.overlong.buffer_length": "error"}),
        (["reward.overlong.buffer_length=6"], {}),
        (["model.lora_rank=4", "model.target_modules=[]"], {"model.target_modules": "error"}),
        (["model.lora_rank=4", "model.target_modules=[q_proj]"], {}),
        (["model.target_modules=[q_proj]"], {"model.target_modules": "warning"}),
        (["model.lora_rank=512", "rollout.name=vllm"], {}),
        (["model.lora_rank=513", "rollout.name=vllm"], {"model.lora_rank": "error"}),
        (["model.lora_rank=513", "rollout.name=vllm", "rollout.merge_lora=true"], {}),
        (["model.lora_rank=513"], {}),
        (["model.lora_rank=4", "rollout.merge_lora=true"], {"rollout.merge_lora": "warning"}),
        (["rollout.name=vllm", "rollout.merge_lora=true"], {"rollout.merge_lora": "warning"}),
    ],
)
def test_rewards_and_adapters(overrides, expected):
    assert problems_of(*overrides) == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward.name=exakt", "or path/to/file.py:function, got 'exakt'"),
        ("reward.params.x=1", "auto takes no parameters"),
        ("reward.name=a.py", "path/to/file.py:function, got 'a.py'"),
        ("reward.name=a.txt:f", "path/to/file.py:function, got 'a.txt:f'"),
        ("reward.terms=[{name: exact}, {name: exakt}]", "item 2, name: must be "),
        ("reward.terms=[{name: exact, wheight: 2}]", "item 1, wheight: unknown key"),
    ],
)
def test_bad_reward_names_are_told_the_good_ones(override, words):
    with pytest.raises(SpecError) as caught:
        load_spec([], [], [override])
    [problem] = caught.value.problems
    assert problem.key == override.partition("=")[0]
    assert words in problem.what


@pytest.mark.parametrize(
    ("theirs", "ours"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("k2", "k2")]
)
def test_verls_names_of_kl_estimators(theirs, ours):
    overrides = [f"algorithm.kl_penalty={theirs}", f"actor.kl_loss_type={theirs}"]
    spec = load_spec([], [], overrides).spec
    assert (spec.algorithm.kl_penalty, spec.actor.kl_loss_type) == (ours, ours)


def test_checks_say_what_they_check():
    assert all(check.__doc__ for check in CHECKS)


#: Overrides under which checks read keys that they do not read by default.
READ_MORE = [
    [],
    ["rollout.name=vllm", "rollout.mode=server"],
    ["rollout.name=vllm", "model.lora_rank=4", "rollout.server.weight_transfer=broadcast"],
    ["rollout.max_staleness=2"],
    ["rollout.staleness=1"],
    ["actor.ppo_max_token_len_per_gpu=1000"],
    ["engine.zero_stage=3", "engine.offload=all"],
    ["algorithm.rollout_correction.bypass_mode=true"],
    ["algorithm.adv_estimator=gae", "critic.enable=true"],
]


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[tuple[int, str], str]]:
    """(id of the section, field) and key of each setting."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield (id(section), name), prefix + name


def test_the_keys_that_checks_read_are_recorded(monkeypatch):
    """A check is left out if a key that it reads is invalid; else it would report on the key's default."""
    read, get = set(), Section.__getattribute__
    record = lambda self, name: read.add((id(self), name)) or get(self, name)  # noqa: E731
    for preset in all_presets():
        for overrides in READ_MORE:
            with contextlib.suppress(SpecError):
                spec = load_spec([preset], [], overrides).spec
                keys_of = dict(leaves(spec))
                for check in CHECKS:
                    read.clear()
                    recorded = set()
                    found = list(check(Recorded(spec, recorded)))
                    with monkeypatch.context() as patched:
                        patched.setattr(Section, "__getattribute__", record)
                        assert list(check(spec)) == found
                    # `default_spec()` is not `spec`, so its reads are not in `keys_of`.
                    assert recorded == {keys_of[one] for one in read & keys_of.keys()}, check.__name__


@pytest.mark.parametrize(("hidden", "found"), [(False, {"rollout.name": "warning"}), (True, {})])
def test_slow_generation_on_a_gpu_is_said(monkeypatch, hidden, found):
    monkeypatch.setattr(check_rollout, "gpus", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"])
    monkeypatch.setattr(check_rollout, "gpus_are_hidden", lambda: hidden)
    assert problems_of(*REAL) == found
    assert problems_of(*REAL, "rollout.name=vllm") == {}
    assert problems_of() == {}  # the built-in model is too small for it to matter


@pytest.mark.parametrize("key", ["trainer.seed", "data.train_batch_size", "data.max_response_length"])
def test_integers_have_64_bits(key):
    """Torch takes no larger seed, and the estimates of the dry run compute with floats."""
    with pytest.raises(SpecError) as caught:
        load_spec(overrides=[f"{key}={10**400}"])
    assert [(one.key, one.what) for one in caught.value.problems if one.severity == "error"] == [
        (key, "must be an integer of 64 bits")
    ]
    with contextlib.suppress(SpecError):  # another check may refuse it
        load_spec(overrides=[f"{key}={2**63 - 1}"])
