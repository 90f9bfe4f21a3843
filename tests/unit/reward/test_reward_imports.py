"""What grading processes import starts fast."""

import re
import subprocess
import sys

import pytest

from rlctl.lazy import lazy_pattern


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


#: Counts the patterns of graders that are compiled.
COUNT = """
import re, sys
from re import _compiler
compiled, compile_one = [], _compiler.compile
def counted(text, flags=0):
    frame = sys._getframe(1)
    while "/re/" in frame.f_code.co_filename or frame.f_code.co_filename.endswith("/rlctl/lazy.py"):
        frame = frame.f_back
    compiled.extend([text] * ("/rlctl/reward/" in frame.f_code.co_filename))
    return compile_one(text, flags)
_compiler.compile = counted
import rlctl.run_spec.run_spec
before = len(compiled)
from rlctl.lazy import compile_patterns
from rlctl.reward.numbers import plain
plain("1.5 * 10^3")
used = len(compiled)
compile_patterns()
print("rlctl.reward.answer" in sys.modules, before, used)
"""


def test_patterns_of_graders_are_compiled_at_their_first_use():
    """All of them compile, without warnings."""
    command = [sys.executable, "-W", "error", "-c", COUNT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    known, before, used = run.stdout.split()
    assert known == "True"
    assert int(before) < 3 < int(used)


def test_a_lazy_pattern_is_one_of_re():
    pattern = lazy_pattern(r"(?P<year>\d{4})", re.ASCII)
    assert pattern.sub("-", "in 2024") == "in -"
    for name in ("pattern", "flags", "groups", "groupindex"):
        assert getattr(pattern, name) == getattr(re.compile(r"(?P<year>\d{4})", re.ASCII), name)
    with pytest.raises(re.error):
        lazy_pattern("(").search("")


def test_a_users_function_needs_no_grader_of_ours(tmp_path):
    (tmp_path / "mine.py").write_text("def score(response): return 1.0\n")
    name = f"{tmp_path}/mine.py:score"
    code = f"import sys; from rlctl.reward.worker import load_grader; load_grader({name!r}, {{}})"
    command = [sys.executable, "-c", f"{code}; print(*sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rlctl.reward.answer" not in run.stdout.split()
