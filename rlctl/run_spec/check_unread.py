"""Checks for keys that have no effect, because another key has a value with which nothing reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from rlctl.capabilities.sections import sections
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Part
from rlctl.run_spec.algorithm import CORRECTION, READ_WITH
from rlctl.run_spec.check import LEAVE_OUT, NO_EFFECT, Problems, is_changed, spec_check, warning
from rlctl.run_spec.keys import known_leaves, value_of
from rlctl.run_spec.run_spec import RunSpec

#: Keys, separated by spaces → the key and its value with which they are not read. A name that ends in a dot
#: stands for all keys below it.
_SWITCHES: dict[str, tuple[str, object]] = {
    "model.lora_alpha model.target_modules": ("model.lora_rank", 0),
    "data.val_files": ("trainer.test_freq", -1),
    "actor.kl_loss_coef actor.kl_loss_type": ("actor.use_kl_loss", False),
    "algorithm.kl_penalty algorithm.kl_ctrl.kl_coef": ("algorithm.use_kl_in_reward", False),
    "algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon": ("algorithm.kl_ctrl.type", "fixed"),
    "algorithm.filter_groups.": ("algorithm.filter_groups.enable", False),
    **{
        " ".join(CORRECTION + name for name in names): (CORRECTION + switch, None)
        for switch, names in READ_WITH.items()
    },
    "rollout.stale_cache": ("rollout.in_flight", False),
    "rollout.beyond_max_age": ("rollout.max_age_updates", None),
    "reward.overlong.penalty_factor": ("reward.overlong.buffer_length", 0),
    "trainer.early_stop.": ("trainer.early_stop.patience", None),
    "trainer.guardrails.": ("trainer.guardrails.mode", "off"),
}
#: The same → whether they are read, and else why not.
_READ: dict[str, tuple[Callable[[RunSpec], bool], str]] = {
    "critic.": (lambda spec: spec.trains_critic, "algorithm.adv_estimator needs no critic"),
    "algorithm.gamma algorithm.lam": (
        lambda spec: spec.algorithm.gamma_per == "token" or spec.environment.name != "single_turn",
        "algorithm.gamma_per is turn, and single_turn has one turn",
    ),
    "rollout.server.": (
        lambda spec: spec.has_rollout_servers,
        "no engine runs in a separate process, as with rollout.mode: server and rollout.name: vllm",
    ),
    "rollout.max_age_updates": (
        lambda spec: bool(spec.batches_ahead) or spec.rollout.sync_every > 1,
        "every response is sampled with the newest weights",
    ),
    "rollout.server.placement": (
        lambda spec: not spec.rollout.server.urls,
        "the engines of rollout.server.urls run already",
    ),
    "reward.name reward.params": (lambda spec: spec.reward.terms is None, "reward.terms lists the rewards"),
    "reward.model.": (lambda spec: "model" in _graders(spec), "no reward is called model"),
    "reward.judge.": (
        lambda spec: bool({"judge", "judge_group"} & {*_graders(spec), *spec.reward.by_source.values()}),
        "no reward is called judge or judge_group",
    ),
    "reward.code.": (lambda spec: bool({"code", "auto"} & _graders(spec)), "no reward is called code"),
}
#: Keys whose value without effect is an error of another check.
_ERRORS = {"critic.enable", "critic.path"}
_CLIPS = ("actor.clip_ratio_low", "actor.clip_ratio_high")
_LOSS_OPTIONS = (*_CLIPS, "actor.clip_ratio_c", "actor.tau_pos", "actor.tau_neg", "actor.dppo_divergence")
_ESTIMATOR_OPTIONS = (
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.gamma_per",
    "algorithm.norm_adv_by_std_in_grpo",
)


def _graders(spec: RunSpec) -> set[str]:
    return {term.name for term in spec.reward.all_terms}


def _add_check(
    names: str, is_read: Callable[[RunSpec], bool], why: str, switch: str = "", fix: str = LEAVE_OUT
) -> None:
    """Registers a check that warns about keys that are set and not read."""
    starts = tuple(name for name in names.split() if name.endswith("."))
    keys = {key for key in known_leaves() if key in names.split() or key.startswith(starts)}
    keys -= _ERRORS | {switch}

    def check(spec: RunSpec) -> Problems:
        if not is_read(spec):
            for key in filter(keys.__contains__, known_leaves()):
                if is_changed(spec, key):
                    yield warning(key, f"{NO_EFFECT}: {why}", fix)

    check.__doc__ = f"{names}: {why}"
    spec_check(check)


def _add_switch(names: str, switch: str, off: object) -> None:
    shown = "null" if off is None else str(off).lower()
    fix = f"{LEAVE_OUT}, or set {switch}" + (": true" if off is False else "")
    _add_check(names, lambda spec: bool(value_of(spec, switch) != off), f"{switch} is {shown}", switch, fix)


_SECTIONS = sections().values()
for _names, (_switch, _off) in chain(_SWITCHES.items(), *(each.switches.items() for each in _SECTIONS)):
    _add_switch(_names, _switch, _off)
for _names, (_is_read, _why) in chain(_READ.items(), *(each.unread.items() for each in _SECTIONS)):
    _add_check(_names, _is_read, _why)


def _unread(spec: RunSpec, part: Part, keys: Iterable[str]) -> Problems:
    for key in keys:
        if key not in part.options and is_changed(spec, key):
            yield warning(key, f"{NO_EFFECT} with {part.name}", LEAVE_OUT)


@spec_check
def options_of_the_estimator(spec: RunSpec) -> Problems:
    """Options that the advantage estimator does not read."""
    part = ADVANTAGE_ESTIMATORS.part(spec.algorithm.adv_estimator)
    yield from _unread(spec, part, _ESTIMATOR_OPTIONS)


@spec_check
def options_of_the_loss(spec: RunSpec) -> Problems:
    """Options that the policy loss does not read; `clip_ratio` is the default of both sides of its clip."""
    loss = POLICY_LOSSES.part(spec.algorithm.rollout_correction.loss_type)
    yield from _unread(spec, loss, _LOSS_OPTIONS)
    if not loss.options.intersection(_CLIPS) and is_changed(spec, "actor.clip_ratio"):
        yield warning("actor.clip_ratio", f"{NO_EFFECT} with {loss.name}", LEAVE_OUT)
    elif spec.actor.clip_ratio_low and spec.actor.clip_ratio_high and is_changed(spec, "actor.clip_ratio"):
        message = f"{NO_EFFECT}: actor.clip_ratio_low and actor.clip_ratio_high are set"
        yield warning("actor.clip_ratio", message, LEAVE_OUT)
