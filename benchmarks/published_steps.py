"""Compares the dry run's estimate of seconds with steps that others have published.

    python benchmarks/published_steps.py

Prints two tables of docs/evidence/planned-steps.md from `published_steps.toml`: stages of training steps, and
output tokens per second of a server. Nothing is measured here; no GPU is needed.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlctl.run_spec.lengths import Lengths
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import machine_of
from rlctl.run_spec.model_size import ModelSize, Shape
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.step_time import GPU_RATES, Seconds

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Tokens that no response reaches.
_NO_LIMIT = 10**6
#: Settings of every row: sampled by vLLM, and flash attention.
_ALL = [
    "data.train_files=x",
    "model.path=org/published",
    "model.attn_implementation=varlen",
    "engine.dtype=bf16",
    "rollout.name=vllm",
]


def placement_of(row: dict[str, Any], *more: str) -> Placement:
    """The plan of a row."""
    *shape, norms, linear = row["shape"]
    idle = row.get("idle", 0)
    dimensions = Shape(
        *shape,
        norms_heads=bool(norms),
        linear_layers=linear,
        has_experts=idle > 0,
        experts_per_token=row.get("experts_per_token", 0),
    )
    size = ModelSize("as published", row["parameters"], dimensions, num_idle=idle)
    spec = load_spec([], [], [*_ALL, *row.get("settings", []), *more]).spec
    return Placement(spec, size, machine_of(row["machine"]), row.get("mean_response"))


def served(row: dict[str, Any]) -> Iterator[tuple[list[float], Seconds]]:
    """Points of a serving row, each with the ends of its output tokens per second."""
    plan = placement_of(row, "rollout.mode=server")
    shape = plan.size.shape
    assert shape
    for point in row["points"]:
        users, prompt, response, _ = point
        speeds = []
        equal = prompt + response / 2
        mean_contexts = equal, Lengths(prompt, response, _NO_LIMIT).context if row.get("unequal") else equal
        for rates, context in zip(GPU_RATES, mean_contexts, strict=True):
            step = plan.work.decode_step(shape, users, context, rates)
            step += users * prompt / response * plan.work.prompt_token(shape, prompt, rates)
            speeds.append(users / step)
        yield point, Seconds(min(speeds), max(speeds))


def tables() -> str:
    """Both tables in Markdown."""
    lines = ["| published | stage | measured, s | estimate, s |", "|---|---|---|---|"]
    for row in TABLE["step"]:
        intervals = placement_of(row).intervals
        name = f"[{row['name']}]({row['source']})"
        for stage, values in row["published"].items():
            lines.append(f"| {name} | {stage} | {', '.join(map(str, values))} | {intervals[stage]} |")
            name = ""
    for row in TABLE["serving"]:
        lines += ["", f"[{row['name']}]({row['source']}):", ""]
        lines += [
            "| users | prompt → response | measured, tokens/s | estimate, tokens/s |",
            "|---|---|---|---|",
        ]
        for (users, prompt, response, measured), ends in served(row):
            lines.append(f"| {users} | {prompt:,} → {response:,} | {measured:,.0f} | {ends} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
