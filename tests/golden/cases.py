"""The golden runs: settings of two training steps on stored responses, in all ways that the spec offers.

Settings are separated by spaces. `rc.` stands for `algorithm.rollout_correction.`, `{models}` for the
directory of the models, `{here}` for that of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product

from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.resolve import criteria_names, examples

#: The preset below all others, so that the defaults of the spec can change.
PLAIN = "rloo-seq-is"
#: On top of the presets: everything small, and in several mini-batches and micro-batches.
BASE = """
model.path={models}/tiny data.train_files={models}/train.parquet data.val_files=[]
rollout.name={here}/stored.py:engine reward.name={here}/graders.py:share rollout.n=4
data.train_batch_size=8 data.max_prompt_length=8 data.max_response_length=12 actor.ppo_mini_batch_size=4
actor.ppo_micro_batch_size_per_gpu=6 actor.ppo_max_token_len_per_gpu=null actor.lr=2e-3 critic.lr=2e-3
engine.dtype=fp32 trainer.total_training_steps=2 trainer.test_freq=-1 trainer.save_freq=-1 trainer.logger=[]
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.guardrails.mode=off trainer.rollouts_per_step=-1
"""
REJECTING = "rc.rollout_rs=token_k1,seq_max_k2 rc.rollout_rs_threshold=0.6_1.6,2.0 "
VERL = "rc.dialect=verl rc.rollout_rs=token_k1 rc.rollout_rs_threshold=0.7_1.4 "
DECOUPLED = "rc.bypass_mode=false "
CLIP = DECOUPLED + "rc.loss_type=ppo_clip "
SURVIVORS = REJECTING + "rc.loss_denominator=after_rejection "
GAE = "algorithm.adv_estimator=gae "
REF = "ref.path={models}/ref "
FILTER = "algorithm.filter_groups.enable=true reward.name={here}/graders.py:whole "
EXACT = "rollout.exact_sampling=true rollout.top_k=8 "
CENTERED = EXACT + "rc.score_centering=4 rc.rollout_is=token "
STALE = "rollout.staleness=1 trainer.total_training_steps=3 " + REJECTING
DAMAGED = "rollout.engine_params.fault=damage "
MANY = CLIP + REJECTING + REF + "actor.entropy_coeff=0.05 actor.use_kl_loss=true "
LORA = "model.lora_rank=4 model.target_modules=[all-linear] "
TWO_HEADS = "model.path={models}/heads engine.sequence_parallel=2 "

#: In decoupled mode the first update has ratios of 1: flags, or the sign of |log ratio|, are then rounding.
TIED = {"kl_cov", "p3o", "topr"}
#: Loss → parameters that it requires, or without which it would do nothing in these runs.
PARAMS = {
    "dispo": {"low_pos": 0.2, "high_pos": 0.28, "low_neg": 0.2, "high_neg": 0.2},
    "dro": {"beta": 0.1},
    "m2po": {"budget": 0.005},
    "kl_cov": {"fraction": 0.1},
    "clip_cov": {"fraction": 0.05, "low": -1.0, "high": 1.0},
    "drpo": {"epsilon": 0.5},
    "gmpo": {"low": 0.05, "high": 0.05},
}
#: Criterion → a threshold at which some responses are rejected, where the spec's example rejects none or all.
THRESHOLDS = {
    **{"geometric": "0.95_1.1", "token_veto": "0.6", "off_policy": "0.03", "mult_prob_error": "1.15"},
    **{"seq_mean_k1": "0.95_1.1", "seq_mean_k2": "0.03", "seq_mean_k3": "0.03"},
    **{"kpop": "0.05", "probability_gap": "0.05"},
}

#: Functions of rlctl → what they return instead, for another way to compute log-probs.
LAYOUT = "rlctl.engine.layout."
SHARED: dict[str, object] = {LAYOUT + "can_pack": False}
PADDED = SHARED | {LAYOUT + "can_share_prefix": False}
CHUNKS: dict[str, object] = {"rlctl.engine.log_probs.logits_at_once": 200}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        preset: on top of PLAIN, below the settings.
        ranks: number of processes.
        patches: function of rlctl → what it returns.
        dumps: the weights and masks of all tokens are recorded, too.
    """

    settings: str = ""
    preset: str = PLAIN
    ranks: int = 1
    patches: dict[str, object] = field(default_factory=dict)
    dumps: bool = False


def cases() -> dict[str, Case]:
    """All golden runs by name."""
    return {
        **{f"preset {name}": Case(preset=name, dumps="uncorrected" not in name) for name in ALGORITHMS},
        **{f"preset {name}": Case("engine.offload=none", preset=name) for name in OTHER_PRESETS},
        **dict(_losses()),
        **dict(_estimators()),
        **dict(_corrections()),
        **dict(_denominators()),
        **dict(_kl()),
        **{name: Case(settings) for name, settings in (TERMS | DATA).items()},
        **ENGINES,
    }


