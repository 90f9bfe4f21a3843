"""Every metric that a run may log: key, unit, definition, and its names in other frameworks.

Tracking writes these keys, diagnosis reads them, and `docs/reference/metrics.md` is generated from them. This
module imports no torch.

Another framework's name is listed only where the quantity is the same. Equal names of different quantities
(for example, five different KLs) are handled by the readers of `rlctl.diagnose`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

#: Prefix of the correction statistics. They cover a whole batch or mini-batch, and are never averages over
#: micro-batches.
CORRECTION = "rollout_corr/"
#: Name of the length penalty among the reward terms, as in `reward/overlong/mean`.
OVERLONG = "overlong"


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number.

    Attributes:
        name: the key; `<…>` stands for a variable part, such as a criterion's name.
        unit: `1` for a pure number, `fraction` for a share in [0, 1], `nats`, `tokens`, `s`, `GiB` …
        definition: what is computed, over what.
        peers: framework → its name for the same quantity.
    """

    name: str
    unit: str
    definition: str
    peers: Mapping[str, str] = field(default_factory=dict)


def _correction() -> Iterator[Metric]:
    """Distance between the rollout policy and the trained policy (ρ = π_train / π_rollout, per token)."""

    def metric(key: str, unit: str, definition: str, **peers: str) -> Metric:
        name = CORRECTION + key
        return Metric(name, unit, definition, {"verl": name, **peers})

    yield metric("training_ppl", "1", "mean over sequences of exp(−mean log π_train)")
    yield metric("rollout_ppl", "1", "mean over sequences of exp(−mean log π_rollout)")
    yield metric("training_log_ppl", "nats", "mean over sequences of −mean log π_train")
    yield metric("rollout_log_ppl", "nats", "mean over sequences of −mean log π_rollout")
    per_sequence = "over sequences of d = mean log π_rollout − mean log π_train of one sequence"
    yield metric("log_ppl_diff", "nats", f"mean {per_sequence}")
    yield metric("log_ppl_abs_diff", "nats", f"mean of |d| {per_sequence}")
    yield metric("log_ppl_diff_max", "nats", f"largest d {per_sequence}")
    yield metric("log_ppl_diff_min", "nats", f"smallest d {per_sequence}")
    yield metric("ppl_ratio", "1", f"mean of exp(d) {per_sequence}")
    yield metric("kl", "nats", "mean over response tokens of log π_rollout − log π_train (k1 estimate)")
    yield metric("k3_kl", "nats", "mean over response tokens of ρ − 1 − log ρ (k3 estimate, never negative)")
    yield metric("chi2_token", "1", "mean over response tokens of ρ², minus 1; raw ESS ≈ 1 / (1 + χ²)")
    yield metric("chi2_seq", "1", "mean over sequences of (Π ρ)², minus 1; raw ESS ≈ 1 / (1 + χ²)")


_APPLIED = (
    "of the weights after bound, rejection (zero) and normalisation: what the loss multiplies by; measured "
    "only in bypass mode with a loss that has its own ratio"
)
_RAW = "of the raw weights (before bound, rejection and normalisation: the true distance of the policies)"
_UNITS = "over response tokens (level token) or sequences (levels sequence and geometric)"


def _weights(kind: str, which: str, peers: bool) -> Iterator[Metric]:
    """Statistics of the importance weights; `kind` is empty (applied) or `raw_`."""

    def metric(key: str, unit: str, definition: str, **others: str) -> Metric:
        name = f"{CORRECTION}rollout_is_{kind}{key}"
        return Metric(name, unit, definition, {"verl": name, **others} if peers else {})

    trl = {
        s: {"trl": f"sampling/importance_sampling_ratio/{s}"} if peers else {} for s in ("mean", "max", "min")
    }
    yield metric("mean", "1", f"mean {which}, {_UNITS}", **trl["mean"])
    yield metric("std", "1", f"population standard deviation {which}, {_UNITS}")
    yield metric("max", "1", f"maximum {which}, {_UNITS}", **trl["max"])
    yield metric("min", "1", f"minimum {which}, {_UNITS}", **trl["min"])
    yield metric("eff_sample_size", "fraction", f"(Σw)² / (n Σw²) in (0, 1] {which}, {_UNITS}")
    token_ess = f"(Σw)² / (n Σw²) in (0, 1] {which}, over response tokens whatever the level"
    yield Metric(f"{CORRECTION}rollout_is_{kind}eff_sample_size_token", "fraction", token_ess)
    per_sequence = f"over sequences of each sequence's mean token weight, {which}"
    yield metric("seq_mean", "1", f"mean {per_sequence}")
    yield metric("seq_std", "1", f"sample standard deviation {per_sequence}")
    yield metric("seq_max", "1", f"maximum {per_sequence}")
    yield metric("seq_min", "1", f"minimum {per_sequence}")
    yield metric("seq_max_deviation", "1", f"largest |w − 1| {per_sequence}")


