"""Settings, batches and engines of the update tests; what runs in processes of its own is here too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlctl.batch import ModelInputs, TokenBatch, TokenLists
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.protocol import PolicyOutput, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.algorithm import ActorSpec, RolloutCorrectionSpec, TeacherSpec
from rlctl.run_spec.resolve import correction_rules
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update
from tests.changed import changed
from tests.models import tiny_batch, tiny_model
from tests.properties.batches import loss_rule, update_settings

ROWS, HORIZON = 16, 6
#: Size of a micro-batch: a number of rows, or a number of tokens ("20 tokens").
Micro = int | str
RS = {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.6_1.6,1.5"}
BYPASS, DECOUPLED = {"bypass_mode": True}, {"bypass_mode": False}
REINFORCE, CLIP = {"loss_type": "reinforce"}, {"loss_type": "ppo_clip"}
VERL = {
    "dialect": "verl",
    "rollout_is": "token",
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.6_1.6,0.3",
}


@dataclass(frozen=True)
class Case:
    """One way to update.

    Attributes:
        correction: fields of `algorithm.rollout_correction`.
        mini_rows: sequences per mini-batch over all ranks.
        terms: further arguments of `settings_of`.
        zero_advantage: rows that no gradient comes from.
    """

    correction: dict[str, object]
    agg_mode: str = "token-mean"
    epochs: int = 1
    mini_rows: int = ROWS
    terms: dict[str, object] = field(default_factory=dict)
    zero_advantage: tuple[int, ...] = ()

    def batch(self, model, seed: int = 3) -> TokenBatch:
        """All rows."""
        batch = batch_of(model, seed=seed)
        is_zero = torch.zeros(batch.num_episodes, dtype=torch.bool)
        is_zero[list(self.zero_advantage)] = True
        advantages = batch.advantages.masked_fill(batch.units.episode.spread(is_zero), 0.0)
        most_likely = lists_of(model, batch, self.correction.get("score_centering"))
        batch = changed(batch, advantages=advantages, most_likely=most_likely)
        if not self.terms.get("teacher_kl_coef"):
            return batch
        listed = lists_of(model, batch, None if "teacher_kl_type" in self.terms else 4)
        tail = None if listed is None else (-listed.padded()[1].exp().sum(1)).log1p()
        columns = {"teacher_log_probs": batch.column("ref_log_probs"), "teacher_tail": tail}
        return batch.with_columns(**columns, most_likely=listed)

    @property
    def options(self) -> dict[str, object]:
        """Arguments of `settings_of` for one step on the whole batch."""
        return {"agg_mode": self.agg_mode, **self.terms}


CASES = {
    "sequence": Case(BYPASS | REINFORCE | {"rollout_is": "sequence"}),
    "token": Case(BYPASS | REINFORCE | {"rollout_is": "token"}, "seq-mean-token-sum", mini_rows=8),
    "geometric": Case(
        BYPASS | REINFORCE | {"rollout_is": "geometric"},
        "seq-mean-token-mean",
        terms={"kl_loss_type": "sequence", "kl_loss_coef": 0.5},
    ),
    "survivors": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence", "loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        mini_rows=8,
    ),
    "rejection only": Case(BYPASS | REINFORCE | RS | {"rollout_is": None}),
    "no settling": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "token", "rollout_is_batch_normalize": False},
        epochs=2,
        mini_rows=8,
    ),
    "bypass clip": Case(BYPASS | CLIP | RS | {"rollout_is": "token"}, "seq-mean-token-sum-norm"),
    "decoupled clip": Case(DECOUPLED | CLIP | RS | {"rollout_is": "sequence"}, epochs=2, mini_rows=8),
    "zero advantages": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence", "loss_denominator": "after_rejection"},
        zero_advantage=(0, 1, 3, 4, 6, 7, 9, 12, 13, 15),
    ),
    "zero advantages, two steps": Case(
        DECOUPLED | CLIP | RS | {"rollout_is": "sequence"},
        epochs=2,
        mini_rows=8,
        zero_advantage=(0, 2, 3, 4, 8, 9, 14),
    ),
    "decoupled reinforce": Case(
        DECOUPLED | REINFORCE | RS | {"rollout_is": "token", "loss_denominator": "after_rejection"},
        epochs=2,
        mini_rows=4,
    ),
    "verl": Case(BYPASS | REINFORCE | VERL),
    "survivors by token": Case(
        BYPASS | REINFORCE | VERL | {"loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        mini_rows=8,
    ),
    "survivors, all terms": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence", "loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        terms={"entropy_coeff": 0.2, "kl_loss_type": "unbiased", "kl_loss_coef": 0.5},
    ),
    "dual clip": Case(
        DECOUPLED | CLIP | RS | {"rollout_is": "sequence"},
        epochs=2,
        terms={"numbers": {"clip_c": 1.05}, "entropy_coeff": 0.2},
    ),
    "gspo": Case(
        DECOUPLED | {"loss_type": "gspo"} | VERL,
        "seq-mean-token-mean",
        mini_rows=8,
        terms={"numbers": {"clip_low": 0.02, "clip_high": 0.03}, "kl_loss_type": "k2", "kl_loss_coef": 0.5},
    ),
    "cispo": Case(
        BYPASS | {"loss_type": "cispo"} | RS | {"rollout_is": "token"},
        terms={"entropy_coeff": 0.2, "kl_loss_type": "k1", "kl_loss_coef": 0.5},
    ),
    "sapo": Case(
        DECOUPLED | {"loss_type": "sapo", "rollout_is": "sequence"},
        "seq-mean-token-sum",
        epochs=2,
        terms={"numbers": {"tau_pos": 1.5, "tau_neg": 3.0}, "kl_loss_type": "k3", "kl_loss_coef": 0.5},
    ),
    "dppo": Case(
        BYPASS | {"loss_type": "dppo", "loss_denominator": "after_rejection"} | RS,
        mini_rows=8,
        terms={
            "numbers": {"clip_low": 2e-4, "clip_high": 5e-4, "clip_c": 1.2, "divergence": "kl"},
            "kl_loss_type": "unbiased",
            "kl_loss_coef": 0.5,
        },
    ),
}


#: Those that read lists of the most likely tokens, of the sampler or of a teacher.
CENTERED = {
    "taught": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence"},
        zero_advantage=(0, 1, 3, 4),
        terms={"teacher_kl_coef": 0.7},
    ),
    "taught by sampled tokens": Case(
        DECOUPLED | CLIP | RS | {"rollout_is": "token", "loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        mini_rows=8,
        terms={"teacher_kl_coef": 0.7, "teacher_kl_type": "k2", "entropy_coeff": 0.2},
    ),
    "centered": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": None, "score_centering": 5}, zero_advantage=(0, 1, 3)
    ),
    "centered weights": Case(
        BYPASS
        | REINFORCE
        | RS
        | {"rollout_is": "token", "score_centering": 5, "loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        mini_rows=8,
    ),
    "centered weights, all terms": Case(
        BYPASS | REINFORCE | RS | {"rollout_is": "token", "score_centering": 5},
        terms={"entropy_coeff": 0.2, "kl_loss_type": "unbiased", "kl_loss_coef": 0.5},
    ),
}


def lists_of(model, batch: TokenBatch, count: object) -> TokenLists | None:
    """The `count` most likely tokens of a sampler that is a little away from the model."""
    if count is None:
        return None
    lengths, logits = batch.lengths.tolist(), []
    with torch.no_grad():
        for ids, sampled in zip(batch.token_ids.split(lengths), batch.sampled.split(lengths), strict=True):
            logits.append(model(input_ids=ids[None]).logits[0, :-1][sampled[1:]].float())
    together = torch.cat(logits)
    noise = torch.randn(together.shape, generator=torch.Generator().manual_seed(5))
    highest = (together + 0.5 * noise).log_softmax(-1).topk(int(str(count)))
    counts = torch.full((len(together),), int(str(count)), dtype=torch.int32)
    return TokenLists(counts, highest.indices.flatten().int(), highest.values.flatten())


def settings_of(
    correction: dict[str, object],
    agg_mode: str = "token-mean",
    epochs: int = 1,
    mini_rows: int = ROWS,
    rows: int = ROWS,
    micro_sequences: int = ROWS,
    micro_tokens: int | None = None,
    max_nonfinite_fraction: float = 0.1,
    numbers: dict[str, object] | None = None,
    teacher_kl_coef: float | None = None,
    teacher_kl_type: str | None = None,
    **terms: object,
) -> UpdateSettings:
    """`numbers` are the loss's own, `terms` further keys of `actor`."""
    actor = ActorSpec(
        loss_agg_mode=agg_mode,
        ppo_epochs=epochs,
        ppo_micro_batch_size_per_gpu=micro_sequences,
        ppo_max_token_len_per_gpu=micro_tokens,
        use_kl_loss="kl_loss_type" in terms,
        **terms,
    )
    fixed = {"rollout_is": "sequence", "max_nonfinite_fraction": max_nonfinite_fraction}
    section = RolloutCorrectionSpec.model_validate(BYPASS | REINFORCE | fixed | correction)
    teacher = TeacherSpec(path="teacher", kl_coef=teacher_kl_coef or 1.0, kl_type=teacher_kl_type)
    return update_settings(
        correction_rules(section),
        loss_rule(section.loss_type, **{"clip_low": 0.2, "clip_high": 0.3, **(numbers or {})}),
        actor=actor,
        correction=section,
        teacher=teacher if teacher_kl_coef else None,
        groups=(mini_rows, rows),
        horizon=HORIZON,
    )