ALGORITHMS = (
    *("grpo-rs-only", "grpo-token-is-multi-rs", "grpo-uncorrected", "ppo-seq-is-token-rs"),
    *("ppo-uncorrected", "rloo-seq-is", "rloo-uncorrected"),
)
OTHER_PRESETS = (
    *("qwen2.5-7b-grpo-multi-rs", "qwen2.5-7b-rloo-seq-is", "smollm2-135m-sums"),
    *("1gpu-lora", "8gpu", "1gpu-80gb"),
)


def _losses() -> Iterator[tuple[str, Case]]:
    for name in (part.name for part in POLICY_LOSSES.parts()):
        loss = f"rc.loss_type={name} actor.clip_ratio=0.03 {_params(name)} {REJECTING} "
        yield f"loss {name}, bypass", Case(loss + "actor.loss_agg_mode=seq-mean-token-mean")
        if name not in TIED:
            yield f"loss {name}, decoupled", Case(loss + DECOUPLED + "rc.rollout_is=token")


def _params(loss: str) -> str:
    return " ".join(f"rc.loss_params.{name}={value}" for name, value in PARAMS.get(loss, {}).items())


def _estimators() -> Iterator[tuple[str, Case]]:
    failing = "reward.name={here}/graders.py:failing reward.max_error_fraction=0.9 "
    for name in (part.name for part in ADVANTAGE_ESTIMATORS.parts()):
        estimator = f"algorithm.adv_estimator={name} "
        yield f"estimator {name}", Case(estimator)
        ungraded = estimator + failing + CLIP + "algorithm.gamma=0.9 algorithm.lam=0.8"
        yield f"estimator {name}, some ungraded", Case(ungraded)
    not_divided = "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false"
    yield "estimator grpo, not divided", Case(not_divided)


def _corrections() -> Iterator[tuple[str, Case]]:
    """Every criterion of each dialect, and every weight with every bound; also both modes in turn."""
    weights = [part.name for part in CORRECTION_WEIGHTS.parts() if part.unit in ("token", "sequence")]
    known = [(name, *example) for name in criteria_names() for example in examples(name)]
    for dialect in ("rlctl", "verl"):
        pairs = cycle(product(weights, ("clip", "truncate", "mask")))
        criteria = [(name, threshold) for name, own, threshold, _ in known if own == dialect]
        missing = max(0, 3 * len(weights) - len(criteria))
        for place, (name, example) in enumerate([*criteria, *criteria[:missing]]):
            weight, bound = next(pairs)
            settings = (
                f"rc.dialect={dialect} rc.rollout_is={weight} rc.rollout_is_bound={bound} "
                f"rc.rollout_is_threshold={'0.8_1.3' if place % 2 else '1.2'} "
                f"rc.rollout_is_batch_normalize={place % 3 > 0} "
                f"rc.rollout_rs={name} rc.rollout_rs_threshold={THRESHOLDS.get(name, example)} "
                f"rc.loss_denominator={('before', 'after')[place % 2]}_rejection "
                "rollout.engine_params.fault=lag "
            )
            settings += CLIP if place % 4 == 3 else ""
            yield f"{dialect} {weight} {bound}, {name}", Case(settings, dumps=place % 6 == 0)


def _denominators() -> Iterator[tuple[str, Case]]:
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    rejecting = {"sequences": REJECTING, "tokens": VERL}
    for (what, reject), mode, when in product(rejecting.items(), modes, ("before", "after")):
        settings = f"{reject} actor.loss_agg_mode={mode} rc.loss_denominator={when}_rejection"
        yield f"{mode}, {when} rejecting {what}", Case(settings)


def _kl() -> Iterator[tuple[str, Case]]:
    for part in KL_ESTIMATORS.parts():
        loss = f"{REF} actor.use_kl_loss=true actor.kl_loss_coef=0.2 actor.kl_loss_type={part.name} "
        yield f"kl loss {part.name}", Case(loss + REJECTING)
        yield f"kl loss {part.name}, decoupled", Case(loss + CLIP + "actor.entropy_coeff=0.05")
        if "rollout_log_probs" not in part.needs:
            reward = f"{REF} algorithm.use_kl_in_reward=true algorithm.kl_penalty={part.name} "
            yield f"kl reward {part.name}", Case(reward + "algorithm.kl_ctrl.kl_coef=0.1")
    adaptive = "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=100 "
    plus_plus = "algorithm.adv_estimator=reinforce_plus_plus "
    yield "kl reward, adaptive", Case(reward + adaptive + plus_plus + DECOUPLED)


