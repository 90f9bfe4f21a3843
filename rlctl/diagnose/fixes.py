"""Fixes: changes of the spec, with the same change in other frameworks' keys, and manual actions.

A change is offered unless the run is known to have it already. Functions of the run yield nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlctl.convert.table import tables
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Fix
from rlctl.diagnose.table import RunLog

RC, RATE = "algorithm.rollout_correction.", "actor/lr"


def _with_trls_users(others: dict[str, str]) -> dict[str, str]:
    """Adds LLaMA-Factory's keys and ms-swift's options, which are TRL's keys."""
    if "trl" not in others:
        return others
    options = ("--" + setting.replace("=", " ") for setting in others["trl"].split())
    return {"llama-factory": others["trl"], "ms-swift": " ".join(options)} | others


def elsewhere(name: str, value: str | None = None) -> dict[str, str]:
    """Framework → its key of a spec key, with the value if one is given, or its settings of a named fix.

    They are in the tables of `rlctl import`, `convert/frameworks/*.toml`.
    """
    frameworks = (table for table in tables().values() if table.is_framework)
    return {framework.name: found for framework in frameworks if (found := framework.fix(name, value))}


def change(*settings: str, why: str = "", named: str = "", **others: str) -> Fix:
    """A fix of `key=value` settings that are applied together.

    Where renaming the keys is not enough for other frameworks, `named` is the name of the fix in their
    tables; `others`: framework → its settings.
    """
    each = [elsewhere(*setting.split("=", 1)) for setting in settings]
    renamed = {name: " ".join(one[name] for one in each) for name in set(each[0]).intersection(*each)}
    others = renamed | (elsewhere(named) if named else {}) | others
    return Fix(settings, why, _with_trls_users(others))


def _correction(run: RunLog, *settings: str, why: str = "", named: str) -> Fix:
    """A change of rlctl's and verl's rollout correction, which other frameworks have under a name.

    These correct the gap to π_old, so they do nothing where the loss has its ratio to the sampler.
    """
    return change(*settings, why=why, named="" if run.facts.bypass_mode else named)


def by_hand(why: str, **others: str) -> Fix:
    """An action that no setting of rlctl performs."""
    return Fix((), why, _with_trls_users(others))


def larger(key: str, why: str) -> Fix:
    """Advice to raise the value of a key, without a concrete value."""
    return Fix((), f"{why} (`{key}`)", _with_trls_users(elsewhere(key)))


def gentler(run: RunLog) -> Iterator[Fix]:
    """Fixes that reduce how far the policy moves between sampling and the last update on a batch."""
    yield from fresher(run, fully=False)
    epochs = run.facts.ppo_epochs or 1
    if epochs > 1:
        yield change("actor.ppo_epochs=1", why="sample more often")
    if (run.facts.updates_per_batch or 1) > epochs:
        why = "one update per pass over the batch"
        yield change("actor.ppo_mini_batch_size=null", why=why, named="one_update")
    yield from slower(run)


def peak_rate(run: RunLog) -> float | None:
    """The peak learning rate, configured or seen in the log; None where unknown, or 0.

    A log shows the peak where it begins with the run and the rate has stopped rising, or where the rate is
    constant. One row in the middle of a schedule does not.
    """
    if run.facts.lr is not None:
        return run.facts.lr or None
    rates = run.table.series(RATE)
    if len(rates) < 2:
        return None
    is_constant = len(rates) >= th.MIN_STEPS and not np.ptp(rates.values)
    begins = rates.steps[0] <= max(th.FIRST_STEP, int(np.median(np.diff(rates.steps))))
    has_stopped_rising = rates.values[-1] < rates.values.max() or rates.values[-1] == rates.values[-2]
    if not (is_constant or (begins and has_stopped_rising)):
        return None
    return float(rates.values.max()) or None


def is_warming_up(run: RunLog) -> bool:
    """Whether the log ends in a warm-up that has not reached half of the peak learning rate."""
    rates = run.table.series(RATE).values
    if len(rates) < 2 or run.facts.lr is None or rates[0] == rates[-1]:
        return False
    return bool(0.0 < rates[-1] == rates.max() < run.facts.lr / 2.0)


def shorter_warm_up(run: RunLog) -> Fix:
    """Fix that ends the warm-up within a tenth of the logged steps; without a spec, advice."""
    why = "the warm-up, not the peak, sets the learning rate"
    if run.spec is None or run.spec.actor.lr_warmup_steps == 0:
        return by_hand(f"shorten the warm-up: {why}")
    updates = len(run.table.steps) * run.spec.updates_per_batch // 10
    return change(f"actor.lr_warmup_steps={min(updates, run.spec.actor.lr_warmup_steps // 2)}", why=why)


def slower(run: RunLog, by: float = 2.0) -> Iterator[Fix]:
    """Fix that divides the peak learning rate; none in a warm-up that has not reached half of it."""
    peak = peak_rate(run)
    if is_warming_up(run):
        return
    fix = change(f"actor.lr={peak / by:.2g}") if peak else by_hand("lower the learning rate")
    yield replace(fix, of_updates=True)


def usual_rate(run: RunLog, key: str = "actor.lr") -> Iterator[Fix]:
    """Fix that sets the model's default learning rate of policy or critic; without a spec, advice."""
    if run.spec is None:
        yield larger(key, "raise the learning rate")
        return
    from rlctl.run_spec.load import load_spec

    default = load_spec(overrides=[f"model.path={run.spec.model.path}"]).spec
    rate = default.critic.lr if key == "critic.lr" else default.actor.lr
    yield change(f"{key}={rate:g}", why="the default")


