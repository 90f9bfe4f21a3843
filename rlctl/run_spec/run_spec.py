"""Spec sections `engine` (DeepSpeed) and `trainer`, and `RunSpec`, which contains all sections."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from rlctl.registry import ROLLOUT_ENGINES, TRACKERS, TRAINING_ENGINES
from rlctl.run_spec.algorithm import ActorSpec, AlgorithmSpec, CriticSpec, RefSpec
from rlctl.run_spec.base import Duration, JsonMapping, NullWord, Registered, Section, one_or_many
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.model import EMBEDDED, ModelSpec
from rlctl.run_spec.rollout import DataSpec, EngineCapabilities, RewardSpec, RolloutSpec

Logger = Annotated[str, Registered(TRACKERS)]
Loggers = Annotated[list[Logger], BeforeValidator(one_or_many, json_schema_input_type=list[Logger] | str)]
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
#: A valid directory name: no separators, neither hidden nor `..`.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class EngineSpec(Section):
    """The training engine."""

    name: Annotated[str, Registered(TRAINING_ENGINES)] = "deepspeed"
    """Training engine of policy and critic. `fsdp`: PyTorch's FSDP2, which shards weights, gradients and
    optimizer states, the reference's weights too. With a user's engine the reference is DeepSpeed's."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, what ranks shard. 1: optimizer states; 2: also gradients; 3: also parameters."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the forward and backward pass. If not set: `bf16` if the GPU or the CPU (AMX-BF16,
    AVX512-BF16) of the machine that starts the run supports it, else `fp32`; the same for all ranks."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Offloading to host memory: `optimizer` (states and float32 copies; from stage 1 on) or `all` (also the
    parameters; stage 3). Saves GPU memory and costs time."""
    offload_base: bool = False
    """With LoRA: move the frozen weights to host memory while a colocated vLLM samples, so that only one of
    the two copies is on the GPU at a time."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the tokens of each row (DeepSpeed-Ulysses), which reduces the activations
    per rank. Must divide the ranks of a node, and the model's attention and key heads."""
    shard_size: Annotated[int | None, NullWord] = Field(default=None, ge=2)
    """Number of consecutive ranks that share one copy of sharded weights, such as those of a node, which then
    gather weights among themselves; with ZeRO-3 or FSDP2. null: all ranks. FSDP2 shards gradients and
    optimizer states among as many ranks; DeepSpeed shards those among all ranks, and holds the copy besides
    the sharded weights (`zero_hpz_partition_size`). Must divide the number of ranks."""
    deepspeed: JsonMapping = Field(default={})
    """Options merged into DeepSpeed's configuration unchanged: a mapping, or the path of a JSON file."""

    @property
    def width(self) -> int:
        """Bytes per number in `dtype`."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def effective_stage(self) -> int:
        """The ZeRO stage in effect: in bf16 at least 1, as the engine keeps float32 copies like stage 1."""
        if self.name == "fsdp":
            return 3
        return self.zero_stage if self.dtype == "fp32" else max(self.zero_stage, 1)

    def shards(self, world_size: int) -> int:
        """Number of ranks among which weights, gradients and optimizer states are sharded."""
        return self.shard_size if self.shard_size and self.name == "fsdp" else world_size


class GuardrailsSpec(Section):
    """Actions of training when a diagnosis rule fires; the thresholds are those of `rlctl diagnose`."""

    mode: Literal["off", "warn", "act"] = "warn"
    """`off`: no rule is evaluated; `warn`: actions are only reported; `act`: actions are taken."""
    ess_floor: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Raw effective sample size (ESS) below which an update is far off-policy; null: 0.3, as in diagnosis."""
    on_low_ess: Literal["warn", "scale_lr", "skip_step"] = "scale_lr"
    """Action on an update with raw ESS below the floor. `scale_lr`: multiply its learning rate by ESS /
    floor; `skip_step`: skip it. Both also halve the learning rate of the following updates; 11 updates
    without an alarm undo one halving."""
    on_drift: Literal["warn", "skip_step"] = "skip_step"
    """Action on an update if trained and sampling policy differ by more than 0.1 nats per token. `skip_step`:
    as in `on_low_ess`."""
    on_heavy_tail: Literal["warn", "tighten"] = "tighten"
    """Action if the median raw ESS of 11 batches is below the floor. `tighten`: halve the bounds of weights
    and rejection in log ρ until ESS recovers."""
    on_collapse: Literal["warn", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """Action if the run stops learning: no reward in 20 batches, no update in 11, degenerate responses."""


class EarlyStopSpec(Section):
    """End of a run whose metric no longer improves; a checkpoint of its last step is saved."""

    metric: Annotated[str | None, NullWord] = None
    """Metric that must improve, such as `val/gsm8k/reward_mean`; null: the mean validation reward, by which
    `keep_best` chooses."""
    goal: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""
    patience: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Number of logged values without improvement after which the run ends; null: never. Of the validation
    reward one is logged every `test_freq` steps."""
    min_delta: float = Field(default=0.0, ge=0)
    """A value counts as an improvement if it is better than the best by more than this."""


class TrainerSpec(Section):
    """Length, seed, tracking and checkpoints of the run."""

    logger: Loggers = Field(default=["console"])
    """Trackers besides `metrics.jsonl`, which is always written; `file.py:function`: your own."""
    project_name: str = Field(default="rlctl", pattern=NAME)
    """Project name in trackers such as W&B, and directory under `runs/`."""
    experiment_name: str = Field(default="run", pattern=NAME)
    """Run name in trackers such as W&B, and prefix of the run directory's name."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training prompts."""
    total_training_steps: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Number of batches to train on; null: as many as `total_epochs` contains."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks per machine, one per GPU (CPU processes without GPUs)."""
    nnodes: int = Field(default=1, ge=1)
    """Number of machines. For more than one, start `rlctl train` with torchrun on each."""
    save_freq: int = Field(default=-1, ge=-1)
    """Steps between checkpoints, besides `save_every`; 0 or -1: none by steps. The end is always saved."""
    save_every: Annotated[Duration | None, NullWord] = "30min"
    """Time between checkpoints, such as `90s`, `30min` or `2h`; null: none by time."""
    keep_best: bool = True
    """Save a checkpoint after every best validation so far, and keep the best (`checkpoints/best`)."""
    test_freq: int = Field(default=-1, ge=-1)
    """Steps between validations; also validates at start and end. 0 or -1: never."""
    early_stop: EarlyStopSpec = EarlyStopSpec()
    critic_warmup: int = Field(default=0, ge=0)
    """Number of batches at the start that train only the critic."""
    max_ckpt_to_keep: Annotated[int | None, NullWord] = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best; null: all."""
    save_in_background: Annotated[bool | None, NullWord] = None
    """Copy the state to the host's memory and write the checkpoint while training goes on; null: if it has at
    least 1 GiB. Where the memory does not suffice, training waits, and the run says so. The last one is
    waited for."""
    hang_timeout: Duration = "20min"
    """End the run if no rank makes progress for this long; the error names the rank that is waited for and
    the file with the stacks of all threads. A warning is printed after a twentieth of this time."""
    guardrails: GuardrailsSpec = GuardrailsSpec()
    rollouts_per_step: int = Field(default=32, ge=-1)
    """Episodes per step that are written to `rollouts/` with their log-probs, in whole groups; 0: none,
    -1: all."""
    log_samples: int = Field(default=-1, ge=-1)
    """Steps between tables of responses in W&B, MLflow and trackio: prompt, response, reward, its terms and
    log ρ of the episodes in `rollouts/`. 0 or -1: none."""
    seed: int = Field(default=1, ge=0)
    """Seed of data order, sampling and initialisation."""
    run_dir: Annotated[str | None, NullWord] = None
    """Run directory; null: `runs/<project_name>/<experiment_name>-<time>`."""
    accept_changed_inputs: bool = False
    """With `--resume`: continue although models, prompts or your files are not as at the start of the run.
    Not recorded: each resume needs it again."""


class RunSpec(Section):
    """Configuration of one training run; every field has a default."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    rollout: RolloutSpec = RolloutSpec()
    environment: EnvironmentSpec = EnvironmentSpec()
    reward: RewardSpec = RewardSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    actor: ActorSpec = ActorSpec()
    critic: CriticSpec = CriticSpec()
    ref: RefSpec = RefSpec()
    engine: EngineSpec = EngineSpec()
    trainer: TrainerSpec = TrainerSpec()

    @property
    def is_embedded(self) -> bool:
        """Whether the policy is the built-in tiny model."""
        return self.model.path == EMBEDDED

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self.environment.context_length or (
            self.data.max_prompt_length + self.data.max_response_length
        )

    @property
    def ppo_mini_batch_size(self) -> int:
        """Prompts per optimizer step, with null resolved."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size

    @property
    def critic_mini_batch_size(self) -> int:
        """Prompts per optimizer step of the critic, with null resolved."""
        return self.critic.ppo_mini_batch_size or self.ppo_mini_batch_size

    @property
    def critic_epochs(self) -> int:
        """The critic's passes over each batch, with null resolved."""
        return self.critic.ppo_epochs or self.actor.ppo_epochs

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of the policy per batch."""
        return max(1, self.data.train_batch_size // self.ppo_mini_batch_size) * self.actor.ppo_epochs

    @property
    def batches_ahead(self) -> int:
        """Batches that are sampled before they are due; below 0: all weights are older than permitted."""
        rollout = self.rollout
        ahead = max(rollout.staleness, rollout.max_staleness)
        if not rollout.paces:
            return ahead
        return min(ahead, (rollout.max_age_updates or 0) // self.updates_per_batch - rollout.sync_every + 1)

    @property
    def critic_updates_per_batch(self) -> int:
        """Optimizer steps of the critic per batch."""
        return max(1, self.data.train_batch_size // self.critic_mini_batch_size) * self.critic_epochs

    @property
    def critic_micro_batch_size(self) -> int:
        """Sequences per forward pass of the critic on one rank, with null resolved."""
        return self.critic.ppo_micro_batch_size_per_gpu or self.actor.ppo_micro_batch_size_per_gpu

    @property
    def critic_max_token_len(self) -> int | None:
        """Tokens per forward pass of the critic on one rank, with null resolved; None: no token budget."""
        return self.critic.ppo_max_token_len_per_gpu or self.actor.ppo_max_token_len_per_gpu

    @property
    def trains_critic(self) -> bool:
        """Whether a critic is built and trained."""
        return self.algorithm.estimator_needs("values")

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty needs a reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def syncs_adapter(self) -> bool:
        """Whether the rollout engine receives only LoRA's adapter and applies it itself."""
        applies = self.rollout_engine.applies_adapters
        return applies and self.model.lora_rank > 0 and not self.rollout.merge_lora

    @property
    def drops_weights_asleep(self) -> bool:
        """Whether a sleeping engine in this process drops its weights, because a full sync follows."""
        return self.rollout.sync_every == 1 and not self.syncs_adapter

    @property
    def engine_sleeps(self) -> bool:
        """Whether the rollout engine is in this process and frees its GPU memory during training."""
        frees = self.rollout_engine.frees_memory and self.rollout.free_cache_engine
        return frees and not self.has_rollout_servers

    @property
    def rollout_width(self) -> int:
        """Bytes per number of the rollout engine's weights; int8 weights are stored in `engine.dtype`."""
        return {"fp32": 4, "bf16": 2}.get(self.rollout.dtype or "", self.engine.width)

    @property
    def sampled_width(self) -> int:
        """Bytes per weight in the memory of the rollout engine: 1 if vLLM quantises them to fp8."""
        return 1 if self.rollout.engine_kwargs.get("quantization") == "fp8" else self.rollout_width

    @property
    def cached_width(self) -> int:
        """Bytes per number of cached keys and values."""
        kind = str(self.rollout.engine_kwargs.get("kv_cache_dtype", ""))
        return 1 if kind.startswith("fp8") else self.rollout_width

    @property
    def rollout_engine(self) -> EngineCapabilities:
        """Capabilities of the rollout engine."""
        capabilities: EngineCapabilities | None = ROLLOUT_ENGINES.part(self.rollout.name).capabilities
        return capabilities or EngineCapabilities()

    @property
    def has_rollout_servers(self) -> bool:
        """Whether rollout engines run in separate processes."""
        return self.rollout.mode == "server" and "server" in self.rollout_engine.modes

    @property
    def samples_in_ranks_with_vllm(self) -> bool:
        """Whether each rank has an engine of vLLM in its process, or a part of one."""
        return self.rollout.name == "vllm" and not self.has_rollout_servers

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks and rollout servers are on one machine."""
        server = self.rollout.server
        is_local = all(urlsplit(url).hostname in _LOOPBACK for url in server.urls)
        is_beside = not self.has_rollout_servers or (is_local and not server.is_placed_by_ray)
        return self.trainer.nnodes == 1 and is_beside

    def broadcasts_weights(self, *, on_gpus: bool) -> bool:
        """Whether servers receive new weights by broadcast; an adapter is always sent as files."""
        transfer = self.rollout.server.weight_transfer
        is_chosen = transfer == "broadcast" or (transfer == "auto" and on_gpus)
        return is_chosen and self.has_rollout_servers and not self.syncs_adapter

    @property
    def data_ranks(self) -> int:
        """Number of rank groups that process different rows; without sequence parallelism, of ranks."""
        return self.world_size // self.engine.sequence_parallel

    @property
    def pass_tokens(self) -> int | None:
        """Token budget per pass of the policy, over a sequence-parallel group's ranks; None: no budget."""
        budget = self.actor.ppo_max_token_len_per_gpu
        return None if budget is None else budget * self.engine.sequence_parallel

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.trainer.n_gpus_per_node * self.trainer.nnodes


@cache
def default_spec() -> RunSpec:
    """The spec of defaults alone; built once, because each construction copies every section."""
    return RunSpec()
