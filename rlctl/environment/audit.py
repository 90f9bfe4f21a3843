"""Plays an environment with policies that cannot solve anything, and reports what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rlctl.batch import Episode, Task, Turn
from rlctl.environment.build import build_environment
from rlctl.environment.protocol import EnvironmentContext
from rlctl.environment.run_episodes import run_episodes
from rlctl.environment.state_leaks import state_leak
from rlctl.environment.template_audit import Findings
from rlctl.leftovers import temporary_directory
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.seeds import turn_seed

if TYPE_CHECKING:
    from rlctl.environment.protocol import Environment

#: Policies that know nothing.
POLICIES = ("empty replies", "echo", "random tokens", "tool calls")
#: Tasks that are played twice, and without their columns; those that are played alone; episodes at a time.
_NUM_AGAIN, _NUM_ALONE, _AT_A_TIME = 8, 4, 16
_GROWTH_MIB, _SLOW_S = 64, 1.0
#: Findings with which episodes differ, or take long, whatever their process played before.
_DIFFERS_ANYWAY = ("reset_differs", "tool_hangs", "hangs")


@dataclass(frozen=True, slots=True)
class Played:
    """What a policy scored."""

    policy: str
    episodes: list[Episode]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the episodes that did not fail and have one."""
        return [e.reward for e in self.episodes if not e.error and e.reward is not None]

    @property
    def errors(self) -> list[str]:
        """Why episodes failed."""
        return [episode.error for episode in self.episodes if episode.error]

    def mean(self, metric: str) -> float:
        """Mean of a metric of the episodes."""
        return fmean(episode.metrics.get(metric, 0.0) for episode in self.episodes)


