"""The rule about what the log-ratio of the trained policy to the sampling one consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Fix
from rlctl.diagnose.rule import Detection, Rule
from rlctl.diagnose.signals import evidence_over
from rlctl.diagnose.table import RunLog


def _fresh_cache(run: RunLog) -> Iterator[Fix]:
    """Fix that recomputes the cache after updates in flight, unless the run does; without a spec, advice."""
    if run.spec is None:
        yield fix.by_hand("recompute the cache after an update in flight: `rollout.stale_cache=recompute`")
    elif run.spec.rollout.stale_cache != "recompute":
        yield fix.change("rollout.stale_cache=recompute")


#: Mean square of the log-ratio, nats², from which it is worth making smaller: 0.1² per token.
_VISIBLE = 0.01
#: Part → its name, its cause, and the changes that make it smaller.
_PARTS: dict[str, tuple[str, str, Callable[[RunLog], tuple[Fix, ...]]]] = {
    "engine": (
        "between engine and trainer, with weights that should be the same",
        "the engine has other weights than it says, or computes otherwise: kernels, precision",
        lambda run: (fix.PROVE_THE_SYNC, fix.FIND_THE_CAUSE, *fix.same_precision(run)),
    ),
    "kept_set": (
        "the truncation of sampling",
        "the engine normalises over the tokens that top-p, top-k and min-p keep, the trainer over all",
        lambda run: (
            fix.change("rollout.exact_sampling=true"),
            fix.change("rollout.top_p=1", "rollout.top_k=-1"),
        ),
    ),
    "cache": (
        "the stale key-value cache",
        "tokens attend to keys and values of older weights",
        lambda run: tuple(_fresh_cache(run)),
    ),
    "staleness": (
        "staleness",
        "the policy was updated between sampling and training",
        lambda run: (*fix.fresher(run, fully=True), *fix.slower(run)),
    ),
}
_KEYS = tuple(f"rollout_corr/split/{part}" for part in _PARTS)
_STALE = "rollout_corr/stale_cache_fraction"


@Rule(
    "ratio-parts",
    source=th.OWN,
    thresholds=f"a sum over {_VISIBLE:g} / — / —",
    signal="`rollout_corr/split/*`: the largest part of the mean square of the log-ratio",
    cause="by the largest part",
    sure=("high", "the parts are measured in the run"),
    one_of=_KEYS,
    uses=(_STALE,),
    not_applicable=lambda run: "" if run.table.columns.keys() & set(_KEYS) else "only rlctl logs the parts",
)
def ratio_parts(run: RunLog) -> Detection | None:
    """The trained policy is close to the sampling one."""
    series = {part: run.table.series(f"rollout_corr/split/{part}") for part in _PARTS}
    sizes = {part: float(found.values.mean()) for part, found in series.items() if len(found)}
    total = sum(sizes.values())
    largest = max(sizes, key=lambda part: sizes[part])
    if not total > _VISIBLE:
        return None
    name, cause, fixes = _PARTS[largest]
    others = ", ".join(f"{part.replace('_', ' ')} {size / total:.0%}" for part, size in sizes.items())
    message = f"{sizes[largest] / total:.0%} of the squared log-ratio of trained to sampling policy is {name}"
    figure = f"{sizes[largest]:.2g} of {total:.2g} nats² on average ({others})"
    seen = [evidence_over(series[largest].steps, f"rollout_corr/split/{largest}", figure)]
    if largest == "cache" and len(stale := run.table.series(_STALE)):
        seen.append(evidence_over(stale.steps, _STALE, f"{stale.values.mean():.0%} of the tokens on average"))
    return Detection(
        severity="info",
        what=message,
        evidence=tuple(seen),
        cause=cause,
        fixes=fixes(run),
    )
