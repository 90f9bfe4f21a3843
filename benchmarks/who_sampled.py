"""Plants rollouts of other weights than recorded in runs of the embedded model, and asks who sampled them.

    python benchmarks/who_sampled.py [--sound 50] [--skip 0] [--planted 20] [--steps 8]

`rlctl diagnose RUN --who-sampled` must name what is planted, and must find nothing in sound runs of many
settings. A run that does not learn enough to tell weights apart cannot be named and counts as missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scipy.stats import beta

from benchmarks.runs import fork_server

BASE = (
    "data.train_batch_size=8",
    "data.max_prompt_length=8",
    "data.max_response_length=6",
    "actor.lr=8e-4",
    "actor.lr_scheduler_type=constant",
    "actor.ppo_micro_batch_size_per_gpu=32",
    "actor.weight_decay=0",
    "engine.dtype=fp32",
    "actor.ppo_mini_batch_size=4",
    "actor.lr_warmup_steps=0",
    "rollout.n=4",
    "trainer.rollouts_per_step=-1",
    "trainer.test_freq=-1",
    "trainer.max_ckpt_to_keep=null",
)
KEPT = ("trainer.save_freq=1", "trainer.save_freq=2", "trainer.save_freq=3")
#: Settings of sound runs, each with every one of `KEPT` in turn.
SOUND: tuple[tuple[str, ...], ...] = (
    (),
    ("rollout.dtype=bf16",),
    ("rollout.dtype=int8",),
    ("rollout.temperature=0.7",),
    ("rollout.top_p=0.9",),
    ("rollout.top_p=0.9", "rollout.exact_sampling=true"),
    ("rollout.staleness=1",),
    ("rollout.max_staleness=1",),
    ("rollout.sync_every=2",),
    ("model.lora_rank=4", "actor.lr=5e-3"),
    ("actor.ppo_mini_batch_size=8",),
    ("actor.lr=1e-5",),
    ("actor.lr=3e-3",),
    ("algorithm.rollout_correction.bypass_mode=false",),
    ("trainer.max_ckpt_to_keep=1",),
)
LORA = ("model.lora_rank=4", "actor.lr=5e-3")


def planted(count: int, steps: int) -> list[tuple[str, tuple[str, ...], dict[str, int]]]:
    """Fault, overrides, and what the engine does: `late` syncs behind, `never`, or without the adapter."""
    found: list[tuple[str, tuple[str, ...], dict[str, int]]] = []
    for number in range(count):
        kept, dtype = KEPT[number % 3], (("rollout.dtype=bf16",) if number % 4 == 3 else ())
        found.append(("never delivered", (kept, *dtype), {"late": steps}))
        late = 1 + number % 3
        found.append(("late", ("trainer.save_freq=1", *dtype), {"late": late}))
        found.append(("base", (kept, *dtype, *LORA), {"merged": 0}))
    return found


def main() -> None:
    """Trains, asks, and prints the rates with 95 % intervals (Clopper–Pearson)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sound", type=int, default=50)
    parser.add_argument("--skip", type=int, default=0, help="sound runs to leave out, from the first")
    parser.add_argument("--planted", type=int, default=20, help="runs of each fault")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    settings = itertools.islice(itertools.cycle(itertools.product(SOUND, KEPT)), given.skip, given.sound)
    jobs = [("sound", (kept, *more), {}) for more, kept in settings] + planted(given.planted, given.steps)
    context = fork_server()
    counts: dict[str, list[bool]] = {}
    for seed, (fault, overrides, change) in enumerate(jobs, 1 + given.skip):
        with tempfile.TemporaryDirectory() as where:
            more = (*BASE, f"trainer.total_training_steps={given.steps}", f"trainer.seed={seed}", *overrides)
            process = context.Process(target=_run, args=(more, change, Path(where)))
            process.start()
            process.join()
            file = Path(where) / "found.json"
            log = (Path(where) / "log").read_text(errors="replace")
            said = {"fault": "failed", "conclusion": log[-500:]}
            said = json.loads(file.read_text()) if file.exists() else said
        is_right = said["fault"] == (None if fault == "sound" else fault)
        if fault == "late":  # of two updates per batch
            is_right &= f"{2 * change['late']} updates later" in said["conclusion"]
        counts.setdefault(fault, []).append(is_right)
        if not is_right or fault == "sound":
            print(f"{fault:16} {' '.join(overrides)} {change}: {said['conclusion']}", flush=True)
    for fault, right in counts.items():
        hits, total = sum(right), len(right)
        low = beta.ppf(0.025, hits, total - hits + 1) if hits else 0.0
        high = beta.ppf(0.975, hits + 1, total - hits) if hits < total else 1.0
        print(f"{fault:16} right {hits}/{total} = {hits / total:.0%} ({low:.0%} to {high:.0%})")


def _run(overrides: tuple[str, ...], change: dict[str, int], where: Path) -> None:
    """In the child: trains with the planted fault and writes what `--who-sampled` finds."""
    import torch

    from rlctl.mismatch.who_sampled import who_sampled
    from rlctl.rollout.hf import HFRollout
    from rlctl.run_spec.load import dump_spec, load_spec
    from rlctl.tiny.game import embedded_task
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    log = os.open(where / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    task = embedded_task(load_spec([], [], ["trainer.seed=1"]).spec)  # one model, many seeds
    own = (f"model.path={task.model_dir}", f"data.train_files=[{task.train_file}]", "data.val_files=[]")
    spec = load_spec(["rloo-seq-is"], [], [*own, *overrides]).spec
    sync, sent = HFRollout.sync_weights, list[dict[str, Any]]()

    def wrong(self: Any, policy: Any, policy_version: int) -> None:
        merged = bool(change.get("merged", 1))
        sent.append({name: tensor.clone() for name, tensor in policy.weights(merged=merged)})
        late = sent[-1 - change.get("late", 0)] if len(sent) > change.get("late", 0) else None
        weights = list((late or {name: x.clone() for name, x in self._weights.items()}).items())
        sync(self, SimpleNamespace(weights=lambda: iter(weights)), policy_version)

    if change:
        HFRollout.sync_weights = wrong  # type: ignore[method-assign]
    run_dir = where / "run"
    run_dir.mkdir()
    (run_dir / "spec.yaml").write_text(dump_spec(spec))
    run_rank(dump_spec(spec), str(run_dir), False)
    (where / "found.json").write_text(json.dumps(who_sampled(run_dir).as_document()))


if __name__ == "__main__":
    main()