def _bounds_and_counts() -> Iterator[Metric]:
    """Effects of bounding and rejection, and counts of sequences and updates that could not be corrected."""

    def metric(key: str, unit: str, definition: str, verl: bool = True) -> Metric:
        name = CORRECTION + key
        return Metric(name, unit, definition, {"verl": name} if verl else {})

    raw = "raw weights, before the bound"
    yield metric("rollout_is_ratio_fraction_high", "fraction", f"share of {raw}, above the upper threshold")
    yield metric("rollout_is_ratio_fraction_low", "fraction", f"share of {raw}, below the lower threshold")
    mean = "share of sequences whose mean raw token weight is"
    yield metric("rollout_is_seq_fraction_high", "fraction", f"{mean} above the upper threshold")
    yield metric("rollout_is_seq_fraction_low", "fraction", f"{mean} below the lower threshold")
    yield metric("rollout_is_batch_norm_factor", "1", "mean surviving weight the weights were divided by")
    yield metric("rollout_rs_masked_fraction", "fraction", "rejected response tokens / response tokens")
    yield metric("rollout_rs_seq_masked_fraction", "fraction", "share of sequences with a rejected token")
    nonfinite = "sequences with a NaN or infinite log-prob, of π_rollout, π_old or π_θ"
    yield metric("nonfinite_sequences", "sequences", nonfinite, verl=False)
    error = "error of a mini-batch's gradient relative to the expected reward's: 0 exact, 1 useless"
    yield metric("grad_error", "fraction", error, verl=False)
    for end, which in (("lo", "lower"), ("hi", "upper")):
        bound = f"{which} end of its 90 % interval; 0 to 1 where the weights are too uneven for an estimate"
        yield metric(f"grad_error_{end}", "fraction", bound, verl=False)
    rule = "weight that `auto` used: 0 none, 1 and 2 per token at most 2 and 5, 3 and 4 per sequence"
    yield metric("auto_rule", "index", rule, verl=False)
    yield metric("auto_lr_scale", "1", "factor of the learning rate set by `auto`", verl=False)
    discarded = "1 if `auto` discarded the responses sampled ahead after this step"
    yield metric("auto_discarded", "0 or 1", discarded, verl=False)
    for name in ("none", "token_2", "token_5", "sequence_2", "sequence_5"):
        for moment, what in (("norm", "|E x|²"), ("inner", "E x · E y"), ("signal", "|E y|²")):
            words = (
                f"{what} of the group gradients x under this weight of `auto`, y under exact weights; scaled"
            )
            yield metric(f"auto_{moment}/{name}", "1", f"{words} to mean square 1", verl=False)
    listed = "mean probability under π_rollout of the tokens that score centering lists at each position"
    yield metric("listed_mass", "fraction", listed, verl=False)
    saturated = "sequences whose Σ log ρ left ±20, so that the sequence weight is only the clamp"
    yield metric("saturated_sequences", "sequences", saturated, verl=False)
    skipped = "optimizer steps not made because nothing survived or a loss or gradient was not finite"
    yield metric("skipped_updates", "updates", skipped, verl=False)


#: verl logs the same names; the quantities are the same only under this dialect.
_VERL_DIALECT = "verl (under `dialect: verl`)"


