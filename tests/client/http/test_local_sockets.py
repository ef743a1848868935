"""A client on the server's machine prefers the server's Unix socket, and says where port and socket differ."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_worker_pool.client.http.transport import CallFailed, Transport
from gpu_worker_pool.host.addresses import is_own_address, names_of_this_machine
from gpu_worker_pool.host.unix_socket import find_socket, is_trustworthy, server_socket
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import gpu_pool
from tests.other_user import ALICE


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "8000.sock"))
        listener.listen()
        yield folder / "8000.sock"


@pytest.mark.parametrize(
    ("configured", "environ", "uid", "path"),
    [
        (None, {}, 0, "/run/gpu-worker-pool/8000.sock"),
        (None, {"RUNTIME_DIRECTORY": "/run/gpu-worker-pool:/run/b"}, 999, "/run/gpu-worker-pool/8000.sock"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/gpu-worker-pool/8000.sock"),
        (None, {"XDG_RUNTIME_DIR": "relative"}, 7, None),
        (None, {}, 7, None),
        ("/srv/pool.sock", {}, 0, "/srv/pool.sock"),
        ("", {}, 0, None),
    ],
)
def test_where_a_server_listens(configured: str | None, environ: dict[str, str], uid: int, path: str | None) -> None:
    assert server_socket(configured, environ, port=8000, uid=uid) == (None if path is None else Path(path))


def test_only_a_socket_that_no_other_user_can_have_put_there_counts(listening: Path) -> None:
    folder = listening.parent
    assert is_trustworthy(listening, os.geteuid())
    assert find_socket({"GPU_POOL_SOCKET": str(listening)}, port=1) == listening
    folder.chmod(0o775)
    assert not is_trustworthy(listening, os.geteuid()), "its group may write there"
    folder.chmod(0o755)
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert not is_trustworthy(link / listening.name, os.geteuid()), "a link"
    (folder / "file").write_text("")
    assert not is_trustworthy(folder / "file", os.geteuid()), "not a socket"
    folder.parent.chmod(0o777)
    assert not is_trustworthy(listening, os.geteuid()), "another user could have moved the directory"
    folder.parent.chmod(0o1777)
    assert is_trustworthy(listening, os.geteuid()), "as in /tmp"
    if os.geteuid() == 0:
        os.chown(folder, ALICE, ALICE)
        assert not is_trustworthy(listening, os.geteuid()), "another user may have made it there"
        folder.parent.chmod(0o755)
        assert is_trustworthy(listening, os.geteuid()), "root has made it for that user"
        os.chown(folder.parent, ALICE, ALICE)
        os.chown(folder, 0, 0)
        assert not is_trustworthy(listening, os.geteuid()), "another user has the directory above"


async def ask(url: str, *, is_named: bool = False) -> str:
    async with Transport(is_named=is_named) as transport:
        node: str = (await transport.call("GET", url, "/pool", timeout_s=10)).data["node"]
        return node


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess, Path]]:
    folder = tmp_path_factory.mktemp("two")
    path = folder / "real" / "pool.sock"
    with ExitStack() as stack:
        real = ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "real", "GPU_POOL_SOCKET": str(path)})
        false = ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "false"})
        yield stack.enter_context(real), stack.enter_context(false), path


async def test_the_socket_is_used_though_another_server_has_the_port(
    two: tuple[ServerProcess, ServerProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, false, path = two
    monkeypatch.setenv("GPU_POOL_SOCKET", str(path))
    assert await ask(real.url) == "real"
    assert await ask(false.url) == "real"


async def test_an_endpoint_that_was_named_wins_over_the_socket_of_another_server(
    two: tuple[ServerProcess, ServerProcess, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, false, path = two
    monkeypatch.setenv("GPU_POOL_SOCKET", str(path))
    # Not under the address of the test before: what was told once is not told again.
    named = f"http://localhost:{false.port}"
    with caplog.at_level(logging.WARNING, "gpu_worker_pool"):
        assert await ask(real.url, is_named=True) == "real"
        assert await ask(named, is_named=True) == "false"
        assert await ask(named, is_named=True) == "false"
    (said,) = caplog.messages
    assert f"{path} is the socket of another server than that of localhost:{false.port}, which was named" in said


async def test_the_port_is_not_used_instead_of_a_socket_whose_server_died(
    two: tuple[ServerProcess, ServerProcess, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, false, _ = two
    stale = tmp_path / "run" / "pool.sock"
    stale.parent.mkdir(mode=0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(stale))
    listener.close()
    monkeypatch.setenv("GPU_POOL_SOCKET", str(stale))
    for is_named in (False, True):
        with pytest.raises(
            CallFailed, match=f"to the socket {stale}: .*; restart its server, or set GPU_POOL_SOCKET= "
        ):
            await ask(false.url, is_named=is_named)

    with ServerProcess({"SIMULATED_GPUS": "1", "GPU_POOL_SOCKET": str(stale)}) as mortal:
        async with Transport() as transport:
            await transport.call("GET", mortal.url, "/pool", timeout_s=10)
            mortal.kill()
            with pytest.raises(CallFailed, match=f"to the socket {stale}"):
                await transport.call("GET", mortal.url, "/pool", timeout_s=10)


def test_a_server_of_this_machine_is_used_by_its_socket_whatever_it_is_called(tmp_path: Path) -> None:
    """The lab's bug 3: on the box itself, the box by its own name was refused like a stranger."""
    names = [name for name in names_of_this_machine(with_ipv6=False) if is_own_address(name)]
    if not names:
        pytest.skip("this machine has no address except loopback")
    with ServerProcess({"HOST": "0.0.0.0", "SIMULATED_GPUS": "1"}) as server:  # noqa: S104 - as a box listens
        server.env["GPU_POOL_SOCKET"] = str(tmp_path / "gpu-worker-pool" / f"{server.port}.sock")
        server.restart()
        env = {"GPU_POOL_SOCKET": server.env["GPU_POOL_SOCKET"]}
        for name in names:
            url = f"http://{name}:{server.port}"
            assert gpu_pool("drain", "0", "--endpoint", url, env=env).err == ""
            assert gpu_pool("undrain", "0", "--endpoint", url, env=env).err == ""
        # Another server at the same port of another name stays another server.
        with ServerProcess({"HOST": names[-1], "SIMULATED_GPUS": "1"}) as other:
            done = gpu_pool("drain", "0", "--endpoint", f"http://{names[-1]}:{other.port}", env=env)
            assert "Without a token" in done.err
