"""Values that follow a value of a stronger layer which they were not chosen for.

Rank, scaling and layers of LoRA are those of the adapter with which training starts.
A mini-batch that does not divide the batch becomes the batch, and a token budget that does not hold the
longest sequence becomes that length. Values of one layer that do not fit each other stay: a contradiction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl.run_spec.run_spec import default_spec
from rlctl.run_spec.sources import Leaf, Origin

#: Layers, weakest first; those of one strength together.
_STRENGTH = {"inferred": 0, "embedded": 1, "preset": 2, "file": 3, "command line": 4, "values": 4}
_BATCH = "data.train_batch_size"
_MINI_BATCHES = ("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_BUDGETS = ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")


_ADAPTER = "model.lora_adapter_path"


def follow_stronger(leaves: dict[str, Leaf]) -> None:
    """Replaces such values in `leaves`; the origin of a replaced one says why."""
    for key, value in _adapter_values(leaves).items():
        if _strength(leaves, key) < _strength(leaves, _ADAPTER):
            leaves[key] = Leaf(value, None, Origin("inferred", "of the adapter"))
    batch = _number(leaves, _BATCH)
    for key in _MINI_BATCHES:
        mini = _number(leaves, key)
        if mini and batch and batch % mini and _strength(leaves, key) < _strength(leaves, _BATCH):
            why = f"the batch, because {mini} of {leaves[key].origin} does not divide {batch}"
            leaves[key] = Leaf(None, None, Origin("inferred", why))
    longest = sum(_number(leaves, key) for key in _LENGTHS)
    strongest = max(_strength(leaves, key) for key in _LENGTHS)
    if "environment.context_length" in leaves or not all(_number(leaves, key) for key in _LENGTHS):
        return
    for key, ranks in zip(_BUDGETS, (_number(leaves, "engine.sequence_parallel"), 1), strict=True):
        budget = _number(leaves, key)
        if budget and ranks and budget * ranks < longest and _strength(leaves, key) < strongest:
            needed = -(-longest // ranks)
            why = f"one sequence, because {budget} of {leaves[key].origin} does not hold {longest} tokens"
            leaves[key] = Leaf(needed, str(needed), Origin("inferred", why))


def _adapter_values(leaves: dict[str, Leaf]) -> dict[str, Any]:
    """Key → value that describes the adapter; empty without one that can be read here."""
    path = leaves[_ADAPTER].value if _ADAPTER in leaves else None
    if not isinstance(path, str):
        return {}
    try:
        config = json.loads((Path(path).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        rank, alpha, layers = (config[name] for name in ("r", "lora_alpha", "target_modules"))
        names = [layers] if isinstance(layers, str) else sorted({name.rpartition(".")[2] for name in layers})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"model.lora_rank": rank, "model.lora_alpha": alpha, "model.target_modules": names}


def _strength(leaves: dict[str, Leaf], key: str) -> int:
    """Strength of the layer that sets the key; -1: its default, or what the hardware decides."""
    return _STRENGTH.get(leaves[key].origin.layer, -1) if key in leaves else -1


def _number(leaves: dict[str, Leaf], key: str) -> int:
    """The positive integer at the key, or its default; 0: any other value."""
    section, _, name = key.partition(".")
    value: Any = leaves[key].value if key in leaves else getattr(getattr(default_spec(), section), name)
    return value if type(value) is int and value > 0 else 0
