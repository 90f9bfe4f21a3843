"""How long a training step takes on a machine: the work of its stages, and the two ends of their seconds.

Every stage is a roofline: arithmetic at a share of the peak FLOP/s, or bytes at a share of a bandwidth,
whichever takes longer, plus what does not depend on sizes. The shares are ranges of published measurements
(`step_rates.toml`); the two ends of an estimate are the fast and the slow end of all of them.
docs/evidence/planned-steps.md compares the result with published steps.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from rlctl.capabilities.sections import sections_on
from rlctl.run_spec.explain import BatchArithmetic
from rlctl.run_spec.lengths import Lengths
from rlctl.run_spec.machine import Machine
from rlctl.run_spec.memory import (
    adapter_parameters,
    has_no_mask,
    memory_total,
    packed_width,
    rollout_workspace,
    sequences_at_once,
)
from rlctl.run_spec.model_size import ModelSize, Shape
from rlctl.run_spec.run_spec import RunSpec

#: Weights of a layer: projections, their biases, norms.
_WEIGHTS_PER_LAYER = 12
#: Bytes per second for writing or reading a file in shared memory.
_FILES = 3e9
#: Tokens of packed rows with a mask, per token of sequences: rows are not filled.
_UNFILLED = 1.15
#: Bytes of memory traffic per token and layer in a forward pass in bf16, besides weights: for each element of
#: the hidden state (two norms in float32, two sums, inputs and outputs of products), of queries and keys
#: (rotations, products), of their norms, and of the inner state; and for each logit (float32, its log-sum).
_HIDDEN_BYTES, _QUERY_BYTES, _QUERY_NORM_BYTES, _INNER_BYTES, _LOGIT_BYTES = 98, 26, 36, 16, 20
#: Bytes that the optimizer's step reads and writes per parameter, on the GPU and on the host.
_STEP_BYTES, _HOST_STEP_BYTES = 40, 28


class Seconds(NamedTuple):
    """The two ends of an estimate."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The value from which both ends are equally far, as a ratio."""
        return float((self.low * self.high) ** 0.5)

    def __str__(self) -> str:
        """E.g. `36–57`, and `0.4–0.6` below ten seconds."""
        low, high = (f"{end:,.0f}" if self.high >= 10 else f"{end:,.1f}" for end in self)
        return low if low == high else f"{low}–{high}"


@dataclass(frozen=True, slots=True)
class Rates:
    """What programs reach of a machine; `step_rates.toml` explains each."""

    passes: float
    expert_rows: float
    masked_attention: float
    sampling: float
    bandwidth: float
    server_step: float
    server_sequence: float
    process_step: float
    process_sequence: float
    eager_layer: float
    plain_generation: float
    collectives: float
    all_reduce: float
    sync_weight: float
    wake: float
    optimizer_step: float
    beyond_tail: float


_TABLE = tomllib.loads(Path(__file__).with_name("step_rates.toml").read_text(encoding="utf-8"))
_FAST, _SLOW = (
    Rates(**{field.name: _TABLE[field.name][end] for field in fields(Rates)}) for end in ("fast", "slow")
)
#: The fast and the slow end. The bandwidth of a CPU is measured, not its peak.
GPU_RATES = _FAST, _SLOW
CPU_RATES = (
    replace(_FAST, sampling=1.0, bandwidth=0.9, process_step=0.001, sync_weight=0.001, beyond_tail=1.0),
    replace(_SLOW, sampling=0.7, bandwidth=0.6, process_step=0.004, sync_weight=0.003),
)