def batch_of(model, rows: int = ROWS, seed: int = 3) -> TokenBatch:
    """Old and reference policy are each a little away from the model's own; every row is its own group."""
    batch = tiny_batch(model, rows, seed=seed, horizon=HORIZON, gap=0.3)
    noise = torch.randn(rows, HORIZON, generator=torch.Generator().manual_seed(1000 + seed))
    sampled = torch.arange(HORIZON) < batch.units.episode.lengths[:, None]
    return batch.with_columns(ref_log_probs=batch.old_log_probs + 0.3 * noise[sampled])


def by_row(batch: TokenBatch, column: torch.Tensor) -> Sequence[torch.Tensor]:
    """A column (M,) as one tensor per row."""
    return column.split(batch.units.episode.lengths.tolist())


#: Class and configuration of a model → what its probe found: a linear head, packed rows, shared prompts.
_SUPPORTED: dict[tuple[type, str], tuple[bool, bool | None, bool]] = {}


def policy_of(model) -> PolicyModule:
    """The model's policy; models that differ only in their weights are probed once."""
    key = type(model), str(model.config.to_dict())
    if key not in _SUPPORTED:
        module = PolicyModule(model, 1.0)
        _SUPPORTED[key] = (module.head.is_linear, module.reader.packs, module.reader.shares_prompts)
        return module
    module = PolicyModule(model, 1.0, probe=False, share_prompts=False)
    module.head.is_linear, module.reader.packs, module.reader.shares_prompts = _SUPPORTED[key]
    return module


