"""An optimizer whose state is lost, seen in a checkpoint."""

import pickle
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import DumpEvidence, OptimizerState
from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.engine.plain_state import load_plain
from rlctl.errors import RunFailure
from rlctl.report.optimizer_state import optimizer_state
from rlctl.report.run_dumps import with_dumps
from tests.hostile_files import poison
from tests.processes import on_ranks_each
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, write_run
from tests.unit.diagnose.test_equal_responses import dump, is_right, sampled
from tests.unit.diagnose.test_rules_judged import found, skipped
from tests.unit.engine import plain_state_jobs
from tests.unit.engine.engine_jobs import FSDP

RULE = "optimizer-state"


def adam_of(updates, *, forget_after=()):
    """State of Adam after so many updates; it forgets after some of them."""
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight], lr=1e-3)
    for update in range(1, updates + 1):
        weight.grad = torch.ones(3)
        adam.step()
        if update in forget_after:
            adam.state.clear()
    return adam.state_dict()


def plain(state):
    return {"mp_rank_00_model_states.pt": {"module": {"weight": torch.ones(3)}, "optimizer": state}}


def zero(state):
    """DeepSpeed's files with ZeRO: the moments are in a file per rank."""
    return {
        "mp_rank_00_model_states.pt": {"module": {"weight": torch.ones(3)}, "optimizer": None},
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {
            "optimizer_state_dict": {"base_optimizer_state": state, "zero_stage": 2}
        },
    }


def keep(run_dir, step, made, files):
    """A checkpoint with these files of the engine."""
    partial = begin(run_dir / CHECKPOINTS, step)
    (partial / "engine" / "engine").mkdir(parents=True)
    for name, content in files.items():
        torch.save(content, partial / "engine" / "engine" / name)
    publish(run_dir / CHECKPOINTS, partial, TrainerState(step, made, 1), keep=None)
    return run_dir


@pytest.mark.parametrize("form", [plain, zero])
@pytest.mark.parametrize(
    ("forget_after", "remembered"), [((), 20), (range(1, 21), 0), ((14,), 6), ((20,), 0)]
)
def test_the_updates_since_a_loss_are_counted(tmp_path, form, forget_after, remembered):
    run_dir = keep(tmp_path, 10, 20, form(adam_of(20, forget_after=forget_after)))
    assert optimizer_state(run_dir) == OptimizerState(step=10, remembered=remembered, made=20)


def test_the_newest_intact_checkpoint_counts(tmp_path):
    keep(tmp_path, 5, 10, plain(adam_of(10)))
    keep(tmp_path, 10, 20, plain(adam_of(20, forget_after=(20,))))
    assert optimizer_state(tmp_path).remembered == 0
    [newest] = (tmp_path / CHECKPOINTS / "step_000010").glob("engine/**/*.pt")
    newest.write_bytes(b"damaged")
    assert optimizer_state(tmp_path) == OptimizerState(step=5, remembered=10, made=10)


#: Stage, dtype, updates, the last update that is forgotten.
REAL = [
    *((0, "fp32", 3, 0), (1, "bf16", 3, 0), (1, "fp32", 3, 3), (1, "bf16", 3, 2)),
    *((2, "bf16", 3, 0), (3, "bf16", 3, 2)),
]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Case → the run directory that the engine made."""
    where = tmp_path_factory.mktemp("engines")
    cases = [(*case, str(where / f"{index}")) for index, case in enumerate([*REAL, (FSDP, "fp32", 1, 0)])]
    on_ranks_each(1, plain_state_jobs.kept, cases, where=where)
    return {tuple(case): Path(root) for *case, root in cases}


@pytest.mark.parametrize("case", REAL)
def test_the_states_of_deepspeed_are_read(real, case):
    *_, updates, forget_after = case
    assert optimizer_state(real[case]) == OptimizerState(updates, updates - forget_after, updates)


def test_code_in_a_state_of_deepspeed_is_refused(real, tmp_path):
    for file in real[REAL[1]].glob("checkpoints/*/engine/**/*.pt"):
        own = Path(shutil.copy(file, tmp_path))
        load_plain(own)
        poison(own, tmp_path / "executed")
        with pytest.raises(pickle.UnpicklingError):
            load_plain(own)
    assert not (tmp_path / "executed").exists()


def test_the_states_of_fsdp_are_not_read(real):
    assert optimizer_state(real[FSDP, "fp32", 1, 0]) is None


def of_optimizer(states, **group):
    """State of an optimizer with these parameters' states in one group."""
    states = dict(enumerate(states))
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "params": list(states)} | group
    return {"state": {key: kept for key, kept in states.items() if kept is not None}, "param_groups": [group]}


MOMENTS = {"exp_avg": torch.ones(3)}


@pytest.mark.parametrize(
    ("state", "remembered"),
    [
        (of_optimizer([{"state1": torch.ones(3), "state2": torch.ones(3)}]), None),  # Adam in 8 bits
        (of_optimizer([MOMENTS]), None),  # Lion
        (of_optimizer([MOMENTS], step=20), 20),  # fused Adam
        (of_optimizer([None], step=20), 0),
        (of_optimizer([None, {}]), 0),
        (of_optimizer([None, MOMENTS | {"step": torch.tensor(7.0)}]), 7),
        ({"state": {}, "param_groups": [{"lr": 1e-3, "momentum": 0.9, "params": [0]}]}, None),  # SGD
    ],
)
def test_only_an_empty_state_counts_as_lost(tmp_path, state, remembered):
    found = optimizer_state(keep(tmp_path, 10, 20, plain(state)))
    assert (found and found.remembered) == remembered


