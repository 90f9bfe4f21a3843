"""Rows under rlctl's names → the files that rlctl, verl, TRL and NeMo-RL write, under their own names.

Only what the framework logs is written. The names are stated here once more, apart from the readers', so
that a wrong one is seen.

Sources: verl 0.9 `trainer/ppo/metric_utils.py`, `trainer/ppo/rollout_corr_helper.py`, `trainer/ppo/v1/`;
TRL 1.16 `trainer/grpo_trainer.py`, `experimental/async_grpo/`; NeMo-RL 0.6 `algorithms/grpo.py`.
"""

from __future__ import annotations

import json
import pprint
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.jsonl import METRICS_FILE

Format = Literal["rlctl", "verl", "trl", "nemo-rl"]
FORMATS: tuple[Format, ...] = ("rlctl", "verl", "trl", "nemo-rl")

_CORR = "rollout_corr/"
_STALE = "training/staleness_"
#: What only others log.
_OTHERS = ("mismatch/", "rollout/", "episode/num_messages/", "episode/tool_error_fraction")

#: rlctl's name → verl's.
VERL: Mapping[str, str] = {
    **{
        key: key
        for key in (
            *(f"critic/{what}/{which}" for what in ("score", "rewards", "advantages", "returns")
              for which in ("mean", "max", "min")),
            *(f"response_length/{which}" for which in ("mean", "max", "min", "clip_ratio")),
            *(f"actor/{what}" for what in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy",
              "grad_norm", "lr", "kl_loss", "kl_coef", "reward_kl_penalty")),
            *(f"critic/{what}" for what in ("vf_loss", "vf_explained_var", "grad_norm", "lr")),
            *(f"timing_s/{what}" for what in ("gen", "reward", "old_log_prob", "adv", "update_actor",
              "step")),
            *(f"training/rollout_probs_diff_{which}" for which in ("mean", "max", "std")),
            *(f"{_CORR}{what}" for what in ("training_ppl", "training_log_ppl", "rollout_ppl",
              "rollout_log_ppl", "kl", "k3_kl", "log_ppl_diff", "ppl_ratio", "chi2_token", "chi2_seq")),
            *(f"{_CORR}rollout_is_{what}" for what in ("mean", "std", "min", "max", "eff_sample_size",
              "ratio_fraction_high", "ratio_fraction_low", "batch_norm_factor")),
            f"{_CORR}rollout_rs_masked_fraction",
            "perf/throughput",
            "training/global_step",
        )
    },
    "rollout/empty_fraction": "response/aborted_ratio",
    "episode/num_messages/mean": "num_turns/mean",
    "episode/num_tool_calls": "tool_call_counts/mean",
    "episode/seconds/policy": "timing_s/agent_loop/generate_sequences/mean",
    "episode/seconds/environment": "timing_s/agent_loop/tool_calls/mean",
    f"{_STALE}mean": "training/off_policy/trajectory_staleness/mean",
    f"{_STALE}max": "training/off_policy/trajectory_staleness/max",
}  # fmt: skip
TRL: Mapping[str, str] = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "critic/score/mean": "reward",
    "critic/score/std": "reward_std",
    "reward/zero_spread_groups": "frac_reward_zero_std",
    "response_length/mean": "completions/mean_length",
    "response_length/max": "completions/max_length",
    "response_length/min": "completions/min_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "mismatch/log_prob_abs_diff_mean": "sampling/sampling_logp_difference/mean",
    "mismatch/log_prob_abs_diff_max": "sampling/sampling_logp_difference/max",
    **{
        f"{_CORR}rollout_is_{which}": f"sampling/importance_sampling_ratio/{which}"
        for which in ("mean", "min", "max")
    },
    "episode/num_tool_calls": "tools/call_frequency",
    "episode/tool_error_fraction": "tools/failure_frequency",
    f"{_STALE}mean": "sample/staleness_mean",
    f"{_STALE}max": "sample/staleness_max",
    "timing_s/step": "step_time",
}
NEMO_RL: Mapping[str, str] = {
    "actor/pg_loss": "train/loss",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "critic/score/mean": "train/reward",
    "response_length/mean": "train/mean_gen_tokens_per_sample",
    f"{_CORR}k3_kl": "train/gen_kl_error",
    "mismatch/token_mult_prob_error": "train/token_mult_prob_error",
    f"{_CORR}rollout_is_mean": "train/sampling_importance_ratio",
}


def write_log(form: Format, rows: Sequence[Mapping[str, Any]], spec: RunSpec, directory: Path) -> Path:
    """Write a run's log as `form` does, into a directory that exists.

    Args:
        form: whose format and names.
        rows: one per logged step, under rlctl's names.
        spec: of the run; written if the framework's log contains its configuration.
        directory: gets one file (rlctl: its `spec.yaml`, too).

    Returns:
        what to diagnose.
    """
    return _WRITERS[form](rows, spec, directory)


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """One object per line, NaN and infinities by name."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def verl_console(rows: Iterable[Mapping[str, Any]], prefix: str = "") -> str:
    """`step:N - key:value - …`, values as numpy prints them."""
    lines = []
    for row in rows:
        cells = [f"{key}:np.float64({value!r})" for key, value in row.items() if key != "step"]
        lines.append(prefix + " - ".join([f"step:{row['step']}", *cells]) + "\n")
    return "".join(lines)


def trainer_state(rows: Sequence[Mapping[str, Any]]) -> str:
    """Hugging Face's `trainer_state.json`."""
    state = {"epoch": 1.0, "global_step": rows[-1]["step"], "log_history": list(rows), "logging_steps": 1}
    return json.dumps(state, indent=2)


