"""Compares samples per second and memory of one training step with TRL's RLOOTrainer.

    python benchmarks/step.py [--trl-python PYTHON] [--json FILE] [--threads 1] [--rounds 3] [--steps 12]
    python benchmarks/step.py --llm [--trl-python PYTHON] [--json FILE] [--threads 2] [--rounds 1] [--steps 3]
    python benchmarks/step.py --learning [--trl-python PYTHON] [--json FILE] [--rounds 3] [--steps 15]

Both sides train the embedded model on its task from the same directory: 128 prompts × 8 responses, with the
length limit of the embedded preset, float32 on the CPU, the same attention code and number of threads, exact
match as reward, a constant learning rate without warm-up, one optimizer step per batch (and, for comparison,
rlctl's default of two). Each round has another seed. The difference of the rewards is that of the mean over
the second half of the steps, with a 95 % interval over rounds. TRL runs without
gradient checkpointing, TensorBoard and saving, which are its defaults for large models; rlctl's step includes
its metrics file and rollout files.

Every side runs in a separate process; sides alternate, round by round. A step's time is the time between the
ends of two steps, after warm-up; the results are medians over all rounds. CPU seconds are reported in
addition to wall time, because the machine may be busy. Memory: peak resident set of the process, and its
increase since just before the first step.

`--llm`: SmolLM2-135M-Instruct on sums phrased in words, as `make train-llm` trains it (16 prompts × 8
responses of at most 10 tokens, micro-batches of 32 responses, one optimizer step per batch), compared with
TRL's RLOOTrainer and GRPOTrainer. Sides named bf16 compute in bf16 (TRL: autocast), which is faster only on
CPUs with bf16 instructions (AVX512-BF16, AMX). TRL's reward checks the last number of the response; rlctl
uses the grader `maths`.

`--learning`: the mean reward on both sides after the same number of steps, in bf16, with the reward function
`last_number` on both sides. Batches of 8 prompts and a larger learning rate than with `--llm`, so that a few
steps suffice. Each round has another seed.

`--trl-python` is the interpreter of an environment with TRL, if TRL is not installed in this one.
`--correction` measures, instead of TRL, the correction's share of the step, and of a larger step (a random
model with about ten million parameters, 64 responses of 256 tokens).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
SAMPLES = 8
SIDES = ("rlctl", "rlctl, 2 updates", "trl")
LEARNING_SIDES = ("rlctl", "rlctl, bf16", "trl, bf16")
LLM_SIDES = ("rlctl", "rlctl, bf16", "trl", "trl, GRPO", "trl, bf16")


class Clock(list):
    """A list that records the time of every `append`; replaces the run's history to time its steps."""

    def __init__(self, warm_up: int) -> None:
        super().__init__()
        self.warm_up = warm_up
        self.times: list[tuple[float, float]] = []
        self.tick()

    def append(self, item: Any) -> None:
        super().append(item)
        self.tick()

    def tick(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def steps(self) -> dict[str, list[float]]:
        pairs = list(zip(self.times, self.times[1:], strict=False))[self.warm_up :]
        return {"wall": [b[0] - a[0] for a, b in pairs], "cpu": [b[1] - a[1] for a, b in pairs]}


def last_number(response: str, ground_truth: str) -> float:
    """1.0 if the response's last number is the ground truth, else 0.0."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def memory(key: str) -> float:
    """`VmRSS` (current) or `VmHWM` (peak) of this process in MiB (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) / 1024


# --- rlctl ----------------------------------------------------------------------------------------


def run_rlctl(
    preset: str, overrides: list[str], *, warm_up: int, steps: int, correction: bool = False
) -> dict[str, Any]:
    """Trains and measures; `correction` also measures the seconds per step spent in the correction."""
    from rlctl.engine.ranks import join_ranks, leave_ranks
    from rlctl.run_spec.load import load_spec
    from rlctl.track.console import Startup
    from rlctl.train.loop import train
    from rlctl.train.setup import build
    from rlctl.train.stop import Watchdog, catching_signals

    total = [f"trainer.total_training_steps={steps + warm_up}", "trainer.logger=[]"]
    spec = load_spec([preset], [], [*overrides, *total]).spec
    spent = time_correction() if correction else []
    ranks = join_ranks()
    with tempfile.TemporaryDirectory() as run_dir, catching_signals() as stop:
        watchdog = Watchdog(0, 1, Path(run_dir), timeout_s=1800.0)  # not started
        startup = Startup(is_shown=False)
        with contextlib.ExitStack() as stack:
            run = build(spec, Path(run_dir), ranks, stop, startup, watchdog, stack, resume=False)
            before = memory("VmRSS")
            run.history = clock = Clock(warm_up)
            train(run)
        leave_ranks()
    phases = {key for key in clock[-1] if key.startswith("timing_s/")}
    timed = clock[warm_up:]
    return {
        **clock.steps(),
        "phases": {key.removeprefix("timing_s/"): [row[key] for row in timed] for key in phases},
        "peak_mib": memory("VmHWM"),
        "rise_mib": memory("VmHWM") - before,
        "peak_gib": clock[-1]["perf/max_memory_allocated_gb"],
        "mean_length": statistics.fmean(row["response_length/mean"] for row in timed),
        "rewards": [row["critic/score/mean"] for row in clock],
        "calls": statistics.fmean(row.get("episode/num_tool_calls", 0.0) for row in timed),
        "correction": sum(spent) / (steps + warm_up),
    }


def time_correction() -> list[float]:
    """Wraps the correction functions that the update calls; returns the list of their seconds."""
    import torch

    from rlctl.engine.ranks import Ranks
    from rlctl.train import mini_batch, update

    spent: list[float] = []
    # A GPU continues to compute after a call has returned.
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            wait()
            spent.append(time.perf_counter() - start)
            return result

        return call

    mini_batch.correct = timed(mini_batch.correct)
    for name in ("correction_metrics", "normalized", "normalization_factor"):
        setattr(update, name, timed(getattr(update, name)))
    Ranks.all_reduce = timed(Ranks.all_reduce)  # type: ignore[method-assign]  # the loss's own sums are counted too
    return spent


# --- TRL ------------------------------------------------------------------------------------------


def run_trl(job: dict[str, Any], steps: int, *, is_grpo: bool, is_bf16: bool) -> dict[str, Any]:
    """Runs the same step in TRL; imports nothing from rlctl, whose dependencies may be missing here."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    clock, lengths, means = Clock(job["warm_up"]), [], []

    def exact(
        completions: list[Any], ground_truth: list[str], completion_ids: list[Any], **_: Any
    ) -> list[float]:
        scores = [
            float(a == b) if isinstance(a, str) else last_number(a[-1]["content"], b)
            for a, b in zip(completions, ground_truth, strict=True)
        ]
        lengths.append(statistics.fmean(map(len, completion_ids)))
        means.append(statistics.fmean(scores))
        return scores

    class Timer(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.times.clear()
            clock.tick()
            self.before = memory("VmRSS")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    timer = Timer()
    with tempfile.TemporaryDirectory() as output:
        config = (GRPOConfig if is_grpo else RLOOConfig)(
            output_dir=output,
            use_cpu=True,
            bf16=is_bf16,
            gradient_checkpointing=False,
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=job["prompts"] * SAMPLES // job["micro_batch"],
            num_generations=SAMPLES,
            max_completion_length=job["max_response_length"],
            temperature=1.0,
            beta=0.0,
            learning_rate=job["lr"],
            seed=job["seed"],
            lr_scheduler_type="constant",
            max_steps=steps + job["warm_up"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs={"attn_implementation": job["attention"], "dtype": "float32"},
        )
        trainer = (GRPOTrainer if is_grpo else RLOOTrainer)(
            model=job["model"],
            reward_funcs=exact,
            args=config,
            train_dataset=Dataset.from_list(job["rows"]),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            callbacks=[timer],
        )
        trainer.train()
    return {
        **clock.steps(),
        "peak_mib": memory("VmHWM"),
        "rise_mib": memory("VmHWM") - timer.before,
        "mean_length": statistics.fmean(lengths[job["warm_up"] :]),
        "rewards": means,
    }


# --- comparison -----------------------------------------------------------------------------------


def describe_job(where: Path, is_llm: bool, *, is_learning: bool = False, seed: int = 1) -> Path:
    """Writes the inputs of both sides to a JSON file; returns its path."""
    import pyarrow.parquet as pq

    from rlctl.model_files import model_directory
    from rlctl.run_spec.load import load_spec
    from rlctl.tiny.embedded import ensure_embedded

    overrides = ["actor.lr_scheduler_type=constant", "actor.lr_warmup_steps=0", f"trainer.seed={seed}"]
    if is_llm:
        from examples import sums
        from rlctl.data.schema import write_rows

        write_rows(where / "train.parquet", "train", sums.rows(sums.split()[0]))
        preset = "smollm2-135m-sums"
        overrides.append(f"data.train_files={where / 'train.parquet'}")
        prompts, micro_batch, warm_up = 8 if is_learning else 16, 32, 1
        overrides.append(f"data.train_batch_size={prompts}")
        overrides += ["actor.lr=2e-5", f"reward.name={__file__}:last_number"] if is_learning else []
    else:
        preset, prompts, micro_batch, warm_up = "rloo-seq-is", 128, 128 * SAMPLES, 3
    spec = load_spec([preset], [], overrides).spec
    task = None if is_llm else ensure_embedded(spec.trainer.seed)
    rows = pq.read_table(where / "train.parquet" if task is None else task.train_file).to_pylist()
    job = {
        "model": model_directory(spec.model.path) if task is None else str(task.model_dir),
        "preset": preset,
        "overrides": overrides,
        "prompts": prompts,
        "micro_batch": micro_batch,
        "warm_up": warm_up,
        "max_response_length": spec.data.max_response_length,
        "lr": spec.actor.lr,
        "seed": seed,
        "attention": spec.model.attn_implementation,
        "rows": [
            {
                "prompt": row["prompt"] if is_llm else row["prompt"][0]["content"],
                "ground_truth": row["reward_model"]["ground_truth"],
            }
            for row in rows
        ],
    }
    path = where / "job.json"
    path.write_text(json.dumps(job))
    return path


def in_a_process(python: str, threads: int, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [python, __file__, "--answer", answer.name, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(Path(answer.name).read_text())
        return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all sides alternately; returns medians over all rounds per side."""
    trl = options.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    all_sides = LEARNING_SIDES if options.learning else LLM_SIDES if options.llm else SIDES
    sides = [x for x in all_sides if trl or not x.startswith("trl")]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as where:
        for number in range(options.rounds):
            is_llm = options.llm or options.learning
            job = describe_job(Path(where), is_llm, is_learning=options.learning, seed=number + 1)
            for side in sides:
                python = trl if side.startswith("trl") else sys.executable
                arguments = ["--side", side, "--job", str(job), "--steps", str(options.steps)]
                rounds[side].append(in_a_process(python, options.threads, *arguments))
        samples = json.loads(job.read_text())["prompts"] * SAMPLES
    return {side: merged(found, samples) for side, found in rounds.items()}


def merged(rounds: list[dict[str, Any]], samples: int) -> dict[str, Any]:
    """Medians over the steps of all rounds; `samples`: number of samples per step."""
    found = {key: statistics.median(x for one in rounds for x in one[key]) for key in ("wall", "cpu")}
    found |= {
        key: statistics.median(one[key] for one in rounds) for key in ("peak_mib", "rise_mib", "mean_length")
    }
    found["rewards"] = [one["rewards"] for one in rounds]
    found["reward"] = statistics.median(rewards[0] for rewards in found["rewards"])
    found["samples_per_s"] = samples / found["wall"]
    if "phases" in rounds[0]:
        found["phases"] = {
            phase: statistics.median(x for one in rounds for x in one["phases"][phase])
            for phase in rounds[0]["phases"]
            if phase != "save_checkpoint"
        }
    return found


def show(report: dict[str, Any]) -> None:
    names = ("samples/s", "s/step", "CPU s", "peak MiB", "rise", "length", "reward")
    print(f"{'side':>18}" + "".join(f"{name:>10}" for name in names))
    for side, x in report.items():
        if side != "ratio":
            print(
                f"{side:>18}{x['samples_per_s']:10.1f}{x['wall']:10.3f}{x['cpu']:10.3f}{x['peak_mib']:10.0f}"
                f"{x['rise_mib']:10.0f}{x['mean_length']:10.2f}{x['reward']:10.2f}"
            )
    for side, x in report.items():
        for rewards in x.get("rewards", []):
            print(f"{side}, reward of each step: {' '.join(f'{reward:.2f}' for reward in rewards)}")
    for side, ratios in report.get("ratio", {}).items():
        *times, (_, difference) = ratios.items()
        print(f"{side} against trl: " + ", ".join(f"{key} × {value:.2f}" for key, value in times))
        print("  reward − TRL's (95 % interval): " + " ".join(f"{value:+.3f}" for value in difference))
    for side, x in report.items():
        if "phases" in x:
            parts = sorted(x["phases"].items(), key=lambda part: -part[1])
            print(f"{side}, ms: " + ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in parts))


