"""Facts of a run: from its spec, from the configuration in its log, or inferred from its figures.

A framework's file lists under `config` how its configuration states a fact:

- a dotted key, or `a * b` for a product;
- `{ key, values, else, missing }`: the value of the key → the fact (without `values` the value itself);
  `missing` where a whole configuration has no such value;
- `{ key, if, default }`: the value of the key, or the default, if the flag `if` is set;
- `{ responses, per_update, epochs }`: the sizes from which the number of updates per batch follows;
- a list of alternatives, of which the first that is known is used.

Inferred facts are marked as inferred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.table import Facts, RunLog, Table

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

#: Metrics that only a trained value function has.
_OF_A_CRITIC = ("critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

#: Relative deviation up to which loss / KL counts as constant.
SAME_RATIO = 0.05
#: Maximum number of decimals in a rounded log (verl's older console has 3), and number of newest values per
#: metric that are checked.
DECIMALS, _LAST = 4, 100
#: Minimum number and minimum share of rows with exactly the largest length, for it to be the limit.
AT_LIMIT_ROWS, AT_LIMIT_SHARE = 3, 0.05
#: Minimum length of a limit, in tokens; the second applies where all rows have the same length, because short
#: answers may all have one length without a limit.
SHORTEST_LIMIT, LONG_ANSWER = 16.0, th.LONG_RESPONSE


def facts_of(spec: RunSpec) -> Facts:
    """Returns the facts that a spec of rlctl states."""
    from rlctl.run_spec.resolve import correction_rules

    correction = spec.algorithm.rollout_correction
    in_verls_terms = correction.dialect == "verl"
    in_loss = spec.actor.kl_loss_coef if spec.actor.use_kl_loss else 0.0
    in_reward = spec.algorithm.kl_ctrl.kl_coef if spec.algorithm.use_kl_in_reward else 0.0
    return Facts(
        bypass_mode=correction.bypass_mode,
        updates_per_batch=spec.data.train_batch_size // spec.ppo_mini_batch_size * spec.actor.ppo_epochs,
        ppo_epochs=spec.actor.ppo_epochs,
        rollout_is=correction.rollout_is or "off",
        rollout_is_threshold=correction_rules(correction).weight.upper,
        rollout_rs=correction.rollout_rs or "off",
        batch_size=spec.data.train_batch_size * spec.rollout.n,
        group_size=spec.rollout.n,
        has_critic=spec.trains_critic,
        max_response_length=spec.data.max_response_length,
        kl_coef=max(in_loss, in_reward),
        dtype=spec.engine.dtype,
        lr=spec.actor.lr,
        temperature=spec.rollout.temperature,
        ess_length_weighted=in_verls_terms and correction.rollout_is in {"sequence", "geometric"},
        logs_correction=True,
        naming=correction.dialect,
    )


class Config:
    """Typed values of another program's configuration, nested or with dotted keys; None where missing.

    If it `is_complete`, a missing key has its default value.
    """

    def __init__(self, content: Mapping[str, Any], is_complete: bool = True) -> None:
        self._content = content
        self.is_complete = is_complete

    def get(self, key: str) -> Any:
        """The value at a dotted key."""
        if key in self._content:
            return self._content[key]
        here: Any = self._content
        for segment in key.split("."):
            here = here.get(segment) if isinstance(here, Mapping) else None
        return here

    def number(self, key: str) -> float | None:
        """A number, or a text that contains one."""
        return _number(self.get(key))

    def whole(self, key: str) -> int | None:
        """A whole number, or the product of several: `a * b`."""
        factors = [self.number(one) for one in key.split(" * ")]
        known = [int(factor) for factor in factors if factor is not None and factor.is_integer()]
        return math.prod(known) if len(known) == len(factors) else None

    def upper(self, key: str) -> float | None:
        """The upper bound: a number, or the last of `[lower, upper]` or `"lower_upper"`."""
        value = self.get(key)
        if isinstance(value, list | tuple):
            value = value[-1] if value else None
        return _number(value.rpartition("_")[2] if isinstance(value, str) else value)

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.get(key)
        return value if isinstance(value, bool) else None

    def dtype(self, key: str) -> str | None:
        """A dtype under the name that the spec uses."""
        short = str(self.get(key)).removeprefix("torch.").lower()
        return _DTYPES.get(short, short if short in _DTYPES.values() else None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


#: Fact → how its key is read; numbers otherwise.
_READ: Mapping[str, Callable[[Config, str], Any]] = {
    "is_async": Config.flag,
    "bypass_mode": Config.flag,
    "dtype": Config.dtype,
    "rollout_is_threshold": Config.upper,
    **dict.fromkeys(
        ("updates_per_batch", "ppo_epochs", "batch_size", "group_size", "max_response_length"), Config.whole
    ),
}


def configured_facts(
    framework: str, table: Mapping[str, Any], content: Mapping[str, Any], *, is_complete: bool = True
) -> Facts:
    """Returns the facts that a configuration, whole (`is_complete`) or single settings, states.

    `table` is `config` of the framework's file. A whole configuration without all keys of `requires` belongs
    to another program and states no facts.
    """
    if framework == "rlctl":
        return _rlctl(content) if is_complete else Facts()
    config = Config(content, is_complete)
    if not table or (is_complete and not all(_is_present(config, one) for one in table.get("requires", ()))):
        return Facts()
    return Facts(**_facts(table, config))


def _is_present(config: Config, keys: str | list[str]) -> bool:
    """Whether the configuration has the keys, or those of one of several alternatives."""
    each = [keys] if isinstance(keys, str) else keys
    return any(config.get(key) is not None or config.whole(key) is not None for key in each)


def _facts(table: Mapping[str, Any], config: Config) -> dict[str, Any]:
    return {fact: _stated(config, fact, form) for fact, form in table.items() if fact != "requires"}


def _stated(config: Config, fact: str, form: Any) -> Any:
    """The value of a fact in one of the forms of a framework's file; None where it is missing."""
    if isinstance(form, list):
        each = [_stated(config, fact, one) for one in form]
        return next((value for value in each if value is not None), None)
    read = _READ.get(fact, Config.number)
    if isinstance(form, str):
        return read(config, form)
    if "if" in form:
        return _stated_if(config, form, read)
    if "key" in form:
        return _translated(config, **form)
    sizes = {name: _stated(config, fact, keys) for name, keys in form.items()}
    if not all(sizes.values()):
        return None
    return max(1, sizes["responses"] // sizes["per_update"]) * sizes.get("epochs", 1)


def _stated_if(config: Config, form: Mapping[str, Any], read: Callable[[Config, str], Any]) -> Any:
    """The value of a fact that holds only where a flag is set; None where it is not."""
    if not config.flag(form["if"]):
        return None
    value = read(config, form["key"])
    return form.get("default") if value is None else value


def _translated(
    config: Config, key: str, values: Mapping[str, Any] | None = None, missing: Any = None, **others: Any
) -> Any:
    value = config.get(key)
    if value is None:
        return missing if config.is_complete else None
    return str(value) if values is None else values.get(str(value), others.get("else"))


def setting_keys(table: Mapping[str, Any]) -> frozenset[str]:
    """Every configuration key on which a fact of the framework depends."""
    keys: set[str] = set()

    class Recorder(Config):
        def get(self, key: str) -> Any:
            keys.add(key)

    _facts(table, Recorder({}, is_complete=False))
    return frozenset(keys)


def _rlctl(content: Mapping[str, Any]) -> Facts:
    """Facts from the resolved spec, in the form that is sent to trackers."""
    from pydantic import ValidationError

    from rlctl.run_spec.run_spec import RunSpec

    sections = {key: value for key, value in content.items() if key in RunSpec.model_fields}
    try:
        return facts_of(RunSpec.model_validate(sections)) if sections else Facts()
    except ValidationError:  # a spec of another version
        return Facts()


def with_inferred(run: RunLog) -> RunLog:
    """Returns the run with facts inferred from its figures, where they were unknown."""
    found = {
        "kl_coef": _kl_coefficient(run.table),
        "max_response_length": _length_limit(run.table),
        "has_critic": True if any(len(run.table.series(key)) for key in _OF_A_CRITIC) else None,
    }
    how = {
        "kl_coef": "inferred: loss / KL is constant",
        "max_response_length": "inferred: lengths end there",
        "has_critic": "the critic's figures in the log",
    }
    new = {fact: v for fact, v in found.items() if v is not None and getattr(run.facts, fact) is None}
    origins = {**run.fact_origins, **{fact: how[fact] for fact in new}}
    return replace(run, facts=replace(run.facts, **new), fact_origins=origins)  # type: ignore[arg-type]


def is_rounded(table: Table) -> bool:
    """Whether the whole log is printed with few decimals: a 0 may then be a small number."""
    values = np.concatenate([np.empty(0), *(table.series(key).values[-_LAST:] for key in table.columns)])
    scaled = np.unique(values[values % 1.0 != 0.0]) * 10**DECIMALS
    return len(scaled) >= th.MIN_STEPS and bool((np.abs(scaled - np.round(scaled)) < 1e-6).all())


def _kl_coefficient(table: Table) -> float | None:
    """Loss / KL if it is constant: on-policy, the rest of a loss with group-centred advantages is zero."""
    _, (loss, kl) = table.aligned("actor/pg_loss", "actor/kl_loss")
    large = (kl > 0.0) & (kl >= np.median(kl)) if len(kl) else np.empty(0, dtype=bool)
    if len(np.unique(kl[large])) < th.MIN_STEPS or len(table.series("actor/kl_coef")):
        return None
    ratio = loss[large] / kl[large]
    middle = float(np.median(ratio))
    if middle <= 0.0 or float(np.median(np.abs(ratio - middle))) > SAME_RATIO * middle:
        return None
    return float(f"{middle:.2g}")


def _length_limit(table: Table) -> int | None:
    """The length limit, if many rows have exactly the same largest length, and responses are cut off."""
    shares = table.series(th.TRUNCATED.key)
    if len(shares) and not shares.values.any():
        return None
    mean, longest = (table.series(f"response_length/{which}").values for which in ("mean", "max"))
    _, (means, maxima) = table.aligned("response_length/mean", "response_length/max")
    all_at_once = means[(means == maxima) & (means > LONG_ANSWER)]
    if all_at_once.size:
        return int(all_at_once.max())  # all responses of a row are as long as its longest
    for values in (longest, mean):
        if len(values) and _ends_sharply(values):
            return int(values.max())
    return None


def _ends_sharply(values: NDArray[np.float64]) -> bool:
    top = float(values.max())
    count = int((values == top).sum())
    is_long = top >= (LONG_ANSWER if count == len(values) else SHORTEST_LIMIT)
    return top.is_integer() and is_long and count >= max(AT_LIMIT_ROWS, AT_LIMIT_SHARE * len(values))
