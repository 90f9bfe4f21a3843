"""Launch files of the shapes that the frameworks ship."""

VERL = """\
#!/usr/bin/env bash
set -xeuo pipefail
MODEL=${MODEL:-org/model-1b}
n=${N:-4}
prompts=64
DATA=(
    data.train_files=train.parquet   # the parquet
    data.train_batch_size=$prompts
    # data.seed=3
    data.max_response_length=$((1024 * 2))
)
ray job submit --address=http://127.0.0.1:8265 -- \\
  python3 -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.actor.optim.lr=5e-7 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.clip_ratio=0.3 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.enforce_eager=True \\
    algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \\
    algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.actor.surprise=1 \\
    my.own_key=3 \\
    trainer.n_gpus_per_node=4 trainer.logger='["console","swanlab"]' \\
    trainer.total_epochs=2 $@
"""

TRL = """\
from trl import GRPOConfig, GRPOTrainer

N = 4
raise SystemExit("never executed")
args = GRPOConfig(
    output_dir="out",
    per_device_train_batch_size=2 * N,
    gradient_accumulation_steps=3,
    num_generations=N,
    loss_type="dr_grpo",
    scale_rewards="none",
    epsilon_high=0.28,
    beta=0.04,
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
    learning_rate=float("2e-6"),
    lr_scheduler_type="cosine",
    max_steps=30,
    lerning_rate=1,
)
args.seed = 7
trainer = GRPOTrainer(model="org/model-1b", reward_funcs=[len], args=args)
"""

OPENRLHF = """\
ROLLOUT_ARGS=(
   --actor.model_name_or_path ${MODEL}
   --rollout.batch_size 32
   --rollout.n_samples_per_prompt 8
   --train.batch_size 64
   --data.max_len 4096
   --rollout.max_new_tokens 3072
   --algo.advantage.estimator group_norm
   --algo.advantage.is_correction_level seq
   --algo.kl.init_coef 1e-3
   --algo.kl.use_loss
   --algo.kl.estimator k2
   --actor.eps_clip_low_high 0.2 0.27
   --train.colocate_all
   --no.such_flag
)
python3 -m openrlhf.cli.train_ppo_ray ${ROLLOUT_ARGS[@]} ${MORE_ARGS[@]}
"""

SLIME = """\
PERF_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 9216 --sequence-parallel)
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-tis --kl-loss-coef 0.00)
ray job submit -- python3 train.py --hf-checkpoint /m --colocate --rollout-batch-size 32 \\
   --n-samples-per-prompt 8 --num-steps-per-rollout 4 --rollout-max-response-len 8192 \\
   --lr 1e-6 --adam-beta2 0.98 ${GRPO_ARGS[@]} ${PERF_ARGS[@]} --unheard-of 3
"""
