"""The grid a replay tries: rlctl's own settings, and the rules of other frameworks by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from rlctl.algos.rules import CorrectionRules
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA
from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.spec.resolve import correction_rules, registered_criteria

Family = Literal["run", "rlctl", "verl", "TRL", "OpenRLHF", "slime", "SkyRL"]

_PREFIX = "algorithm.rollout_correction."
#: What a setting fixes; the rest of the section stays the run's own.
_KEYS = (
    "dialect",
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_bound",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)
#: No weight leaves the clamp e^±20, so these bounds are none.
NO_UPPER, NO_LOWER = "1e9", "1e-9"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to correct.

    Attributes:
        name: what tables call it; unique in a grid.
        family: whose rule it is; `run`: what the replayed run itself was set to.
        spec: the rule as rlctl writes it.
    """

    name: str
    family: Family
    spec: RolloutCorrectionSpec

    @property
    def overrides(self) -> tuple[str, ...]:
        """The setting as `key=value`, for `rlctl train`."""
        values = self.spec.model_dump(mode="json")
        return tuple(f"{_PREFIX}{key}={_word(values[key])}" for key in _KEYS)

    @property
    def rules(self) -> CorrectionRules:
        """The rule in the internal form, its metrics by rlctl's own definitions whatever the dialect."""
        rules = correction_rules(self.spec)
        return replace(rules, weight=replace(rules.weight, metrics=None))


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def grid(run: RolloutCorrectionSpec | None = None) -> list[Setting]:
    """Everything a replay tries, the run's own setting first.

    Args:
        run: what the run was set to, if known; rlctl's own settings normalise as it does.
    """
    normalize = True if run is None else run.rollout_is_batch_normalize
    own = [Setting("this run", "run", run)] if run else []
    return own + _weights(normalize) + _rejections(normalize) + frameworks()


def _spec(normalize: bool, **fields: Any) -> RolloutCorrectionSpec:
    return RolloutCorrectionSpec(rollout_is_batch_normalize=normalize, **fields)


def _weights(normalize: bool) -> list[Setting]:
    """No weight, the exact one, and every registered weight × bound × typical threshold."""
    found = [
        Setting("none", "rlctl", _spec(normalize, rollout_is=None)),
        Setting(
            "sequence, no bound",
            "rlctl",
            _spec(
                normalize,
                rollout_is="sequence",
                rollout_is_bound="truncate",
                rollout_is_threshold=NO_UPPER,
            ),
        ),
    ]
    for part in CORRECTION_WEIGHTS.parts():
        for bound in ("truncate", "clip", "mask"):
            for value in part.thresholds:
                fields = {"rollout_is": part.name, "rollout_is_bound": bound, "rollout_is_threshold": value}
                found.append(Setting(f"{part.name} {bound} {value}", "rlctl", _spec(normalize, **fields)))
    return found


#: Rejection criterion → thresholds, by dialect.
_CRITERIA: dict[Literal["rlctl", "verl"], dict[str, tuple[str, ...]]] = {
    "rlctl": {
        "token_k1": ("0.6_1.6", "0.5_2.0"),
        "seq_max_k2": ("2.5",),
        "sequence": ("0.5_2.0", "0.2_5.0"),
        "geometric": ("0.99_1.01", "0.9_1.1"),
        "token_veto": ("1e-4",),
    },
    "verl": {
        "token_k1": ("0.6_1.6",),
        "seq_mean_k1": ("0.999_1.001",),
        "seq_mean_k3": ("0.01",),
        "seq_max_k2": ("2.5",),
    },
}


def _rejections(normalize: bool) -> list[Setting]:
    """Every criterion by itself, and together with a truncated weight of either level."""
    found = []
    registered = {name: REJECTION_CRITERIA.part(name).thresholds for name in registered_criteria()}
    own = {"rlctl": _CRITERIA["rlctl"] | registered, "verl": _CRITERIA["verl"]}
    for dialect, criteria in own.items():
        for name, thresholds in criteria.items():
            for threshold in thresholds:
                for level in (None, "token", "sequence"):
                    weight = {
                        "rollout_is": level,
                        "rollout_is_threshold": "2.0",
                        "rollout_is_bound": "truncate",
                    }
                    spec = _spec(
                        normalize,
                        dialect=dialect,
                        rollout_rs=name,
                        rollout_rs_threshold=threshold,
                        **weight,
                    )
                    said = f"{level} truncate 2.0" if level else "none"
                    whose = "" if dialect == "rlctl" else " (verl)"
                    found.append(Setting(f"{said}, reject {name}{whose} {threshold}", "rlctl", spec))
    return found


