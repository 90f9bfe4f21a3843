"""rlctl's rollout correction inside TRL's GRPOTrainer.

TRL passes each batch to the loss with the log-probs of the trainer and of vLLM. The subclass replaces TRL's
importance ratio with rlctl's weights: sequence or token level, clipped, normalised, with rejection. It logs
the metrics that `rlctl diagnose` reads.

    trainer = CorrectedGRPOTrainer(model=…, args=GRPOConfig(use_vllm=True, …), …)
    trainer.rollout_correction = {"rollout_is": "token", "rollout_is_threshold": "2.0"}
"""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer

import rlctl


class CorrectedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with the weights of `rlctl.correct`."""

    rollout_correction: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": "2.0"}  # noqa: RUF012

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        read = self.use_vllm and self.vllm_importance_sampling_correction
        if not read or self.loss_type == "vespo":  # VESPO adds up log w, also of padding, where w is 0 here
            raise ValueError(
                "TRL multiplies its loss by the weights only with use_vllm=True, "
                "vllm_importance_sampling_correction=True and another loss_type than vespo in GRPOConfig"
            )
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            mask &= batch["tool_mask"].bool()
        corrected = rlctl.correct(
            batch["old_per_token_logps"].float(),
            batch["sampling_per_token_logps"].float(),
            mask,
            advantages=batch["advantages"][:, None].expand(mask.shape),
            **self.rollout_correction,
        )
        batch["importance_sampling_ratio"] = corrected.weights
        mode = "train" if self.model.training else "eval"
        for name, value in corrected.metrics.items():
            self._metrics[mode][name].append(value)
        return batch
