"""The golden runs: settings of two training steps on stored responses, in all ways that the spec offers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path

from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.resolve import criteria_names, examples

HERE = Path(__file__).parent
RC = "algorithm.rollout_correction."
#: On top of a preset: everything small, and in several mini-batches and micro-batches.
BASE = (
    "model.path={models}/tiny",
    "data.train_files={models}/train.parquet",
    f"rollout.name={HERE}/stored.py:engine",
    f"reward.name={HERE}/graders.py:share",
    "rollout.n=4",
    "data.val_files=[]",
    "data.train_batch_size=8",
    "data.max_prompt_length=8",
    "data.max_response_length=12",
    "actor.lr=2e-3",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=6",
    "actor.ppo_max_token_len_per_gpu=null",
    "critic.lr=2e-3",
    "engine.dtype=fp32",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[]",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.guardrails.mode=off",
    "trainer.rollouts_per_step=-1",
)
REJECTING = (f"{RC}rollout_rs=token_k1,seq_max_k2", f"{RC}rollout_rs_threshold=0.6_1.6,2.0")
DECOUPLED = (f"{RC}bypass_mode=false",)
CLIP = (*DECOUPLED, f"{RC}loss_type=ppo_clip")
WHOLE = (f"reward.name={HERE}/graders.py:whole",)
REF = ("ref.path={models}/ref",)
#: Parameters that a part requires, and defaults under which a part would do nothing in these runs.
PARAMS = {
    "dispo": {"low_pos": 0.2, "high_pos": 0.28, "low_neg": 0.2, "high_neg": 0.2},
    "dro": {"beta": 0.1},
    "m2po": {"budget": 0.005},
    "kl_cov": {"fraction": 0.1},
    "clip_cov": {"fraction": 0.05, "low": -1.0, "high": 1.0},
    "drpo": {"epsilon": 0.5},
    "gmpo": {"low": 0.05, "high": 0.05},
}
#: Thresholds at which some responses are rejected, where the examples of the spec reject none or all.
THRESHOLDS = {
    ("rlctl", "geometric"): "0.95_1.1",
    ("rlctl", "seq_max_k2"): "1.8",
    "token_veto": "0.6",
    "off_policy": "0.03",
    "mult_prob_error": "1.15",
    "seq_mean_k1": "0.95_1.1",
    "seq_mean_k2": "0.03",
    "seq_mean_k3": "0.03",
    "kpop": "0.05",
    "probability_gap": "0.05",
}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        settings: overrides; `{models}` stands for the directory of the models.
        presets: weakest first.
        ranks: number of processes.
        patches: function of rlctl → what it returns.
        dumps: the weights and masks of all tokens are recorded, too.
    """

    settings: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    ranks: int = 1
    patches: dict[str, object] = field(default_factory=dict)
    dumps: bool = False


#: What the engine finds out about the model or the machine, otherwise.
LOG_PROBS = "rlctl.engine.log_probs."
SHARED = {f"{LOG_PROBS}can_pack": False}
PADDED = {**SHARED, f"{LOG_PROBS}can_share_prefix": False}
#: Logits at once: nine tokens.
CHUNKS = {f"{LOG_PROBS}logits_at_once": 200}


def cases() -> dict[str, Case]:
    """All golden runs by name."""
    return {
        **{f"preset {name}": Case(presets=(name,), dumps="uncorrected" not in name) for name in ALGORITHMS},
        **{f"preset {name}": Case(settings, (name,)) for name, settings in OTHER_PRESETS.items()},
        **dict(_losses()),
        **dict(_estimators()),
        **dict(_corrections()),
        **{
            f"{mode}, {denominator}": Case(
                (*REJECTING, f"actor.loss_agg_mode={mode}", f"{RC}loss_denominator={denominator}_rejection")
            )
            for mode, denominator in product(MODES, ("before", "after"))
        },
        **dict(_kl()),
        **{name: Case(settings) for name, settings in TERMS.items()},
        **{name: Case(settings) for name, settings in DATA.items()},
        **ENGINES,
    }


ALGORITHMS = (
    "grpo-rs-only",
    "grpo-token-is-multi-rs",
    "grpo-uncorrected",
    "ppo-seq-is-token-rs",
    "ppo-uncorrected",
    "rloo-seq-is",
    "rloo-uncorrected",
)
OTHER_PRESETS: dict[str, tuple[str, ...]] = {
    "qwen2.5-7b-grpo-multi-rs": (),
    "qwen2.5-7b-rloo-seq-is": (),
    "smollm2-135m-sums": (),
    "1gpu-lora": (),
    "8gpu": (),
    "1gpu-80gb": ("engine.offload=none",),
}
MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def _params(key: str, name: str) -> tuple[str, ...]:
    return tuple(f"{key}.{param}={value}" for param, value in PARAMS.get(name, {}).items())


