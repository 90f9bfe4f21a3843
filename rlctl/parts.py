"""What authors of parts import: losses, terms, estimators, engines, graders and others in their own files.

The names here stay where they are; the modules that define them may change. Each is imported at its first
use. See docs/how-to/extend.md. Types are in `parts.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Module → what of it authors of parts use.
_HOMES = {
    "rlctl.algos.correction": "LogRatio",
    "rlctl.algos.estimators": "AdvantageInputs Estimate",
    "rlctl.algos.losses": "LossInputs TokenLoss",
    "rlctl.algos.rules": "LossRule",
    "rlctl.algos.segments": "Segments",
    "rlctl.batch": "ModelInputs TokenBatch TokenLists Turn",
    "rlctl.data.records": "RowError",
    "rlctl.data.schema": "Message Row",
    "rlctl.diagnose.finding": "Evidence",
    "rlctl.diagnose.fixes": "by_hand",
    "rlctl.diagnose.rule": "Detection Rule",
    "rlctl.diagnose.table": "RunLog",
    "rlctl.engine.engines": "TrainContext",
    "rlctl.engine.log_probs": "PolicyModule",
    "rlctl.engine.protocol": "PolicyOutput StepResult",
    "rlctl.errors": "UsageError",
    "rlctl.prepare.benchmarks": "Benchmark",
    "rlctl.prepare.recipes": "Layout",
    "rlctl.registry": (
        "ADVANTAGE_ESTIMATORS CORRECTION_WEIGHTS DATA_RECIPES GRADERS KL_ESTIMATORS "
        "LOSS_TERMS POLICY_LOSSES REJECTION_CRITERIA ROLLOUT_ENGINES TRACKERS TRAINING_ENGINES"
    ),
    "rlctl.rollout.engines": "EngineCapabilities EngineContext",
    "rlctl.rollout.protocol": "EngineReport Policy Request Sampling synced",
    "rlctl.track.sink": "SinkInputs",
    "rlctl.train.terms": "KeptTokens",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'rlctl.parts' has no attribute {name!r}; it has {', '.join(_MODULE_OF)}"
        )
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