TERMS = {
    "entropy bonus": REJECTING + "actor.entropy_coeff=0.1",
    "dual clip": CLIP + "actor.clip_ratio_low=0.05 actor.clip_ratio_high=0.1 actor.clip_ratio_c=1.1",
    "four epochs": CLIP + REJECTING + "actor.ppo_epochs=4",
    "four epochs, bypass": SURVIVORS + "actor.ppo_epochs=4",
    "rate scaled by ess": "actor.lr_ess_scaling=true",
    "schedule": "actor.lr_scheduler_type=cosine actor.lr_warmup_steps=2 actor.grad_clip=0.05",
    "critic of its own": GAE + "algorithm.lam=0.9 critic.ppo_epochs=2 critic.ppo_mini_batch_size=8 "
    "critic.ppo_max_token_len_per_gpu=60 critic.cliprange_value=0.01 "
    "critic.loss_agg_mode=seq-mean-token-mean",
    "critic first": GAE + "trainer.critic_warmup=1",
    "centered scores": REJECTING + "rc.score_centering=4 rc.rollout_is=token",
    "centered scores, no weights": "rc.score_centering=8 rc.rollout_is=null",
    "guardrails scale": "trainer.guardrails.mode=act trainer.guardrails.ess_floor=0.999",
    "guardrails skip": "trainer.guardrails.mode=act trainer.guardrails.ess_floor=0.9 "
    "trainer.guardrails.on_low_ess=skip_step",
}
DATA = {
    "groups filtered": FILTER,
    "groups filtered, one round": FILTER + CLIP + "algorithm.filter_groups.max_num_gen_batches=1",
    "curriculum": FILTER + "algorithm.filter_groups.curriculum=true trainer.total_training_steps=4 "
    "algorithm.filter_groups.curriculum_floor=0.5 trainer.total_epochs=4",
    "exact sampling": EXACT,
    "exact sampling, decoupled": EXACT + CLIP + REJECTING,
    "exact sampling, centered": CENTERED,
    "temperature": DECOUPLED + "rollout.temperature=1.3",
    "stale": STALE,
    "synced every second step": "rollout.sync_every=2 trainer.total_training_steps=3",
    "length penalty": "reward.overlong.buffer_length=6 reward.overlong.penalty_factor=0.5",
    "length penalty, groups filtered": FILTER + "reward.overlong.buffer_length=6",
    "aborted": REJECTING + "rollout.engine_params.fault=abort",
    "aborted, gae": GAE + CLIP + "rollout.engine_params.fault=abort",
    "damaged": DAMAGED + REJECTING,
    "damaged, decoupled": DAMAGED + CLIP + GAE,
    "damaged, survivors": DAMAGED + "rc.loss_denominator=after_rejection rc.rollout_is=geometric "
    "actor.loss_agg_mode=seq-mean-token-mean actor.entropy_coeff=0.05",
}
ENGINES = {
    "prompts shared": Case(MANY, patches=SHARED),
    "prompts shared, exact sampling": Case(CENTERED, patches=SHARED),
    "rows padded": Case(MANY, patches=PADDED),
    "rows padded, exact sampling": Case(CENTERED, patches=PADDED),
    "head in chunks": Case(MANY, patches=CHUNKS),
    "head in chunks, exact sampling": Case(CENTERED, patches=CHUNKS),
    "rows packed": Case(MANY),
    "token budget": Case(MANY + "actor.ppo_max_token_len_per_gpu=70"),
    "checkpointing": Case(MANY + "model.enable_gradient_checkpointing=true"),
    "eager attention": Case(MANY + "model.attn_implementation=eager"),
    "gemma2": Case(MANY + "model.path={models}/gemma2 ref.path=null"),
    "lora": Case(LORA + REJECTING),
    "lora, base as reference": Case(LORA + CLIP + "algorithm.use_kl_in_reward=true"),
    **{f"zero {stage}": Case(f"{MANY} engine.zero_stage={stage}") for stage in (1, 2, 3)},
    **{f"two ranks, zero {stage}": Case(f"{MANY} engine.zero_stage={stage}", ranks=2) for stage in range(4)},
    "two ranks, rloo-seq-is": Case(preset="rloo-seq-is", ranks=2),
    "two ranks, ppo-seq-is-token-rs": Case(preset="ppo-seq-is-token-rs", ranks=2),
    "two ranks, remax": Case(REJECTING + "algorithm.adv_estimator=remax", ranks=2),
    "two ranks, clip_cov": Case(
        f"rc.loss_type=clip_cov {_params('clip_cov')} actor.ppo_max_token_len_per_gpu=60", ranks=2
    ),
    "two ranks, survivors": Case(SURVIVORS, ranks=2),
    "two ranks, groups filtered": Case(FILTER, ranks=2),
    "two ranks, stale": Case(STALE, ranks=2),
    "two ranks, damaged": Case(DAMAGED + REJECTING, ranks=2),
    "sequence parallel": Case(TWO_HEADS + REJECTING, ranks=2),
    "sequence parallel, kl": Case(TWO_HEADS + CLIP + "algorithm.use_kl_in_reward=true", ranks=2),
    "sequence parallel, centered": Case(TWO_HEADS + CENTERED, ranks=2),
}