def frameworks() -> list[Setting]:
    """Rules of other frameworks at their default or recommended thresholds; docs/reference/conformance.md."""
    bounded = {"rollout_is_batch_normalize": False}
    token: dict[str, Any] = bounded | {"rollout_is": "token"}
    sequence: dict[str, Any] = bounded | {"rollout_is": "sequence"}
    no_weight: dict[str, Any] = bounded | {"rollout_is": None}
    geometric = {"rollout_rs": "geometric"}
    rows: list[tuple[str, Family, dict[str, Any]]] = [
        ("verl token TIS", "verl", token | {"dialect": "verl"}),
        ("verl sequence TIS", "verl", sequence | {"dialect": "verl"}),
        ("verl token IcePop", "verl", token | {"dialect": "verl", "rollout_is_threshold": "0.5_5.0"}),
        ("verl sequence TIS + RS", "verl", sequence | _verl_rs("seq_sum_k1", "0.5_2.0")),
        ("verl geometric RS", "verl", no_weight | _verl_rs("seq_mean_k1", "0.999_1.001")),
        ("verl k3 RS", "verl", no_weight | _verl_rs("seq_mean_k3", "0.01")),
        ("TRL sequence_mask", "TRL", sequence | _bound("mask", f"{NO_LOWER}_3.0")),
        ("TRL sequence_truncate", "TRL", sequence | _bound("truncate", "3.0")),
        ("TRL token_mask", "TRL", token | _bound("mask", f"{NO_LOWER}_3.0")),
        ("TRL token_truncate", "TRL", token | _bound("truncate", "3.0")),
        ("OpenRLHF tis", "OpenRLHF", token | _bound("clip", "0.5_5.0")),
        ("OpenRLHF icepop", "OpenRLHF", token | _bound("mask", "0.5_5.0")),
        (
            "OpenRLHF seq-mask-tis",
            "OpenRLHF",
            token | _bound("truncate", NO_UPPER) | geometric | {"rollout_rs_threshold": "0.5_5.0"},
        ),
        ("slime TIS", "slime", token | _bound("truncate", "2.0")),
        ("slime IcePop", "slime", token | _bound("mask", f"{NO_LOWER}_2.0")),
        ("SkyRL token TIS", "SkyRL", token | _bound("truncate", "2.0")),
        ("SkyRL sequence TIS", "SkyRL", sequence | _bound("truncate", "5.0")),
        ("SkyRL geometric mask", "SkyRL", no_weight | geometric | {"rollout_rs_threshold": "0.99_1.01"}),
        (
            "SkyRL product mask",
            "SkyRL",
            no_weight | {"rollout_rs": "sequence", "rollout_rs_threshold": "0.5_2.0"},
        ),
        (
            "SkyRL outlier mask",
            "SkyRL",
            no_weight | {"rollout_rs": "token_k1", "rollout_rs_threshold": "1e-4_100"},
        ),
        ("SkyRL token mask", "SkyRL", no_weight | _verl_rs("token_k1", "0.5_2.0")),
        ("TRL off-policy mask", "TRL", no_weight | _off_policy("0.5")),
        ("slime OPSM", "slime", no_weight | _off_policy("1e-4")),
    ]
    return [Setting(name, family, RolloutCorrectionSpec(**fields)) for name, family, fields in rows]


def _bound(bound: str, threshold: str) -> dict[str, str]:
    return {"rollout_is_bound": bound, "rollout_is_threshold": threshold}


def _verl_rs(name: str, threshold: str) -> dict[str, str]:
    return {"dialect": "verl", "rollout_rs": name, "rollout_rs_threshold": threshold}


def _off_policy(threshold: str) -> dict[str, str]:
    return {"rollout_rs": "off_policy", "rollout_rs_threshold": threshold}
