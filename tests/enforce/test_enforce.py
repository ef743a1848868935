"""`gpu-pool enforce` on real device files, with a real server and real Unix users. No driver is behind the files."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from gpu_worker_pool.enforce.devices import apply, find_devices
from gpu_worker_pool.enforce.plan import plan
from gpu_worker_pool.host.enforcement import VARIABLE
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, Done, environment
from tests.gpus.amd_tree import AmdTree
from tests.other_user import ALICE, BOB, python_as
from tests.preloaded import PreloadedPopen
from tests.server.leasing import OFTEN, eventually

from .box import DRM, Box, can_open, make_box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices and set who opens them")


@pytest.fixture
def box() -> Iterator[Box]:
    with make_box() as made:
        yield made


@pytest.fixture
def server(box: Box) -> Iterator[ServerProcess]:
    settings = {
        **OFTEN,
        "SIMULATED_GPUS": "T4,A10",
        "GPU_POOL_SOCKET": str(box.root / "pool.sock"),
        VARIABLE: str(box.state),
    }
    settings["SIMULATED_OUTSIDERS"] = str(box.root / "outsiders.json")
    with ServerProcess(settings) as running:
        yield running


class Enforced:
    """The devices of the server's two GPUs, with `gpu-pool enforce` on them."""

    def __init__(self, box: Box, server: ServerProcess) -> None:
        self.box, self.server = box, server
        first, second = (gpu["uuid"] for gpu in server.json("/pool")["gpus"])
        self.uuids = (first, second)
        # GPU 0 has the device with the minor 1.
        self.devices = (box.add_nvidia(first, 1), box.add_nvidia(second, 0))
        self.env = {"GPU_POOL_SOCKET": str(box.root / "pool.sock"), VARIABLE: str(box.state)}
        self._log = box.root / "log"
        self._processes: list[subprocess.Popen[Any]] = []

    def start(self, *options: str) -> subprocess.Popen[Any]:
        with self._log.open("ab") as log:
            process = PreloadedPopen(
                [*GPU_POOL, "enforce", "--root", str(self.box.root), *options],
                env=environment(self.server, self.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def call(self, *arguments: str) -> Done:
        return called(*arguments, server=self.server, env=self.env)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_until(self, uid: int, *, gpu: int, can: bool) -> None:
        eventually(
            lambda: can_open(uid, self.devices[gpu]) is can, f"the device of GPU {gpu} is {'open' if can else 'shut'}"
        )

    def call_as(self, uid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`gpu-pool` as this user."""
        command = python_as(uid, "-m", "gpu_worker_pool", *arguments)
        env = {**environment(self.server, self.env), "HOME": "/"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd="/")

    def hold(self, uid: int, *wishes: str) -> dict[str, str]:
        """Hold GPUs as this user, and what it is told to export."""
        done = self.call_as(uid, "hold", *wishes)
        assert done.returncode == 0, done.stderr
        lines = (line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
        return {name: value.strip("'") for name, value in lines}

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def enforced(box: Box, server: ServerProcess) -> Iterator[Enforced]:
    with closing(Enforced(box, server)) as made:
        yield made


def test_only_the_holder_opens_a_device_whose_number_is_not_the_index_of_its_gpu(enforced: Enforced) -> None:
    assert can_open(BOB, enforced.devices[0])
    enforced.start("deny")
    for gpu in (0, 1):
        enforced.wait_until(ALICE, gpu=gpu, can=False)
    held = enforced.hold(ALICE, "--model", "T4")
    # Only one device is left for CUDA to count: an index would name the wrong one.
    assert held["CUDA_VISIBLE_DEVICES"] == held["GPU_POOL_LEASE_UUIDS"] == enforced.uuids[0]
    enforced.wait_until(ALICE, gpu=0, can=True)
    assert not can_open(BOB, enforced.devices[0])
    assert not can_open(ALICE, enforced.devices[1])
    # What every program needs is never touched.
    assert can_open(BOB, enforced.box.control)
    assert enforced.call("cancel", held["GPU_POOL_LEASE_ID"]).code == 0
    enforced.wait_until(ALICE, gpu=0, can=False)


def test_a_command_starts_when_its_device_can_be_opened_and_its_user_is_told_where_that_fails(
    enforced: Enforced,
) -> None:
    enforced.start("deny")
    enforced.wait_until(ALICE, gpu=0, can=False)
    opened = (
        f"import os\ntry: os.open({str(enforced.devices[0])!r}, os.O_RDWR)\nexcept OSError as error: print(error.errno)"
    )
    for _ in range(3):
        done = enforced.call_as(ALICE, "run", "--gpus", "2", "--", "python3", "-c", opened)
        assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


def test_while_the_server_is_away_nothing_changes_and_a_device_that_was_opened_is_shut_again(
    enforced: Enforced,
) -> None:
    enforced.start("deny")
    enforced.wait_until(ALICE, gpu=1, can=False)
    enforced.hold(ALICE, "--model", "T4")
    enforced.wait_until(ALICE, gpu=0, can=True)
    enforced.server.kill()
    eventually(lambda: "the server is away, so nothing changes" in enforced.log, "it is noticed")
    # As nvidia-modprobe does it for any user.
    for device in enforced.devices:
        device.chmod(0o666)
    enforced.wait_until(BOB, gpu=0, can=False)
    enforced.wait_until(BOB, gpu=1, can=False)
    assert can_open(ALICE, enforced.devices[0])
    assert "was opened to others (mode 666), and is shut again" in enforced.log
    enforced.server.start()
    enforced.hold(BOB)
    enforced.wait_until(BOB, gpu=1, can=True)


def test_the_next_one_takes_over_what_a_killed_one_left_and_stop_restores_what_was_before(enforced: Enforced) -> None:
    enforced.devices[0].chmod(0o640)
    first = enforced.start("deny")
    enforced.wait_until(BOB, gpu=1, can=False)
    first.kill()
    first.wait()
    assert not can_open(BOB, enforced.devices[1])
    held = enforced.hold(BOB, "--gpus", "2")
    second = enforced.start("deny")
    enforced.wait_until(BOB, gpu=1, can=True)
    assert "pid" in enforced.call("enforce", "deny", "--root", str(enforced.box.root)).err
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 0
    # It ends as it fails: nobody is let in by that.
    assert not can_open(ALICE, enforced.devices[1])
    enforced.start("deny")
    enforced.call("cancel", held["GPU_POOL_LEASE_ID"])
    enforced.wait_until(BOB, gpu=1, can=False)
    stopped = enforced.call("enforce", "--stop")
    assert (stopped.code, str(enforced.devices[0]) in stopped.err) == (0, True), stopped.err
    assert can_open(BOB, enforced.devices[1])
    assert [device.stat().st_mode & 0o777 for device in enforced.devices] == [0o640, 0o666]
    assert os.listxattr(enforced.devices[0]) == []
    assert enforced.call("enforce", "--stop").code == 1


def test_observe_and_warn_change_nothing_and_name_those_without_a_lease_and_warn_tells_them(enforced: Enforced) -> None:
    primary, terminal = pty.openpty()
    os.fchown(terminal, BOB, BOB)
    outsider = subprocess.Popen(
        python_as(BOB, "-c", "import time; print(1, flush=True); time.sleep(600)"),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    assert outsider.stdout is not None
    outsider.stdout.readline()
    (enforced.box.root / "outsiders.json").write_text(
        f'{{"1": [{{"pid": {outsider.pid}, "memory_mb": 5000, "user": "bob", "name": "train.py"}}]}}', encoding="utf-8"
    )
    try:
        observing = enforced.start()
        eventually(
            lambda: "uses GPU 1 without a lease of bob; deny would have refused it" in enforced.log, "it is seen"
        )
        assert f"deny would let only root open {enforced.devices[0]}" in enforced.log
        assert can_open(BOB, enforced.devices[1])
        observing.terminate()
        assert observing.wait() == 0
        os.set_blocking(primary, False)
        with pytest.raises(BlockingIOError):
            os.read(primary, 1)
        os.set_blocking(primary, True)
        enforced.start("warn")
        assert f"gpu-pool hold --pid {outsider.pid}" in os.read(primary, 4096).decode()
        assert can_open(BOB, enforced.devices[1])
    finally:
        outsider.kill()
        outsider.communicate()
        os.close(primary)
        os.close(terminal)


def test_a_descriptor_that_is_open_outlives_the_list_and_the_gpu_is_not_free_while_its_process_is_there(
    enforced: Enforced,
) -> None:
    device = enforced.devices[0]
    device.unlink()
    enforced.box.add_node(device.name, 3, major=1)  # that of /dev/null, which can be opened
    enforced.start("deny")
    enforced.wait_until(BOB, gpu=0, can=False)
    held = enforced.hold(BOB, "--model", "T4")
    enforced.wait_until(BOB, gpu=0, can=True)
    program = f"import os\nfile = os.open({str(device)!r}, os.O_RDWR)\nprint(0)\nwhile input(): print(os.write(file, b'x'), flush=True)"
    command = python_as(BOB, "-u", "-c", program)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        (enforced.box.root / "outsiders.json").write_text(
            f'{{"0": [{{"pid": {process.pid}, "memory_mb": 5000, "user": "uid-{BOB}", "name": "train.py"}}]}}',
            encoding="utf-8",
        )
        eventually(lambda: enforced.server.json("/pool")["gpus"][0]["processes"], "the process is seen")
        enforced.call("cancel", held["GPU_POOL_LEASE_ID"])
        enforced.wait_until(BOB, gpu=0, can=False)
        process.stdin.write("write\n")
        assert process.stdout.readline() == "1\n"
        assert enforced.server.json("/pool")["gpus"][0]["state"] in {"draining", "outside"}
        process.kill()


def test_an_amd_gpu_is_enforced_by_its_render_node_and_kfd_is_never_touched(box: Box) -> None:
    card = AmdTree(box.root).add_card(3)
    (card.folder / "drm/renderD129").mkdir(parents=True)
    render, kfd = box.add_node("dri/renderD129", 129, major=DRM), box.add_node("kfd", 0, major=234)
    devices = find_devices(box.root)
    assert [(device.uuid, device.path) for device in devices] == [("GPU-5afd2ff3c7a4c1d8", str(render))]
    apply(plan(devices, [], handed_out={"GPU-5afd2ff3c7a4c1d8"}, always={ALICE}))
    assert (can_open(ALICE, render), can_open(BOB, render), can_open(BOB, kfd)) == (True, False, True)


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_a_file_in_place_of_a_device_is_an_error_and_no_device_is_changed(enforced: Enforced) -> None:
    enforced.devices[1].unlink()
    enforced.devices[1].write_text("", encoding="utf-8")
    refused = enforced.call("enforce", "deny", "--root", str(enforced.box.root))
    assert (refused.code, f"{enforced.devices[1]} is not a device" in refused.err) == (125, True), refused.err
    assert can_open(BOB, enforced.devices[0])
    assert not enforced.box.state.exists()


def test_a_file_system_without_lists_is_an_error_and_no_device_is_changed(enforced: Enforced) -> None:
    folder = enforced.box.root / "dev/without"
    folder.mkdir()
    with ExitStack() as mounts:
        for arguments in (
            ("-t", "ramfs", "ramfs", str(folder)),
            ("--bind", str(folder / "nvidia0"), str(enforced.devices[1])),
        ):
            done = subprocess.run(["/usr/bin/mount", *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no file system without access control lists can be mounted here: {done.stderr.strip()}")
            mounts.callback(subprocess.run, ["/usr/bin/umount", arguments[-1]], check=True)
            if not (folder / "nvidia0").exists():
                enforced.box.add_node("without/nvidia0", 0)
        refused = enforced.call("enforce", "deny", "--root", str(enforced.box.root))
    assert (refused.code, f"the file system of {enforced.devices[1]} has no access control lists" in refused.err) == (
        125,
        True,
    ), refused.err
    assert can_open(BOB, enforced.devices[0])
    assert not enforced.box.state.exists()


def test_what_is_wrong_is_said(enforced: Enforced, box: Box) -> None:
    root = ("--root", str(box.root))
    assert (
        "there is no user nobody-of-this-name" in enforced.call("enforce", "--allow", "nobody-of-this-name", *root).err
    )
    assert (
        "it must be observe|warn|deny"
        in called("enforce", *root, server=enforced.server, env={**enforced.env, "GPU_POOL_ENFORCE": "all"}).err
    )
    assert (
        "has no Unix socket"
        in called("enforce", *root, server=enforced.server, env={**enforced.env, "GPU_POOL_SOCKET": ""}).err
    )
    assert "no device of a GPU" in enforced.call("enforce", "--root", "/nonexistent").err
    as_user = enforced.call_as(ALICE, "enforce")
    assert (as_user.returncode, "only root" in as_user.stderr) == (1, True)
