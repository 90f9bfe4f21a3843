"""Models that are cut up while they are read, and the collectives of passes over them."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlctl.engine.deepspeed import (
    DeepSpeedCritic,
    DeepSpeedEngine,
    FrozenPolicy,
    load_partitioned,
)
from rlctl.engine.deepspeed_setup import Settings, frozen_settings
from rlctl.engine.lora import add_lora
from rlctl.engine.ranks import Ranks
from tests.collectives import Recorder
from tests.models import tiny_batch, tiny_model
from tests.peak_memory import PeakMemory
from tests.unit.engine.engine_jobs import DTYPES, ROWS, take_step, weights_of


class Held:
    """Counts numbers of the parameters that modules hold in full, whenever one is given to a module."""

    def __init__(self) -> None:
        self.peak = 0
        self._seen: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()

    def __enter__(self) -> Held:
        self._hook = nn.modules.module.register_module_parameter_registration_hook(self._registered)
        return self

    def __exit__(self, *_) -> None:
        self._hook.remove()

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            # The newest is counted whole: our hook may run before or after the one that cuts it up.
            now = sum(p.data.numel() for p in self._seen.values() if not p.is_meta and p is not parameter)
            if not parameter.is_meta:
                self.peak = max(self.peak, now + getattr(parameter, "ds_numel", parameter.numel()))
            self._seen[id(parameter)] = parameter


def settings(dtype: str, **more) -> Settings:
    return Settings(
        zero_stage=3, dtype=DTYPES[dtype], weight_decay=0.1, betas=(0.9, 0.95), grad_clip=1.0, **more
    )


def read(directory: str, given: Settings, *, whole: bool):
    """The model; the most numbers that modules held at once; the most bytes that were alive at once."""

    def load():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=given["dtype"])

    with Held() as held, PeakMemory() as memory:
        model = load() if whole else load_partitioned(given, load, AutoConfig.from_pretrained(directory))
    return model, held.peak, memory.peak


def both_ways(ranks: Ranks, directory: str, dtype: str, kind: str, at: str):
    """By way of reading: what is the same either way; and the most numbers and bytes held while reading."""
    found = {}
    batch = tiny_batch(tiny_model(), ROWS, seed=1)
    for whole in (True, False):
        given = frozen_settings(DTYPES[dtype]) if kind == "reference" else settings(dtype)
        if kind == "offload":
            given["offload"] = "all"
        model, *held = read(directory, given, whole=whole)
        buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
        same: dict[str, object] = {"buffers": buffers}
        if kind == "reference":
            policy = FrozenPolicy(model, ranks, zero_stage=3, dtype=DTYPES[dtype], temperature=1.0)
            same["log-probs"] = [policy.log_probs(batch.inputs) for _ in range(3)]
            same["log-probs"].append(policy.top_k(batch.inputs, 3, 20))
        elif kind == "critic":
            critic = DeepSpeedCritic(model, ranks, **given)
            values = [critic.values(batch.inputs)]
            critic.backward(((values[0] - batch.advantages) ** 2).sum(), last=True)
            same["norm"] = critic.step(lr=1e-2).grad_norm
            values.append(critic.values(batch.inputs))
            same |= {"values": [value.detach() for value in values], "weights": weights_of(critic)}
        else:
            if kind == "lora":
                torch.manual_seed(3)
                add_lora(model, 3, 6.0, ["q_proj", "down_proj"])
            actor = DeepSpeedEngine(model, ranks, temperature=0.7, **given)
            same["start"] = weights_of(actor)
            first = actor.policy(batch.inputs)
            same["log-probs"], same["entropy"] = first.log_probs.detach(), first.entropy.detach()
            same["norms"] = [take_step(actor, seed, 4).grad_norm for seed in (1, 2)]
            same["after"] = weights_of(actor)
            place = Path(at) / f"{kind}-{dtype}-{Path(directory).name}-{whole}"
            actor.save(place / "engine")
            actor.export(place / "model")
            ranks.barrier()
            fresh, *_ = read(directory, given, whole=whole)
            if kind == "lora":
                add_lora(fresh, 3, 6.0, ["q_proj", "down_proj"])
            resumed = DeepSpeedEngine(fresh, ranks, temperature=0.7, **given)
            resumed.load(place / "engine")
            same["resumed"] = weights_of(resumed)
            same["adapter"] = actor.adapter().tensors if kind == "lora" else {}
            exported = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
            same["exported"] = dict(exported.named_parameters())
        found[whole] = (same, held)
    return found


def count_of_parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


#: As of a model so large that no weight stays gathered until its next use.
LARGE = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
}


def recorded(ranks: Ranks, vocabulary: int, tied: bool, max_logits: int):
    """Per pass in the steady state, what was recorded; and weights after a step, plain and cut up."""
    from rlctl.run_spec import memory

    memory.MAX_LOGITS = max_logits
    batch = tiny_batch(tiny_model(vocabulary=vocabulary), 2 * 4, seed=1, prompt=5, horizon=24)
    mine = batch.pick(range(ranks.rank * 4, ranks.rank * 4 + 4))
    engines = {}
    for stage in (0, 3):
        given = settings("fp32", more_config=LARGE if stage == 3 else {})
        given["zero_stage"] = stage
        model = tiny_model(vocabulary=vocabulary, tied=tied)
        engines[stage] = DeepSpeedEngine(model, ranks, temperature=1.0, **given)
    tokens = len(batch.advantages)

    def score(actor):
        with torch.no_grad():
            return actor.policy(mine.inputs)

    def train(actor):
        output = actor.policy(mine.inputs)
        actor.backward(-(output.log_probs * mine.advantages).sum() / tokens, last=True)

    found: dict[object, object] = {}
    for name, run in (("score", score), ("train", train)):
        for _ in range(5):  # DeepSpeed learns the order of modules in the first passes of a kind
            with Recorder() as recorder:
                run(engines[3])
        found[name] = recorder.counts()
    engines[3].step(lr=0.0, skip=True)
    for stage, actor in engines.items():
        train(actor)
        found[stage] = (actor.step(lr=1e-2).grad_norm, weights_of(actor))
    found["tokens"] = len(mine.advantages)
    return found


class ListOfExperts(nn.Module):
    """A mixture whose experts are modules, as architectures outside transformers write it."""

    def __init__(self, hidden: int, inner: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, count, bias=False)
        parts = [
            nn.Sequential(nn.Linear(hidden, inner), nn.SiLU(), nn.Linear(inner, hidden)) for _ in range(count)
        ]
        self.specialists = nn.ModuleList(parts)
        self.hit: set[int] = set()

    def forward(self, states):
        share, chosen = self.router(states).softmax(-1).max(-1)
        result = torch.zeros_like(states)
        for number in chosen.unique().tolist():
            self.hit.add(number)
            here = chosen == number
            result[here] = self.specialists[number](states[here]) * share[here][:, None]
        return result


def mixture(kind: str):
    torch.manual_seed(0)
    model = tiny_model("llama") if kind == "list" else Qwen3MoeForCausalLM(QWEN3_MOE)
    if kind == "list":
        model.config.num_local_experts = 12
        for layer in model.model.layers:
            layer.mlp = ListOfExperts(16, 24, 12)
    return model.eval()


QWEN3_MOE = Qwen3MoeConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_experts=4,  # as many as layers
    num_experts_per_tok=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=1,
)


def mixed(ranks: Ranks, kind: str, stage: int):
    """Weights after two steps; the experts that this rank ran in the second, after all probes."""
    model = mixture(kind)
    given = settings("fp32", more_config=LARGE if stage == 3 else {})
    given["zero_stage"] = stage
    actor = DeepSpeedEngine(model, ranks, temperature=1.0, **given)
    start = weights_of(actor)
    lists = [part for part in model.modules() if isinstance(part, ListOfExperts)]
    norms = []
    for seed in (1, 2):
        for part in lists:
            part.hit.clear()
        norms.append(take_step(actor, seed, 2).grad_norm)
    return start, norms, weights_of(actor), [sorted(part.hit) for part in lists]
