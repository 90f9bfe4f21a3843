"""Logs of real runs that this project did not write, if present: format and result are correct.

They are no part of the repository. `RLCTL_REAL_LOGS` names another folder.
"""

import os
from pathlib import Path

import pytest

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.metric_names import ELSEWHERE, METRICS

LOGS = Path(os.environ.get("RLCTL_REAL_LOGS", Path(__file__).parents[3] / ".." / "shared" / "data" / "logs"))

#: Log → framework, rows, the last step where the log states it.
EXPECTED = {
    "hotpot_grpo.log": ("trl", 93, None),
    "hotpot_grpo_v2.log": ("trl", 46, 920),
    "nips_rho3.log": ("trl", 200, None),
    "xling_a2_vi_42.json": ("trl", 10, 50),
    "verl_logicrl_115218.log": ("verl", 2, 1),
    "verl_gui.log": ("verl", 2, 2),
    "verl_1458.log": ("verl", 1, 4),
    "slime_1527.log": ("slime", 1, 0),
    "slime_example.log": ("slime", 1, 0),
    "swift_5890.jsonl": ("ms-swift", 2, 2),
    "swift_5571.log": ("ms-swift", 1, 5),
    "trl_ppo_37684.log": ("trl", 2, None),
    "uir1_20.log": ("trl", 1, None),
    "llamafactory_856.jsonl": ("llama-factory", 5, 1260),
    "prime_aime_console.log": ("prime-rl", 20, 19),
    "openrlhf_lfm.log": ("openrlhf", 2, 2),
    "nemo_quickstart.log": ("nemo-rl", 1, 1),
    "agentr1_30.log": ("verl", 1, 83),
    "verl_1037_step2.log": ("verl", 1, 2),
    "verl_econ_700_diskfull.log": ("verl", 233, 699),
    "slime_1837.log": ("slime", 1, 0),
    "swift_9261.jsonl": ("ms-swift", 2, None),
    "swift_4465.jsonl": ("ms-swift", 1, 300),
    "unsloth_2291.md": ("trl", 11, None),
    "trl_oversight_history.json": ("trl", 12, 12),
    "openr1_255.log": ("trl", 3, None),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_log_is_recognised_with_its_steps(name):
    if not (LOGS / name).exists():
        pytest.skip("the real logs are not here")
    framework, rows, last = EXPECTED[name]
    run = read_run(LOGS / name, frozenset({*METRICS, *ELSEWHERE}))
    assert (run.framework, len(run.table.steps)) == (framework, rows)
    assert last in {None, run.table.steps[-1]}
    assert len(run.table.columns) > 2


#: Log of a faulty run → its first events, and what they explain; every other log is of a healthy run.
FAULTS = {
    "hotpot_grpo.log": (["reference-drift"], {"gradient-norm"}),
    "nips_rho3.log": (["truncated", "zero-spread-groups"], set()),
    "slime_1527.log": (["zero-reward"], set()),
    "slime_1837.log": (["truncated"], set()),
    "swift_5890.jsonl": (["no-gradient", "truncated"], set()),
    "swift_5571.log": (["no-gradient"], set()),
    "swift_9261.jsonl": (["truncated"], {"zero-reward", "no-gradient", "zero-spread-groups"}),
    "swift_4465.jsonl": (["not-finite"], set()),
    "llamafactory_856.jsonl": (["flat-reward"], set()),
    "openrlhf_lfm.log": (["zero-spread-groups"], set()),
    "nemo_quickstart.log": (["zero-reward"], set()),
    "agentr1_30.log": (["not-finite"], {"truncated", "zero-advantages"}),
    "verl_1037_step2.log": (["not-finite"], set()),
    "verl_econ_700_diskfull.log": (["exception"], set()),
    "trl_oversight_history.json": (["truncated", "zero-spread-groups"], set()),
    "openr1_255.log": (["reward-terms"], set()),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_first_events_of_a_faulty_run_are_found_and_a_healthy_one_is_not_alarmed(name):
    if not (LOGS / name).exists():
        pytest.skip("the real logs are not here")
    alarms = [
        one for one in examine(read_run(LOGS / name, metrics_read())).findings if one.severity != "info"
    ]
    firsts, explained = FAULTS.get(name, ([], set()))
    assert [one.rule for one in alarms if not one.because_of] == firsts
    assert {one.rule for one in alarms if one.because_of} == explained


def test_remedies_fit_what_happened():
    if not LOGS.exists():
        pytest.skip("the real logs are not here")
    first = {
        name: examine(read_run(LOGS / name, metrics_read())).findings[0]
        for name in ("hotpot_grpo.log", "agentr1_30.log", "verl_econ_700_diskfull.log")
    }
    assert first["hotpot_grpo.log"].fixes[0].settings == {"actor.kl_loss_coef": "0.05"}  # five times
    assert not any("length" in str(fix) for fix in first["agentr1_30.log"].fixes)
    assert "disk" in first["verl_econ_700_diskfull.log"].cause
