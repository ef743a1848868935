"""Jupyter and IPython: `%load_ext gpu_worker_pool`, then `%gpu 2` leases two GPUs for this kernel.

The kernel's environment shows it these GPUs and no others, so `%gpu` comes before anything begins CUDA.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from gpu_worker_pool.client.options import LeaseOptions
from gpu_worker_pool.client.pool_client import Assignment
from gpu_worker_pool.client.process_lease import ProcessLease
from gpu_worker_pool.errors import PoolError
from gpu_worker_pool.host.visible_devices import has_initialized_cuda


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%gpu: {message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="%gpu",
        add_help=False,
        description="Lease GPUs for this kernel; without a number, show the lease; `off` releases it.",
    )
    parser.add_argument("number", nargs="?", metavar="NUMBER|off", help="how many GPUs; off: release them")
    parser.add_argument("--memory", metavar="SIZE", help="share GPUs: so much memory on each, such as 8GB")
    parser.add_argument("--model", metavar="NAME", help="a word of the GPU's name, such as A100")
    parser.add_argument(
        "--min-memory", metavar="SIZE", help="GPUs that are sold with at least this much memory, such as 40GB"
    )
    parser.add_argument("--exclude", metavar="GPUS", help="none of these GPUs, such as 0,3")
    parser.add_argument("--timeout", type=float, metavar="S", default=60.0, help="how long to wait; by default 60 s")
    parser.add_argument("--preemptible", action="store_true", help="the lease may be ended when others need the GPUs")
    return parser


@magics_class
class GpuMagics(Magics):
    """The magic `%gpu`."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._events = shell.events
        self._lease: ProcessLease | None = None
        # Said before every cell until the user has done something about it.
        self._loss: str | None = None

    @line_magic
    def gpu(self, line: str) -> None:
        """Lease GPUs for this kernel: `%gpu 2`, `%gpu 1 --memory 8GB`; `%gpu` shows the lease, `%gpu off` releases it."""
        asked = _parser().parse_args(shlex.split(line))
        if asked.number is None and asked == _parser().parse_args([]):
            print(self._described())  # noqa: T201 - what it is for
        elif asked.number == "off":
            self.release()
            print("No GPU is leased.")  # noqa: T201 - the same
        else:
            self._request(asked)

    def release(self) -> None:
        """Release the lease, if there is one."""
        lease, self._lease, self._loss = self._lease, None, None
        if lease is not None:
            lease.release()

    def load(self) -> None:
        """Begin, or go on with the lease that there was before a `%reload_ext`."""
        self._is_loaded = True
        self._events.register("pre_run_cell", self._remind)

    def unload(self) -> None:
        """Leave the shell as it was when this cell has ended: `%reload_ext` unloads, and loads again in the same cell."""
        self._is_loaded = False
        self._events.unregister("pre_run_cell", self._remind)
        self._events.register("post_run_cell", self._release_if_unloaded)

    def _release_if_unloaded(self, *_: object) -> None:
        self._events.unregister("post_run_cell", self._release_if_unloaded)
        if not self._is_loaded:
            self.release()

    def _request(self, asked: argparse.Namespace) -> None:
        number = asked.number or "1"
        if not number.isdigit() or int(number) < 1:
            raise UsageError(f"%gpu: {number!r} is not a number of GPUs; write %gpu 2, or %gpu off")
        if self._lease is not None and self._loss is None:
            raise UsageError(f"%gpu: {self._described()} Release it first, with %gpu off")
        if has_initialized_cuda():
            raise UsageError(
                "%gpu: CUDA was initialized in this kernel before it had a lease, so the kernel would ignore which GPU is its "
                "own. Restart the kernel, and lease first"
            )
        self.release()
        options: LeaseOptions = {"gpus": int(number), "memory": asked.memory, "model": asked.model}
        options |= {"min_memory": asked.min_memory, "exclude": asked.exclude and asked.exclude.split(",")}
        options |= {"preemptible": asked.preemptible, "on_lost": self._lose}
        try:
            self._lease = ProcessLease(asked.timeout, options)
        except (PoolError, ValueError) as error:
            raise UsageError(f"%gpu: {error}") from None
        print(self._described())  # noqa: T201 - what it is for

    def _described(self) -> str:
        if self._loss is not None:
            return self._loss
        if self._lease is None:
            return "No GPU is leased; %gpu 1 leases one."
        leased = self._lease.assignment
        devices = leased.env["CUDA_VISIBLE_DEVICES"]
        return f"{_gpus_are(leased)} leased for this kernel (CUDA_VISIBLE_DEVICES={devices})."

    def _lose(self, assignment: Assignment) -> None:
        # The client has said so once, when it happened; a cell that is run an hour later has scrolled past that.
        reason = getattr(assignment.lost, "reason", None) or "the lease ended"
        self._loss = (
            f"{_gpus_are(assignment)} no longer yours: {reason}. Do not use it: another user may have it. Restart the kernel if it has "
            "begun CUDA, and lease again with %gpu."
        )

    def _remind(self, *_: object) -> None:
        if self._loss is not None:
            print(f"\x1b[31m{self._loss}\x1b[0m")  # noqa: T201 - what it is for


_loaded: dict[int, GpuMagics] = {}


def load(shell: Any) -> None:
    """For `%load_ext gpu_worker_pool`."""
    if (magics := _loaded.get(id(shell))) is None:
        magics = _loaded[id(shell)] = GpuMagics(shell)
    magics.load()
    shell.register_magics(magics)


def unload(shell: Any) -> None:
    """For `%unload_ext gpu_worker_pool`."""
    if (magics := _loaded.get(id(shell))) is not None:
        magics.unload()


def _gpus_are(assignment: Assignment) -> str:
    """`GPU 2 is`, `GPUs 2, 3 are`."""
    ids = ", ".join(map(str, assignment.gpu_ids))
    return f"GPU {ids} is" if len(assignment.gpu_ids) == 1 else f"GPUs {ids} are"
