"""What the guardrails' tests run in processes of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import GuardrailsSpec
from rlctl.train.guardrails import Guardrails
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update
from tests.models import naive_log_probs, tiny_model
from tests.unit.train.updates import BYPASS, REINFORCE, ROWS, batch_of, settings_of

MINI = 4
#: The mini-batch whose rollouts come from a policy far away.
FAR = 2


def engine_of(ranks: Ranks) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        tiny_model(),
        ranks,
        zero_stage=0,
        dtype=torch.float32,
        temperature=1.0,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
    )


def skipping(ranks: Ranks, micro: int):
    """Four mini-batches of which the guardrails withhold one, compared with an engine that does not receive
    that one."""
    model = tiny_model()
    batch = batch_of(model)
    own = naive_log_probs(model, batch)[0].float()
    shift = 1.5 * batch.units.episode.spread(batch.group_ids // MINI == FAR)
    batch = replace(batch, rollout_log_probs=own - shift, old_log_probs=own - shift)
    share = MINI // ranks.world_size
    parts = [
        batch.pick([start + ranks.rank * share + row for row in range(share)])
        for start in range(0, ROWS, MINI)
    ]
    correction = BYPASS | REINFORCE | {"rollout_is": "sequence"}
    parts = [replace(part, group_ids=part.group_ids % MINI) for part in parts]
    settings = settings_of(correction, mini_rows=MINI, rows=MINI, micro_sequences=micro)
    guard = GuardrailsSpec(mode="act", on_low_ess="warn")
    guarded, spared = engine_of(ranks), engine_of(ranks)
    decisions, skipped_updates, scale = [], 0.0, 1.0
    for number, part in enumerate(parts):
        outcome = update(part, guarded, ranks, settings, lambda _: 1e-3, number, guard=guard, lr_scale=scale)
        scale = outcome.decisions[-1].next_scale if outcome.decisions else scale
        decisions += outcome.decisions
        skipped_updates += outcome.metrics["rollout_corr/skipped_updates"]
    for number, (part, decision) in enumerate(zip(parts, decisions, strict=True)):
        if not decision.skip:
            rate = 1e-3 * decision.lr_scale
            update(part, spared, ranks, settings, lambda _, rate=rate: rate, number)
    return {
        "decisions": decisions,
        "skipped_updates": skipped_updates,
        "guarded": {name: weight.detach().clone() for name, weight in guarded.weights()},
        "spared": {name: weight.detach().clone() for name, weight in spared.weights()},
    }


def run_of(ranks: Ranks, *overrides: str, history=(), notes: list[str] | None = None) -> SimpleNamespace:
    """The part of a run that the guardrails observe."""
    spec = load_spec(["rloo-seq-is"], [], list(overrides)).spec
    note = (lambda _: None) if notes is None else notes.append
    return SimpleNamespace(
        spec=spec,
        run_dir=None,
        total_steps=1000,
        ranks=ranks,
        tracker=SimpleNamespace(note=note),
        history=list(history),
        stopped_because="",
    )


def guardrails_of(run: SimpleNamespace) -> Guardrails:
    return Guardrails(run, UpdateSettings.of(run.spec, ()))


def deciding(ranks: Ranks, rows: list[dict[str, float]], history: list[dict[str, float]]):
    """Decisions step by step; only the main rank has the history."""
    run = run_of(ranks, "trainer.guardrails.mode=act", history=history if ranks.is_main else [])
    guardrails = guardrails_of(run)
    decided = [(guardrails.is_tight, guardrails.lr_scale)]
    for row in rows:
        metrics = row if ranks.is_main else {"rollout_corr/rollout_is_raw_eff_sample_size": 1.0}
        own = guardrails.observe(int(row["step"]), metrics, (), 0)
        run.history.append({"step": row["step"], **metrics, **own})
        decided.append((guardrails.is_tight, run.stopped_because))
    return decided