@dataclass
class EnvironmentAudit(Findings):
    """How an environment was played."""

    tools: list[Mapping[str, Any]]
    played: list[Played] = field(default_factory=list)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens that the first turns of the episodes read, with tools and what `reset` said, ascending."""
        return sorted(e.num_prompt for played in self.played for e in played.episodes if e.sequences)


def audit_environment(
    name: str,
    context: EnvironmentContext,
    tasks: Sequence[Task],
    num_episodes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EnvironmentAudit:
    """Plays about `num_episodes` episodes.

    Raises:
        UsageError: the environment cannot be built, as when a tool has no schema.
    """
    with _watched() as watch:
        # few at a time, so that the seconds of an episode are its own
        watched = {"variables": [*context.spec.variables, _MARK], "concurrency": _AT_A_TIME}
        context = replace(context, spec=context.spec.model_copy(update=watched))
        environment = build_environment(name, context)
        audit = EnvironmentAudit(list(getattr(environment, "tools", ())))
        try:
            each = max(1, num_episodes // len(POLICIES))
            memory = 0
            for done, policy in enumerate(POLICIES):
                progress(done * each, each * len(POLICIES))
                given = [replace(tasks[i % len(tasks)], group_id=i) for i in range(each)]
                audit.played.append(Played(policy, _run(environment, context, given, policy, audit.tools)))
                memory = memory or psutil.Process().memory_info().rss
            grown = (psutil.Process().memory_info().rss - memory) >> 20
            again = [replace(task, group_id=i) for i, task in enumerate(tasks[:_NUM_AGAIN])]
            _check_reset(audit, environment, context, again)
            _check_played(audit, tasks)
            some_work = len(audit.played[0].errors) < len(audit.played[0].episodes)
            if some_work and not any(finding.name in _DIFFERS_ANYWAY for finding in audit.findings):
                _check_leaks(audit, environment, name, context, tasks[:_NUM_ALONE])
        finally:
            environment.close()
    if watch.processes:
        audit.add("leaves_processes", count=len(watch.processes), names=", ".join(watch.processes))
    if watch.files:
        audit.add("leaves_files", count=len(watch.files), first=watch.files[0])
    if grown > _GROWTH_MIB:
        audit.add("grows", mib=grown, episodes=each * 3)
    return audit


def _run(
    environment: Environment,
    context: EnvironmentContext,
    tasks: Sequence[Task],
    policy: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Episode]:
    truths: dict[int | None, str] = {
        turn_seed(0, task.group_id, 0, turn): task.ground_truth
        for task in tasks
        for turn in range(context.spec.max_turns)
    }
    engine = _Blind(policy, context.tokenizer, tools, truths)
    members = [(task, 0) for task in tasks]
    return run_episodes(
        environment, engine, members, context.sampling, 0, context.spec, context.context_length
    )


def _check_reset(
    audit: EnvironmentAudit, environment: Environment, context: EnvironmentContext, tasks: Sequence[Task]
) -> None:
    """Plays the same rows twice, and rows without their columns."""
    first, second = (_run(environment, context, tasks, "empty replies") for _ in range(2))
    if any(
        not (a.error or b.error) and _read_first(a) != _read_first(b)
        for a, b in zip(first, second, strict=True)
    ):
        audit.add("reset_differs")
    if not any(task.extra_info for task in tasks):
        return
    bare = [replace(task, extra_info={}) for task in tasks]
    was_read = any(_read_first(a) != list(a.task.prompt_ids) for a in first if not a.error)
    broken = _run(environment, context, bare, "empty replies")
    if was_read and any(not e.error and e.reward is not None for e in broken):
        audit.add("failure_scored")


def _check_leaks(
    audit: EnvironmentAudit,
    environment: Environment,
    name: str,
    context: EnvironmentContext,
    tasks: Sequence[Task],
) -> None:
    """Plays the same episodes in fresh processes, and in one process after each other."""
    own = replace(context, spec=context.spec.model_copy(update={"fresh_process": True}))
    one = replace(context, spec=context.spec.model_copy(update={"concurrency": 1}))
    fresh = build_environment(name, own)

    def play(policy: str, tasks: Sequence[Task], is_fresh: bool) -> list[Episode]:
        played_in = (fresh, own) if is_fresh else (environment, one)
        return _run(*played_in, tasks, policy, audit.tools)

    knows = any(task.ground_truth for task in tasks)
    policies = ["tool calls"] * bool(audit.tools) + ["right answers" if knows else "echo"]
    try:
        for policy in policies:
            difference = state_leak(partial(play, policy), tasks)
            if difference:
                audit.add("state_leaks", difference=difference)
                return
    finally:
        fresh.close()


def _read_first(episode: Episode) -> list[int]:
    """What the first turn read."""
    sequence = episode.sequences[0]
    found: list[int] = sequence.token_ids[: int(sequence.sampled.int().argmax())].tolist()
    return found


def _check_played(audit: EnvironmentAudit, tasks: Sequence[Task]) -> None:
    """Checks errors, scores, ends and outputs of tools."""
    null = audit.played[0]
    every = [episode for played in audit.played for episode in played.episodes]
    for played in audit.played:
        if not played.errors or (played is not null and null.errors):
            continue
        [(text, _)] = Counter(played.errors).most_common(1)
        counts = {"failed": len(played.errors), "episodes": len(played.episodes)}
        of_null = "reset_fails" if "reset" in text else "episodes_fail"
        kind = of_null if played is null else "policy_excludes"
        audit.add(kind, policy=played.policy, error=text, **counts)
        break
    for played in audit.played[:2]:
        if played.rewards and fmean(played.rewards) > 0:
            audit.add("blind_scores", policy=played.policy, reward=fmean(played.rewards))
            break
    fine = [episode for episode in every if not episode.error]
    if fine and all(e.reward is None for e in fine) and not any(task.ground_truth for task in tasks):
        audit.add("no_reward")
    if null.episodes and all(episode.stop_reason == "max_turns" for episode in null.episodes):
        audit.add("never_ends")
    if any(episode.stop_reason == "timeout" for episode in every):
        audit.add("hangs")
    if fine and (seconds := null.mean("seconds/environment")) > _SLOW_S:
        audit.add("slow", seconds=seconds)
    for episode in every:
        shown = " ".join(str(m["content"]) for m in episode.messages if m["role"] != "assistant")
        truth = episode.task.ground_truth
        if len(truth) > 2 and truth in shown and truth not in episode.task.text:
            audit.add("shows_answer", truth=truth)
            break
    _check_outputs(audit, every)


def _check_outputs(audit: EnvironmentAudit, episodes: Sequence[Episode]) -> None:
    """Checks what tools say to calls with arguments of the types of their schemas."""
    kinds: dict[tuple[str, str], str] = {}
    for episode in episodes:
        for message in episode.messages:
            name = str(message.get("name", ""))
            text = str(message["content"])
            if message["role"] != "tool" or not name:
                continue
            error = ""
            with contextlib.suppress(ValueError, TypeError, KeyError):
                error = str(json.loads(text)["error"])
            kind = _fault_of_output(text, error)
            if kind and "does not answer any more" not in error:
                kinds.setdefault((kind, name), error)
    for (kind, name), error in kinds.items():
        audit.add(kind, name=name, error=error)


def _fault_of_output(text: str, error: str) -> str:
    """Kind of the fault of what a tool said; `error`: what it reports as one. Empty: none."""
    if error:
        return "tool_hangs" if error.startswith("timed out") else "tool_raises"
    if not text:
        return "tool_is_silent"
    return "tool_is_cut" if text.endswith("… (cut)") else ""


class _Blind:
    """Samples without a model; `truths` holds the ground truth of each seed for the policy that knows it."""

    def __init__(
        self,
        policy: str,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        truths: Mapping[int | None, str],
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._truths = truths
        self._tools = [tool["function"] for tool in tools]

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """One turn per request."""
        return [self._turn(request, request.limit(sampling)) for request in requests]

    def _turn(self, request: Request, limit: int) -> Turn:
        draw = random.Random(request.seed)
        ids: list[int] = []
        if self._policy == "echo":
            ids = list(request.token_ids[-min(64, limit) :])
        elif self._policy == "random tokens":
            ids = [draw.randrange(len(self._tokenizer)) for _ in range(draw.randint(1, 32))]
        elif self._policy == "tool calls" and self._tools:
            ids = self._tokenizer(self._call(draw), add_special_tokens=False)["input_ids"]
        elif self._policy == "right answers":
            ids = self._tokenizer(self._truths[request.seed], add_special_tokens=False)["input_ids"]
        ids = [*[i for i in ids if i != self._tokenizer.eos_token_id], self._tokenizer.eos_token_id]
        is_cut = len(ids) > limit
        turn = torch.tensor(ids[:limit])
        return Turn(turn, torch.zeros(len(turn)), torch.zeros_like(turn), "length" if is_cut else "stop")

    def _call(self, draw: random.Random) -> str:
        """A call with arguments of the right types."""
        tool = draw.choice(self._tools)
        arguments = {
            key: draw.choice(schema["enum"])
            if "enum" in schema
            else _VALUES.get(str(schema.get("type")), _text)(draw)
            for key, schema in tool["parameters"]["properties"].items()
        }
        return f"<tool_call>{json.dumps({'name': tool['name'], 'arguments': arguments})}</tool_call>"


def _text(draw: random.Random) -> str:
    return draw.choice(("1", "1+1", "a", "apple"))


_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "integer": lambda draw: draw.randint(0, 9),
    "number": lambda draw: draw.uniform(0, 9),
    "boolean": lambda draw: draw.random() < 0.5,
    "array": lambda draw: [],
    "object": lambda draw: {},
}
#: Variable by which processes of the environment are found.
_MARK = "RLCTL_AUDIT"


@dataclass(slots=True)
class _Watch:
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _watched() -> Iterator[_Watch]:
    """Finds the processes and temporary files that are left after the block; the processes are ended."""
    watch = _Watch()
    mark = secrets.token_hex(8)
    before = dict(os.environ)
    with temporary_directory("audit") as directory:
        os.environ.update({_MARK: mark, "TMPDIR": str(directory)})
        try:
            yield watch
        finally:
            for name in (_MARK, "TMPDIR"):
                os.environ.pop(name)
                os.environ.update({name: before[name]} if name in before else {})
            _, left = psutil.wait_procs([*_processes_with(mark)], timeout=1.0)  # killed ones are ending
            for process in left:
                with contextlib.suppress(psutil.Error):
                    if process.status() != psutil.STATUS_ZOMBIE:  # it has ended
                        watch.processes.append(process.name())
                        process.kill()
            watch.files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def _processes_with(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                yield process
