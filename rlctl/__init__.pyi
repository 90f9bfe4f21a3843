from rlctl.api import CorrectedBatch, EvaluationRecord, correct, diagnose, evaluate, grade, load_spec, train
from rlctl.errors import RlctlError
from rlctl.track.open_run import RunRecord, open_run

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
