"""Measures the conversion of what vLLM returns to turns: CPU microseconds per sampled token.

    python benchmarks/completions.py [--tokens 1000] [--turns 64]

The outputs are synthetic: in process `FlatLogprobs`, of a server the JSON of its answer. A row with listed
tokens is that of exact sampling and score centering together. Each figure is the least of five rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlctl.batch import Turn
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.vllm import completion_of as of_process
from rlctl.rollout.vllm_server import completion_of as of_server

VOCABULARY, ROUNDS = 50_000, 5


def output_of_process(tokens: int, listed: int) -> Any:
    """One output of vLLM: at each place the sampled token, then the most likely ones."""
    logits = torch.randn(tokens, 1 + listed).log_softmax(-1)
    ids = torch.randint(VOCABULARY, (tokens, 1 + listed))
    flat = SimpleNamespace(
        token_ids=ids.flatten().tolist(),
        logprobs=logits.flatten().tolist(),
        start_indices=list(range(0, tokens * (1 + listed), 1 + listed)),
    )
    return SimpleNamespace(token_ids=ids[:, 0].tolist(), logprobs=flat, finish_reason="stop")


def answer_of_server(tokens: int, listed: int) -> bytes:
    """The JSON of one answer, with all that a server writes for each token."""
    output = output_of_process(tokens, listed)
    pairs = list(zip(output.logprobs.token_ids, output.logprobs.logprobs, strict=True))
    tops = [
        {f"token_id:{token}": value for token, value in pairs[start : start + 1 + listed]}
        for start in output.logprobs.start_indices
    ]
    log_probs = {
        "text_offset": list(range(0, 4 * tokens, 4)),
        "tokens": [f"token_id:{token}" for token in output.token_ids],
        "token_logprobs": [output.logprobs.logprobs[start] for start in output.logprobs.start_indices],
        "top_logprobs": tops,
    }
    choice = {"index": 0, "text": "word " * tokens, "logprobs": log_probs, "finish_reason": "stop"}
    return json.dumps({"choices": [choice | {"token_ids": output.token_ids}]}).encode()


def microseconds(work: Callable[[], list[Turn]]) -> float:
    """Per token; the least of several rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        turns = work()
        found.append(1e6 * (time.process_time() - start) / sum(len(turn.token_ids) for turn in turns))
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per turn")
    parser.add_argument("--turns", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| listed tokens | in process | server |\n|---|---|---|")
    for listed in (0, 20, 128):
        sampling = Sampling(options.tokens, with_kept=listed > 0, top_k=listed // 2, num_most_likely=listed)
        outputs = [output_of_process(options.tokens, listed) for _ in range(options.turns)]
        answers = [answer_of_server(options.tokens, listed) for _ in range(options.turns)]

        def in_process(outputs: list[Any] = outputs, sampling: Sampling = sampling) -> list[Turn]:
            has_lists = sampling.num_most_likely > 0
            return [of_process(output, has_lists=has_lists).turn(sampling, 0) for output in outputs]

        def by_server(answers: list[bytes] = answers, sampling: Sampling = sampling) -> list[Turn]:
            has_lists = sampling.num_most_likely > 0
            return [of_server(answer, has_lists=has_lists).turn(sampling, 0) for answer in answers]

        print(f"| {listed} | {microseconds(in_process):.2f} | {microseconds(by_server):.2f} |", flush=True)


if __name__ == "__main__":
    main()
