"""Compares the memory estimate of `rlctl train --dry-run` for an update with measured memory.

    python benchmarks/memory.py [--json FILE]
    python benchmarks/memory.py --run SPEC [key=value …]
    python benchmarks/memory.py --loading

Random models with DeepSpeed on one CPU rank; every case runs in a separate process. The measured value is the
peak resident memory during an update after the first, minus the memory of the process before the model was
created (Linux). The first table measures weights, gradients and optimizer: two sizes, every ZeRO stage, two
short sequences, so that activations are negligible. The second table measures whole updates of small models
on long rows, so that activations dominate: four architectures, both precisions, checkpointing, adapters, a
critic, a reference.

`--run` trains a spec for two steps, including sampling, and compares the peak of the whole run.
`--loading` reads a model of 64 million parameters on two ranks, cast as it is read, and as stored: peak of
each rank's own memory until it is read, and bytes that both read from the disk (the system's cache is dropped
before). Then the ranks export it: peak of each rank's own memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.step import memory
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import MemoryPart, memory_parts, memory_total
from rlctl.run_spec.model_size import ModelSize, Shape


@dataclass(frozen=True)
class Case:
    """A model and its training settings.

    Attributes:
        family: architecture.
        layers, hidden, inner, heads, kv_heads, vocab: its dimensions.
        rows, prompt, response: rows of a micro-batch; prompt and response tokens.
        overrides: spec overrides.
    """

    family: str = "llama"
    layers: int = 4
    hidden: int = 256
    inner: int = 768
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 1024
    rows: int = 8
    prompt: int = 32
    response: int = 480
    overrides: tuple[str, ...] = ("engine.dtype=fp32",)

    @property
    def shape(self) -> Shape:
        widths = self.hidden, self.inner, self.heads, self.kv_heads, self.hidden // self.heads
        return Shape(self.layers, *widths, self.vocab)

    @property
    def spec(self) -> Any:
        sizes = [
            f"data.max_prompt_length={self.prompt}",
            f"data.max_response_length={self.response}",
            f"actor.ppo_micro_batch_size_per_gpu={self.rows}",
        ]
        return load_spec([], [], [*sizes, *self.overrides]).spec


def _states(hidden: int, dtype: str, stage: int) -> Case:
    overrides = (f"engine.dtype={dtype}", f"engine.zero_stage={stage}")
    return Case(
        layers=6,
        hidden=hidden,
        inner=2 * hidden,
        heads=8,
        kv_heads=8,
        rows=2,
        prompt=6,
        response=8,
        overrides=overrides,
    )


STATES = [_states(h, dtype, stage) for h in (512, 1024) for dtype in ("fp32", "bf16") for stage in range(4)]

BF16, FP32 = "engine.dtype=bf16", "engine.dtype=fp32"
AGAIN, EAGER = "model.enable_gradient_checkpointing=true", "model.attn_implementation=eager"
LORA = ("model.lora_rank=8",)
CRITIC, REFERENCE = "algorithm.adv_estimator=gae", "actor.use_kl_loss=true"
PASSES = [
    Case(),
    Case(overrides=(BF16,)),
    Case("qwen2", 6, 192, 1152, 6, 2, overrides=(FP32,)),
    Case("qwen2", 6, 192, 1152, 6, 2, overrides=(BF16,)),
    Case("gemma", 3, 256, 2048, 4, 4, overrides=(FP32,)),
    Case("gemma", 3, 256, 2048, 4, 4, overrides=(BF16,)),
    Case("mistral", 4, 512, 1024, 8, 2, rows=4, overrides=(FP32,)),
    Case("mistral", 4, 512, 1024, 8, 2, rows=4, overrides=(BF16,)),
    Case(rows=2, response=1504, overrides=(FP32,)),
    Case(overrides=(FP32, EAGER)),
    Case(overrides=(BF16, EAGER)),
    Case("llama", 30, 576, 1536, 9, 3, 49152, rows=32, prompt=48, response=10),  # as SmolLM2-135M, untied
    Case(layers=8, overrides=(FP32, AGAIN)),
    Case(layers=8, overrides=(BF16, AGAIN)),
    Case(layers=8, rows=4, overrides=(FP32, AGAIN, EAGER)),
    Case(vocab=16384, layers=2, rows=4, overrides=(FP32,)),
    Case(vocab=16384, layers=2, overrides=(FP32,)),
    Case(vocab=16384, layers=2, overrides=(BF16,)),
    Case(overrides=(FP32, *LORA)),
    Case(overrides=(BF16, *LORA)),
    Case(overrides=(FP32, *LORA, "model.target_modules=[q_proj,v_proj]")),
    Case(layers=8, overrides=(BF16, *LORA, AGAIN)),
    Case(overrides=(FP32, CRITIC)),
    Case(rows=4, overrides=(BF16, CRITIC, "critic.ppo_micro_batch_size_per_gpu=12")),
    Case(overrides=(FP32, REFERENCE)),
    Case(overrides=(FP32, "engine.zero_stage=2")),
    Case(overrides=(BF16, "engine.zero_stage=3")),
]
#: Memory parts that only sampling uses; they are not measured here.
ROLLOUT = ("rollout's weights", "key-value cache")


def build(case: Case) -> Any:
    """Builds a random model."""
    from transformers import AutoModelForCausalLM

    from tests.models import config_of

    config = config_of(case.family, case.shape, tie_word_embeddings=False)
    attention = case.spec.model.attn_implementation
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(case: Case, rows: int) -> Any:
    """Random sequences of full length, except a shorter one, so that an attention mask is needed."""
    import torch

    from rlctl.batch import ModelInputs

    length = case.prompt + case.response
    lengths = torch.full((rows,), length)
    lengths[0] -= 1
    scored = torch.cat([torch.arange(count) >= count - case.response for count in lengths.tolist()])
    return ModelInputs(torch.randint(2, case.vocab, (len(scored),)), scored, lengths)


class Trainer:
    """The models of a run, with a method for one update."""

    def __init__(self, case: Case, ranks: Any) -> None:
        import torch

        from rlctl.engine.deepspeed import DeepSpeedCritic, DeepSpeedEngine, FrozenPolicy
        from rlctl.engine.lora import add_lora

        spec, model = case.spec, build(case)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.engine.dtype]
        stage = spec.engine.zero_stage
        if spec.model.lora_rank:
            add_lora(model, spec.model.lora_rank, spec.model.lora_alpha, spec.model.target_modules)
        settings: Any = {
            "zero_stage": stage,
            "dtype": dtype,
            "weight_decay": 0.0,
            "betas": (0.9, 0.999),
            "grad_clip": 1.0,
            "gradient_checkpointing": spec.model.enable_gradient_checkpointing,
        }
        self.actor = DeepSpeedEngine(model, ranks, temperature=1.0, **settings)
        self.critic = DeepSpeedCritic(build(case), ranks, **settings) if spec.trains_critic else None
        self.reference = None
        if spec.needs_reference and not spec.model.lora_rank:
            frozen = build(case)
            self.reference = FrozenPolicy(frozen, ranks, zero_stage=stage, dtype=dtype, temperature=1.0)
        self.batch = batch_of(case, spec.actor.ppo_micro_batch_size_per_gpu)
        self.critic_batch = batch_of(case, spec.critic_micro_batch_size)

    def update(self) -> None:
        if self.reference:
            self.reference.log_probs(self.batch)
        if self.critic:
            self.critic.backward(self.critic.values(self.critic_batch).sum(), last=True)
            self.critic.step(lr=1e-4)
        self.actor.backward(self.actor.policy(self.batch).log_probs.sum(), last=True)
        self.actor.step(lr=1e-4)


def measured(case: Case) -> dict[str, float]:
    """Number of parameters and peak MiB of an update; must run in a separate process."""
    from dataclasses import replace

    from rlctl.engine.ranks import join_ranks, leave_ranks

    ranks = join_ranks()
    Trainer(replace(case, layers=1, hidden=16, inner=16, heads=2, kv_heads=1, rows=2), ranks).update()
    before = memory("VmRSS")  # includes libraries that are loaded at first use
    trainer = Trainer(case, ranks)
    trainer.update()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    trainer.update()
    parameters = sum(tensor.numel() for _, tensor in trainer.actor.weights())
    leave_ranks()
    return {"parameters": parameters, "mib": memory("VmHWM") - before}


def predicted(case: Case, parameters: int) -> list[MemoryPart]:
    """Estimated memory parts of an update."""
    parts = memory_parts(case.spec, ModelSize("counted", parameters, case.shape))
    return [part for part in parts if part.name not in ROLLOUT]


def in_a_process(case: Case) -> dict[str, float]:
    with tempfile.NamedTemporaryFile() as answer:
        arguments = [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--answer", answer.name]
        # Freed memory is returned to the system immediately; otherwise the peak would include it.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        subprocess.run(arguments, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(Path(answer.name).read_text())
        return found


def compare(case: Case) -> dict[str, Any]:
    found = in_a_process(case)
    parts = predicted(case, int(found["parameters"]))
    passes = [part for part in parts if part.name == "activations"]
    return found | {
        "predicted_mib": memory_total(parts) / 2**20,
        "activations_mib": sum(part.num_bytes or 0.0 for part in passes) / 2**20,
        "case": asdict(case),
    }


def whole_run(name: str, overrides: list[str]) -> str:
    """Compares the peak resident memory of two steps, without that of the imports, with the estimate."""
    from benchmarks.runs import PRELOADED
    from rlctl.run_spec.load import dump_spec
    from rlctl.run_spec.model_size import model_size
    from rlctl.train.start import run_rank

    for module in PRELOADED:
        importlib.import_module(module)
    before = memory("VmRSS")
    steps = ["trainer.total_training_steps=2", "trainer.save_freq=-1"]
    spec = load_spec([name], [], [*overrides, *steps]).spec
    with tempfile.TemporaryDirectory() as run_dir:
        run_rank(dump_spec(spec), run_dir, False)
    found = memory("VmHWM") - before
    wanted = memory_total(memory_parts(spec, model_size(spec.model))) / 2**20
    return f"predicted {wanted:.0f} MiB, measured {found:.0f} MiB ({wanted / found:.2f})"


def own_memory(action: Any) -> tuple[Any, float]:
    """The result, and the MiB by which this process's own memory rises at most: without mapped files."""
    before, peak, done = memory("RssAnon"), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], memory("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    result = action()
    done.set()
    watching.join()
    return result, max(0.0, peak[0] - before)


def loading(
    ranks: Any, directory: str, stage: int | str, dtype: str, as_stored: bool
) -> tuple[float, float, float]:
    """MiB of own memory while reading, MiB from the disk, MiB of own memory while exporting."""
    import torch

    from rlctl.engine import model as engine_model
    from rlctl.engine.deepspeed import DeepSpeedEngine, load_partitioned
    from rlctl.engine.fsdp import FsdpEngine

    def from_disk() -> float:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"]) / 2**20

    engine_model.SHARE_BYTES = 2**20
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    settings: Any = {"zero_stage": 3 if stage == 3 else 0, "dtype": kinds[dtype], "weight_decay": 0.0}
    settings |= {"betas": (0.9, 0.999), "grad_clip": 1.0}
    for file in Path(directory).glob("*.safetensors"):
        with file.open() as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ranks.barrier()
    before = from_disk()
    partition = partial(load_partitioned, settings) if stage == 3 else None
    options: Any = {"revision": None, "trust_remote_code": False, "attn_implementation": "sdpa"}
    options |= {"dtype": "auto" if as_stored else kinds[dtype], "partition": partition}
    (model, _), read = own_memory(lambda: engine_model.load_policy(directory, **options))
    build = FsdpEngine if stage == "fsdp" else DeepSpeedEngine
    engine = build(model, ranks, temperature=1.0, **settings)
    disk = from_disk() - before
    _, exported = own_memory(lambda: engine.export(Path(directory) / f"export-{stage}-{dtype}-{as_stored}"))
    return read, disk, exported


def loadings() -> None:
    """Prints the table of `--loading`."""
    from rlctl.run_spec.model import RECIPE
    from rlctl.tiny.model import build_tokenizer
    from tests.processes import on_ranks_each

    case = Case(layers=8, hidden=768, inner=2048, heads=8, kv_heads=4, vocab=8192)
    print("| engine | stored → computed | read | own MiB per rank | MiB from disk, both | export: own MiB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as where:
        cases: list[tuple[object, ...]] = []
        for stored in ("fp32", "bf16"):
            model = build(case) if stored == "fp32" else build(case).bfloat16()
            model.save_pretrained(f"{where}/{stored}")
            build_tokenizer(RECIPE).save_pretrained(f"{where}/{stored}")
            ways = [(0, False), (0, True), ("fsdp", False), ("fsdp", True), (3, False)]
            cases += [(f"{where}/{stored}", stage, "fp32", as_stored) for stage, as_stored in ways]
        for one in cases:
            at, stage, dtype, as_stored = one
            # The first case loads libraries; the engine keeps its file mapped.
            first = (f"{where}/{'bf16' if str(at).endswith('fp32') else 'fp32'}", 0, "fp32", False)
            results: Any = on_ranks_each(2, loading, [first, one], where=Path(where))[one]
            read, disk, exported = zip(*results, strict=True)
            engine = "FSDP2" if stage == "fsdp" else f"ZeRO {stage}"
            how = "as stored" if as_stored else "cast" if stage != 3 else "partitioned"
            print(
                f"| {engine} | {Path(str(at)).name} → {dtype} | {how} | {max(read):.0f} | {sum(disk):.0f} "
                f"| {max(exported):.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--run", nargs="+", metavar="SPEC", help="a preset, then key=value")
    parser.add_argument("--loading", action="store_true", help="reading and exporting on two ranks")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        fields = json.loads(options.case)
        case = Case(**fields | {"overrides": tuple(fields["overrides"])})
        options.answer.write_text(json.dumps(measured(case)))
        os._exit(0)  # DeepSpeed can abort at interpreter exit after `leave_ranks` (every third ZeRO-3 case)
    if options.loading:
        loadings()
        return
    if options.run:
        print(whole_run(options.run[0], options.run[1:]))
        os._exit(0)
    report = []
    print("| parameters | settings | predicted MiB | measured MiB | predicted / measured |")
    print("|---|---|---|---|---|")
    for case in STATES:
        x = compare(case)
        print(
            f"| {x['parameters'] / 1e6:.0f} M | {' '.join(case.overrides)} | {x['predicted_mib']:.0f} "
            f"| {x['mib']:.0f} | {x['predicted_mib'] / x['mib']:.2f} |",
            flush=True,
        )
        report.append(x)
    print(
        "\n| model | layers × hidden, inner, heads/kv, vocabulary | rows × tokens | settings "
        "| activations MiB | predicted MiB | measured MiB | predicted / measured |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in PASSES:
        x = compare(case)
        dimensions = (
            f"{case.layers} × {case.hidden}, {case.inner}, {case.heads}/{case.kv_heads}, {case.vocab}"
        )
        print(
            f"| {case.family} | {dimensions} | {case.rows} × {case.prompt + case.response} "
            f"| {' '.join(case.overrides)} | {x['activations_mib']:.0f} | {x['predicted_mib']:.0f} "
            f"| {x['mib']:.0f} | {x['predicted_mib'] / x['mib']:.2f} |",
            flush=True,
        )
        report.append(x)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
