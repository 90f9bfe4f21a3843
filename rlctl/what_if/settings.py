"""The grid of settings that a replay evaluates: rlctl's settings and the rules of other frameworks."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rlctl.algos.rules import CorrectionRules
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA
from rlctl.run_spec.algorithm import CORRECTION, RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules, registered_criteria
from rlctl.user_code import is_file_function, split_names

Family = Literal["run", "rlctl", "verl", "TRL", "OpenRLHF", "slime", "SkyRL"]

#: Keys that a setting overrides; all other keys of the section keep the run's values.
_KEYS = (
    "dialect",
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_bound",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "score_centering",
)
#: A bound without effect, because weights are clamped to e^±20.
NO_UPPER = "1e9"
#: Rejection criteria, and the rules of other frameworks; see the file.
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Extra inputs of rules that dumps have.
_IN_DUMPS = {"advantages"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One correction setting."""

    name: str  # name in tables; unique in a grid
    family: Family  # framework that the rule comes from; `run`: the setting of the replayed run
    spec: RolloutCorrectionSpec  # the rule as an rlctl spec section
    cleared: tuple[str, ...] = ()  # keys of parameters that the replayed run has, and this setting has not

    @property
    def overrides(self) -> tuple[str, ...]:
        """The setting as `key=value`, for `rlctl train`."""
        values = self.spec.model_dump(mode="json")
        words = {key: json.dumps(v) if v is None or isinstance(v, bool) else v for key, v in values.items()}
        settings = [f"{CORRECTION}{key}={words[key]}" for key in _KEYS]
        return (*settings, *(f"{CORRECTION}{key}={{}}" for key in self.cleared))

    @property
    def rules(self) -> CorrectionRules:
        """The rule in the internal form, with rlctl's metric definitions for every dialect."""
        rules = correction_rules(self.spec)
        return replace(rules, weight=replace(rules.weight, metrics=None))


def grid(run: RolloutCorrectionSpec | None = None) -> list[Setting]:
    """Returns all settings of a replay, the run's own setting first.

    Args:
        run: the run's setting, if known; rlctl's settings use the same batch normalisation, and the grid
            includes a weight and criteria of the user's files.
    """
    normalize = True if run is None else run.rollout_is_batch_normalize
    others = _weights(normalize, run) + _rejections(normalize, run) + frameworks()
    if run is None:
        return others
    own = [key for key in ("rollout_is_params", "rollout_rs_params") if getattr(run, key)]
    cleared = [tuple(key for key in own if not getattr(setting.spec, key)) for setting in others]
    others = [replace(setting, cleared=keys) for setting, keys in zip(others, cleared, strict=True)]
    return [Setting("this run", "run", run), *others]


def _spec(normalize: bool, **fields: Any) -> RolloutCorrectionSpec:
    return RolloutCorrectionSpec(rollout_is_batch_normalize=normalize, **fields)


def weight_keys(level: str | None, bound: str, threshold: str) -> dict[str, Any]:
    """Spec keys of an importance weight."""
    return {"rollout_is": level, "rollout_is_bound": bound, "rollout_is_threshold": threshold}


def _of_files(names: str | None) -> list[str]:
    return [name for name in split_names(names or "") if is_file_function(name)]


def _weights(normalize: bool, run: RolloutCorrectionSpec | None) -> list[Setting]:
    """Returns no weight, the exact weight, and every registered weight × bound × typical threshold."""
    named: dict[str, dict[str, Any]] = {
        "none": {"rollout_is": None},
        "sequence, no bound": weight_keys("sequence", "truncate", NO_UPPER),
    }
    of_files = _of_files(run.rollout_is if run else None)
    parts = [*CORRECTION_WEIGHTS.parts(), *map(CORRECTION_WEIGHTS.part, of_files)]
    for weight in (part for part in parts if part.needs <= _IN_DUMPS):
        params = {"rollout_is_params": run.rollout_is_params} if run and weight.name in of_files else {}
        for bound in ("truncate", "clip", "mask"):
            for value in weight.thresholds:
                named[f"{weight.name} {bound} {value}"] = weight_keys(weight.name, bound, value) | params
    return [Setting(name, "rlctl", _spec(normalize, **fields)) for name, fields in named.items()]


def _rejections(normalize: bool, run: RolloutCorrectionSpec | None) -> list[Setting]:
    """Returns every criterion without a weight, and with a truncated weight at token and sequence level."""
    of_files = _of_files(run.rollout_rs if run else None)
    parts = [REJECTION_CRITERIA.part(name) for name in (*registered_criteria(), *of_files)]
    registered = {part.name: part.thresholds for part in parts if part.needs <= _IN_DUMPS}
    criteria = _TABLE["criteria"]
    rules = [
        (dialect, name, threshold)
        for dialect, of_dialect in (criteria | {"rlctl": criteria["rlctl"] | registered}).items()
        for name, thresholds in of_dialect.items()
        for threshold in thresholds
    ]
    settings = []
    for (dialect, name, threshold), level in product(rules, (None, "token", "sequence")):
        fields: dict[str, Any] = weight_keys(level, "truncate", "2.0")
        fields |= {"dialect": dialect, "rollout_rs": name, "rollout_rs_threshold": threshold}
        if run and name in of_files:
            fields["rollout_rs_params"] = run.rollout_rs_params
        weight = f"{level} truncate 2.0" if level else "none"
        whose = "" if dialect == "rlctl" else " (verl)"
        title = f"{weight}, reject {name}{whose} {threshold}"
        settings.append(Setting(title, "rlctl", _spec(normalize, **fields)))
    return settings


def frameworks() -> list[Setting]:
    """Returns the rules of other frameworks."""
    return [
        Setting(name, family, _spec(False, **{"rollout_is": None, **fields}))
        for name, (family, fields) in _TABLE["frameworks"].items()
    ]