def _losses() -> Iterator[tuple[str, Case]]:
    for name in (part.name for part in POLICY_LOSSES.parts()):
        own = (f"{RC}loss_type={name}", *_params(f"{RC}loss_params", name))
        loss = (*own, "actor.clip_ratio=0.03", *REJECTING)
        yield f"loss {name}, bypass", Case((*loss, "actor.loss_agg_mode=seq-mean-token-mean"))
        yield f"loss {name}, decoupled", Case((*loss, *DECOUPLED, f"{RC}rollout_is=token"))


def _estimators() -> Iterator[tuple[str, Case]]:
    for name in (part.name for part in ADVANTAGE_ESTIMATORS.parts()):
        settings = (f"algorithm.adv_estimator={name}", *_params("algorithm.adv_params", name))
        yield f"estimator {name}", Case(settings)
        more = ("algorithm.gamma=0.9", "algorithm.lam=0.8", "reward.max_error_fraction=0.9")
        failing = f"reward.name={HERE}/graders.py:failing"
        yield f"estimator {name}, some ungraded", Case((*settings, *more, failing, *CLIP))
    not_divided = "algorithm.norm_adv_by_std_in_grpo=false"
    yield "estimator grpo, not divided", Case(("algorithm.adv_estimator=grpo", not_divided))


def _corrections() -> Iterator[tuple[str, Case]]:
    """Every criterion of each dialect, and every weight with every bound; also both modes in turn."""
    weights = [part.name for part in CORRECTION_WEIGHTS.parts()]
    for dialect in ("rlctl", "verl"):
        pairs = cycle(product(weights, ("clip", "truncate", "mask")))
        known = [(name, *example) for name in criteria_names() for example in examples(name)]
        criteria = [(name, threshold) for name, own, threshold, _ in known if own == dialect]
        missing = max(0, 3 * len(weights) - len(criteria))
        for place, (name, example) in enumerate([*criteria, *criteria[:missing]]):
            weight, bound = next(pairs)
            threshold = THRESHOLDS.get((dialect, name), THRESHOLDS.get(name, example))
            settings = (
                f"{RC}dialect={dialect}",
                f"{RC}rollout_is={weight}",
                f"{RC}rollout_is_bound={bound}",
                f"{RC}rollout_is_threshold={'0.8_1.3' if place % 2 else '1.2'}",
                f"{RC}rollout_is_batch_normalize={place % 3 > 0}",
                f"{RC}rollout_rs={name}",
                f"{RC}rollout_rs_threshold={threshold}",
                f"{RC}loss_denominator={('before', 'after')[place % 2]}_rejection",
                "rollout.engine_params.fault=lag",
                *(CLIP if place % 4 == 3 else ()),
            )
            yield f"{dialect} {weight} {bound}, {name}", Case(settings, dumps=place % 6 == 0)


def _kl() -> Iterator[tuple[str, Case]]:
    for part in KL_ESTIMATORS.parts():
        loss = ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.2", f"actor.kl_loss_type={part.name}", *REF)
        yield f"kl loss {part.name}", Case((*loss, *REJECTING))
        yield f"kl loss {part.name}, decoupled", Case((*loss, *CLIP, "actor.entropy_coeff=0.05"))
        if "rollout_log_probs" not in part.needs:
            reward = ("algorithm.use_kl_in_reward=true", f"algorithm.kl_penalty={part.name}", *REF)
            yield f"kl reward {part.name}", Case((*reward, "algorithm.kl_ctrl.kl_coef=0.1"))
    adaptive = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", *DECOUPLED)
    yield "kl reward, adaptive", Case((*reward, *adaptive, "algorithm.adv_estimator=reinforce_plus_plus"))


