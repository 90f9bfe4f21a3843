"""Parts of users' files that raise, or return what they should not: the error names the part or its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.usefixtures("embedded")
RC = "algorithm.rollout_correction."
#: Part: its function in the file, the overrides that use it, and the words of the error.
FAULTY = {
    "a loss that raises": (
        "def part(rule, inputs): raise KeyError('advantage')",
        [f"{RC}loss_type=FILE:part"],
        ["KeyError: 'advantage'", "FILE:3, in part", "correct the function"],
    ),
    "a loss of one number per response": (
        "def part(rule, inputs): return TokenLoss(inputs.log_probs.sum(-1))",
        [f"{RC}loss_type=FILE:part"],
        ["policy loss", "FILE:part returned a tensor of shape (", "return a tensor of shape ("],
    ),
    "a loss that is a tensor": (
        "def part(rule, inputs): return -inputs.advantages * inputs.log_probs",
        [f"{RC}loss_type=FILE:part"],
        ["FILE:part returned Tensor", "return TokenLoss(values)"],
    ),
    "a loss whose clip is a number": (
        "def part(rule, inputs): return TokenLoss(-inputs.log_probs, clipped=inputs.log_probs)",
        [f"{RC}loss_type=FILE:part"],
        ["FILE:part returned clipped as torch.float32", "return bool, or None"],
    ),
    "a KL estimate without gradient": (
        "def part(log_probs, ref, rollout, unit): return log_probs.detach() - ref",
        ["actor.use_kl_loss=true", "actor.kl_loss_type=FILE:part"],
        ["KL estimator", "FILE:part has no gradient", "without detach()"],
    ),
    "an engine that samples without settings": (
        "class part:\n    def __init__(self, context): pass\n    def close(self): pass\n"
        "    def sync_weights(self, *arguments, **options): pass\n"
        "    def sample(self, requests): pass",
        ["rollout.name=FILE:part"],
        ["sample: too many positional arguments", "def sample(self, requests, sampling"],
    ),
    "a loss without gradient": (
        "def part(rule, inputs): return TokenLoss((-inputs.advantages * inputs.log_probs).detach())",
        [f"{RC}loss_type=FILE:part"],
        ["FILE:part has no gradient", "without detach()"],
    ),
    "a loss that is NaN": (
        "def part(rule, inputs): return TokenLoss(inputs.log_probs * float('nan'))",
        [f"{RC}loss_type=FILE:part"],
        ["policy loss", "FILE:part returned NaN"],
    ),
    "a KL estimate that is NaN": (
        "def part(log_probs, ref, rollout, unit): return log_probs * float('nan')",
        ["actor.use_kl_loss=true", "actor.kl_loss_type=FILE:part"],
        ["KL estimator", "FILE:part returned NaN"],
    ),
    "a weight that is NaN": (
        "def part(log_ratio, params): return log_ratio.token * float('nan')",
        [f"{RC}rollout_is=FILE:part"],
        ["correction weight", "FILE:part returned NaN"],
    ),
    "a criterion that is NaN": (
        "def part(log_ratio, params): return log_ratio.token * float('nan')",
        [f"{RC}rollout_rs=FILE:part", f"{RC}rollout_rs_threshold=2"],
        ["rejection criterion", "returned NaN"],
    ),
    "a KL estimate of one number per response": (
        "def part(log_probs, ref, rollout, unit): return (log_probs - ref).sum(-1)",
        ["actor.use_kl_loss=true", "actor.kl_loss_type=FILE:part"],
        ["KL estimator", "FILE:part returned a tensor of shape ("],
    ),
    "advantages that are None": (
        "def part(inputs): return None",
        ["algorithm.adv_estimator=FILE:part"],
        ["advantage estimator", "FILE:part returned NoneType, not a tensor"],
    ),
    "an engine that raises": (
        "def part(context): raise RuntimeError('no licence')",
        ["rollout.name=FILE:part"],
        ["RuntimeError: no licence", "FILE:3, in part"],
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_the_error_names_the_part(name: str, tmp_path: Path) -> None:
    source, overrides, said = FAULTY[name]
    file = tmp_path / "mine.py"
    file.write_text(f"from rlctl.algos.losses import TokenLoss\n\n{source}\n")
    given = [override.replace("FILE", str(file)) for override in overrides]
    job = runs.start_train(tmp_path / "run", "trainer.total_training_steps=1", *given)
    assert job.wait() == 1, job.output[-4000:]
    output = " ".join(job.output.split())
    for words in said:
        assert words.replace("FILE", str(file)) in output, job.output[-4000:]
    assert "Traceback" not in output
    assert "bug in rlctl" not in output


def test_a_tracker_that_is_none_is_disabled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def part(inputs): return None\n\n\n"
        "class Emptied:\n    def __init__(self, inputs): pass\n    def close(self, status): pass\n"
        "    def log(self, step, metrics):\n        metrics.clear()\n        raise RuntimeError('no disk')\n"
    )
    loggers = f"trainer.logger=[{tmp_path}/mine.py:part,{tmp_path}/mine.py:Emptied]"
    job = runs.start_train(tmp_path / "run", "trainer.total_training_steps=1", loggers)
    assert job.wait() == 0, job.output[-4000:]
    output = " ".join(job.output.split())
    assert "NoneType has no log and no close" in output
    assert "Emptied" in output
    assert "no disk" in output


def test_an_input_that_no_batch_has_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlctl.registry import POLICY_LOSSES\n\n"
        "@POLICY_LOSSES.register(needs={'entropy'})\n"
        "def part(rule, inputs): ...\n"
    )
    job = runs.start_train(tmp_path / "run", f"{RC}loss_type={tmp_path}/mine.py:part")
    assert job.wait() == 2, job.output[-4000:]
    assert "needs=['entropy']: a policy loss can need old_log_probs" in " ".join(job.output.split())


def test_a_resumed_run_refuses_a_changed_file_unless_it_is_accepted(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "run"
    file.write_text("def part(log_ratio, params): return log_ratio.token\n")
    used = (f"{RC}rollout_is={file}:part", "actor.lr_scheduler_type=constant", "trainer.save_freq=1")
    first = runs.start_train(run, "trainer.total_training_steps=1", *used)
    assert first.wait() == 0, first.output[-4000:]
    file.write_text("def part(log_ratio, params): return 0.5 * log_ratio.token\n")
    for accepted, code in (((), 2), (("trainer.accept_changed_inputs=true",), 0)):
        job = runs.resume(run, "trainer.total_training_steps=2", *accepted)
        assert job.wait() == code, job.output[-4000:]
        assert str(file) in "".join(job.output.split())
