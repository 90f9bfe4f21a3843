"""Parts of installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.registry import CORRECTION_WEIGHTS, GRADERS, POLICY_LOSSES
from rlctl.run_spec.load import load_spec
from tests.packages import install_package

LOSS = "algorithm.rollout_correction.loss_type"
RC = "algorithm.rollout_correction."


def test_packages_that_cannot_be_used_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = "def agree(response, ground_truth):\n    return 1.0\n"
    for name in ("one-parts", "two-parts"):
        install_package(tmp_path, name, grader, f"[rlctl.graders]\nagree = {name.replace('-', '_')}:agree\n")
    install_package(
        tmp_path, "ends-python", "import sys\nsys.exit(3)\n", "[rlctl.graders]\nends = ends_python:f\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert list(GRADERS).count("agree") == 1
    with pytest.raises(UsageError, match=r"entry point of (one|two)-parts and (one|two)-parts") as caught:
        GRADERS.part("agree")
    assert caught.value.fix == "uninstall one of them"
    with pytest.raises(UsageError, match="SystemExit"):
        GRADERS.part("ends")
    with pytest.warns(UserWarning, match="left out") as warned:
        names = [part.name for part in GRADERS.parts()]
    assert "maths" in names
    assert not {"agree", "ends"} & set(names)
    assert len(warned) == 2


def test_a_diagnosis_goes_on_without_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = "[rlctl.diagnosis_rules]\nmine = no_rules:mine\n"
    install_package(tmp_path, "no-rules", "import absent_library\n", broken)
    rule = (
        "from rlctl.diagnose.rule import Detection, Rule\n\n\n"
        '@Rule("short")\ndef short(run):\n    return Detection("info", "too short", ())\n'
    )
    install_package(tmp_path, "good-rules", rule, "[rlctl.diagnosis_rules]\nshort = good_rules:short\n")
    log = tmp_path / "log.csv"
    log.write_text("step,actor/entropy\n" + "".join(f"{step},0.5\n" for step in range(1, 30)))
    command = [sys.executable, "-m", "rlctl", "diagnose", str(log)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: diagnosis rule `mine` is left out: importing ")
    assert line.endswith("(fix or uninstall no-rules)")
    assert "too short" in done.stdout


def test_an_entry_point_may_have_another_name_than_the_decorator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from rlctl.registry import CORRECTION_WEIGHTS\n\n\n"
        '@CORRECTION_WEIGHTS.register("flat", unit="sequence")\n'
        "def flattened(log_ratio, params):\n    return 0.5 * log_ratio.sequence\n"
    )
    install_package(
        tmp_path, "flat-parts", code, "[rlctl.correction_weights]\nflat-w = flat_parts:flattened\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    part = CORRECTION_WEIGHTS.part("flat-w")
    del CORRECTION_WEIGHTS._parts["flat-w"]  # for good: `monkeypatch.delitem` would add it again at the end
    assert (part.name, part.unit) == ("flat-w", "sequence")
    assert "flat" not in list(CORRECTION_WEIGHTS)


def test_parts_of_one_module_have_only_the_names_of_their_entry_points(tmp_path: Path) -> None:
    """Also if the module was imported for another part, or by the user."""
    code = (
        "from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA\n\n\n"
        "@CORRECTION_WEIGHTS.register()\ndef flat(log_ratio, params):\n    return 0.5 * log_ratio.token\n\n\n"
        "@REJECTION_CRITERIA.register(thresholds=['0.5'])\n"
        "def gap(log_ratio, params):\n    return log_ratio.token.abs()\n"
    )
    entry_points = (
        "[rlctl.correction_weights]\na_flat = both:flat\n[rlctl.rejection_criteria]\na_gap = both:gap\n"
    )
    install_package(tmp_path, "both", code, entry_points)
    check = (
        "from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA\n"
        "if imported: import both\n"
        "assert CORRECTION_WEIGHTS.part('a_flat').name == 'a_flat'\n"
        "assert imported or 'gap' not in list(REJECTION_CRITERIA)\n"
        "names = [part.name for part in REJECTION_CRITERIA.parts()]\n"
        "assert 'a_gap' in names and 'gap' not in names, names\n"
        "assert set(names) == set(REJECTION_CRITERIA)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for imported in (False, True):
        command = [sys.executable, "-c", f"imported = {imported}\n{check}"]
        subprocess.run(command, check=True, env=environment)


def test_a_file_that_imports_built_in_parts_does_not_rename_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import rlctl.algos.losses\n\n\ndef weight(log_ratio, params):\n    return log_ratio.token\n"
    )
    code = (
        "from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES\n"
        f"CORRECTION_WEIGHTS.part('{tmp_path}/mine.py:weight')\n"
        "assert 'ppo_clip' in list(POLICY_LOSSES), list(POLICY_LOSSES)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_installed_package_adds_a_part(tmp_path: Path) -> None:
    """A package on the path whose metadata names an entry point, in a process of its own."""
    parts = (
        "from rlctl.registry import POLICY_LOSSES\n\n\n"
        '@POLICY_LOSSES.register("theirs", label="Theirs", needs={"old_log_probs"})\n'
        "def loss(*arguments):\n    raise NotImplementedError\n\n\n"
        "def gap(log_ratio, params):\n    return log_ratio.token.abs()\n\n\n"
        "from rlctl.registry import GRADERS\n\n\n"
        '@GRADERS.register(data_sources=r"their_\\d+")\n'
        "def same(response, ground_truth):\n    return 1.0\n"
    )
    entry_points = (
        "[rlctl.policy_losses]\ntheirs = their_losses:loss\nbroken = their_losses:absent\n"
        "reinforce = their_losses:loss\n"
        "[rlctl.rejection_criteria]\ngap = their_losses:gap\n[rlctl.graders]\nsame = their_losses:same\n"
    )
    install_package(tmp_path, "their-losses", parts, entry_points)
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from rlctl.errors import UsageError
        from rlctl.registry import POLICY_LOSSES
        from rlctl.run_spec.load import load_spec
        assert "theirs" in set(POLICY_LOSSES)
        spec = load_spec([], [], ["{LOSS}=theirs", "algorithm.rollout_correction.rollout_is=null"]).spec
        assert spec.algorithm.rollout_correction.loss_type == "theirs"
        assert POLICY_LOSSES.part("theirs").label == "Theirs"
        load_spec([], [], ["{RC}rollout_rs=gap", "{RC}rollout_rs_threshold=0.5"])
        assert POLICY_LOSSES.part("theirs").needs == {{"old_log_probs"}}
        from rlctl.reward.build import grader_for
        assert (grader_for("hub/their_7"), grader_for("hub/gsm8k")) == ("same", "maths")
        try:
            POLICY_LOSSES.part("broken")
        except UsageError as error:
            assert "their-losses" in (error.fix or ""), error
        else:
            raise AssertionError("the broken entry point was accepted")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    warned = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "`reinforce` of their-losses is ignored: the name is taken" in warned


def test_installed_packages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading takes tens of milliseconds, and a spec names many parts."""
    reads = []
    read = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **group: reads.append(group) or read(**group))
    monkeypatch.syspath_prepend(tmp_path)  # other packages than in the tests before
    for _ in range(2):
        load_spec([], [], [f"{LOSS}=reinforce"])
        assert set(POLICY_LOSSES)
    assert len(reads) == 1
