"""`PreloadedPopen`: a process of this package as `subprocess.Popen` makes it, without half a second of imports.

A process of the tests' own has everything loaded. Each process that is asked for is a fork of it, with the arguments,
the environment, the folder and the streams that were asked for, and a child of the process that asked. What a fork
cannot do as a process of its own would is started by `subprocess.Popen`. The servers of a benchmark that is such a fork
are forks too.

`stand_in()` is a command for a shell to start such a fork by: see tests/stand_in.py. The keeper that a fork starts is started
by it too.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import gpu_worker_pool
from gpu_worker_pool.host import state_dir
from gpu_worker_pool.host.connections import unix_peer
from gpu_worker_pool.jobs import keeper_process
from gpu_worker_pool.testing import ServerProcess

ROOT: Final = Path(__file__).parent.parent
# A process that speaks TLS to none needs no certificates, and to read all of the machine takes long.
NO_CERTIFICATES: Final = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
# What the package loads only where it is needed.
_LOADED: Final = ("encodings.idna", "uvicorn.lifespan.on", "uvicorn.loops.auto", "uvloop", "pynvml")
# Those that do something when they are loaded, or need what is not installed.
_NOT_LOADED: Final = ("__main__", "gpu_server", "pytest_plugin")
# Read by the loader or by Python when it starts.
_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "SSL_CERT_FILE", "SSL_CERT_DIR")
_KEPT: Final = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
# The programs that may be forks.
_PROGRAMS: Final = ("gpu_worker_pool", "tests", "benchmarks", "pytest")
_STAND_IN: Final = (sys.executable, "-I", "-S", str(ROOT / "tests" / "stand_in.py"))
_LONGEST_MESSAGE: Final = 1 << 20
_MOST_FILES: Final = 64
_PR_SET_CHILD_SUBREAPER: Final = 36


def _can_start(args: Sequence[str], env: Mapping[str, str], loaded_with: Mapping[str, str]) -> bool:
    own = {name: value for name, value in env.items() if value and name.startswith(_READ_AT_START)}
    path = own.pop("PYTHONPATH", str(ROOT)).split(os.pathsep)
    ours = {name: value for name, value in loaded_with.items() if name in own}
    # A program of another package expects that nothing of it is loaded yet.
    is_known = args[1] == "-c" or (args[1] == "-m" and args[2].startswith(_PROGRAMS))
    if args[0] != sys.executable or not is_known or str(ROOT) not in path or own != ours:
        return False
    return all(map(_hides_nothing, path[: path.index(str(ROOT))]))


def _hides_nothing(folder: str) -> bool:
    """A module in a folder before ours may stand for one that is loaded already."""
    found = {entry.name for entry in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    return found <= {"sitecustomize.py", "__pycache__"}


def _without_safety(args: Sequence[str]) -> list[str]:
    """Without -P, with which Python looks for no module in the folder of its program."""
    return [args[0], *args[2:]] if args[1] == "-P" else [*args]


def _listener() -> socket.socket:
    """For stand-ins, under a name that the machine gives it. Only processes of this user are answered."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen(16)
    return listener