def _rlctl(rows: Sequence[Mapping[str, Any]], spec: RunSpec, directory: Path) -> Path:
    log = directory / METRICS_FILE
    own = [{key: value for key, value in row.items() if not key.startswith(_OTHERS)} for row in rows]
    log.write_text(jsonl(own), encoding="utf-8")
    (directory / RUN_SPEC_FILE).write_text(_dumped(spec.model_dump_json()), encoding="utf-8")
    return log


@cache
def _dumped(spec: str) -> str:
    """A spec as text; writing it out takes longer than the log does."""
    return dump_spec(RunSpec.model_validate_json(spec))


def _verl(rows: Sequence[Mapping[str, Any]], spec: RunSpec, directory: Path) -> Path:
    prefix = "(TaskRunner pid=4711) "
    config = pprint.pformat(verl_config(spec)).splitlines()
    named = renamed(rows, VERL, lambda source: f"val-core/{source}/reward/mean@1")
    log = directory / "console.log"
    head = "".join(f"{prefix}{line}\n" for line in config)
    log.write_text(head + verl_console(named, prefix), encoding="utf-8")
    return log


def _trl(rows: Sequence[Mapping[str, Any]], spec: RunSpec, directory: Path) -> Path:
    """Evaluations are rows of their own; a resumed run's history has no step twice."""
    named = renamed({row["step"]: row for row in rows}.values(), TRL, lambda source: "eval_reward")
    history = []
    for row in named:
        training = {key: value for key, value in row.items() if not key.startswith("eval_")}
        evaluation = {key: value for key, value in row.items() if key.startswith("eval_")}
        history += [training, *([{**evaluation, "step": row["step"]}] if evaluation else [])]
    log = directory / "trainer_state.json"
    log.write_text(trainer_state(history), encoding="utf-8")
    return log


def _nemo_rl(rows: Sequence[Mapping[str, Any]], spec: RunSpec, directory: Path) -> Path:
    log = directory / "train.jsonl"
    log.write_text(jsonl(renamed(rows, NEMO_RL, lambda source: "validation/accuracy")), encoding="utf-8")
    return log


_WRITERS: Mapping[Format, Callable[[Sequence[Mapping[str, Any]], RunSpec, Path], Path]] = {
    "rlctl": _rlctl,
    "verl": _verl,
    "trl": _trl,
    "nemo-rl": _nemo_rl,
}


def renamed(
    rows: Iterable[Mapping[str, Any]], names: Mapping[str, str], validation: Callable[[str], str]
) -> list[dict[str, Any]]:
    """What is logged of each row, under another framework's names.

    Staleness of a run that is never stale is left out: only asynchronous trainers log it.
    """
    rows = list(rows)
    is_fresh = not any(row.get(f"{_STALE}max") for row in rows)
    found = []
    for row in rows:
        new: dict[str, Any] = {"step": row["step"]}
        for key, value in row.items():
            if key.startswith("val/") and key.endswith("/reward_mean"):
                new[validation(key.removeprefix("val/").removesuffix("/reward_mean"))] = value
            elif key in names and not (is_fresh and key.startswith(_STALE)):
                new[names[key]] = value
        found.append(new)
    return found


def verl_config(spec: RunSpec) -> dict[str, Any]:
    """The part of verl's configuration, printed at the start of its log, that corresponds to this spec."""
    correction, actor = spec.algorithm.rollout_correction, spec.actor
    return {
        "actor_rollout_ref": {
            "actor": {
                "fsdp_config": {"dtype": {"bf16": "bfloat16", "fp32": "float32"}[spec.engine.dtype]},
                "kl_loss_coef": actor.kl_loss_coef,
                "optim": {"lr": actor.lr},
                "ppo_epochs": actor.ppo_epochs,
                "ppo_mini_batch_size": spec.ppo_mini_batch_size,
                "use_kl_loss": actor.use_kl_loss,
            },
            "rollout": {"n": spec.rollout.n, "temperature": spec.rollout.temperature},
        },
        "algorithm": {
            "adv_estimator": spec.algorithm.adv_estimator,
            "kl_ctrl": {"kl_coef": spec.algorithm.kl_ctrl.kl_coef},
            "rollout_correction": {
                "bypass_mode": correction.bypass_mode,
                "loss_type": correction.loss_type,
                "rollout_is": correction.rollout_is,
                "rollout_is_threshold": correction.rollout_is_threshold,
                "rollout_rs": correction.rollout_rs,
                "rollout_rs_threshold": correction.rollout_rs_threshold,
            },
            "use_kl_in_reward": spec.algorithm.use_kl_in_reward,
        },
        "data": {
            "max_response_length": spec.data.max_response_length,
            "train_batch_size": spec.data.train_batch_size,
        },
    }