def calmer(run: RunLog) -> Iterator[Fix]:
    """Fixes that make updates smaller: gradient clipping where it is off, and a lower learning rate."""
    if run.spec and run.spec.actor.grad_clip == 0.0:
        yield replace(change("actor.grad_clip=1.0"), of_updates=True)
    yield from slower(run)


def fresher(run: RunLog, *, fully: bool) -> Iterator[Fix]:
    """Fixes that allow no stale samples (`fully`), or half the staleness; none without a spec."""
    for name, fresh in (("max_staleness", 0), ("staleness", 0), ("sync_every", 1)):
        age = getattr(run.spec.rollout, name) if run.spec else fresh
        if age > fresh:
            yield change(f"rollout.{name}={fresh if fully else max(fresh, age // 2)}")


def reject_outliers(run: RunLog) -> Iterator[Fix]:
    """Fix that rejects responses with extreme tokens, unless a rejection criterion is configured."""
    if run.facts.rollout_rs in {None, "off"}:
        yield _correction(
            run,
            f"{RC}rollout_rs=token_k1",
            f"{RC}rollout_rs_threshold=0.6_1.6",
            why="reject responses with extreme tokens",
            named="reject_outliers",
        )


def wider_bound(run: RunLog) -> Iterator[Fix]:
    """Fix that raises the bound of the weights to 5 where it is lower or unknown, to truncate fewer."""
    if run.facts.rollout_is != "off" and (run.facts.rollout_is_threshold or 0.0) < 5.0:
        yield _correction(run, f"{RC}rollout_is_threshold=5", named="wider_bound")


def correct_tokens(run: RunLog) -> Iterator[Fix]:
    """Fix that enables importance weights per token where none are configured.

    In bypass mode only REINFORCE multiplies by the weights; for other losses the fix also turns bypass mode
    off.
    """
    if run.facts.rollout_is not in {None, "off"}:
        return
    loss = run.spec.algorithm.rollout_correction.loss_type if run.spec else ""
    only_measured = run.facts.bypass_mode and loss != "reinforce"
    yield _correction(
        run,
        *((f"{RC}bypass_mode=false",) if only_measured else ()),
        f"{RC}rollout_is=token",
        why="correct for the gap",
        named="correct_tokens",
    )


def geometric(run: RunLog) -> Iterator[Fix]:
    """Fix with weights near 1 that do not grow with the response length (verl and TRL have none)."""
    if run.facts.rollout_is == "geometric":
        return
    settings = ("rollout_is=geometric", "rollout_is_bound=mask", "rollout_is_threshold=0.99_1.01")
    keys = tuple(RC + setting for setting in settings)
    yield change(*keys, why="a weight that does not grow with the length", named="geometric")


def same_precision(run: RunLog) -> Iterator[Fix]:
    """Fixes that run engine and trainer in the same precision, or in a higher one."""
    if run.spec and run.spec.rollout.dtype not in {None, run.spec.engine.dtype}:
        yield change("rollout.dtype=null", why="sample in the trainer's precision")
    if run.facts.dtype in {None, "bf16"}:
        yield change(
            "engine.dtype=fp32",
            why="higher precision (FP16 on both sides costs less, where available)",
            named="higher_precision",
        )


def larger_groups(run: RunLog) -> Iterator[Fix]:
    """Fix that doubles the responses per prompt, where their number is known; none with a critic."""
    size = run.facts.group_size
    if size and not run.facts.has_critic:
        yield change(f"rollout.n={2 * size}", why="larger groups")


def length_penalty(run: RunLog) -> Iterator[Fix]:
    """A length penalty that grows towards the limit (DAPO), unless one is configured."""
    limit = run.facts.max_response_length
    spec = run.spec
    if limit and limit >= 8 and (spec is None or spec.reward.overlong.buffer_length <= 0):
        setting = f"reward.overlong.buffer_length={limit // 4}"
        others = {"trl": "mask_truncated_completions=True", "ms-swift": "--overlong_filter true"}
        yield change(setting, why="against overlong responses", **others)


def other_grader(run: RunLog) -> Iterator[Fix]:
    """The grader that the data names, where the run has another; otherwise advice."""
    if run.spec is not None and run.spec.reward.terms is None and run.spec.reward.name != "auto":
        yield change("reward.name=auto", why="the grader that the data names")
    yield by_hand("run the grader on stored rollouts")


#: For a gap between the two implementations.
FIND_THE_CAUSE = by_hand("compare the two engines: `rlctl diagnose mismatch --model PATH`")


PROVE_THE_SYNC = by_hand("prove the weight sync: `rlctl train --prove-sync` with this spec")


def read_step(step: int | None) -> Fix:
    """Advice for a finding that no change is known for."""
    where = "the first step" if step is None else f"step {step:,}"
    return by_hand(f"read the responses, the rewards and the other metrics of {where} and the one before it")


def several_responses(run: RunLog) -> Iterator[Fix]:
    """Advice for advantages that are all 0, which with a critic do not come from groups."""
    if run.facts.has_critic:
        yield by_hand("check that the rewards reach the returns, and that the critic's values are not they")
    else:
        yield by_hand("check that a prompt has several responses, and that the advantages use the rewards")


def resume_before(step: int) -> Fix:
    """Advice to resume with weights from before the fault."""
    return replace(by_hand(f"resume from a checkpoint before step {step}"), of_updates=True)