class _Parent:
    """The process that all others are forks of. It ends when the process that has it closes its socket, or ends."""

    def __init__(self, env: Mapping[str, str], requests: socket.socket, address: str) -> None:
        self.env = env
        self.address = address
        self._ours = requests
        self._turn = threading.Lock()
        self._libc = ctypes.CDLL(None)

    @classmethod
    def started(cls) -> _Parent:
        """One that loads everything."""
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {**NO_CERTIFICATES, "PYTHONPATH": str(ROOT)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _listener() as listener:
            address, given = str(listener.getsockname()[1:], "ascii"), [theirs.fileno(), listener.fileno()]
            command = [sys.executable, "-m", "tests.preloaded", *map(str, given)]
            process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=given, process_group=0)

        def close() -> None:
            ours.close()
            process.wait()

        atexit.register(close)
        return cls(env, ours, address)

    @classmethod
    def forked(cls, env: Mapping[str, str]) -> _Parent:
        """One that has loaded what this process has, before this process does anything else."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = _listener()
        address = str(listener.getsockname()[1:], "ascii")
        if not os.fork():
            ours.close()
            _run(_serve(theirs, listener, env), env, address)
        theirs.close()
        listener.close()
        return cls(env, ours, address)

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        with self._turn:
            # Orphans come to this process for as long as the new one has no other parent.
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._ours, [json.dumps(request).encode()], streams)
                return int(self._ours.recv(32))
            finally:
                self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_parents: dict[int, _Parent] = {}


def _parent() -> _Parent:
    return _parents.get(os.getpid()) or _parents.setdefault(os.getpid(), _Parent.started())


def stand_in() -> tuple[str, ...]:
    """In front of the arguments of Python: the command that starts it as a fork."""
    return (*_STAND_IN, _parent().address)


class PreloadedPopen(subprocess.Popen[Any]):
    """As `subprocess.Popen`. The pid, the streams and the exit code are those of the fork."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        executable, preexec, _, passed, cwd, env, _, _, shell, *pipes, _, gid, gids, uid, umask, session, group = rest
        parent = _parent()
        given = os.environ if env is None else env
        is_odd = executable or preexec or passed or shell or session or umask != -1 or (gid, gids, uid) != (None,) * 3
        if is_odd or isinstance(args, str) or not _can_start(args, given, parent.env):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        streams = [own if own != -1 else inherited for inherited, own in enumerate((stdin, stdout, stderr))]
        group = os.getpgid(0) if group == -1 else group
        request = {
            "args": [os.fspath(part) for part in args],
            "env": dict(given),
            "cwd": str(cwd or Path.cwd()),
            "group": group,
        }
        self.pid = parent.start(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_preloaded(
    command: Sequence[str | Path], *, timeout_s: float = 60.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output as text."""
    pipe = subprocess.PIPE
    with PreloadedPopen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _serve(requests: socket.socket, listener: socket.socket, loaded_with: Mapping[str, str]) -> dict[str, Any]:
    """Fork for each request, and return it in the fork."""
    while True:
        is_asked = select.select([requests, listener], [], [])[0]
        request = _fork_behind(listener, loaded_with) if listener in is_asked else _fork_for(requests)
        if request is not None:
            requests.close()
            listener.close()
            return request


def _fork_for(requests: socket.socket) -> dict[str, Any] | None:
    """In the fork, the request."""
    message, streams, _, _ = socket.recv_fds(requests, _LONGEST_MESSAGE, 3)
    if not message:
        os._exit(0)
    # Its end is read when the caller is the parent of the fork.
    has_parent, has_none = os.pipe()
    if not (middle := os.fork()):
        if os.fork():
            os._exit(0)
        os.close(has_none)
        os.read(has_parent, 1)
        os.close(has_parent)
        request: dict[str, Any] = json.loads(message)
        os.setpgid(0, request["group"])
        for descriptor, given in enumerate(streams):
            os.dup2(given, descriptor)
            os.close(given)
        requests.send(str(os.getpid()).encode())
        return request
    os.waitpid(middle, 0)
    for descriptor in (has_parent, has_none, *streams):
        os.close(descriptor)
    return None


def _fork_behind(listener: socket.socket, loaded_with: Mapping[str, str]) -> dict[str, Any] | None:
    """In the fork behind a stand-in, its request. A process between the two passes on signals, and how the fork ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    with listener.accept()[0] as line:
        message, files, _, _ = socket.recv_fds(line, _LONGEST_MESSAGE, _MOST_FILES)
        is_ours = message and unix_peer(line)[1] == os.geteuid()
        request: dict[str, Any] = marshal.loads(message) if is_ours else {}  # noqa: S302
        if not request or not _can_stand_behind(request, loaded_with):
            line.close()
        elif not os.fork():
            if fork := os.fork():
                listener.close()
                for file in files:
                    os.close(file)
                _pass_on(line, fork)
            _take_over(request, files)
            return request
    for file in files:
        os.close(file)
    return None


def _can_stand_behind(request: Mapping[str, Any], loaded_with: Mapping[str, str]) -> bool:
    """A fork can have a session of its own, or be in ours; it can be in no other one."""
    is_at_home = request["session"] in (request["pid"], os.getsid(0))
    has_streams = {0, 1, 2} <= {*request["open"]}
    return is_at_home and has_streams and _can_start(_without_safety(request["args"]), request["env"], loaded_with)


def _pass_on(line: socket.socket, fork: int) -> NoReturn:
    ended = os.pidfd_open(fork)
    try:
        line.send(b"yes")
        while ended not in select.select([line.fileno(), ended], [], [])[0]:
            told = line.recv(1)
            os.kill(fork, told[0] if told else signal.SIGKILL)
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])).encode())
    except OSError:  # the stand-in is gone
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
    os._exit(0)


