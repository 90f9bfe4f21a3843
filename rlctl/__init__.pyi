from rlctl.api import correct, diagnose, evaluate, grade, load_spec, train
from rlctl.errors import RlctlError
from rlctl.track.open_run import open_run

__all__ = ["RlctlError", "correct", "diagnose", "evaluate", "grade", "load_spec", "open_run", "train"]