def _criteria() -> Iterator[Metric]:
    """Statistics of one rejection criterion. Longer endings come first, because they are matched in order.

    verl logs the same names. Its criteria compare k1, k2 and k3; rlctl's compare ρ itself.
    """

    def metric(ending: str, unit: str, definition: str) -> Metric:
        name = f"{CORRECTION}rollout_rs_<criterion>_{ending}"
        return Metric(name, unit, definition, {_VERL_DIALECT: name})

    of_criterion = (
        "of the criterion's statistic (ρ_t, max ρ_t, Π ρ or its mean under dialect rlctl; verl's k1, k2 or "
        "k3 under dialect verl), over the tokens or sequences it is compared for"
    )
    one = "this criterion alone rejects"
    yield metric("seq_masked_fraction", "fraction", f"share of sequences in which {one} a token")
    yield metric("masked_fraction", "fraction", f"share of response tokens that {one}")
    yield metric("fraction_high", "fraction", f"share {of_criterion}, above the upper bound")
    yield metric("fraction_low", "fraction", f"share {of_criterion}, below the lower bound")
    yield metric("mean", "of the statistic", f"mean {of_criterion}")
    yield metric("std", "of the statistic", f"population standard deviation {of_criterion}")
    yield metric("max", "of the statistic", f"maximum {of_criterion}")
    yield metric("min", "of the statistic", f"minimum {of_criterion}")


def _training() -> Iterator[Metric]:
    """Difference of the probabilities, and progress of the run (step, epoch, staleness, weight sync)."""

    def verl(key: str, unit: str, definition: str) -> Metric:
        return Metric(f"training/{key}", unit, definition, {"verl": f"training/{key}"})

    gap = "over response tokens of |π_train − π_rollout| (probabilities, not log-probs)"
    yield verl("rollout_probs_diff_mean", "1", f"mean {gap}")
    yield verl("rollout_probs_diff_max", "1", f"maximum {gap}")
    yield verl("rollout_probs_diff_std", "1", f"sample standard deviation {gap}")
    pearson = "Pearson correlation of π_train and π_rollout over response tokens"
    yield verl("rollout_actor_probs_pearson_corr", "1", pearson)
    yield verl("global_step", "steps", "batches trained on so far, this one included")
    yield verl("epoch", "epochs", "passes over the training prompts begun before this batch, from 0")
    stale = "over samples of optimizer updates between sampling and training"
    yield Metric("training/staleness_mean", "updates", f"mean {stale}")
    yield Metric("training/staleness_max", "updates", f"maximum {stale}")
    gap = "mean of |log π_train − log π_rollout| over a few tokens sampled right after a weight sync"
    yield Metric("rollout/sync_gap", "nats", gap)


def _actor() -> Iterator[Metric]:
    """Metrics of the policy update."""

    def metric(key: str, unit: str, definition: str, **peers: str) -> Metric:
        name = f"actor/{key}"
        return Metric(name, unit, definition, {"verl": name, **peers})

    loss = "policy-gradient loss of the batch, correction applied, mean over its optimizer steps"
    yield metric("pg_loss", "1", loss, trl="policy_loss")
    clipped = "share of response tokens where PPO's clip binds; 0 for REINFORCE"
    yield metric("pg_clipfrac", "fraction", clipped, trl="clip_ratio/region_mean")
    lower = (
        "share of response tokens where the dual clip for negative advantages binds (not the lower PPO bound)"
    )
    yield metric("pg_clipfrac_lower", "fraction", lower)
    yield metric("ppo_kl", "nats", "mean over response tokens of log π_old − log π_θ: drift within the batch")
    in_loss = "KL to the reference in the loss, mean over the batch's optimizer steps"
    yield metric("kl_loss", "nats", in_loss, trl="kl")
    yield metric("kl_coef", "1", "coefficient of the KL in the loss")
    in_reward = "mean over responses of their mean KL to the reference, as subtracted from the reward"
    yield metric("reward_kl_penalty", "nats", in_reward)
    yield metric("reward_kl_penalty_coeff", "1", "coefficient of the KL in the reward")
    entropy = "mean over response tokens of the policy's entropy at the sampling temperature"
    yield metric("entropy", "nats", entropy, trl="entropy")
    norm = "global gradient norm before clipping, mean over the batch's optimizer steps"
    yield metric("grad_norm", "1", norm, trl="grad_norm")
    yield metric("lr", "1", "learning rate of the batch's last optimizer step", trl="learning_rate")