def _take_over(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Have what the stand-in has."""
    if request["session"] == request["pid"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])
    # None of them may be in the place of another one.
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(aside, request["open"], strict=True):
        os.dup2(file, place)
        os.close(file)
    os.umask(request["umask"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _run(request: Mapping[str, Any], loaded_with: Mapping[str, str], address: str) -> NoReturn:
    keeper = getattr(keeper_process, "GPU_POOL")  # noqa: B009 - one that is not a constant here
    setattr(keeper_process, "GPU_POOL", (*_STAND_IN, address, *keeper[1:]))  # noqa: B010
    try:
        _become(request, loaded_with)
        code: object = None
    except SystemExit as ended:
        code = ended.code
    _end(code)


def _become(request: Mapping[str, Any], loaded_with: Mapping[str, str]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    setattr(state_dir, "_failpoint", os.environ.get("GPU_POOL_FAILPOINT"))  # noqa: B010 - as at its import
    # A stream keeps whether it is a terminal, and whether it can seek.
    for descriptor, (stream, mode, buffering) in enumerate(
        (("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1))
    ):
        old = getattr(sys, stream)
        new = open(descriptor, mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, stream, new)
    _, kind, program, *arguments = args = _without_safety(request["args"])
    sys.path[:1] = [""] if args == request["args"] else []
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path += more
    if any((Path(folder) / "sitecustomize.py").exists() for folder in more):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    sys.argv = [kind, *arguments]
    if program.startswith("benchmarks"):
        _parents[os.getpid()] = _Parent.forked(loaded_with)
        ServerProcess.popen = PreloadedPopen
    gc.enable()
    if kind == "-m":
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)  # noqa: S102 - as python -c


def _end(code: object) -> NoReturn:
    """As Python ends, but what was loaded is not taken apart: that takes ten times as long as the fork.

    What the program made is taken apart, so that what it left open complains.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (main := sys.modules["__main__"]).__dict__ is not globals():
        main.__dict__.clear()
    gc.collect()
    with suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        if code is None or isinstance(code, int):
            os._exit((code or 0) & 0xFF)
    sys.exit(code)  # type: ignore[arg-type]  # Python tells what is wrong


def _modules() -> list[str]:
    found = pkgutil.walk_packages(gpu_worker_pool.__path__, "gpu_worker_pool.")
    own = [module.name for module in found if not module.name.endswith(_NOT_LOADED)]
    return [name for name in own if ".adapters." not in name]


if __name__ == "__main__":
    gc.disable()
    for name in (*_LOADED, *_modules()):
        importlib.import_module(name)
    gc.freeze()
    loaded_with = dict(os.environ)
    requests, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    address = str(listener.getsockname()[1:], "ascii")
    _run(_serve(requests, listener, loaded_with), loaded_with, address)
