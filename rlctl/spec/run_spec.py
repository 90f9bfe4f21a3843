"""`RunSpec`: the complete configuration of a run."""

from __future__ import annotations

from rlctl.registry import ROLLOUT_ENGINES
from rlctl.spec.actor import ActorSpec, CriticSpec, RefSpec
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.spec.base import Section
from rlctl.spec.model import EMBEDDED, ModelSpec
from rlctl.spec.reward import RewardSpec
from rlctl.spec.rollout import DataSpec, EngineCapabilities, RolloutSpec
from rlctl.spec.trainer import EngineSpec, TrainerSpec


class RunSpec(Section):
    """Configuration of one training run; every field has a default."""

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    rollout: RolloutSpec = RolloutSpec()
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
    def rollout_engine(self) -> EngineCapabilities:
        """Capabilities of the rollout engine."""
        found: EngineCapabilities | None = ROLLOUT_ENGINES.part(self.rollout.name).capabilities
        return found or EngineCapabilities()

    @property
    def has_rollout_servers(self) -> bool:
        """Whether rollout engines run in separate processes."""
        return self.rollout.mode == "server" and "server" in self.rollout_engine.modes

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