def reward_difference(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Of the mean rewards of the second half of the steps: mean over rounds, lower and upper end."""
    from benchmarks.intervals import mean_interval

    pairs = zip(ours, theirs, strict=True)
    found = [statistics.fmean(a[len(a) // 2 :]) - statistics.fmean(b[len(b) // 2 :]) for a, b in pairs]
    return list(mean_interval(found)) if len(found) > 1 else found


def ratios(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Ratios of rlctl to TRL: speed (higher is better) and memory (lower is better); rewards."""
    trl = report["trl"]
    return {
        side: {
            "speed": trl["wall"] / report[side]["wall"],
            "speed by CPU seconds": trl["cpu"] / report[side]["cpu"],
            "peak memory": report[side]["peak_mib"] / trl["peak_mib"],
            "reward difference": reward_difference(report[side]["rewards"], trl["rewards"]),
        }
        for side in report
        if not side.startswith("trl")
    }


# --- the correction's share -----------------------------------------------------------------------


def larger_model(where: Path) -> list[str]:
    """Overrides for a step with 64 responses of 256 tokens and a random model of ten million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlctl.run_spec.model import RECIPE
    from rlctl.tiny.embedded import ensure_embedded
    from rlctl.tiny.model import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(where)
    build_tokenizer(RECIPE).save_pretrained(where)
    task = ensure_embedded(1)
    return [
        f"model.path={where}",
        f"data.train_files={task.train_file}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=256",
        "rollout.n=8",
        "actor.ppo_mini_batch_size=8",
        "actor.ppo_micro_batch_size_per_gpu=64",
        "engine.dtype=fp32",
        "reward.name=exact",
    ]


def correction_share(options: argparse.Namespace) -> dict[str, Any]:
    report = {}
    with tempfile.TemporaryDirectory() as where:
        job = ["--job", str(describe_job(Path(where), is_llm=False))]
        cases: list[tuple[str, list[str]]] = [
            *((side, ["--side", side, "--steps", str(options.steps), *job]) for side in SIDES[:2]),
            ("larger", ["--side", SIDES[0], "--steps", "2", "--larger", where]),
        ]
        for name, case in cases:
            arguments = [*case, "--correction"]
            found = in_a_process(sys.executable, options.threads, *arguments)
            step = statistics.median(found["wall"])
            report[name] = {
                "step_s": step,
                "correction_s": found["correction"],
                "share": found["correction"] / step,
                "mean_length": found["mean_length"],
            }
            milliseconds = found["correction"] * 1e3
            print(
                f"{name:>18}: step {step:8.3f} s, correction and its metrics {milliseconds:6.2f} ms, "
                f"share {found['correction'] / step:.2%} (mean length {found['mean_length']:.0f})"
            )
    return report


def one_side(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one side in this process."""
    timing = {"steps": options.steps, "correction": options.correction}
    if options.larger:
        return run_rlctl("rloo-seq-is", larger_model(options.larger), warm_up=3, **timing)
    job = json.loads(options.job.read_text())
    if options.side.startswith("trl"):
        return run_trl(job, options.steps, is_grpo="GRPO" in options.side, is_bf16="bf16" in options.side)
    prompts, micro_batch = job["prompts"], job["micro_batch"]
    updates = 2 if "2" in options.side else 1
    overrides = [f"actor.ppo_mini_batch_size={prompts // updates}"]
    overrides.append(f"actor.ppo_micro_batch_size_per_gpu={micro_batch}")
    overrides.append(f"engine.dtype={'bf16' if 'bf16' in options.side else 'fp32'}")
    return run_rlctl(job["preset"], [*job["overrides"], *overrides], warm_up=job["warm_up"], **timing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps per round")
    parser.add_argument("--llm", action="store_true", help="SmolLM2-135M instead of the embedded model")
    parser.add_argument("--learning", action="store_true", help="rewards of both sides, on SmolLM2-135M")
    parser.add_argument("--correction", action="store_true", help="the correction's share instead of TRL")
    for hidden in ("--side", "--answer"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--job", "--larger"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        Path(options.answer).write_text(json.dumps(one_side(options)))
        return
    if options.correction:
        report = correction_share(options)
    else:
        report = compare(options)
        if "trl" in report:
            report["ratio"] = ratios(report)
        show(report)
        if not any(side.startswith("trl") for side in report):
            print("TRL is not here: pip install trl==1.16.0, or --trl-python of an environment that has it")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
