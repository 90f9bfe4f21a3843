"""One small function per contradiction: why it is one, and what to write instead.

Types and ranges are the fields' own business; here are the mistakes that only two values together
make. Nothing is computed twice: rollout correction is checked by translating it.
"""

from __future__ import annotations

from rlctl.errors import Problem
from rlctl.metric_names import OVERLONG
from rlctl.spec.check_algorithm import ALGORITHM_CHECKS, Check
from rlctl.spec.check_rollout import ROLLOUT_CHECKS
from rlctl.spec.embedded import PROMPT_LENGTH, RESPONSE_LENGTH
from rlctl.spec.model import ALL_LINEAR
from rlctl.spec.resolve import (
    IS_THRESHOLD_KEY,
    RS_KEY,
    RS_THRESHOLD_KEY,
    correction_problems,
    correction_rules,
)
from rlctl.spec.run_spec import RunSpec

_CORRECTION = "algorithm.rollout_correction."
#: Learning rates above this are unusual for a pretrained language model.
UNUSUAL_LR = 1e-4


def check_spec(spec: RunSpec, *, skip: frozenset[str] = frozenset()) -> list[Problem]:
    """Every contradiction in `spec`, errors and warnings.

    Args:
        spec: a validated spec.
        skip: keys whose values could not be read (they hold defaults now): checks that read one of
            them say nothing.
    """
    return [
        problem for check, keys in CHECKS.items() if not skip.intersection(keys) for problem in check(spec)
    ]


def correction_is_clear(spec: RunSpec) -> list[Problem]:
    """Criteria must exist in their dialect, thresholds must fit them and let on-policy data pass."""
    return correction_problems(spec.algorithm.rollout_correction)


def threshold_has_a_criterion(spec: RunSpec) -> list[Problem]:
    """A threshold left over after `rollout_rs=null` is harmless, one without a criterion a slip."""
    correction = spec.algorithm.rollout_correction
    if correction.rollout_rs or not correction.rollout_rs_threshold:
        return []
    what = f"{correction.rollout_rs_threshold} has no effect: rollout_rs is null, nothing is rejected"
    fix = "name a criterion in rollout_rs, or set the threshold to null too"
    return [Problem("warning", RS_THRESHOLD_KEY, what, fix)]


def weight_band_holds_one(spec: RunSpec) -> list[Problem]:
    """On-policy weights are exactly 1; a band without 1 changes even those."""
    correction = spec.algorithm.rollout_correction
    if correction.rollout_is is None or correction_problems(correction):
        return []
    weight = correction_rules(correction).weight
    lower, upper = weight.band()
    if lower <= 1.0 <= upper:
        return []
    what = f"the band [{lower:g}, {upper:g}] leaves out 1, the weight of on-policy data"
    return [Problem("warning", IS_THRESHOLD_KEY, what, "choose bounds with 1 between them")]


def batch_divides(spec: RunSpec) -> list[Problem]:
    """A batch is cut into equal mini-batches and each of them over all ranks; nothing may be left over."""
    batch, mini, world = spec.data.train_batch_size, spec.ppo_mini_batch_size, spec.world_size
    key = "actor.ppo_mini_batch_size" if spec.actor.ppo_mini_batch_size else "data.train_batch_size"
    problems = []
    if mini > batch:
        what = f"{mini} prompts per mini-batch, but a batch has only {batch} (data.train_batch_size)"
        problems.append(Problem("error", key, what, f"use a divisor of {batch}"))
    elif batch % mini:
        what = f"{mini} does not divide data.train_batch_size: {batch}; {batch % mini} prompts are left over"
        near = max(size for size in range(1, mini + 1) if batch % size == 0)
        problems.append(Problem("error", key, what, f"use a divisor of {batch}, for example {near}"))
    if mini % world:
        what = f"{mini} prompts cannot be shared equally by {world} ranks"
        problems.append(
            Problem("error", key, what, f"use a multiple of {world}, for example {_up(mini, world)}")
        )
    return problems


def prompts_are_given(spec: RunSpec) -> list[Problem]:
    """Only the embedded model brings a task of its own."""
    if spec.is_embedded:
        if not spec.data.train_files:
            return []
        what = "the embedded model reads only the digits and signs of its own addition task"
        fix = "set model.path to a Hugging Face model, or leave train_files out"
        return [Problem("warning", "data.train_files", what, fix)]
    if spec.data.train_files:
        return []
    what = f"no training prompts for {spec.model.path}"
    fix = "data.train_files=…/train.parquet (`rlctl prepare-data parquet` writes one)"
    return [Problem("error", "data.train_files", what, fix)]