ODD_COUNTS = ["x", "20", None, float("inf"), float("nan"), -1, 10**400, torch.ones(2), {}, b"1"]


@pytest.mark.parametrize(
    "state",
    [
        *(of_optimizer([MOMENTS | {"step": step}]) for step in ODD_COUNTS),
        {"state": [], "param_groups": [{"betas": (0.9, 0.99), "params": [0]}]},
        {"state": {}, "param_groups": [{"betas": (0.9, 0.99)}]},
        {"state": {}, "param_groups": [{"betas": (0.9, 0.99), "params": 3}]},
        {"state": {0: 3}, "param_groups": [{"betas": (0.9, 0.99), "params": [0]}]},
        {"state": {}, "param_groups": None},
    ],
)
def test_an_odd_state_says_nothing(tmp_path, state):
    assert optimizer_state(keep(tmp_path, 10, 20, plain(state))) is None


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"\x80\x02X\x01", b"\x80\x02}q\x01N."])
def test_a_damaged_file_says_nothing(tmp_path, content):
    partial = begin(tmp_path / CHECKPOINTS, 10)
    with zipfile.ZipFile(partial / "engine" / "states.pt", "w") as archive:
        archive.writestr("states/version", b"3\n")
        archive.writestr("states/data.pkl", content)
    publish(tmp_path / CHECKPOINTS, partial, TrainerState(10, 20, 1), keep=None)
    assert optimizer_state(tmp_path) is None


@pytest.mark.parametrize("content", [{"module": {}}, {"optimizer": None}])
def test_an_unknown_format_says_nothing(tmp_path, content):
    assert optimizer_state(keep(tmp_path, 10, 20, {"model_states.pt": content})) is None


def test_code_in_a_state_is_not_run(tmp_path):
    class Odd:
        def __reduce__(self):
            return (print, ("run",))

    assert optimizer_state(keep(tmp_path, 10, 20, {"model_states.pt": {"optimizer": Odd()}})) is None


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert optimizer_state(tmp_path) is None


def with_state(state):
    rows = [row | {f"{CORR}k3_kl": 0.3, "critic/score/mean": 0.3} for row in healthy_rows()]
    return examine(replace(run_log(rows), dumps=DumpEvidence(optimizer=state)))


def test_a_lost_state_explains_large_updates_and_no_rate_is_advised():
    diagnosis = with_state(OptimizerState(step=60, remembered=0, made=120))
    first = diagnosis.findings[0]
    assert first.rule == RULE
    assert not any(fix.spec for fix in first.fixes)
    assert found(diagnosis)["large-updates"].because_of == RULE


def test_a_state_may_have_been_lost_before_the_last_loss():
    diagnosis = with_state(OptimizerState(step=60, remembered=20, made=120))
    assert "last lost after step 50" in found(diagnosis)[RULE].what
    assert found(diagnosis)["large-updates"].because_of == RULE  # from the first step


def test_a_state_of_few_updates_is_skipped_for_its_own_reason():
    assert "4 updates" in skipped(with_state(OptimizerState(2, 0, 4)))[RULE].why
    assert "FSDP" in skipped(with_state(None))[RULE].why


def test_a_checkpoint_that_cannot_be_read_is_not_called_a_dump(tmp_path, monkeypatch):
    def fail(run_dir):
        raise RunFailure("it is a link")

    monkeypatch.setattr("rlctl.report.optimizer_state.optimizer_state", fail)
    run_dir = write_run(tmp_path / "run", [row | {"actor/ppo_kl": 0.05} for row in healthy_rows()])
    dump(run_dir / "rollouts", sampled(is_right))
    [note] = [note for note in with_dumps(read_run(run_dir, metrics_read())).notes if "it is a link" in note]
    assert "checkpoint" in note
    assert "dumped" not in note


@pytest.mark.parametrize("state", [None, OptimizerState(60, 119, 120), OptimizerState(2, 0, 4)])
def test_a_state_that_remembers_or_is_unknown_is_quiet(state):
    diagnosis = with_state(state)
    assert RULE not in found(diagnosis)
    assert (RULE in skipped(diagnosis)) is (state is None or state.made < 10)


@pytest.mark.parametrize(("kl", "is_asked"), [(0.05, True), (1e-4, False)])
def test_diagnose_reads_the_state_where_the_policy_moves_visibly(tmp_path, kl, is_asked):
    rows = [row | {f"{CORR}log_wealth": 0.0, "actor/ppo_kl": kl} for row in healthy_rows()]
    run_dir = write_run(tmp_path / "run", rows)
    dump(run_dir / "rollouts", sampled(is_right))
    keep(run_dir, 60, 120, plain(adam_of(120, forget_after=range(1, 121))))
    run = with_dumps(read_run(run_dir, metrics_read()))
    assert (run.dumps.optimizer is not None) is is_asked
