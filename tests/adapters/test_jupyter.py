"""`%load_ext gpu_worker_pool` and `%gpu`, typed into a real IPython in a real terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.cli.terminal import Terminal
from tests.client.blocking.programs import active
from tests.server.leasing import eventually, release
from tests.server.running import ROOT

pytest.importorskip("IPython", reason="IPython is not installed")


@pytest.fixture
def shell(server: ServerProcess, tmp_path: Path) -> Iterator[Terminal]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "COLUMNS": "200"}
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit"]
    with Terminal(command, env, columns=200) as terminal:
        terminal.wait_for("In [1]:")
        run(terminal, "%load_ext gpu_worker_pool", 2)
        yield terminal


def run(terminal: Terminal, line: str, number: int) -> str:
    """Type a line; what is shown until the prompt of this number."""
    terminal.type(line + "\n")
    return terminal.wait_for(f"In [{number}]:")


def test_gpus_are_leased_for_the_kernel_shown_and_released(server: ServerProcess, shell: Terminal) -> None:
    assert "No GPU is leased; %gpu 1 leases one." in run(shell, "%gpu", 3)
    shown = run(shell, "%gpu 2 --model A100", 4)
    leased = re.search(r"GPUs (\d), (\d) are leased for this kernel \(CUDA_VISIBLE_DEVICES=(\d,\d)\)", shown)
    assert leased is not None
    assert f"sees {leased[3]}" in run(shell, "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])", 5)
    (lease_id,) = active(server)
    assert len(server.json(f"/leases/{lease_id}")["gpus"]) == 2

    assert "Release it first, with %gpu off" in run(shell, "%gpu 1", 6)
    assert "No GPU is leased." in run(shell, "%gpu off", 7)
    assert active(server) == set()
    assert "sees None" in run(shell, "print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))", 8)


def test_a_lost_lease_is_said_at_once_and_before_every_cell(server: ServerProcess, shell: Terminal) -> None:
    run(shell, "%gpu 1", 3)
    (lease_id,) = active(server)
    release(server, lease_id)
    shell.wait_for("(it was released by")
    for number in (4, 5):
        shown = run(shell, "1 + 1", number)
        assert "is no longer yours: it was released by" in shown
    assert "is leased for this kernel" in run(shell, "%gpu 1", 6)


def test_a_reload_keeps_the_lease_and_an_unload_releases_it(server: ServerProcess, shell: Terminal) -> None:
    run(shell, "%gpu 1", 3)
    leases = active(server)
    run(shell, "%reload_ext gpu_worker_pool", 4)
    assert "is leased for this kernel" in run(shell, "%gpu", 5)
    assert (active(server), len(leases)) == (leases, 1)
    run(shell, "%unload_ext gpu_worker_pool", 6)
    eventually(lambda: active(server) == set(), "it is released")


def test_what_cannot_be_done_is_said_in_a_line_and_changes_nothing(
    server: ServerProcess, shell: Terminal, tmp_path: Path
) -> None:
    for number, (line, said) in enumerate(
        {
            "%gpu 9": "UsageError: %gpu: the request was refused: 127.0.0.1: This can never be granted here: 9 GPUs",
            "%gpu some": "UsageError: %gpu: 'some' is not a number of GPUs; write %gpu 2, or %gpu off",
            "%gpu 1 --memory much": "UsageError: %gpu: memory: 'much' is not an amount of memory",
            "%gpu 1 --colour red": "UsageError: %gpu: unrecognized arguments: --colour red",
            f"cuda = open({str(tmp_path / 'nvidia-uvm')!r}, 'w')": "In [",
            "%gpu 1": "UsageError: %gpu: CUDA was initialized in this kernel before it had a lease",
        }.items(),
        start=3,
    ):
        assert said in run(shell, line, number)
    assert active(server) == set()


def test_the_lease_ends_with_the_kernel(server: ServerProcess, shell: Terminal) -> None:
    run(shell, "%gpu 1", 3)
    shell.type("exit\n")
    assert shell.wait() == 0
    eventually(lambda: active(server) == set(), "it is released")
