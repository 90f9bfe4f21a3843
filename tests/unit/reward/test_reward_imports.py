"""What grading processes import starts fast."""

import subprocess
import sys


def test_graders_need_neither_torch_nor_pydantic_and_import_sympy_late():
    code = (
        "import sys, rlctl.reward.worker, rlctl.reward.pool\n"
        "from rlctl.registry import GRADERS\n"
        "GRADERS.part('maths')\n"
        "print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"rlctl.reward.maths", "rlctl.reward.model"} <= set(run.stdout.split())
    assert set(run.stdout.split()).isdisjoint({"torch", "sympy", "pydantic", "transformers"})