def _critic() -> Iterator[Metric]:
    """Metrics of the critic update."""

    def metric(key: str, unit: str, definition: str) -> Metric:
        return Metric(f"critic/{key}", unit, definition, {"verl": f"critic/{key}"})

    steps = "mean over the batch's optimizer steps"
    yield metric("vf_loss", "reward²", f"value loss, ½ (V − return)² clipped, {steps}")
    yield metric("vf_clipfrac", "fraction", "share of response tokens where the value clip binds")
    yield metric("vpred_mean", "reward", "mean over response tokens of the values being trained")
    yield metric("vf_explained_var", "1", "1 − Var(return − V) / Var(return); V: values before the updates")
    yield metric("grad_norm", "1", f"the critic's gradient norm before clipping, {steps}")
    yield metric("lr", "1", "the critic's learning rate at the batch's last optimizer step")
    skipped = "the critic's optimizer steps not made because loss or gradient was not finite"
    yield Metric("critic/skipped_updates", "updates", skipped)
    for what, word in (("values", "value before the updates"), ("returns", "return")):
        for statistic, of in (("mean", "mean"), ("max", "maximum"), ("min", "minimum")):
            yield metric(f"{what}/{statistic}", "reward", f"{of} over response tokens of the {word}")


def _rewards() -> Iterator[Metric]:
    """Scores, shaped rewards, advantages, failed samples, and dynamic sampling."""
    for statistic, word in (("mean", "mean"), ("max", "maximum"), ("min", "minimum")):
        score, reward, advantage = (
            f"critic/{what}/{statistic}" for what in ("score", "rewards", "advantages")
        )
        graded = f"{word} over validly graded samples of the grader's score"
        yield Metric(
            score, "reward", graded, {"verl": score, **({"trl": "reward"} if word == "mean" else {})}
        )
        shaped = f"{word} over validly graded samples of the reward after KL penalty and shaping"
        yield Metric(reward, "reward", shaped, {"verl": reward})
        yield Metric(advantage, "1", f"{word} over response tokens of the advantage", {"verl": advantage})
    aborted = "responses that the rollout engine aborted; they are excluded, not scored 0"
    yield Metric("response/num_aborted", "samples", aborted)
    yield Metric(
        "reward/num_errors", "samples", "samples the grader failed on; they are excluded, not scored 0"
    )
    yield Metric("reward/error_fraction", "fraction", "samples the grader failed on / samples")
    ended = "responses whose grading hit the time or memory limit or crashed; they are scored 0"
    yield Metric("reward/num_timeouts", "samples", ended)
    several = "logged if there are several rewards"
    yield Metric("reward/<term>/mean", "reward", f"mean score of one reward before its weight; {several}")
    failed = "samples that this reward failed on"
    yield Metric("reward/<term>/num_errors", "samples", f"{failed}; {several}")
    spread = "fraction of groups whose rewards are all equal: their group-relative advantages are 0"
    yield Metric("reward/zero_spread_groups", "fraction", spread, {"trl": "frac_reward_zero_std"})
    for name, unit, what in (
        ("rounds", "rounds", "rounds of sampling that the batch took"),
        ("samples_paid", "samples", "responses sampled for the batch, used or not"),
        ("samples_used", "samples", "responses trained on"),
        ("tokens_paid", "tokens", "response tokens sampled for the batch"),
        ("tokens_used", "tokens", "response tokens trained on"),
        ("paid_per_used", "ratio", "tokens sampled per token trained on"),
        ("dead_fraction", "fraction", "sampled groups whose rewards are all equal"),
        ("dead_used", "groups", "dead groups that the batch was filled up with"),
        ("live_unused", "groups", "groups whose rewards differ that were sampled and not needed"),
        ("prompts_skipped", "prompts", "prompts that the curriculum passed over"),
        ("score_paid_mean", "reward", "mean score of all samples paid; critic/score/mean is of those used"),
    ):
        yield Metric(f"filter_groups/{name}", unit, f"dynamic sampling: {what}")


def _lengths() -> Iterator[Metric]:
    """Tokens per prompt and per response."""
    trl = {"mean": "mean_length", "max": "max_length", "min": "min_length", "clip_ratio": "clipped_ratio"}
    for what, clipped in (
        ("response", "share of responses cut off at data.max_response_length"),
        ("prompt", "share of prompts as long as data.max_prompt_length"),
    ):
        for statistic, word in (("mean", "mean"), ("max", "maximum"), ("min", "minimum"), ("clip_ratio", "")):
            name = f"{what}_length/{statistic}"
            peers = {"verl": name, **({"trl": f"completions/{trl[statistic]}"} if what == "response" else {})}
            unit, definition = ("tokens", f"{word} {what} length") if word else ("fraction", clipped)
            yield Metric(name, unit, definition, peers)