TERMS = {
    "entropy bonus": ("actor.entropy_coeff=0.1", f"{RC}rollout_is_batch_normalize=true", *REJECTING),
    "dual clip": (*CLIP, "actor.clip_ratio_low=0.05", "actor.clip_ratio_high=0.1", "actor.clip_ratio_c=1.1"),
    "four epochs": ("actor.ppo_epochs=4", *CLIP, *REJECTING),
    "four epochs, bypass": ("actor.ppo_epochs=4", f"{RC}loss_denominator=after_rejection", *REJECTING),
    "rate scaled by ess": ("actor.lr_ess_scaling=true",),
    "schedule": ("actor.lr_scheduler_type=cosine", "actor.lr_warmup_steps=2", "actor.grad_clip=0.05"),
    "critic of its own": (
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.9",
        "critic.ppo_epochs=2",
        "critic.ppo_mini_batch_size=8",
        "critic.ppo_max_token_len_per_gpu=60",
        "critic.cliprange_value=0.01",
        "critic.loss_agg_mode=seq-mean-token-mean",
    ),
    "critic first": ("algorithm.adv_estimator=gae", "trainer.critic_warmup=1"),
    "centered scores": (f"{RC}score_centering=4", f"{RC}rollout_is=token", *REJECTING),
    "centered scores, no weights": (f"{RC}score_centering=8", f"{RC}rollout_is=null"),
    "guardrails scale": ("trainer.guardrails.mode=act", "trainer.guardrails.ess_floor=0.999"),
    "guardrails skip": (
        "trainer.guardrails.mode=act",
        "trainer.guardrails.ess_floor=0.9",
        "trainer.guardrails.on_low_ess=skip_step",
    ),
}
FILTER = ("algorithm.filter_groups.enable=true", *WHOLE)
DATA = {
    "groups filtered": FILTER,
    "groups filtered, one round": (*FILTER, "algorithm.filter_groups.max_num_gen_batches=1", *CLIP),
    "curriculum": (
        *FILTER,
        "algorithm.filter_groups.curriculum=true",
        "algorithm.filter_groups.curriculum_floor=0.5",
        "trainer.total_training_steps=4",
        "trainer.total_epochs=4",
    ),
    "exact sampling": ("rollout.exact_sampling=true", "rollout.top_k=8"),
    "exact sampling, decoupled": ("rollout.exact_sampling=true", "rollout.top_k=8", *CLIP, *REJECTING),
    "exact sampling, centered": (
        *("rollout.exact_sampling=true", "rollout.top_k=8"),
        *(f"{RC}score_centering=4", f"{RC}rollout_is=token"),
    ),
    "temperature": ("rollout.temperature=1.3", *DECOUPLED),
    "stale": ("rollout.staleness=1", "trainer.total_training_steps=3", *REJECTING),
    "synced every second step": ("rollout.sync_every=2", "trainer.total_training_steps=3"),
    "length penalty": ("reward.overlong.buffer_length=6", "reward.overlong.penalty_factor=0.5"),
    "length penalty, groups filtered": ("reward.overlong.buffer_length=6", *FILTER),
    "aborted": ("rollout.engine_params.fault=abort", *REJECTING),
    "aborted, gae": ("rollout.engine_params.fault=abort", "algorithm.adv_estimator=gae", *CLIP),
    "damaged": ("rollout.engine_params.fault=damage", *REJECTING),
    "damaged, decoupled": ("rollout.engine_params.fault=damage", *CLIP, "algorithm.adv_estimator=gae"),
    "damaged, survivors": (
        "rollout.engine_params.fault=damage",
        f"{RC}loss_denominator=after_rejection",
        f"{RC}rollout_is=geometric",
        "actor.loss_agg_mode=seq-mean-token-mean",
        "actor.entropy_coeff=0.05",
    ),
}
MANY = (*CLIP, *REJECTING, "actor.entropy_coeff=0.05", "actor.use_kl_loss=true", *REF)
LORA = ("model.lora_rank=4", "model.target_modules=[all-linear]")
KV2 = ("model.path={models}/heads", "engine.sequence_parallel=2")
ENGINES = {
    "prompts shared": Case(MANY, patches=SHARED),
    "prompts shared, exact sampling": Case(DATA["exact sampling, centered"], patches=SHARED),
    "rows padded": Case(MANY, patches=PADDED),
    "rows padded, exact sampling": Case(DATA["exact sampling, centered"], patches=PADDED),
    "head in chunks": Case(MANY, patches=CHUNKS),
    "head in chunks, exact sampling": Case(DATA["exact sampling, centered"], patches=CHUNKS),
    "rows packed": Case(MANY),
    "token budget": Case((*MANY, "actor.ppo_max_token_len_per_gpu=70")),
    "checkpointing": Case((*MANY, "model.enable_gradient_checkpointing=true")),
    "eager attention": Case((*MANY, "model.attn_implementation=eager")),
    "gemma2": Case((*MANY, "model.path={models}/gemma2", "ref.path=null")),
    "lora": Case((*LORA, *REJECTING)),
    "lora, base as reference": Case((*LORA, "algorithm.use_kl_in_reward=true", *CLIP)),
    **{f"zero {stage}": Case((*MANY, f"engine.zero_stage={stage}")) for stage in (1, 2, 3)},
    **{
        f"two ranks, zero {stage}": Case((*MANY, f"engine.zero_stage={stage}"), ranks=2) for stage in range(4)
    },
    "two ranks, rloo-seq-is": Case(presets=("rloo-seq-is",), ranks=2),
    "two ranks, ppo-seq-is-token-rs": Case(presets=("ppo-seq-is-token-rs",), ranks=2),
    "two ranks, remax": Case(("algorithm.adv_estimator=remax", *REJECTING), ranks=2),
    "two ranks, clip_cov": Case(
        (
            f"{RC}loss_type=clip_cov",
            *_params(f"{RC}loss_params", "clip_cov"),
            "actor.ppo_max_token_len_per_gpu=60",
        ),
        ranks=2,
    ),
    "two ranks, survivors": Case((*REJECTING, f"{RC}loss_denominator=after_rejection"), ranks=2),
    "two ranks, groups filtered": Case(FILTER, ranks=2),
    "two ranks, stale": Case(DATA["stale"], ranks=2),
    "two ranks, damaged": Case(DATA["damaged"], ranks=2),
    "sequence parallel": Case((*KV2, *REJECTING), ranks=2),
    "sequence parallel, kl": Case((*KV2, "algorithm.use_kl_in_reward=true", *CLIP), ranks=2),
    "sequence parallel, centered": Case((*KV2, *DATA["exact sampling, centered"]), ranks=2),
}
