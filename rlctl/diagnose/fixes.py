"""Fixes: changes of the spec, with the same change in other frameworks' keys, and manual actions.

A change is offered unless the run is known to have it already. Functions of the run yield nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.convert.table import tables
from rlctl.diagnose.finding import Fix
from rlctl.diagnose.table import RunLog

RC = "algorithm.rollout_correction."


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
    return {one.name: found for one in tables().values() if (found := one.fix(name, value))}


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
    """The peak learning rate, as configured or otherwise as logged; None where unknown, or 0."""
    logged = run.table.series("actor/lr").values
    return run.facts.lr or (float(logged.max()) if len(logged) else None) or None


def slower(run: RunLog, by: float = 2.0) -> Iterator[Fix]:
    """Fix that divides the peak learning rate."""
    peak = peak_rate(run)
    fix = change(f"actor.lr={peak / by:.2g}") if peak else by_hand("lower the learning rate")
    yield replace(fix, of_updates=True)


def usual_rate(run: RunLog) -> Iterator[Fix]:
    """Fix that sets the model's default learning rate; without a spec, advice."""
    if run.spec is None:
        yield larger("actor.lr", "raise the learning rate")
        return
    from rlctl.spec.load import load_spec

    default = load_spec(overrides=[f"model.path={run.spec.model.path}"]).spec.actor.lr
    yield change(f"actor.lr={default:g}", why="the default")


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
    keys = tuple(RC + one for one in settings)
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
    """Fix that doubles the responses per prompt, where their number is known."""
    if size := run.facts.group_size:
        yield change(f"rollout.n={2 * size}", why="larger groups")


def other_grader(run: RunLog) -> Iterator[Fix]:
    """The grader that the data names, where the run has another; otherwise advice."""
    if run.spec is not None and run.spec.reward.terms is None and run.spec.reward.name != "auto":
        yield change("reward.name=auto", why="the grader that the data names")
    yield by_hand("run the grader on stored rollouts")


#: For a gap between the two implementations.
FIND_THE_CAUSE = by_hand("compare the two engines: `rlctl diagnose mismatch --model PATH`")


def resume_before(step: int) -> Fix:
    """Advice to resume with weights from before the fault."""
    return replace(by_hand(f"resume from a checkpoint before step {step}"), of_updates=True)
