"""Harmful programs in the real sandbox."""

import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlctl.reward.sandbox import confine
from rlctl.reward.sandbox.run_program import Limits, run_program

LIMITS = Limits(timeout_s=60.0, memory_mb=256)
needs_landlock = pytest.mark.skipif(confine.landlock_version() == 0, reason="the kernel has no Landlock")


def output(program, limits=LIMITS, **more):
    """What it printed, having ended well."""
    outcome = run_program(program, limits, **more)
    assert outcome.refused is None
    assert outcome.exit_code == 0, outcome
    return outcome.stdout


PRCTL = """
def prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
"""


def attempt(action, setup=""):
    """The name of the error the action raises, or what it returned."""
    return output(
        f"import os, socket, subprocess, signal, resource, ctypes\n{PRCTL}{setup}\n"
        f"try:\n    print({action})\nexcept BaseException as error:\n    print(type(error).__name__)"
    ).strip()


@pytest.mark.parametrize(
    "action",
    [
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', 22), 1)",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['/bin/true'])",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.memfd_create('x')",
        "prctl(1, 0)",  # PR_SET_PDEATHSIG: to outlive the trainer
        pytest.param("open(f'/proc/{os.getppid()}/environ').read()", marks=needs_landlock),
    ],
)
def test_nothing_outside_can_be_reached(action):
    assert attempt(action) == "PermissionError"


@pytest.mark.parametrize(
    ("number", "arguments"), [(425, "8, 0"), (435, "0, 0"), (0x40000000 + 41, "2, 1, 0")]
)
def test_ways_past_the_filter_are_closed(number, arguments):
    """io_uring, clone3, and socket under its x32 number."""
    setup = "libc = ctypes.CDLL(None, use_errno=True)"
    assert attempt(f"libc.syscall({number}, {arguments})", setup) == "-1"


@needs_landlock
def test_files_outside_are_neither_read_nor_changed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    before = secret.stat()
    for action in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.remove({str(secret)!r})",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.chmod({str(tmp_path)!r}, 0)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.rename({str(secret)!r}, 'mine')",
        f"os.listdir({str(tmp_path)!r})",
        "os.mkdir('folder')",
        "os.symlink('/etc', 'link')",
    ):
        assert attempt(action) == "PermissionError", action
    assert secret.read_text() == "42"
    assert secret.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@needs_landlock
def test_ordinary_programs_run():
    program = (
        "import asyncio, numpy, random, threading, tempfile, os, collections\n"
        "open('mine.txt', 'w').write('kept'); print(open('mine.txt').read()); os.remove('mine.txt')\n"
        "print('quiet', file=open(os.devnull, 'w'))\n"
        "thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()\n"
        "asyncio.run(asyncio.sleep(0)); print(numpy.arange(3).sum(), 'é', input())\n"
    )
    words = output(program, Limits(10.0, 1024), stdin="ü\n").split()
    assert words == ["kept", "thread", "3", "é", "ü"]


