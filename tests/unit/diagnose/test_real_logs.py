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


#: Log of a faulty run → the rules that must find the fault; every other log is of a healthy run.
FAULTS = {
    "hotpot_grpo.log": {"reference-drift", "gradient-norm"},
    "nips_rho3.log": {"zero-spread-groups", "truncated"},
    "slime_1527.log": {"zero-reward"},
    "swift_5890.jsonl": {"no-gradient", "truncated"},
    "swift_5571.log": {"no-gradient"},
    "llamafactory_856.jsonl": {"flat-reward"},
    "openrlhf_lfm.log": {"zero-spread-groups"},
    "nemo_quickstart.log": {"zero-reward"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_faulty_run_is_found_and_a_healthy_one_is_not_alarmed(name):
    if not (LOGS / name).exists():
        pytest.skip("the real logs are not here")
    findings = examine(read_run(LOGS / name, metrics_read())).findings
    alarms = {one.rule for one in findings if one.severity != "info"}
    assert alarms >= FAULTS.get(name, set())
    assert bool(alarms) == (name in FAULTS)
