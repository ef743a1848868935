"""JupyterHub: a single-user server holds GPUs while it runs. In jupyterhub_config.py:

from gpu_worker_pool.adapters.jupyterhub import GpuHooks
hooks = GpuHooks(gpus=1, time="8h")
c.Spawner.pre_spawn_hook = hooks.pre_spawn
c.Spawner.post_stop_hook = hooks.post_stop
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shlex
import signal
import sys
from typing import Any, Final

_COMMAND: Final = (sys.executable, "-m", "gpu_worker_pool")
# Where the command finds its server and its socket, and Python the package.
_PASSED_ON: Final = ("PATH", "LANG", "PYTHONPATH")


class GpuHooks:
    """Holds GPUs as the user of the server (`gpu-pool hold`), from before it starts until it has stopped, or until the `time` is
    over. The server's environment shows its kernels these GPUs and no others. A hub that is restarted keeps them.

    A number `gpus` among the options of the user (`options_form`) wins; with 0 the server has no GPU. A start waits for GPUs as
    long as `timeout_s` says. `options` are more words for `gpu-pool hold`.
    """

    def __init__(
        self, gpus: int = 1, time: str = "8h", timeout_s: float = 300.0, options: tuple[str, ...] = ()
    ) -> None:
        self._gpus = gpus
        self._words, self._timeout_s = ("--time", time, *options), timeout_s

    async def pre_spawn(self, spawner: Any) -> None:
        """Wait for the GPUs; where none becomes free in time, the start fails, and the user sees why."""
        gpus = int(spawner.user_options.get("gpus", self._gpus))
        if gpus == 0:
            spawner.environment.update(CUDA_VISIBLE_DEVICES="-1")
            return
        words = ("hold", "--gpus", str(gpus), "--name", _name(spawner), *self._words)
        try:
            exports = await asyncio.wait_for(_gpu_pool(spawner.user.name, *words), self._timeout_s)
        except TimeoutError:
            raise NoGpuError(
                f"none was free within {self._timeout_s:g} s; `gpu-pool status` shows who has them"
            ) from None
        for line in exports.splitlines():
            name, _, value = shlex.split(line)[1].partition("=")
            spawner.environment[name] = value

    async def post_stop(self, spawner: Any) -> None:
        """Release what this server holds. What cannot be released ends with its time."""
        try:
            found = json.loads(await _gpu_pool(spawner.user.name, "jobs", "--json"))
            ids = [lease["id"] for lease in found["leases"] if lease["labels"].get("name") == _name(spawner)]
            if ids:
                await _gpu_pool(spawner.user.name, "cancel", *ids)
        except NoGpuError as error:
            spawner.log.warning("the GPUs of %s were not released: %s", spawner.user.name, error)


class NoGpuError(Exception):
    """The pool did not do what was asked. JupyterHub shows `jupyterhub_message` to the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.jupyterhub_message = f"No GPU: {message}"


def _name(spawner: Any) -> str:
    """The name of the lease, which tells the servers of one user apart."""
    return f"jupyterhub {spawner.name or 'default'}"


async def _gpu_pool(user: str, *words: str) -> str:
    """What the command prints, run as this user; NoGpuError."""
    kept = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("GPU_")}
    options: dict[str, Any] = {"env": kept}
    if os.geteuid() == 0:
        found = pwd.getpwnam(user)
        groups = os.getgrouplist(user, found.pw_gid)
        options |= {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": groups, "cwd": "/"}
        options["env"] = {**kept, "HOME": found.pw_dir}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_COMMAND, *words, stdout=pipe, stderr=pipe, **options)
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        process.send_signal(signal.SIGINT)  # it leaves the queue
        await process.wait()
        raise
    if process.returncode:
        raise NoGpuError(errors.decode(errors="replace").strip().removeprefix("gpu-pool: "))
    return out.decode()
