"""Compares two weight syncs to vLLM with LoRA, merged weights or only the adapter: cost and precision.

    python benchmarks/lora_sync.py [--syncs 5]

A random Qwen2 with 58 million parameters and a random adapter of rank 16. The trainer sends it to a colocated
engine, which samples 16 responses of 48 tokens; the trainer scores these. Every case runs in a separate
process and prints a Markdown row: tensors sent, MiB per sync, median seconds per sync after the first, the
mean over tokens of |log π_train − log π_rollout|, and the same distance between the policy and its base
model, which is the effect of the adapter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.engine.lora import Adapter

RANK, ALPHA = 16, 32.0
LEARNT = 2e-3  # standard deviation of the adapter's B matrices
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 2, 32, 48
COLUMNS = ("precision", "transferred", "MiB per sync", "s per sync", "sync gap", "policy − base")


class Counted:
    """A policy that counts the bytes of the tensors it sends.

    Attributes:
        num_bytes: bytes sent since it was last set to 0.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.num_bytes = 0

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._actor.weights(merged=merged):
            self.num_bytes += tensor.nbytes
            yield name, tensor

    def adapter(self) -> Adapter:
        adapter: Adapter = self._actor.adapter()
        self.num_bytes += sum(tensor.nbytes for tensor in adapter.tensors.values())
        return adapter


def policy_model() -> Any:
    """A random Qwen2 with 18 layers of width 512 and tied embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlctl.run_spec.model_size import Shape
    from tests.models import config_of

    shape = Shape(layers=18, hidden=512, inner=1536, heads=8, kv_heads=2, head_dim=64, vocab=8192)
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of("qwen2", shape, tie_word_embeddings=True, **tokens))


def measure(precision: str, max_lora_rank: int, syncs: int) -> dict[str, Any]:
    """Measures one case in this process; with `max_lora_rank` 0, merged weights are sent."""
    import torch

    from rlctl.batch import ModelInputs, TokenSequence
    from rlctl.engine.deepspeed import DeepSpeedEngine
    from rlctl.engine.lora import BasePolicy, adapter_parameters, add_lora
    from rlctl.engine.ranks import join_ranks, leave_ranks
    from rlctl.rollout.completions import vllm_options
    from rlctl.rollout.expected_weights import ExpectedWeights
    from rlctl.rollout.protocol import Request, Sampling
    from rlctl.rollout.vllm import VLLMRollout
    from rlctl.run_spec.model import ALL_LINEAR, RECIPE
    from rlctl.tiny.model import build_tokenizer

    ranks, dtype = join_ranks(), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model, tokenizer = policy_model().to(dtype), build_tokenizer(RECIPE)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        adapters = {"enable_lora": True, "max_lora_rank": max_lora_rank} if max_lora_rank else {}
        rollout = VLLMRollout(
            directory,
            tokenizer,
            vllm_options(precision, PROMPT_TOKENS + RESPONSE_TOKENS) | adapters,
            ExpectedWeights(model),
        )
    add_lora(model, RANK, ALPHA, [ALL_LINEAR])
    for name, parameter in adapter_parameters(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=LEARNT)
    settings: dict[str, Any] = {"weight_decay": 0.0, "betas": (0.9, 0.999), "grad_clip": 1.0}
    actor = DeepSpeedEngine(model, ranks, temperature=1.0, zero_stage=0, dtype=dtype, **settings)
    counted, seconds = Counted(actor), []
    for version in range(1 + syncs):
        counted.num_bytes, began = 0, time.perf_counter()
        rollout.sync_weights(counted, policy_version=version)
        seconds.append(time.perf_counter() - began)
    sampling = Sampling(max_response_length=RESPONSE_TOKENS)
    prompts = torch.randint(2, 8192, (PROMPTS, PROMPT_TOKENS)).tolist()
    requests = [Request(prompts[i // SAMPLES], seed=i) for i in range(PROMPTS * SAMPLES)]
    turns = rollout.sample(requests, sampling)
    sequences = [TokenSequence.of_turn(r.token_ids, turn) for r, turn in zip(requests, turns, strict=True)]
    inputs = ModelInputs(
        torch.cat([sequence.token_ids for sequence in sequences]).to(ranks.device),
        torch.cat([sequence.sampled for sequence in sequences]).to(ranks.device),
        torch.tensor([len(sequence.token_ids) for sequence in sequences], device=ranks.device),
    )
    with torch.no_grad():
        said = actor.policy(inputs).log_probs
    learnt = (said - BasePolicy(actor, model).log_probs(inputs)).abs().mean().item()
    gap = (said.cpu() - torch.cat([turn.log_probs for turn in turns])).abs().mean().item()
    rollout.close()
    leave_ranks()
    return {
        "precision": precision,
        "transferred": "adapter" if max_lora_rank else "merged",
        "MiB per sync": f"{counted.num_bytes / 2**20:.1f}",
        "s per sync": f"{statistics.median(seconds[1:]):.3f}",
        "sync gap": f"{gap:.1e}",
        "policy − base": f"{learnt:.1e}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--syncs", type=int, default=5, help="measured, after the first")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        precision, rank = options.case
        print(json.dumps(measure(precision, int(rank), options.syncs)))
        return
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for precision in ("fp32", "bf16"):
        for rank in (0, RANK):
            command = [
                sys.executable,
                __file__,
                "--case",
                precision,
                str(rank),
                "--syncs",
                str(options.syncs),
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |", flush=True)


if __name__ == "__main__":
    main()