def embedded_task_fits(spec: RunSpec) -> list[Problem]:
    """The built-in task's lengths are known: a shorter limit leaves nothing to train on."""
    if not spec.is_embedded or spec.data.train_files:
        return []
    needs = {"max_prompt_length": PROMPT_LENGTH, "max_response_length": RESPONSE_LENGTH}
    return [
        Problem(
            "error",
            f"data.{key}",
            f"the built-in task needs {tokens} tokens, this allows {getattr(spec.data, key)}",
            f"set it to {tokens} or more",
        )
        for key, tokens in needs.items()
        if getattr(spec.data, key) < tokens
    ]


def validation_is_possible(spec: RunSpec) -> list[Problem]:
    """Validation needs both prompts and a rhythm."""
    asked, given = spec.trainer.test_freq > 0, bool(spec.data.val_files)
    if asked and not given and not spec.is_embedded:
        what = f"validation every {spec.trainer.test_freq} steps, but data.val_files is empty"
        return [Problem("error", "trainer.test_freq", what, "give data.val_files, or test_freq: -1")]
    if given and not asked:
        what = "never read, because trainer.test_freq is -1"
        return [Problem("warning", "data.val_files", what, "set trainer.test_freq, for example to 10")]
    return []


def frequencies_are_meant(spec: RunSpec) -> list[Problem]:
    """Every 0 steps is neither always nor never."""
    return [
        Problem("error", f"trainer.{key}", "0 is neither never (-1) nor a number of steps", "-1, or 1 and up")
        for key in ("save_freq", "test_freq")
        if getattr(spec.trainer, key) == 0
    ]


def learning_rate_is_usual(spec: RunSpec) -> list[Problem]:
    """Policy gradients destroy a pretrained model at rates that supervised training shrugs off."""
    lr = spec.actor.lr
    if lr == 0:
        return [Problem("warning", "actor.lr", "at 0 the policy never changes", "5e-7 to 3e-6 is usual")]
    if lr > UNUSUAL_LR and not spec.is_embedded:
        what = f"{lr:g} is far above what policy gradients on pretrained models survive"
        return [Problem("warning", "actor.lr", what, "5e-7 to 3e-6 is usual")]
    return []


def attention_kernel_fits(spec: RunSpec) -> list[Problem]:
    """FlashAttention's kernels know half precision only."""
    if spec.model.attn_implementation != "flash_attention_2" or spec.engine.dtype == "bf16":
        return []
    what = f"flash_attention_2 has no kernel for {spec.engine.dtype}"
    return [Problem("error", "model.attn_implementation", what, "use sdpa, or engine.dtype: bf16")]


