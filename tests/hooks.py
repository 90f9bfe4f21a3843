"""Fault injection: patches applied in the process of a run before it starts, bound by `functools.partial`."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
from pathlib import Path


def kill_after_logging(step: int) -> None:
    """SIGKILL immediately after `step` is written to metrics.jsonl."""
    from rlctl.track.jsonl import JsonlSink

    original = JsonlSink.log

    def log(self, number, metrics):
        original(self, number, metrics)
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)

    JsonlSink.log = log


def kill_in_validation(step: int) -> None:
    """SIGKILL while the validation of `step` is graded, its responses sampled and nothing of it written."""
    from rlctl.train import validate

    original = validate._about

    def about(run, number, *counts):
        if number == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(run, number, *counts)

    validate._about = about


def kill_in_save(step: int, moment: str) -> None:
    """SIGKILL while `step` is saved: during `writing`, or `before` or `after` it is published."""
    from rlctl.train import saving

    original_begin, original_publish = saving.begin, saving.publish
    now = [0]

    def begin(root, number, parts):
        now[0] = number
        return original_begin(root, number, parts)

    def publish(root, partial, state, **how):
        if state.step == step and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        published = original_publish(root, partial, state, **how)
        if state.step == step and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return published

    saving.begin, saving.publish = begin, publish
    if moment == "writing":
        from rlctl.engine.deepspeed import DeepSpeedEngine
        from rlctl.engine.fsdp import FsdpEngine

        def killed_in(original_save):
            def save(self, directory, files=None):
                if now[0] == step:  # only half of the bytes are written
                    original_save(self, directory)
                    for path in filter(Path.is_file, directory.rglob("*")):
                        os.truncate(path, path.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                return original_save(self, directory, files)

            return save

        for engine in (DeepSpeedEngine, FsdpEngine):
            engine.save = killed_in(engine.save)


def kill_in_background(step: int) -> None:
    """SIGKILL while a thread writes `step`: the next one is logged, and each file has half of its bytes."""
    import threading

    from rlctl.track.jsonl import JsonlSink
    from rlctl.train.background import HeldCheckpoint

    original_log, original_write = JsonlSink.log, HeldCheckpoint.write
    has_logged_next = threading.Event()

    def log(self, number, metrics):
        original_log(self, number, metrics)
        if number == step + 1:
            has_logged_next.set()

    def write(self):
        written = original_write(self)
        if self.state.step == step:
            has_logged_next.wait(120)
            for path in filter(Path.is_file, self.partial.rglob("*")):
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    JsonlSink.log, HeldCheckpoint.write = log, write


def share_exports(kill_at: int = 0, whom: str = "") -> None:
    """Two ranks, forks, write every exported model together.

    Args:
        kill_at: step while whose model is exported a SIGKILL comes; 0: none.
        whom: `main` or `other` rank, when the other one has written its shard and it has half of its own;
            `all` processes of the run at that moment; `joining`: the main rank, when it has named the first
            shard and not the second.
    """
    import time
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlctl.engine import model

    forked_ranks()
    model.SHARE_BYTES = 1000
    original, original_join = PreTrainedModel.save_pretrained, model._join_parts
    group = os.getpgrp()  # of the run, which is a session of its own

    def is_now(directory):
        return f".partial-{kill_at:06d}" in str(directory)

    def save_pretrained(self, directory, **how):
        original(self, directory, **how)
        if not is_now(directory) or whom == "joining":
            return
        written = directory.parents[1]
        if os.environ["RANK"] != ("0" if whom == "main" else "1"):
            (written / "written").touch()
            return
        while not (written / "written").exists():
            time.sleep(0.01)
        [shard] = directory.glob("*.safetensors")
        os.truncate(shard, shard.stat().st_size // 2)
        os.killpg(group, signal.SIGKILL) if whom == "all" else os.kill(os.getpid(), signal.SIGKILL)

    def join(main, saved, metadata, directory, **how):
        if is_now(directory) and whom == "joining":
            rename = Path.rename

            def once(path, target):
                rename(path, target)
                os.kill(os.getpid(), signal.SIGKILL)

            Path.rename = once
        original_join(main, saved, metadata, directory, **how)

    PreTrainedModel.save_pretrained, model._join_parts = save_pretrained, join


def refuse_export(step: int) -> None:
    """Two ranks, forks: rank 1 must not write its part of the model of `step`, rank 0 is still writing."""
    import errno
    import time

    from transformers import PreTrainedModel

    share_exports()
    original = PreTrainedModel.save_pretrained

    def save_pretrained(self, directory, **how):
        if f".partial-{step:06d}" in str(directory):
            if os.environ["RANK"] == "1":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
            time.sleep(0.5)
            (directory.parent / "another_file").touch()
        original(self, directory, **how)

    PreTrainedModel.save_pretrained = save_pretrained


def kill_at_answer(
    python: str,
    number: int = 0,
    *,
    path: str = "",
    after_saving: bool = False,
    is_real: bool = False,
    servers: str = "",
) -> None:
    """SIGKILL at answer `number` of a vLLM server that samples or gets weights; 0: never.

    Args:
        python: see `servers_are_forks`.
        path: count answers at this path only.
        after_saving: count from the first checkpoint on that this process publishes.
        is_real: the server is no fork.
        servers: directory of its output; its processes are noted in a line of the file `pids` beside it.
    """
    from pathlib import Path

    from rlctl.rollout import vllm_server
    from rlctl.rollout.server_client import ServerClient
    from rlctl.train import saving
    from tests.processes import writers_to

    servers_are_forks(python, after=int(is_real))
    updates = {"/pause", "/collective_rpc", "/update_weight_version", "/resume"}
    counted = {path} if path else {vllm_server.GENERATE, *updates}
    send, publish = ServerClient.send, saving.publish
    counts, answers = [not after_saving], [0]

    async def counting(self, url, path, *how, **named):
        answer = await send(self, url, path, *how, **named)
        answers[0] += counts[0] and path.partition("?")[0] in counted
        if answers[0] == number > 0:
            if servers:
                with Path(servers).with_name("pids").open("a") as file:
                    print(*writers_to(Path(servers)), file=file, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def publishing(*given, **named):
        published = publish(*given, **named)
        counts[0] = True
        return published

    ServerClient.send, saving.publish = counting, publishing


def no_large_files_after(step: int, limit: int = 100_000) -> None:
    """From the end of `step` on, no file can grow beyond `limit` bytes, as on a full disk."""
    from rlctl.track.jsonl import JsonlSink

    original = JsonlSink.log

    def log(self, number, metrics):
        original(self, number, metrics)
        if number == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    JsonlSink.log = log


def nan_rollouts_at(step: int, rows: int) -> None:
    """The rollout engine reports NaN for the first token of `rows` responses in generation number `step`."""
    from rlctl.rollout.hf import HFRollout

    original = HFRollout.sample
    calls = [0]

    def sample(self, *args, **kwargs):
        turns = original(self, *args, **kwargs)
        calls[0] += 1
        for turn in turns[:rows] if calls[0] == step else ():
            turn.log_probs[0] = float("nan")
        return turns

    HFRollout.sample = sample


def failing_grader(every: int) -> None:
    """The grader raises on every `every`-th response."""
    from rlctl.reward.build import LocalScorer

    original, calls = LocalScorer.grade_and_read, [0]

    def choke(response, ground_truth):
        raise ValueError("the grader choked")

    def grade_and_read(self, samples, *, read_answers=True):
        graded = original(self, samples, read_answers=read_answers)
        function = self._function
        for index in range(len(graded)):
            calls[0] += 1
            if calls[0] % every == 0:
                self._function = choke
                graded[index] = original(self, samples[:1], read_answers=False)[0]
        self._function = function
        return graded

    LocalScorer.grade_and_read = grade_and_read


def failing_sync_at(step: int) -> None:
    """One weight is missing in sync number `step` to the rollout engine."""
    from rlctl.engine.deepspeed import DeepSpeedEngine

    original = DeepSpeedEngine.weights
    calls = [0]

    def weights(self):
        calls[0] += 1
        named = original(self)
        if calls[0] == step:
            next(named)
        return named

    DeepSpeedEngine.weights = weights


def slow_steps() -> None:
    """From the third generation on, each takes a minute."""
    import time

    from rlctl.rollout.hf import HFRollout

    original = HFRollout.sample
    calls = [0]

    def sample(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] > 2:
            time.sleep(60.0)
        return original(self, *args, **kwargs)

    HFRollout.sample = sample


def far_rollouts() -> None:
    """The rollout engine reports log-probs that are three nats too low, so every ratio is about 20."""
    from rlctl.rollout.hf import HFRollout

    original = HFRollout.sample

    def sample(self, *args, **kwargs):
        turns = original(self, *args, **kwargs)
        for turn in turns:
            turn.log_probs.sub_(3.0)
        return turns

    HFRollout.sample = sample


def pauses() -> None:
    """Ranks are forks, and pause 0.3 s before each generation: a run that a test stops needs few steps."""
    import time

    from rlctl.rollout.hf import HFRollout

    forked_ranks()
    original = HFRollout.sample

    def sample(self, *args, **kwargs):
        time.sleep(0.3)
        return original(self, *args, **kwargs)

    HFRollout.sample = sample


def clock_jumps(*jumps: float) -> None:
    """The wall clock has an offset, in seconds, that changes after every step."""
    import datetime
    import time

    from rlctl.track import jsonl

    original_time, original_log = time.time, jsonl.JsonlSink.log
    off = [0.0]

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(original_time() + off[0], tz)

    def log(self, number, metrics):
        original_log(self, number, metrics)
        off[0] = jumps[number % len(jumps)]

    time.time = lambda: original_time() + off[0]
    jsonl.datetime = Jumping
    jsonl.JsonlSink.log = log


def keepers_are_fast() -> None:
    """What keeps the files and servers of this process waits less for them to end by themselves."""
    from rlctl import leftovers

    quick = "from rlctl import leftovers as l; l._LOOK_S, l._KILL_S = 0.1, 0.5; "
    leftovers._KEEP = leftovers._KEEP.replace("main()", f"{quick} main()")


def forked_ranks() -> None:
    """Starts ranks as forks of their launcher, with its imports; for tests of ranks after their start."""
    from rlctl.engine import launch

    launch._START_METHOD = "fork"


def forked_ranks_with_vllm() -> None:
    """Like `forked_ranks`, and imports vLLM first."""
    forked_ranks()
    parents_are_watched()
    from rlctl.rollout import vllm
    from rlctl.rollout.vllm import IsolatedState

    vllm._set_environment()
    with IsolatedState().running():
        import vllm.v1.worker.cpu_worker
        from vllm import LLM  # noqa: F401
    gc.freeze()  # see tests/preload.py
    gc.unfreeze = lambda: None  # called when an engine closes


def parents_are_watched() -> None:
    """`end_with_parent` works in commands of `tests.forked_python`, which the kernel gives another parent."""
    import select
    import threading

    from rlctl import processes

    def end_with_parent(number: signal.Signals, parent: int) -> None:
        def watch() -> None:
            with contextlib.suppress(ProcessLookupError):
                select.select([os.pidfd_open(parent)], [], [])
            os.kill(os.getpid(), number)

        threading.Thread(target=watch, daemon=True).start()

    processes.end_with_parent = end_with_parent


def python_is(python: str) -> None:
    """Processes that this one spawns start by `python`, a command of `tests.forked_python`."""
    import multiprocessing
    import sys

    sys.executable = python
    multiprocessing.set_executable(python)


def servers_are_forks(python: str, after: int = 0) -> None:
    """vLLM servers, except the first `after`, start by `python`, a command of `tests.forked_python`.

    They are forks of a process that has imported vLLM, as are the processes that they spawn.
    """
    import subprocess
    from types import SimpleNamespace

    from rlctl.rollout import server_process

    started = []

    def start(command: list[str], **how: object) -> subprocess.Popen[bytes]:
        started.append(command)
        if len(started) > after:
            command = [python, *command[1:]]
        return subprocess.Popen(command, **how)  # type: ignore[call-overload]

    server_process.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start})
