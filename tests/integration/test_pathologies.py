"""Faults planted into whole runs are found in rlctl's, verl's and TRL's log; the rest is a benchmark."""

import pytest

from benchmarks.studies.pathologies import FORMATS, in_formats
from benchmarks.studies.planted import DECOUPLED, never_synced
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from tests.runs import start_train

pytestmark = pytest.mark.usefixtures("embedded")
STEPS = 22


@pytest.mark.parametrize(
    ("patch", "overrides", "rules"),
    [
        (
            never_synced,
            ("actor.lr=2e-3",),
            {"rlctl": "policy-gap", "verl": "policy-gap", "trl": "stale-weights"},
        ),
        (None, (), {"rlctl": "zero-reward", "verl": "zero-reward", "trl": "zero-reward"}),
    ],
    ids=["never synced", "all wrong"],
)
def test_a_fault_is_found_in_every_format(tmp_path, patch, overrides, rules):
    (tmp_path / "grader.py").write_text("def score(response, ground_truth):\n    return 0.0\n")
    graded = () if patch else (f"reward.name={tmp_path / 'grader.py'}:score",)
    run_dir = tmp_path / "run"
    steps = f"trainer.total_training_steps={STEPS}"
    job = start_train(run_dir, *DECOUPLED, *overrides, *graded, steps, before=patch)
    assert job.wait() == 0, job.output[-4000:]
    found = {}
    for form, log in in_formats(run_dir):
        diagnosis = examine(read_run(log, metrics_read()))
        assert diagnosis.run.framework == form
        found[form] = {one.rule for one in diagnosis.findings if one.severity == "critical"}
    assert found.keys() == set(FORMATS)
    assert all(rules[form] in found[form] for form in FORMATS), found