def warmup_ends(spec: RunSpec) -> list[Problem]:
    """A warm-up as long as the run never reaches the learning rate asked for."""
    batches, actor, critic = spec.trainer.total_training_steps, spec.actor, spec.critic
    if batches is None:
        return []

    def steps(mini: int, epochs: int) -> int:
        return max(1, spec.data.train_batch_size // mini) * epochs

    per_batch = steps(spec.ppo_mini_batch_size, actor.ppo_epochs)
    rates = {"actor": (actor.lr_warmup_steps, actor.lr, (batches - spec.trainer.critic_warmup) * per_batch)}
    if spec.trains_critic:
        per_batch = steps(spec.critic_mini_batch_size, spec.critic_epochs)
        rates["critic"] = (critic.lr_warmup_steps, critic.lr, batches * per_batch)
    return [
        Problem(
            "warning",
            f"{who}.lr_warmup_steps",
            f"{warmup} of the run's {total} optimizer steps are warm-up: {lr:g} is never reached",
            "5 to 10 % of the steps is usual",
        )
        for who, (warmup, lr, total) in rates.items()
        if 0 < total <= warmup
    ]


def adapters_have_layers(spec: RunSpec) -> list[Problem]:
    """LoRA without a layer to adapt would train nothing; layers without a rank are a slip."""
    model = spec.model
    if model.lora_rank and not model.target_modules:
        what = "LoRA without layers to adapt trains nothing"
        return [Problem("error", "model.target_modules", what, "name layers, or write all-linear")]
    if not model.lora_rank and model.target_modules != [ALL_LINEAR]:
        what = "has no effect: model.lora_rank is 0, all weights are trained"
        return [Problem("warning", "model.target_modules", what, "set model.lora_rank, 16 for example")]
    return []


def offload_has_a_stage(spec: RunSpec) -> list[Problem]:
    """DeepSpeed moves to the host what a ZeRO stage has cut up."""
    needs = {"none": 0, "optimizer": 1, "all": 3}[spec.engine.offload]
    if spec.engine.zero_stage >= needs:
        return []
    what = f"{spec.engine.offload} needs engine.zero_stage {needs} or above, this is {spec.engine.zero_stage}"
    return [Problem("error", "engine.offload", what, f"set engine.zero_stage: {max(needs, 2)}")]


def budget_holds_a_row(spec: RunSpec) -> list[Problem]:
    """A forward pass must have room for the longest prompt with the longest response."""
    longest = spec.data.max_prompt_length + spec.data.max_response_length
    budgets = {"actor": spec.actor.ppo_max_token_len_per_gpu, "critic": spec.critic.ppo_max_token_len_per_gpu}
    return [
        Problem(
            "error",
            f"{who}.ppo_max_token_len_per_gpu",
            f"{budget} tokens, but one prompt and its response may have {longest}",
            f"use {longest} or more, or lower data.max_prompt_length or data.max_response_length",
        )
        for who, budget in budgets.items()
        if budget is not None and budget < longest
    ]


def rewards_are_complete(spec: RunSpec) -> list[Problem]:
    """A reward model needs a path; an empty list of terms rewards nothing."""
    reward = spec.reward
    problems = []
    if reward.terms == []:
        what = "no reward at all: the list is empty"
        problems.append(
            Problem("error", "reward.terms", what, "list terms, or write null to use reward.name")
        )
    names = {term.name for term in reward.terms or []} or {reward.name}
    if reward.terms and reward.name != "auto":
        what = f"has no effect: reward.terms lists {', '.join(sorted(names))}"
        problems.append(Problem("warning", "reward.name", what, "leave it out"))
    labels = [term.label for term in reward.all_terms]
    doubled = sorted({label for label in labels if labels.count(label) > 1} | ({OVERLONG} & set(labels)))
    if doubled:
        what = f"{', '.join(doubled)} would name two rewards in the metrics"
        fix = "add the weights up in one term, or give a function another name"
        problems.append(Problem("error", "reward.terms" if reward.terms else "reward.name", what, fix))
    if any(term.weight == 0 for term in reward.all_terms):
        what = "a weight of 0: the reward is computed and thrown away"
        problems.append(Problem("warning", "reward.terms", what, "leave the term out, or give it a weight"))
    if "model" in names and reward.model.path is None:
        fix = "reward.model.path=… (a sequence classifier with one output)"
        problems.append(Problem("error", "reward.model.path", "the reward model has no path", fix))
    if "model" not in names and reward.model.path is not None:
        what = "never read: no reward is called model"
        problems.append(
            Problem("warning", "reward.model.path", what, "set reward.name: model, or add a term")
        )
    return problems


def overlong_fits(spec: RunSpec) -> list[Problem]:
    """The penalty's ramp must begin within the response."""
    buffer, longest = spec.reward.overlong.buffer_length, spec.data.max_response_length
    if buffer <= longest:
        return []
    what = f"{buffer} tokens, but responses end at {longest} (data.max_response_length)"
    return [Problem("error", "reward.overlong.buffer_length", what, f"use {longest} or less")]


def _up(number: int, multiple: int) -> int:
    """The next multiple of `multiple` at or above `number`."""
    return -(-number // multiple) * multiple


_RS = (RS_KEY, RS_THRESHOLD_KEY, f"{_CORRECTION}dialect")
_IS = (
    f"{_CORRECTION}rollout_is",
    IS_THRESHOLD_KEY,
    f"{_CORRECTION}rollout_is_bound",
    f"{_CORRECTION}dialect",
)
_BATCH = ("data.train_batch_size", "actor.ppo_mini_batch_size")
_WORLD = ("trainer.n_gpus_per_node", "trainer.nnodes")

#: Every contradiction and the keys it reads.
CHECKS: dict[Check, tuple[str, ...]] = {
    prompts_are_given: ("model.path", "data.train_files"),
    embedded_task_fits: (
        "model.path",
        "data.train_files",
        "data.max_prompt_length",
        "data.max_response_length",
    ),
    validation_is_possible: ("model.path", "data.val_files", "trainer.test_freq"),
    frequencies_are_meant: ("trainer.save_freq", "trainer.test_freq"),
    batch_divides: (*_BATCH, *_WORLD),
    correction_is_clear: (*_IS, *_RS),
    threshold_has_a_criterion: _RS,
    weight_band_holds_one: (*_IS, *_RS),
    **ROLLOUT_CHECKS,
    attention_kernel_fits: ("model.attn_implementation", "engine.dtype"),
    learning_rate_is_usual: ("actor.lr", "model.path"),
    warmup_ends: (
        *_BATCH,
        "trainer.total_training_steps",
        "trainer.critic_warmup",
        "actor.lr_warmup_steps",
        "actor.ppo_epochs",
        "critic.lr_warmup_steps",
        "critic.ppo_epochs",
        "critic.ppo_mini_batch_size",
        "algorithm.adv_estimator",
    ),
    adapters_have_layers: ("model.lora_rank", "model.target_modules"),
    offload_has_a_stage: ("engine.offload", "engine.zero_stage"),
    budget_holds_a_row: (
        "actor.ppo_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "data.max_prompt_length",
        "data.max_response_length",
    ),
    rewards_are_complete: ("reward.name", "reward.terms", "reward.model.path"),
    overlong_fits: ("reward.overlong.buffer_length", "data.max_response_length"),
    **ALGORITHM_CHECKS,
}
