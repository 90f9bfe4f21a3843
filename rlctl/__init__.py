"""rlctl: reinforcement-learning post-training of language models.

The Python API. Heavy packages are imported at their first use; `import rlctl` does not import torch.

    import rlctl

    spec = rlctl.load_spec("rloo-seq-is", {"trainer.total_training_steps": 20})
    run = rlctl.train(spec, callbacks=[lambda step, metrics: print(step, metrics.get("critic/score/mean"))])
    print(rlctl.diagnose(run.path).findings)

Types are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = [
    "CorrectedBatch",
    "EvaluationRecord",
    "RlctlError",
    "RunRecord",
    "correct",
    "diagnose",
    "evaluate",
    "grade",
    "load_spec",
    "open_run",
    "train",
]

_HOMES = dict.fromkeys(__all__, "rlctl.api") | {
    "RlctlError": "rlctl.errors",
    "RunRecord": "rlctl.track.open_run",
    "open_run": "rlctl.track.open_run",
}


class _Package(ModuleType):
    """Keeps `train`, `evaluate` and `diagnose` functions, although subpackages have the same names.

    Importing `rlctl.train.loop` would otherwise replace the function `rlctl.train` by the package.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlctl' has no attribute {name!r}; there are {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


sys.modules[__name__].__class__ = _Package
