"""An optimizer whose state is lost, seen in a checkpoint."""

from dataclasses import replace

import pytest
import torch

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import DumpEvidence, OptimizerState
from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.report.optimizer_state import optimizer_state
from rlctl.report.run_dumps import with_dumps
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, write_run
from tests.unit.diagnose.test_equal_responses import dump, is_right, sampled
from tests.unit.diagnose.test_rules_judged import found, skipped

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


def test_a_state_that_was_lost_later_explains_nothing_before():
    late = OptimizerState(step=60, remembered=20, made=120)
    finding = found(with_state(late))[RULE]
    assert finding.since == 50


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