def test_the_environment_stays_outside(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    assert "sesame" not in output("import os\nprint(os.environ)")


def test_an_endless_loop_is_ended_on_the_wall():
    start = time.monotonic()
    assert run_program("while True: pass", Limits(0.5, 256)).timed_out
    assert run_program("import time\ntime.sleep(60)", Limits(0.5, 256)).timed_out
    assert run_program(
        "import signal, time\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)", Limits(0.5, 256)
    ).timed_out
    assert time.monotonic() - start < 6


def test_a_fork_bomb_forks_nothing():
    program = """
import os
failed = 0
for _ in range(1000):
    try:
        os.fork()
    except OSError:
        failed += 1
print(failed)
"""
    assert output(program) == "1000\n"


def test_a_thread_bomb_is_contained():
    program = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    start = time.monotonic()
    assert run_program(program, Limits(2.0, 256)).exit_code != 0
    assert time.monotonic() - start < 6


def test_memory_is_limited():
    assert attempt("len(bytearray(300 << 20))") == "MemoryError"
    assert attempt("len(bytearray(100 << 20))") == str(100 << 20)


def test_output_and_files_are_limited():
    endless = run_program("while True: print('x' * 100000)", LIMITS)
    assert endless.exit_code != 0
    assert len(endless.stdout) <= 16 << 20
    assert attempt("open('big', 'wb').write(bytes(17 << 20))") == "OSError"
    assert attempt("[open('/dev/null') for _ in range(100)]") == "OSError"


@needs_landlock
def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output("open('left', 'w').write('x')")
    run_program("open('left', 'w').write('x')\nwhile True: pass", Limits(0.5, 256))
    assert list(tmp_path.iterdir()) == []


def test_it_dies_with_whoever_started_it(tmp_path):
    """A killed trainer leaves no program running."""
    program = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    code = f"from rlctl.reward.sandbox.run_program import *\nrun_program({program!r}, Limits(60, 256))"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=Path(confine.__file__).parents[3]
    ) as trainer:
        while not (found := [path for path in tmp_path.rglob("pid") if path.read_text()]):
            time.sleep(0.02)
        trainer.kill()
    pid = int(found[0].read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("it is still running")


def test_without_landlock_no_file_is_changed(tmp_path):
    """The fallback of older kernels, in a process confined by hand."""
    code = f"""
import sys, os
sys.path.insert(0, {str(Path(confine.__file__).parent)!r})
import confine, platform
program = confine.filter_program(deny_file_changes=True)
confine.drop_privileges(platform.machine())
confine.filter_system_calls(program)
refused = 0
for action in (
    lambda: open("x", "w"),
    lambda: open("kept", "a"),
    lambda: os.open("kept", os.O_TRUNC),
    lambda: os.remove("kept"),
    lambda: os.mkdir("y"),
    lambda: os.rename("kept", "z"),
    lambda: os.symlink("a", "b"),
    lambda: os.link("kept", "c"),
):
    try:
        action()
    except PermissionError:
        refused += 1
print(refused, open("kept").read())
"""
    (tmp_path / "kept").write_text("safe")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "8 safe\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("deny_file_changes", [False, True])
def test_the_filter_says_what_its_rules_say(machine, deny_file_changes):
    """Every rule, run through a slow interpreter of the filter's instructions, on both machines."""
    program = list(
        struct.iter_unpack(
            "=HBBI", confine.filter_program(deny_file_changes=deny_file_changes, machine=machine)
        )
    )
    place, arch = confine.MACHINES[machine]
    allowed, denied = 0x7FFF0000, 0x00050000

    def decision(number, arguments=(0,) * 6, arch=arch):
        data, accumulator, at = struct.pack("=IIQ6Q", number, arch, 0, *arguments), 0, 0
        while True:
            code, then, otherwise, value = program[at]
            if code == 0x06:
                return value
            if code == 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            else:
                true = {
                    0x15: accumulator == value,
                    0x35: accumulator >= value,
                    0x45: bool(accumulator & value),
                }[code]
                at += then if true else otherwise
            at += 1

    rules = confine.ALWAYS | (confine.FILE_CHANGES if deny_file_changes else {})
    numbers = {rule.numbers[place]: rule for rule in rules.values()}
    for number in range(500):
        rule = numbers.get(number)
        if rule is None:
            assert decision(number) == allowed
        elif rule.argument is None:
            assert decision(number) == denied | rule.error
        else:
            bits = [0] * 6
            bits[rule.argument] = rule.only or rule.mask
            is_denied = rule.if_set and rule.only is None
            assert decision(number, bits) == (denied | rule.error if is_denied else allowed)
            assert decision(number) == (allowed if is_denied else denied | rule.error)
    assert decision(0, arch=0x40000003) == 0x80000000  # 32-bit system calls have numbers of their own
    assert decision(0x40000000) != allowed


def test_a_machine_without_a_filter_is_refused():
    with pytest.raises(OSError, match="no system call filter for riscv64"):
        confine.filter_program(deny_file_changes=False, machine="riscv64")