class StepWork:
    """What a step computes, reads and sends. All figures are of one rank, and of one step.

    Args:
        as_others: count work that rlctl leaves out and other software does: prompts are computed for each of
            their responses, and the policy is scored before the updates in bypass mode, too.
    """

    def __init__(
        self, spec: RunSpec, size: ModelSize, machine: Machine, lengths: Lengths, *, as_others: bool = False
    ) -> None:
        self.spec = spec
        self.size = size
        self.machine = machine
        self.lengths = lengths
        self.as_others = as_others
        self.stage = spec.engine.effective_stage
        self.whole = (size.num_parameters or 0) * spec.engine.width

    # --- training ---------------------------------------------------------------------------------

    @property
    def responses(self) -> float:
        """Responses to train on."""
        return self.spec.data.train_batch_size * self.spec.rollout.n / self.spec.world_size

    def tokens(self) -> float:
        """Prompt and response tokens at the mean lengths."""
        return self.lengths.total * self.responses

    @property
    def micro_batches(self) -> float:
        """Forward passes of one model over the batch."""
        batch = BatchArithmetic(self.spec)
        budget = self.spec.actor.ppo_max_token_len_per_gpu
        if budget:
            return max(float(batch.mini_batches), self.tokens() / budget)
        return float(batch.mini_batches * (batch.micro_batches_per_rank or 1))

    @property
    def shares_prompts(self) -> float:
        """Share of prompt tokens that are computed: a micro-batch computes a prompt once for its responses.

        With a token budget, kernels without a mask or checkpointed layers, each response has its own prompt.
        """
        actor = self.spec.actor
        model = self.spec.model
        rows = self.spec.actor.ppo_micro_batch_size_per_gpu
        apart = has_no_mask(model.attn_implementation) or model.enable_gradient_checkpointing
        if self.as_others or apart or actor.ppo_max_token_len_per_gpu:
            return 1.0
        return -(-rows // self.spec.rollout.n) / rows

    @property
    def scores_policy(self) -> bool:
        """Whether the policy scores the batch before the updates."""
        algorithm = self.spec.algorithm
        needed = any(map(algorithm.estimator_needs, ("score_norms", "sequence_weights")))
        return self.as_others or not algorithm.rollout_correction.bypass_mode or needed

    @property
    def scoring_passes(self) -> int:
        """Models that score the batch before the updates."""
        others = self.spec.needs_reference, self.spec.trains_critic
        more = sum(each.num_scoring_passes(self.spec) for each in sections_on(self.spec).values())
        return self.scores_policy + sum(others) + more

    @property
    def update_passes(self) -> int:
        """Forward passes over the batch that cost as much as all updates.

        A backward pass costs two, one of them for the gradients of weights, which frozen weights do not have;
        checkpointed layers are computed again. A critic has no adapters.
        """
        again = int(self.spec.model.enable_gradient_checkpointing)
        policy = (2 if self.spec.model.lora_rank else 3) + again
        critic = 3 + again
        return self.spec.actor.ppo_epochs * (policy + critic * self.spec.trains_critic)

    @property
    def trained(self) -> int:
        """Number of parameters of the policy that are trained."""
        return adapter_parameters(self.spec, self.size) or self.size.num_trainable or 0

    @property
    def gathered(self) -> float:
        """Bytes of weights received in one forward pass over the batch, under ZeRO-3."""
        return self.micro_batches * self.whole if self.stage == 3 and self.spec.world_size > 1 else 0.0

    @property
    def reduced(self) -> float:
        """Bytes exchanged to sum gradients and to collect the updated weights.

        Sums are in float32, at stages 0 and 1 at every optimizer step, at stages 2 and 3 after every backward
        pass. Stage 0 sums all gradients on all ranks, which moves them twice.
        """
        spec = self.spec
        steps = self.spec.updates_per_batch
        if spec.world_size == 1:
            return 0.0
        backward = 4 * self.micro_batches * spec.actor.ppo_epochs
        sums = (8 * steps, 4 * steps, backward, backward)[self.stage]
        collected = spec.engine.width * steps if self.stage in (1, 2) else 0.0
        return self.trained * (1 + spec.trains_critic) * (sums + collected)

    @property
    def _group(self) -> int | None:
        """Number of ranks that gather weights among themselves, if these are not all."""
        size = self.spec.engine.shard_size
        return size if size and size < self.spec.world_size and self.gathered else None

    @property
    def _sums_in_group(self) -> bool:
        """Whether gradients are summed within a group first, as FSDP2 does; DeepSpeed sums over all ranks."""
        return self._group is not None and self.spec.engine.name == "fsdp"

    @property
    def gathers_in_node(self) -> bool:
        """Whether weights are gathered within a node, on several."""
        return self._group is not None and self.spec.trainer.n_gpus_per_node % self._group == 0

    @property
    def exchanged_in_group(self) -> float:
        """Bytes that a GPU sends to others of its group in the updates, of these groups or of all ranks."""
        return self.update_passes * self.gathered + (
            self.reduced if self._sums_in_group or not self._group else 0.0
        )

    @property
    def exchanged_beyond_group(self) -> float:
        """Bytes that a GPU sends beyond its group in the updates; 0 without `engine.shard_size`."""
        if not self._group:
            return 0.0
        return self._summed_between if self._sums_in_group else self._refreshed + self.reduced

    @property
    def _summed_between(self) -> float:
        """Bytes to sum a rank's shard of the gradients over the groups of FSDP2, which moves it twice."""
        assert self._group
        return 2 * self.reduced / self._group

    @property
    def _refreshed(self) -> float:
        """Bytes of updated weights that DeepSpeed gathers over all ranks, once after each optimizer step.

        Afterwards each group has a copy. Frozen weights stay in it; a step outdates only the trained ones.
        """
        if not self._group or self._sums_in_group:
            return 0.0
        width = self.spec.engine.width
        models = 1 + self.spec.trains_critic
        return self.spec.updates_per_batch * self.trained * width * models

    def _forward_seconds(self, shape: Shape, parameters: int, rates: Rates) -> float:
        """Arithmetic and memory traffic of a forward pass over the batch.

        Two FLOPs per token and weight that multiplies it; attention four per token, layer, element of a query
        and position that is attended to: half of the sequence, or with a mask all of the packed row. The
        output head is computed for response tokens only, and an embedding is looked up.
        """
        masked = not has_no_mask(self.spec.model.attn_implementation)
        sampled = self.responses * self.lengths.response
        tokens = sampled + self.responses * self.lengths.prompt * self.shares_prompts
        head = shape.vocab * shape.hidden
        sharing = max(1, self.spec.trainer.n_gpus_per_node // (self.machine.gpus or 1))
        speed = self.machine.flops / sharing
        multiplied = parameters - head - self._idle_embedding(shape)
        linear = (tokens * 2 * multiplied + sampled * 2 * head) / (speed * rates.passes)
        traffic = tokens * self._layer_bytes(shape) + sampled * _LOGIT_BYTES * shape.vocab
        linear += sharing * traffic / (self.machine.gpu_bandwidth * rates.bandwidth)
        linear += sharing * tokens * self._expert_traffic(shape, rates)
        each = 4 * (shape.layers - shape.linear_layers) * shape.queries
        if not masked:
            return linear + tokens * each * self.lengths.attended / (speed * rates.passes)
        row = max(self.lengths.total, packed_width(shape.hidden))
        attention = tokens * each * row / (speed * rates.masked_attention)
        return _UNFILLED * (linear + attention)

    def _link(self, rates: Rates) -> float:
        """Bytes/s of collectives: of a node's GPUs, or of their network cards together."""
        machine = self.machine
        link = machine.link
        if self.spec.trainer.nnodes > 1:
            link = min(link, machine.network * max(1, self.spec.trainer.n_gpus_per_node))
        return link * rates.collectives

    def _group_link(self, rates: Rates) -> float:
        """Bytes/s of collectives among the ranks that gather weights together."""
        return self.machine.link * rates.collectives if self.gathers_in_node else self._link(rates)

    def _exchange_seconds(self, rates: Rates) -> float:
        """Seconds of what is exchanged in the updates besides the weights gathered in a group."""
        if not self._sums_in_group:
            return (self.reduced + self._refreshed) / self._link(rates)
        machine = self.machine
        between = self.machine.link
        if self.spec.trainer.nnodes > 1:  # each rank of a node by its own network card
            between = min(between, machine.network)
        return self.reduced / self._group_link(rates) + self._summed_between / (between * rates.collectives)

    # --- sampling ---------------------------------------------------------------------------------

    def decode_step(self, shape: Shape, running: float, context: float, rates: Rates) -> float:
        """Seconds of one decoding step of one engine.

        Args:
            running: sequences; every step reads their keys and values, and all weights that they use.
            context: mean tokens of each.
        """
        spec = self.spec
        machine = self.machine
        gpus = self._engine_gpus
        reads = self._weights_read(shape, running) / (machine.gpu_bandwidth * gpus * rates.bandwidth)
        active = (self.size.num_parameters or 0) - self.size.num_idle - self._idle_embedding(shape)
        computed = 2 * active * running / (machine.flops * gpus * rates.sampling)
        cache = (
            running * context * self.cached_bytes(shape) / (machine.gpu_bandwidth * gpus * rates.bandwidth)
        )
        on_gpu = max(reads, computed) + cache + running * self._expert_traffic(shape, rates) / gpus
        if gpus > 1:
            on_gpu += running * self._summed_bytes(shape) / (machine.link * rates.collectives)
            on_gpu += shape.layers * 2 * rates.all_reduce
        is_server = spec.has_rollout_servers
        fixed = rates.server_step if is_server else rates.process_step
        each = rates.server_sequence if is_server else rates.process_sequence
        if self._is_eager and machine.gpus:
            on_gpu = max(on_gpu, shape.layers * rates.eager_layer)
        return on_gpu + fixed + each * running

    def prompt_token(self, shape: Shape, length: float, rates: Rates) -> float:
        """Seconds per token of a prompt of this length; the output head is computed for its last one only."""
        attention = 2 * (shape.layers - shape.linear_layers) * shape.queries * length
        active = (self.size.num_parameters or 0) - self.size.num_idle
        computed = active - shape.vocab * shape.hidden - self._idle_embedding(shape)
        seconds = (2 * computed + attention) / (self.machine.flops * rates.sampling)
        seconds += self._expert_traffic(shape, rates)
        summed = self._summed_bytes(shape) / (self.machine.link * rates.collectives)
        return seconds / self._engine_gpus + summed

    def cached_bytes(self, shape: Shape) -> float:
        """Bytes of keys and values per token."""
        return 2.0 * (shape.layers - shape.linear_layers) * shape.keys * self.spec.cached_width

    def _summed_bytes(self, shape: Shape) -> float:
        """Bytes per token that a GPU sends to others of its engine: two sums of hidden states per layer."""
        gpus = self._engine_gpus
        return shape.layers * 2 * (2 * (gpus - 1) / gpus) * shape.hidden * 2

    def _layer_bytes(self, shape: Shape) -> float:
        """Bytes per token that layers, without experts, read and write in a forward pass."""
        heads = shape.queries + shape.keys
        each = _HIDDEN_BYTES * shape.hidden + (_QUERY_BYTES + _QUERY_NORM_BYTES * shape.norms_heads) * heads
        inner = 0 if shape.has_experts else _INNER_BYTES * shape.inner
        return shape.layers * (each + inner) * self.spec.engine.width / 2

    def _expert_traffic(self, shape: Shape, rates: Rates) -> float:
        """Seconds per token to gather and pad the rows of experts and to add up their results, on one GPU."""
        if not shape.has_experts:
            return 0.0
        inputs = shape.layers * max(1, shape.experts_per_token) * shape.hidden
        inner = self._active_experts(shape) / (3 * shape.hidden)  # of all layers
        return rates.expert_rows * 2 * (inputs + inner) / self.machine.gpu_bandwidth

    def _active_experts(self, shape: Shape) -> float:
        """Weights of the experts that one token chooses."""
        if not shape.has_experts:
            return 0.0
        active = (self.size.num_trainable or 0) - self.size.num_idle
        attention = sum(
            inputs * outputs
            for name, (inputs, outputs) in shape.matrices().items()
            if name in {"q_proj", "k_proj", "v_proj", "o_proj"}
        )
        ends = shape.vocab * shape.hidden + self._idle_embedding(shape)
        return max(0.0, float(active - ends - shape.layers * attention))

    @property
    def _engine_gpus(self) -> int:
        return self.spec.rollout.tensor_model_parallel_size

    @property
    def _is_eager(self) -> bool:
        return bool(self.spec.rollout.engine_kwargs.get("enforce_eager", False))

    def _idle_embedding(self, shape: Shape) -> int:
        """Parameters of the embedding where it is apart from the head: a step looks up rows of it."""
        layer = sum(inputs * outputs for inputs, outputs in shape.matrices().values())
        ends = (self.size.num_trainable or 0) - self.size.num_idle - shape.layers * layer
        return shape.vocab * shape.hidden if ends > 1.5 * shape.vocab * shape.hidden else 0

    def _weights_read(self, shape: Shape, tokens: float) -> float:
        """Bytes of weights that these tokens use: of experts, those that any token chooses."""
        parameters = self.size.num_parameters or 0
        idle = self.size.num_idle
        experts = idle + self._active_experts(shape)
        unused = idle * (idle / experts) ** max(tokens - 1, 0.0) if idle else 0.0
        return (parameters - unused - self._idle_embedding(shape)) * self.spec.sampled_width

    def generation(self, shape: Shape, rates: Rates) -> float:
        """Seconds to sample the responses of a step: until the slowest engine's longest response ends."""
        spec = self.spec
        machine = self.machine
        lengths = self.lengths
        servers = spec.rollout.server.replicas if spec.has_rollout_servers else 0
        engines = servers or max(1, spec.world_size // self._engine_gpus)
        responses = max(1.0, spec.data.train_batch_size * spec.rollout.n / engines)
        caches = spec.rollout.engine_kwargs.get("enable_prefix_caching", True)
        once = 1 / spec.rollout.n if caches and spec.rollout_engine.forms_batches else 1.0
        running = min(responses, self._fitting(shape, once))
        seconds = responses * once * lengths.prompt * self.prompt_token(shape, lengths.prompt, rates)
        # While responses wait, a new one takes the place of each that ends.
        steps = (responses - running) * lengths.response / running
        seconds += steps * self.decode_step(shape, running, lengths.context, rates)
        before = 0.0
        groups = lengths.responses
        for place, length in enumerate(groups):
            left = max(1.0, running * (len(groups) - place) / len(groups))
            context = lengths.prompt + (before + length) / 2
            seconds += (length - before) * self.decode_step(shape, left, context, rates)
            before = length
        longest = lengths.longest(responses * engines)
        longest += rates.beyond_tail * (lengths.limit - longest)
        seconds += (longest - before) * self.decode_step(shape, 1.0, lengths.prompt + longest, rates)
        slower = 1.0 if spec.rollout_engine.forms_batches or not machine.gpus else rates.plain_generation
        return seconds * slower

    def _fitting(self, shape: Shape, once: float) -> float:
        """Sequences that an engine samples at once; `once`: share of a prompt that each sequence stores."""
        spec = self.spec
        machine = self.machine
        most = float(
            spec.rollout.max_num_seqs or sequences_at_once(machine.gpu_bytes if machine.gpus else None)
        )
        if not (machine.gpus and spec.rollout_engine.forms_batches):
            return float(spec.rollout.max_num_seqs or 1e9)
        share = spec.rollout.gpu_memory_utilization * machine.gpu_bytes
        share -= memory_total(rollout_workspace(spec, shape, machine.gpu_bytes))
        weights = (self.size.num_parameters or 0) * spec.sampled_width
        cache = share * self._engine_gpus - weights
        stored = self.lengths.context - (1 - once) * self.lengths.prompt
        return max(1.0, min(most, cache / (self.cached_bytes(shape) * stored)))

    # --- all stages -------------------------------------------------------------------------------

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Stage → seconds; empty if the model's dimensions or the GPU's speeds are unknown."""
        spec = self.spec
        shape = self.size.shape
        parameters = self.size.num_parameters
        if shape is None or parameters is None or not self.machine.knows_speed:
            return {}
        machine = self.machine
        read = (self.size.num_trainable or parameters) - self.size.num_idle
        passing = max(self._forward_seconds(shape, read, rates), self.gathered / self._group_link(rates))
        shard = self.trained / spec.world_size
        per_step = _STEP_BYTES * shard / (machine.gpu_bandwidth * rates.bandwidth)
        if spec.engine.offload != "none" and machine.gpus:
            ranks = spec.trainer.n_gpus_per_node
            per_step = _HOST_STEP_BYTES * shard * ranks / machine.host_bandwidth + 6 * shard / machine.bus
        figures = {
            "generate": self.generation(shape, rates),
            "score": self.scoring_passes * passing,
            "update": self.update_passes * passing + self._exchange_seconds(rates),
            "step": spec.updates_per_batch * (per_step + rates.optimizer_step) * (1 + spec.trains_critic),
            "sync": self._sync(shape, rates),
        }
        return figures | {"whole step": sum(figures.values())}

    def _sync(self, shape: Shape, rates: Rates) -> float:
        """Seconds until the rollout engine samples with new weights, and to wake it and put it to sleep."""
        spec = self.spec
        machine = self.machine
        sampling = (self.size.num_parameters or 0) * spec.rollout_width / self._engine_gpus
        link = self._group_link(rates) if self._sums_in_group else self._link(rates)
        seconds = 2 * sampling / machine.gpu_bandwidth + (self.whole / link if self.gathered else 0.0)
        if spec.syncs_adapter:
            seconds = self.trained * spec.engine.width / machine.gpu_bandwidth
        elif spec.has_rollout_servers:
            is_broadcast = spec.broadcasts_weights(on_gpus=machine.gpus > 0)
            seconds += (
                self.whole / (machine.link * rates.collectives) if is_broadcast else 2 * self.whole / _FILES
            )
        if machine.gpus and spec.engine_sleeps:
            seconds += rates.wake
            if not spec.drops_weights_asleep:
                seconds += 2 * sampling / machine.bus
        return seconds + _WEIGHTS_PER_LAYER * shape.layers * rates.sync_weight
