"""Harmful programs in the real sandbox."""

import errno
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import EnvironmentFailure
from rlctl.processor_time import thread_waits
from rlctl.reward.sandbox import confine, run_program, system_calls
from rlctl.reward.sandbox.run_program import Limits, NotRun, check_sandbox

LIMITS = Limits(timeout_s=60.0, memory_mb=256)
HAS_LANDLOCK = confine.landlock_version() > 0
RULES = system_calls.rules_of(has_landlock=HAS_LANDLOCK)
needs_landlock = pytest.mark.skipif(not HAS_LANDLOCK, reason="the kernel has no Landlock")
NOBODY = 65534


def output(program, limits=LIMITS, **more):
    """What it printed, having ended well."""
    outcome = run_program.run_program(program, limits, **more)
    assert outcome.exit_code == 0, outcome
    return outcome.stdout


#: Runs every action, and prints the name of the error that it raises, or what it returns.
ATTEMPTS = """
import ctypes, errno, fcntl, json, os, resource, signal, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
inward, outward = os.pipe()
pair = socket.socketpair()
def call(name, *arguments):
    values = [a if isinstance(a, (bytes, type(None))) else ctypes.c_long(a) for a in arguments]
    if libc.syscall(NUMBERS[name], *values) == -1:
        raise OSError(ctypes.get_errno(), name)
found = {}
for action in ACTIONS:
    try:
        found[action] = repr(eval(action))
    except OSError as error:
        found[action] = errno.errorcode.get(error.errno, str(error))
    except BaseException as error:
        found[action] = type(error).__name__
print(json.dumps(found))
"""


def attempt(*actions, limits=LIMITS, **more):
    """Action → the error that it raises in one confined process, or what it returns."""
    numbers = {name: rule.number for name, rule in RULES.items()}
    program = f"NUMBERS = {numbers!r}\nACTIONS = {actions!r}\n{ATTEMPTS}"
    return json.loads(output(program, limits, **more).splitlines()[-1])


