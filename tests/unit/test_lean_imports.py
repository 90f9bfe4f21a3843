"""What transformers imports only because it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

START = """
    import sys
    from rlctl.lean_imports import import_models
    import_models()
    from transformers.models.llama import modeling_llama
"""
LISTED = """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    print(*sys.modules)
"""
LATER = """
    from transformers.generation import candidate_generator
    from transformers.loss import loss_for_object_detection
    print(candidate_generator.roc_curve("labels", pos_label=1))
    print([places.tolist() for places in loss_for_object_detection.linear_sum_assignment([[1, 2], [0, 5]])])
    from scipy.optimize import brentq
    print(round(brentq(lambda x: x - 2.0, 0.0, 5.0)))
    import sklearn.metrics
    print(sklearn.metrics.__file__)
    from transformers.utils import is_scipy_available, is_sklearn_available
    print(is_scipy_available(), is_sklearn_available())
"""


@pytest.fixture
def sklearn(tmp_path: Path) -> Path:
    """Directory with a package of this name."""
    package = tmp_path / "sklearn"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "metrics.py").write_text("def roc_curve(*given, **named): return given, named\n")
    return tmp_path


def output(code: str, *paths: Path, **environment: str) -> str:
    path = {"PYTHONPATH": os.pathsep.join(map(str, [*paths, Path.cwd()]))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_models_import_no_package_that_training_does_not_use(sklearn: Path) -> None:
    loaded = set(output(START + LISTED, sklearn, CUDA_VISIBLE_DEVICES="").split())
    assert "transformers.models.llama.modeling_llama" in loaded
    assert loaded.isdisjoint({"scipy.optimize", "sklearn", "sklearn.metrics", "triton"})


def test_later_everything_works(sklearn: Path) -> None:
    assert output(START + LATER, sklearn).splitlines() == [
        "(('labels',), {'pos_label': 1})",
        "[[0, 1], [1, 0]]",
        "2",
        str(sklearn / "sklearn" / "metrics.py"),
        "True True",
    ]


def test_triton_is_there_where_it_is_used() -> None:
    pytest.importorskip("triton")
    loaded = output(START + LISTED, TRITON_INTERPRET="1").split()
    assert "triton" in loaded
    if torch.cuda.is_available():
        assert "triton" in output(START + LISTED).split()


def test_a_module_that_cannot_be_imported_fails_at_its_own_import(tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text("import triton\n")
    (tmp_path / "triton.py").touch()
    code = """
        from rlctl.lean_imports import lean_import
        lean_import("no_such_module", "strict")
        import strict
        print(strict.triton.__file__)
    """
    expected = str(tmp_path / "triton.py")
    assert output(code, tmp_path, CUDA_VISIBLE_DEVICES="").strip() == expected