def _performance() -> Iterator[Metric]:
    """Speed, memory and time per stage."""

    def verl(name: str, unit: str, definition: str) -> Metric:
        return Metric(name, unit, definition, {"verl": name})

    yield verl("perf/throughput", "tokens/s/GPU", "prompt and response tokens / (step time × ranks)")
    yield verl("perf/total_num_tokens", "tokens", "prompt and response tokens of the batch, padding left out")
    yield verl("perf/time_per_step", "s", "wall time of the step")
    memory = "peak GPU memory allocated by torch on rank 0; on CPU the process's peak resident memory"
    yield verl("perf/max_memory_allocated_gb", "GiB", memory)
    for stage, what in (
        ("gen", "sampling the responses"),
        ("reward", "grading"),
        ("old_log_prob", "the extra forward pass of the policy (decoupled mode, optimal token baseline)"),
        ("gen_max", "sampling the greedy responses (ReMax)"),
        ("ref", "the reference's forward pass"),
        ("values", "the critic's forward pass"),
        ("update_critic", "the critic's forward, backward and optimizer steps"),
        ("adv", "advantages, and in decoupled mode weights and rejection"),
        ("update_actor", "forward, backward and optimizer steps"),
        ("sync_weights", "handing the new weights to the rollout engine"),
        ("save_checkpoint", "saving"),
        ("testing", "validation"),
        ("step", "the whole step"),
    ):
        yield verl(f"timing_s/{stage}", "s", f"wall time of {what}")


def _guardrails() -> Iterator[Metric]:
    """Alarms and interventions of `trainer.guardrails` (not logged where guardrails are off)."""
    beyond = "updates whose raw ESS is under its floor or whose |KL| is over its limit"
    tail = "1 if the raw ESS has been under its floor for a window of batches"
    yield Metric("guardrails/alarms", "1", f"{beyond}, plus {tail}")
    done = "updates scaled or withheld, plus 1 for a batch with tightened bounds, plus 1 for ending the run"
    yield Metric("guardrails/interventions", "1", done)
    yield Metric("guardrails/updates", "updates", "planned updates of the batch, each of them checked")
    yield Metric("guardrails/skipped", "updates", "updates the guardrails withheld")
    yield Metric("guardrails/lr_scale", "1", "factor with which the next batch's learning rate starts")
    limit = "limit of that factor: below 1 while a critical level is forecast and `on_forecast` acts"
    yield Metric("guardrails/forecast_scale", "1", limit)
    yield Metric("guardrails/tightened", "1", "1 if the batch was trained with tightened bounds, else 0")


def _validation() -> Iterator[Metric]:
    """Scores and lengths on held-out prompts, per data source."""
    reward = "mean score over validation prompts of this data source, each the mean of its graded samples"
    yield Metric("val/<data_source>/reward_mean", "reward", reward)
    length = "mean response length over validation samples of this data source"
    yield Metric("val/<data_source>/response_length_mean", "tokens", length)
    passed = "chance that one of k samples scores 1 or more, unbiased (with several samples per prompt)"
    yield Metric("val/<data_source>/pass@<k>", "fraction", passed)
    voted = "mean score of the prompts' most frequent answers among n samples (with several per prompt)"
    yield Metric("val/<data_source>/maj@<n>", "reward", voted)
    cut = "validation samples cut off at the length limit (with several per prompt)"
    yield Metric("val/<data_source>/truncated_fraction", "fraction", cut)


#: Section title → its metrics, in the order `docs/reference/metrics.md` shows them.
SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Distance of the two policies": tuple(_correction()),
    "Importance weights, applied": tuple(_weights("", _APPLIED, peers=True)),
    "Importance weights, raw": tuple(_weights("raw_", _RAW, peers=False)),
    "Bounds, rejection and bad numbers": tuple(_bounds_and_counts()),
    "Rejection, by criterion": tuple(_criteria()),
    "Run and probability gap": tuple(_training()),
    "Policy update": tuple(_actor()),
    "Critic": tuple(_critic()),
    "Rewards and advantages": tuple(_rewards()),
    "Lengths": tuple(_lengths()),
    "Speed, memory, time": tuple(_performance()),
    "Guardrails": tuple(_guardrails()),
    "Validation": tuple(_validation()),
}

#: Every metric by name; a metric with a variable part is listed under its pattern.
METRICS: Mapping[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}