def as_user(user, function):
    """The result of a function, JSON, in a process of root or of an ordinary user."""
    if (user == "root") == (os.geteuid() == 0):
        return function()
    if user == "root":
        pytest.skip("not run by root")
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _may_run(path)), None)
    if python is None:
        pytest.skip("an ordinary user cannot run a Python here")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            sys.executable = python
            os.write(writing, json.dumps(function()).encode())
        except BaseException as error:
            os.write(writing, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = json.load(file)
    os.waitpid(child, 0)
    return found


def _may_run(path):
    try:
        subprocess.check_call([path, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


#: System calls for memory and objects of others, and for facilities of the kernel.
OBJECTS = """
shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open memfd_create
memfd_secret inotify_init1 inotify_add_watch fanotify_init fanotify_mark io_setup userfaultfd bpf
perf_event_open keyctl add_key request_key unshare setns mount umount2 pivot_root chroot open_tree fsopen
mount_setattr swapon reboot syslog sethostname init_module kexec_load acct quotactl sync vmsplice splice tee
mlockall migrate_pages move_pages process_madvise name_to_handle_at open_by_handle_at modify_ldt iopl
landlock_create_ruleset io_uring_setup io_uring_enter
"""
#: Ways to reach other processes, files and the kernel; every one must be refused.
REFUSED = [
    # signals, and descriptors that send them
    "os.kill(parent, signal.SIGKILL)",
    "os.kill(-1, signal.SIGKILL)",
    "os.killpg(os.getpgid(parent), signal.SIGTERM)",
    "os.kill(os.getpid(), signal.SIGSTOP)",
    "call('tgkill', parent, parent, 9)",
    "call('rt_sigqueueinfo', parent, 9, bytes(128))",
    "call('pidfd_open', parent, 0)",
    "call('pidfd_send_signal', 0, 9, 0, 0)",
    "call('timer_create', 0, bytes(64), bytes(8))",
    "fcntl.fcntl(inward, 8, parent)",  # F_SETOWN
    "fcntl.fcntl(inward, 8, -os.getpgid(parent))",
    "fcntl.fcntl(inward, 10, 9)",  # F_SETSIG
    "fcntl.fcntl(inward, 15, bytes(8))",  # F_SETOWN_EX
    "fcntl.fcntl(inward, fcntl.F_SETFL, 0x2000)",  # O_ASYNC
    "fcntl.fcntl(pair[0], fcntl.F_SETFL, 0x2000 | os.O_NONBLOCK)",
    "fcntl.fcntl(0, 1024, 0)",  # F_SETLEASE
    "fcntl.fcntl(0, 1026, 1)",  # F_NOTIFY
    "fcntl.fcntl(outward, 1031, 1 << 20)",  # F_SETPIPE_SZ
    "fcntl.fcntl(0, 37, bytes(32))",  # F_OFD_SETLK
    "call('fcntl', inward, 8 | 1 << 32, parent)",
    *(
        f"fcntl.ioctl({fd}, {request}, bytes(4))"
        for request in ("0x8901", "0x8902", "0x5452", "0x5412", "0x540E", "0x40086602", "0x40049409")
        for fd in ("inward", "pair[0]", "1")
    ),
    # processes and programs
    "os.fork()",
    "call('vfork')",
    "call('clone', 17, 0, 0, 0, 0)",
    "call('clone', 0x10000 | 0x10000000, 0, 0, 0, 0)",  # in a new user namespace
    "os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess.run(['/bin/true'])",
    "os.execv('/bin/true', ['true'])",
    "call('execveat', -100, b'/bin/true', 0, 0, 0)",
    "call('ptrace', 0, 0, 0, 0)",
    "call('ptrace', 16, parent, 0, 0)",
    "call('process_vm_readv', parent, 0, 0, 0, 0, 0)",
    "call('process_vm_writev', parent, 0, 0, 0, 0, 0)",
    "call('pidfd_getfd', 0, 0, 0)",
    "call('kcmp', parent, os.getpid(), 0, 0, 0)",
    "resource.prlimit(parent, resource.RLIMIT_CPU, (1, 1))",
    "os.sched_setaffinity(parent, {0})",
    "os.sched_setaffinity(0, {0})",
    "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "os.nice(1)",
    "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "call('ioprio_set', 1, parent, 0)",
    "call('personality', 0x40000)",
    "os.setsid()",
    "os.setpgid(0, 0)",
    "os.setuid(os.getuid())",
    "os.setgroups([])",
    "call('prctl', 1, 0, 0, 0, 0)",  # PR_SET_PDEATHSIG: to outlive the trainer
    "call('prctl', 4, 1, 0, 0, 0)",  # PR_SET_DUMPABLE
    "call('prctl', 36, 1, 0, 0, 0)",  # PR_SET_CHILD_SUBREAPER
    "call('seccomp', 1, 0, 0)",
    # sockets: only stream pairs
    "socket.socket()",
    "socket.socket(socket.AF_UNIX)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket.create_connection(('127.0.0.1', 22), 1)",
    "socket.socketpair(type=socket.SOCK_DGRAM)",
    "socket.socketpair(type=socket.SOCK_SEQPACKET)",
    "pair[0].sendto(b'x', '\\0abstract')",
    "pair[0].sendto(b'x', '/run/systemd/notify')",
    "call('sendto', pair[0].fileno(), b'x', 1, 0, 1 << 32, 2)",
    "pair[0].bind('\\0abstract')",
    "pair[0].connect('\\0abstract')",
    "pair[0].listen()",
    "pair[0].accept()",
    "pair[0].send(b'x', socket.MSG_OOB)",
    "pair[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'0000')])",
    "pair[0].recvmsg(1)",
    "pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)",
    # memory and objects of others
    *(f"call({name!r}, 0, 0, 0, 0, 0)" for name in OBJECTS.split()),
    # attributes of files, locks and the file cache
    "os.mkdir('folder')",
    "os.symlink('/etc', 'link')",
    "os.link('/dev/null', 'link')",
    "os.mkfifo('fifo')",
    "os.mknod('node')",
    "os.chmod('.', 0o777)",
    "os.chown('.', os.getuid(), -1)",
    "os.utime('.')",
    "os.truncate('/dev/null', 0)",
    "os.setxattr('.', 'user.x', b'1')",
    "os.listxattr('.')",
    "os.posix_fadvise(0, 0, 0, os.POSIX_FADV_DONTNEED)",
    "fcntl.flock(0, fcntl.LOCK_EX)",
    f"os.open({os.__file__!r}, os.O_TRUNC)",  # for reading: what Landlock allows before version 3
]


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_everything_outside_is_refused(user):
    actions = [a for a in REFUSED if not (name := re.match(r"call\('(\w+)'", a)) or name[1] in RULES]
    found = as_user(user, lambda: attempt(*actions))
    assert isinstance(found, dict), found
    assert {action: error for action, error in found.items() if error not in ("EPERM", "EACCES")} == {}


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_forms_that_a_filter_cannot_read_do_not_exist(user):
    """clone3, openat2, and calls with the numbers of x86_64's second set or beyond the table."""
    actions = ["call('clone3', 0, 0)", "call('openat2', 0, 0, 0, 0)"]
    actions += [f"libc.syscall({number}, 2, 1, 0), ctypes.get_errno()" for number in (0x40000000 + 41, 10**6)]
    found = as_user(user, lambda: attempt(*actions))
    absent = f"(-1, {errno.ENOSYS})"
    assert list(found.values()) == ["ENOSYS", "ENOSYS", absent, absent]


@needs_landlock
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_files_outside_are_neither_read_nor_changed(user):
    with tempfile.TemporaryDirectory() as name:
        folder, secret = Path(name), Path(name) / "secret"
        folder.chmod(0o777)
        secret.write_text("42")
        secret.chmod(0o666)
        before = secret.stat()
        actions = [
            f"open({str(secret)!r}).read()",
            f"open({str(secret)!r}, 'w')",
            f"open({str(folder / 'new')!r}, 'w')",
            f"os.remove({str(secret)!r})",
            f"os.truncate({str(secret)!r}, 0)",
            f"os.chmod({name!r}, 0)",
            f"os.utime({str(secret)!r}, (0, 0))",
            f"os.rename({str(secret)!r}, 'mine')",
            f"os.listdir({name!r})",
            "open('../stdin', 'r+')",
            "os.rename('../stdout', 'mine')",
            "os.listdir('..')",
            *(f"open(f'/proc/{{{pid}}}/{file}', {mode!r})" for pid in ("parent", "os.getpid()")
              for file in ("mem", "environ", "maps") for mode in ("rb", "rb+")),
            "os.listdir(f'/proc/{parent}/fd')",
            "os.readlink(f'/proc/{parent}/fd/1')",
            "open('/proc/self/oom_score_adj', 'w')",
            "open('/proc/self/fd/0', 'r+')",
            "open('/etc/passwd')",
        ]  # fmt: skip
        found = as_user(user, lambda: attempt(*actions))
        assert {action: error for action, error in found.items() if error not in ("EPERM", "EACCES")} == {}
        assert secret.read_text() == "42"
        assert secret.stat().st_mtime_ns == before.st_mtime_ns
        assert [path.name for path in folder.iterdir()] == ["secret"]


@pytest.mark.skipif(confine.landlock_version() < 6, reason="Landlock has no scopes")
def test_landlock_alone_keeps_signals_and_abstract_sockets_inside(tmp_path):
    """The second line of defence: without the filter, a signal by `F_SETOWN` does not arrive, either."""
    code = f"""
import sys, os, fcntl, socket, signal
sys.path.insert(0, {str(Path(confine.__file__).parent)!r})
import confine
confine.confine_files(os.getcwd())
def refused(action):
    try:
        return action()
    except PermissionError:
        return "refused"
inward, outward = os.pipe()
fcntl.fcntl(inward, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(inward, 10, signal.SIGUSR1)
fcntl.fcntl(inward, fcntl.F_SETFL, 0x2000)
os.write(outward, b"x")
print(refused(lambda: os.kill(os.getppid(), signal.SIGUSR1)),
      refused(lambda: socket.socket(socket.AF_UNIX).connect({f"{chr(0)}rlctl-{os.getpid()}"!r})))
"""
    arrived = []
    before = signal.signal(signal.SIGUSR1, lambda *_: arrived.append(True))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0rlctl-{os.getpid()}")
        server.listen()
        with (tmp_path / "printed").open("w") as file:
            subprocess.run(
                [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=file, check=True
            )
    signal.signal(signal.SIGUSR1, before)
    assert ((tmp_path / "printed").read_text(), arrived) == ("refused refused\n", [])


def test_it_has_no_descriptors_of_others_and_cannot_raise_limits():
    found = attempt(
        "[fd for fd in range(200) if call('fcntl', fd, 1, 0) is None]"
        .replace("call('fcntl', fd, 1, 0) is None", "os.path.exists(f'/dev/fd/{fd}')"),
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))",
    )  # fmt: skip
    fds, *limits = found.values()
    assert len(json.loads(fds)) == 3 + 1 + 4  # its own three, the line, and those that ATTEMPTS makes
    assert limits == ["ValueError"] * 3


@needs_landlock
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_ordinary_programs_run(user):
    program = """
import asyncio, ctypes, os, signal, socket, sqlite3, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
open("mine.txt", "w").write("kept"); os.rename("mine.txt", "other.txt"); print(open("other.txt").read())
os.remove("other.txt")
print("quiet", file=open(os.devnull, "w"))
threading.stack_size(1 << 20); sys.setrecursionlimit(10**5)
thread = threading.Thread(target=lambda: print("thread")); thread.start(); thread.join()
print(*ThreadPoolExecutor(2).map(abs, [-1, -2]))
asyncio.run(asyncio.sleep(0.001)); time.sleep(0.001)
async def two(): return await asyncio.gather(asyncio.to_thread(abs, -3), asyncio.sleep(0, 4))
print(asyncio.run(two()))
a, b = socket.socketpair(); a.sendall(b"pair"); print(b.recv(9).decode())
data = sqlite3.connect("data.db"); data.execute("create table t (x)")
data.execute("insert into t values (5)"); data.commit(); print(data.execute("select x from t").fetchall())
tempfile.TemporaryFile(dir=".").write(b"x")
signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.001); signal.pause()
print(ctypes.CDLL(None).abs(-6), len(os.listdir(".")) > 0, os.cpu_count() > 0, sys.stdout.isatty(), input())
"""
    words = as_user(user, lambda: output(program, Limits(20.0, 1024), stdin="ü\n")).split("\n")
    assert words == ["kept", "thread", "1 2", "[3, 4]", "pair", "[(5,)]", "alarm", "6 True True False ü", ""]


def test_programs_with_libraries_run():
    program = """
import numpy, sympy
matrix = numpy.random.default_rng(0).normal(size=(200, 200))
x = sympy.Symbol("x")
print(numpy.allclose(matrix @ numpy.linalg.inv(matrix), numpy.eye(200)), sympy.solve(x**2 - 2, x))
numpy.save("a.npy", matrix); print(numpy.load("a.npy", mmap_mode="r").shape, numpy.fft.fft([1, 0]).real)
"""
    expected = "True [-sqrt(2), sqrt(2)]\n(200, 200) [1. 1.]\n"
    assert output(program, Limits(60.0, 2048)) == expected


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_standard_streams_have_paths(user):
    program = """
import sys
print(open("/dev/stdin").readline(), open("/dev/fd/0").read(), open("/proc/self/fd/0").readline(), end="")
sys.stdout.flush()
open("/dev/stdout", "a").write("end")
print("quiet", file=open("/dev/stderr", "w"))
"""
    assert as_user(user, lambda: output(program, stdin="1\n2\n")) == "1\n 1\n2\n 1\nend"


def test_the_environment_stays_outside(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    assert "sesame" not in output("import os\nprint(os.environ)")


def test_endless_programs_are_ended():
    """By processor time, and by elapsed time if they use none."""
    for program in (
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()",
        "import signal, time\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(600)",
        "import os\nos.closerange(0, 100)\nwhile True: pass",
        "import os, time\nos.closerange(0, 100)\nwhile True: time.sleep(0.01)",
    ):
        outcome = run_program.run_program(program, Limits(0.3, 256))
        assert outcome.reached_limit, program
        assert outcome.exit_code == -signal.SIGKILL


def test_time_in_the_queue_for_a_processor_is_not_the_programs(monkeypatch):
    """On a busy machine a program may take longer; a machine that is too busy is no outcome of a program."""
    waits = itertools.count(0.0, 9.0)  # all time that passes
    monkeypatch.setattr(run_program, "thread_waits", lambda pids: {"1": next(waits)})
    program = "import time\ntime.sleep(1.5)\nprint(1)"
    assert run_program.run_program(program, Limits(0.3, 256)).stdout == "1\n"
    with pytest.raises(NotRun, match="too busy"):
        run_program.run_program("import time\ntime.sleep(600)", Limits(0.1, 256))
    assert run_program.run_program("while True: pass", Limits(0.1, 256)).reached_limit


def test_waiting_for_a_processor_is_measured():
    """Two processes on one core: each waits about as long as it runs."""
    code = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        meter = run_program._Meter([both[0].pid], 60.0)
        before = thread_waits([both[0].pid])
        while run_program.cpu_seconds(both[0].pid) < 0.1:
            time.sleep(0.02)
        after = thread_waits([both[0].pid])
        assert not meter.is_over()
    finally:
        for process in both:
            process.kill()
            process.wait()
    (thread,) = after
    assert after[thread] > before[thread]
    assert 0.0 < meter._waits.waited < time.monotonic() - meter._start
    assert thread_waits([both[0].pid]) == {}  # it has ended


def test_waits_of_threads_are_not_added_up(monkeypatch):
    """A program whose threads wait for each other must not turn its time limit into a busy machine."""
    clock, waits = [0.0], {}
    monkeypatch.setattr(run_program.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_program, "thread_waits", lambda pids: dict(waits))
    meter = run_program._Meter([], 1.0)
    for tick in range(1, 10):  # in each tick one more thread runs for the first time, after all that time
        clock[0] = tick / 10
        waits = {str(thread): max(0.0, min(tick, thread) / 10) for thread in range(10)}
        waits["unseen"] = 50.0
        assert not meter.is_over()
    assert meter._waits.waited <= 0.9
    clock[0] = 4.0
    assert meter.is_over()


def test_bombs_are_contained():
    threads = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    assert run_program.run_program(threads, Limits(2.0, 256)).exit_code != 0
    endless = run_program.run_program("while True: print('x' * 100000)", LIMITS)
    assert endless.exit_code != 0
    assert len(endless.stdout) <= 1 << 20
    files = "for i in range(10**6): open(str(i), 'wb').write({})"
    for content in ("b''", "bytes(15 << 20)"):
        assert run_program.run_program(files.format(content), LIMITS).reached_limit
    found = attempt(
        "len(bytearray(300 << 20))",
        "len(bytearray(100 << 20))",
        "open('big', 'wb').write(bytes(17 << 20))",
        "[open('/dev/null') for _ in range(100)]",
    )
    assert list(found.values()) == ["MemoryError", str(100 << 20), "EFBIG", "EMFILE"]


@needs_landlock
def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output("open('left', 'w').write('x')")
    run_program.run_program("open('left', 'w').write('x')\nwhile True: pass", Limits(0.3, 256))
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


def test_without_landlock_no_file_is_changed(monkeypatch):
    """The fallback of older kernels."""
    monkeypatch.setattr(confine, "landlock_version", lambda: 0)
    actions = [
        "open('x', 'w')",
        "open('../stdout', 'a')",
        "os.open('../stdin', os.O_TRUNC)",
        "os.open('.', os.O_TMPFILE | os.O_RDWR)",
        "os.remove('../stdin')",
        "os.mkdir('y')",
        "os.rename('../stdin', 'z')",
        "os.symlink('a', 'b')",
        "os.link('../stdin', 'c')",
        "open(f'/proc/{os.getpid()}/mem', 'rb+')",
    ]
    found = attempt(*actions, "open('../stdin').read()", stdin="safe")
    assert list(found.values()) == [*["EPERM"] * len(actions), "'safe'"]


def test_the_sandbox_is_checked_call_by_call(monkeypatch):
    """A kernel that lets a denied call through is found, whichever call it is."""
    check_sandbox(LIMITS)
    for name in ("shmat", "inotify_add_watch", "fcntl"):
        leaky = RULES | {name: replace(RULES[name], allowed_if=[[]])}
        leak = system_calls.filter_program(leaky.values()).hex()
        monkeypatch.setattr(run_program, "_filter", lambda leak=leak, **_: leak)
        with pytest.raises(EnvironmentFailure, match=rf"a program could call {name}\b"):
            check_sandbox(LIMITS)


def test_every_call_of_the_kernel_is_in_the_table_once():
    table = system_calls.read_table()
    groups = [table[kind] for kind in ("allow", "allow_with_landlock", "deny", "absent")]
    listed = [name for group in groups for names in group.values() for name in names.split()]
    listed += table["allow_if"]
    assert len(listed) == len(set(listed))
    assert set(table["allow_if_without_landlock"]) <= set(table["allow_if"])
    for machine in system_calls.MACHINES:
        rules = system_calls.rules_of(has_landlock=True, machine=machine)
        assert set(rules) <= set(listed)
        assert len({rule.number for rule in rules.values()}) == len(rules)


#: Names in the headers that are no calls of these machines: those of 32-bit machines have 64-bit times.
NO_CALLS = re.compile(r"syscalls|arch_specific_syscall|sync_file_range2|\w+time64|\w+_adjtime64")


@pytest.mark.parametrize(
    ("machine", "header", "renamed"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h", {}),
        ("aarch64", "asm-generic/unistd.h", {"fstatat": "newfstatat"}),
    ],
)
def test_the_numbers_are_those_of_the_kernel(machine, header, renamed):
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip("the kernel's headers are not installed")
    rules = system_calls.rules_of(has_landlock=True, machine=machine)
    numbers = {name: rule.number for name, rule in rules.items()}
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
    for no_call in [name for name in found if NO_CALLS.fullmatch(name)]:
        del found[no_call]
    assert {name: numbers.get(renamed.get(name, name)) for name in found} == {
        name: int(number) for name, number in found.items()
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("has_landlock", [False, True])
def test_the_filter_says_what_the_table_says(machine, has_landlock):
    """Every call, run through a slow interpreter of the filter's instructions, on both machines."""
    rules = system_calls.rules_of(has_landlock=has_landlock, machine=machine)
    program = list(struct.iter_unpack("=HBBI", system_calls.filter_program(rules.values(), machine)))
    allowed = 0x7FFF0000

    def decision(number, halves=(0,) * 12, arch=system_calls.MACHINES[machine]):
        data, accumulator, at = struct.pack("=IIQ12I", number, arch, 0, *halves), 0, 0
        while True:
            code, then, otherwise, value = program[at]
            if code == 0x06:
                return value
            if code == 0x20:
                accumulator = struct.unpack_from("=I", data, value)[0]
            elif code == 0x54:
                accumulator &= value
            else:
                at += then if accumulator == value else otherwise
            at += 1

    by_number = {rule.number: (name, rule) for name, rule in rules.items()}
    for number in range(600):
        name, rule = by_number.get(number, ("", system_calls.SeccompRule(number, [], errno.ENOSYS)))
        denied = 0x00050000 | rule.error
        assert decision(number, (0xFFFFFFFF,) * 12) == (allowed if rule.allowed_if == [[]] else denied)
        for alternative in rule.allowed_if:
            for choice in range(max([1, *(len(values) for _, _, values in alternative)])):
                halves = [0] * 12
                for half, _, values in alternative:
                    halves[half] = values[choice % len(values)]
                assert decision(number, halves) == allowed, name
                for half, mask, values in alternative:
                    wrong = halves.copy()
                    wrong[half] = next(bit for bit in (1 << i for i in range(32)) if bit & mask not in values)
                    others = [one for one in rule.allowed_if if one is not alternative]
                    if not any(all(wrong[h] & m in v for h, m, v in one) for one in others):
                        assert decision(number, wrong) == denied, name
    assert decision(rules["read"].number, arch=0x40000003) == 0x80000000  # 32-bit calls have other numbers
    assert decision(0x40000000 + rules["read"].number) == 0x00050000 | errno.ENOSYS


def test_a_machine_without_a_filter_is_refused():
    with pytest.raises(OSError, match="no system call filter for riscv64"):
        system_calls.rules_of(has_landlock=True, machine="riscv64")