class PlainEngine:
    """A `TrainEngine` of plain torch and SGD, which keeps the gradient of its last step."""

    scales_gradients = True

    def __init__(self, model) -> None:
        self.model = model
        self.module = policy_of(model)
        self.gradient: dict[str, torch.Tensor] = {}
        self.num_forwards = 0
        #: For each backward pass, whether it was marked as the last one before the step.
        self.last: list[bool] = []

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        return "as it is"

    def policy(self, inputs: ModelInputs, *, entropy_grad=False, sum_pi_squared=False) -> PolicyOutput:
        self.num_forwards += 1
        return self.module(inputs, entropy_grad=entropy_grad, sum_pi_squared=sum_pi_squared)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.last.append(last)
        loss.backward()

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        named = dict(self.model.named_parameters())
        self.gradient = {n: p.grad * grad_scale for n, p in named.items() if p.grad is not None}
        norm = float(torch.stack([g.square().sum() for g in self.gradient.values()]).sum().sqrt())
        skip = skip or not math.isfinite(norm)  # as DeepSpeed does
        if not skip:
            with torch.no_grad():
                for name, gradient in self.gradient.items():
                    named[name] -= lr * gradient
        self.model.zero_grad()
        return StepResult(norm, applied=not skip)


def alone() -> Ranks:
    return Ranks(0, 1, torch.device("cpu"))


def sizes_of(micro: Micro) -> dict[str, int | None]:
    """Arguments of `settings_of`."""
    if isinstance(micro, str):
        return {"micro_sequences": 1, "micro_tokens": int(micro.removesuffix(" tokens"))}
    return {"micro_sequences": micro, "micro_tokens": None}


def lr_of(number: int) -> float:
    return 2e-3 * (number + 1)


def invariance(ranks: Ranks, plan: list[tuple]):
    """What `one_update` finds of each of its arguments."""
    return {case: one_update(ranks, *case) for case in plan}


def one_update(ranks: Ranks, name: str, micro: Micro, stage: int = 0, dtype: torch.dtype = torch.float32):
    """Weights, metrics and what was seen after one `update`."""
    case = (CASES | CENTERED)[name]
    mini = case.mini_rows
    share = mini // ranks.world_size
    mine = [
        start + ranks.rank * share + i for start in range(0, ROWS, mini) for i in range(share)
    ]  # as `places_of` deals out prompts
    actor = DeepSpeedEngine(
        tiny_model(),
        ranks,
        zero_stage=stage,
        dtype=dtype,
        temperature=1.0,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
    )
    batch = case.batch(tiny_model()).pick(mine)
    settings = settings_of(
        case.correction, epochs=case.epochs, mini_rows=mini, **sizes_of(micro), **case.options
    )
    outcome = update(batch, actor, ranks, settings, lr_of, 0)
    seen = outcome.seen
    return {
        "metrics": outcome.metrics,
        "num_updates": outcome.num_updates,
        "num_tokens": len(batch.advantages),
        "rows": mine,
        "seen": [by_row(batch, getattr(seen, name)) for name in ("training_log_probs", "weights", "keep")],
        "weights": {n: t.detach().float().clone() for n, t in actor.weights()},
    }