def _logged_elsewhere() -> Iterator[Metric]:
    """Metrics that other frameworks log and rlctl does not; diagnosis reads them under these names."""
    gap = "over response tokens of |log π_train − log π_rollout|"
    abs_diff = {
        "trl": "sampling/sampling_logp_difference/mean",
        "slime": "train/train_rollout_logprob_abs_diff",
    }
    yield Metric("mismatch/log_prob_abs_diff_mean", "nats", f"mean {gap}", abs_diff)
    largest = {"trl": "sampling/sampling_logp_difference/max"}
    yield Metric("mismatch/log_prob_abs_diff_max", "nats", f"maximum {gap}", largest)
    error = "mean over response tokens of exp |log π_train − log π_rollout|, 1 where the policies agree"
    yield Metric("mismatch/token_mult_prob_error", "1", error, {"nemo-rl": "train/token_mult_prob_error"})
    divergence = "mean over response tokens of the Jensen–Shannon divergence's estimate"
    yield Metric("mismatch/js_divergence", "nats", divergence, {"nemo-rl": "train/js_divergence_error"})
    outside = "share of raw weights outside the bound, on either side"
    yield Metric(
        f"{CORRECTION}rollout_is_outside_fraction",
        "fraction",
        outside,
        {"verl": f"{CORRECTION}rollout_is_oob_ratio", "nemo-rl": "train/is_oob_ratio"},
    )
    moved = "mean over response tokens of π_θ / π_old"
    yield Metric("actor/ppo_ratio_mean", "1", moved, {"nemo-rl": "train/probs_ratio", "slime": "train/ois"})
    dropped = "samples dropped in this step because they were too stale"
    yield Metric("training/stale_dropped", "samples", dropped, {"prime-rl": "off_policy/dropped"})
    empty = "share of responses without a token"
    yield Metric("rollout/empty_fraction", "fraction", empty, {"verl": "response/aborted_ratio"})
    yield Metric("rollout/error_fraction", "fraction", "share of rollouts that ended in an error")
    spread = "standard deviation over samples of the grader's score"
    yield Metric("critic/score/std", "reward", spread)
    within = "mean over groups of the standard deviation of a group's rewards"
    same = {"trl": "reward_std", "openrlhf": "group_reward_std"}
    yield Metric("reward/group_std", "reward", within, same)
    idle = "share of the time in which the trainer waited for rollouts"
    yield Metric("perf/trainer_idle_fraction", "fraction", idle, {"verl": "fully_async/trainer/idle_ratio"})


#: Metrics of other frameworks' logs that rlctl does not log itself.
ELSEWHERE: Mapping[str, Metric] = {metric.name: metric for metric in _logged_elsewhere()}


@cache
def key_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles `a/<x>_mean` to a regex with the variable part as group `x` (which may contain slashes)."""
    parts = re.split(r"<(\w+)>", pattern)
    literal = (re.escape(part) if i % 2 == 0 else rf"(?P<{part}>.+)" for i, part in enumerate(parts))
    return re.compile("".join(literal))


_PATTERNS = tuple((key_pattern(name), metric) for name, metric in METRICS.items() if "<" in name)


def describe(key: str) -> Metric | None:
    """Returns the metric of a logged key, with the variable part filled in; None for an unknown key.

    Example: `describe("rollout_corr/rollout_rs_token_k1_mean")` returns the entry of
    `rollout_corr/rollout_rs_<criterion>_mean`, with the given key as its name.
    """
    if "<" in key:
        return None
    if key in METRICS or key in ELSEWHERE:
        return METRICS.get(key) or ELSEWHERE[key]
    for matcher, metric in _PATTERNS:
        if match := matcher.fullmatch(key):
            return replace(metric, name=key, peers={k: _filled(v, match) for k, v in metric.peers.items()})
    return None


def _filled(name: str, match: re.Match[str]) -> str:
    """Fills the variable parts of the matched key into another framework's pattern."""
    for part, value in match.groupdict().items():
        name = name.replace(f"<{part}>", value)
    return name


def markdown() -> str:
    """The tables of `docs/reference/metrics.md`."""
    lines: list[str] = []
    for title, metrics in SECTIONS.items():
        lines += [
            f"### {title}",
            "",
            "| key | unit | definition | same quantity elsewhere |",
            "|---|---|---|---|",
        ]
        for metric in metrics:
            others = ", ".join(
                framework if name == metric.name else f"{framework} `{name}`"
                for framework, name in metric.peers.items()
            )
            definition = metric.definition.replace("|", "\\|")
            lines.append(f"| `{metric.name}` | {metric.unit} | {definition} | {others or '—'} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
