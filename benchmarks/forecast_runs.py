"""Short runs of the embedded model for `benchmarks/forecast.py`: healthy ones, and six causes of collapse.

The number of a run determines its cause, severity and seed. Causes alternate, so the first N runs are a
balanced sample of all 500. A finished run is a directory with a file `done`; the same command continues with
the next run. Training uses the normal code path (`run_rank`) in processes forked from a server that has
imported the libraries; only the final checkpoint is omitted.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planted import _GAMEABLE, _LONGER, _NOISE, DECOUPLED, RC
from benchmarks.runs import fork_server

RUNS, STEPS, MODELS = 500, 70, 8
#: Causes of ten consecutive runs; four are healthy.
TURN = (
    *("healthy", "rate", "staleness", "healthy", "temperature"),
    *("precision", "healthy", "gaming", "entropy", "healthy"),
)
#: Constants of the forecast are fitted only to runs with these causes.
DEVELOPMENT = frozenset({"rate", "temperature", "entropy"})
HELD_OUT = frozenset({"staleness", "precision", "gaming"})
#: Bypass mode: the trained policy is compared with the sampling policy during the updates of a batch.
BYPASS = (
    "algorithm.adv_estimator=rloo",
    f"{RC}bypass_mode=true",
    f"{RC}loss_type=reinforce",
    f"{RC}rollout_is=token",
    f"{RC}rollout_is_batch_normalize=false",
    f"{RC}rollout_is_threshold=2.0",
)
COMMON = (
    "data.train_batch_size=8",
    "actor.lr_scheduler_type=constant",
    "actor.lr_warmup_steps=5",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.001",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=10",
    "trainer.rollouts_per_step=0",
    "trainer.guardrails.mode=off",
)
VALIDATION_PROMPTS = 64
HEALTHY = ("plain", "bf16 engine", "8-bit engine", "one batch late", "decaying rate")


@dataclass(frozen=True, slots=True)
class Planned:
    """Plan of one run.

    Attributes:
        number: from 0; name of the directory.
        cause: `healthy`, or the planted cause of a collapse.
        detail: the severity, for tables.
        held_out: whether the run belongs to the part that was not used to choose any constant.
        seed: seed of the run and of its model.
        overrides: spec overrides.
        grader: source of a function `score`; empty for the task's own grader.
        patch: (name, argument) of a function of this module, called in the training process.
    """

    number: int
    cause: str
    detail: str
    held_out: bool
    seed: int
    overrides: tuple[str, ...]
    grader: str = ""
    patch: tuple[str, float] | None = None


def planned(number: int) -> Planned:
    """Plan of run `number` of `RUNS`."""
    turn, place = divmod(number, len(TURN))
    cause = TURN[place]
    count = turn if cause != "healthy" else 4 * turn + TURN[:place].count("healthy")
    one, two = count * 0.6180339887 % 1.0, count * 0.7548776662 % 1.0  # low-discrepancy sequence
    bypass = (count // MODELS + count) % 2
    style = BYPASS if bypass else DECOUPLED
    updates, lr = 2, 4e-4
    more: tuple[str, ...] = ()
    grader, patch, detail = "", None, ""
    held_out = cause in HELD_OUT
    if cause == "healthy":
        variant = HEALTHY[count % len(HEALTHY)]
        lr, detail = 2e-4 * 2.5**one, variant
        held_out = count % 2 == 1
        more = {
            "bf16 engine": ("rollout.dtype=bf16",),
            "8-bit engine": ("rollout.dtype=int8",),
            "one batch late": ("rollout.staleness=1",),
            "decaying rate": ("actor.lr_scheduler_type=linear",),
        }.get(variant, ())
    elif cause == "rate":
        lr = 6e-4 * 4**one
        more, detail = ("actor.lr_warmup_steps=70",), f"{lr:.1e} after 70"
    elif cause == "staleness":
        late, lr = int(3 + 14 * one), 2e-4 * 3.5**two
        more, detail = (f"rollout.staleness={late}",), f"{late} batches, {lr:.1e}"
    elif cause == "temperature" and count % 3:
        slope = 0.03 * 10**one
        patch, detail = ("heating", slope), f"+{slope:.3f} a step"
    elif cause == "temperature":
        patch, detail = ("heated", 1.3 + 1.2 * one), f"{1.3 + 1.2 * one:.2f}"
    elif cause == "precision":
        levels, lr = float(2 + int(7 * one)), 1.5e-4 * 4**two
        more, patch = ("rollout.dtype=int8",), ("coarse", levels)
        detail = f"±{levels:g} levels, {lr:.1e}"
    elif cause == "gaming":
        lr = 1.5e-5 * 5**one
        grader, what = ((_GAMEABLE, "digit"), (_LONGER, "length"))[count % 2]
        detail = f"{what}, {lr:.1e}"
    elif count % 2:
        coefficient = 0.04 * 4**one
        more, detail = (f"actor.entropy_coeff={coefficient:.4f}",), f"bonus {coefficient:.2f}"
    else:
        coefficient = 0.05 * 20**one
        grader, patch, detail = _NOISE, ("penalised", coefficient), f"penalty {coefficient:.2f}"
    own = (f"actor.lr={lr:.3e}", f"actor.ppo_mini_batch_size={8 // updates}", *more)
    return Planned(
        number, cause, detail, held_out, 1 + count % MODELS, (*style, *COMMON, *own), grader, patch
    )


def run_dir(directory: Path, number: int) -> Path:
    """Directory of run `number`."""
    return directory / f"{number:03d}"


def finished(directory: Path) -> list[Planned]:
    """The finished runs, in order."""
    return [planned(i) for i in range(RUNS) if (run_dir(directory, i) / "done").exists()]


def slow(seed: int) -> Planned:
    """An additional run that collapses slowly, in 60 steps: the grader rewards length, the rate is low."""
    own = ("actor.lr=3e-5", "actor.ppo_mini_batch_size=4")
    return Planned(RUNS + seed, "gaming", "length, 3.0e-05", True, seed, (*DECOUPLED, *COMMON, *own), _LONGER)


def guarded(one: Planned, action: str) -> Planned:
    """The same run with acting guardrails and this `on_forecast`."""
    more = ("trainer.guardrails.mode=act", f"trainer.guardrails.on_forecast={action}")
    return replace(one, overrides=(*one.overrides, *more))


def train_missing(todo: Iterable[tuple[Planned, Path]], until: float) -> None:
    """Trains the missing runs in order, one at a time.

    Args:
        todo: runs and their directories; validation prompts are stored in the parent directories.
        until: no run begins after this time (of `time.time`).
    """
    context = fork_server()
    for one, where in todo:
        if (where / "done").exists():
            continue
        if time.time() > until:
            return
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        began = time.perf_counter()
        process = context.Process(target=_train, args=(one, where))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"run {one.number}: exit code {process.exitcode}; see {where}/log")
        (where / "done").touch()
        took = time.perf_counter() - began
        print(f"{where.name:<24}{one.cause:<12}{one.detail:<24}{took:6.1f} s", file=sys.stderr, flush=True)


def _train(one: Planned, where: Path) -> None:
    import torch

    from rlctl.errors import RlctlError
    from rlctl.spec.load import RUN_SPEC_FILE, dump_spec, load_spec
    from rlctl.tiny.embedded import ensure_embedded
    from rlctl.train import saving
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    log = os.open(where / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    overrides = [*one.overrides, f"trainer.seed={one.seed}"]
    overrides.append(f"data.val_files={_validation(ensure_embedded(one.seed), where.parent, one.seed)}")
    if one.grader:
        (where / "grader.py").write_text(one.grader)
        overrides.append(f"reward.name={where / 'grader.py'}:score")
    saving.save_checkpoint = lambda run, step, best=None: None
    if one.patch:
        PATCHES[one.patch[0]](one.patch[1])
    text = dump_spec(load_spec(["grpo-uncorrected"], [], overrides).spec)
    (where / RUN_SPEC_FILE).write_text(text)
    try:
        run_rank(text, str(where), False)
    except RlctlError as error:  # a run that the trainer stopped is also a result
        (where / "error").write_text(str(error))
    shutil.rmtree(where / "evaluations", ignore_errors=True)


def _validation(task: Any, directory: Path, seed: int) -> Path:
    """Writes the first prompts of the validation set to a file, if missing; returns its path."""
    import pyarrow.parquet as pq

    path = directory / f"validation-{seed}.parquet"
    if not path.exists():
        pq.write_table(pq.read_table(task.val_file).slice(0, VALIDATION_PROMPTS), path)
    return path


# --- faults that no spec setting can cause -----------------------------------------------------


def heated(temperature: float) -> None:
    """The engine divides its logits by an additional temperature and reports the resulting log-probs."""
    _heat(lambda batch: temperature)


def heating(slope: float) -> None:
    """Like `heated`, with a temperature that increases in every batch from batch 15 on."""
    _heat(lambda batch: 1.0 + slope * max(0, batch - 15))


def _heat(temperature: Any) -> None:
    from transformers import TemperatureLogitsWarper

    from rlctl.rollout import hf

    told, batches = hf.processors, [0]

    def processors(sampling: Any, sampler: Any) -> Any:
        chain = told(sampling, sampler)
        if not sampling.greedy:
            batches[0] += 1
            chain.insert(0, TemperatureLogitsWarper(float(temperature(batches[0]))))
        return chain

    hf.processors = processors


def coarse(levels: float) -> None:
    """The engine's weights are rounded to this many levels on either side of 0."""
    import torch

    from rlctl.rollout import hf

    @torch.no_grad()
    def rounded(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                step = module.weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / levels
                module.weight.copy_((module.weight / step).round() * step)

    hf._round_to_int8 = rounded


def penalised(coefficient: float) -> None:
    """The loss rewards low entropy."""
    from dataclasses import replace

    import torch

    from rlctl.engine import deepspeed
    from rlctl.train.settings import UpdateSettings

    read, honest = UpdateSettings.of, deepspeed.policy_output

    def policy_output(*args: Any, **asked: Any) -> Any:
        return honest(*args, **asked | {"entropy_grad": torch.is_grad_enabled()})

    deepspeed.policy_output = policy_output
    UpdateSettings.of = staticmethod(lambda spec: replace(read(spec), entropy_coeff=-coefficient))


PATCHES = {patch.__name__: patch for patch in (heated, heating, coarse, penalised)}
