"""`token`, `login` and `logout` at a real server, as an administrator and a new user use them."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker_pool.client.blocking import GPUWorkerPool
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import GPU_POOL, Done, environment, gpu_pool
from tests.cli.terminal import Terminal
from tests.server.leasing import OFTEN, release_all


@pytest.fixture(scope="module")
def running() -> Iterator[ServerProcess]:
    with ServerProcess({**OFTEN, "SIMULATED_GPUS": "2xT4"}) as server:
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    yield running
    for token in running.json("/admin/tokens")["tokens"]:
        running.ask(f"/admin/tokens/{token['digest']}", "DELETE")
    release_all(running)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty home."""
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}


def add(server: ServerProcess, *arguments: str) -> str:
    done = called("token", "add", *arguments, server=server)
    assert done.code == 0, done.err
    return done.out.splitlines()[1].removeprefix("export GPU_POOL_TOKEN=")


def log_in(server: ServerProcess, token: str, home: dict[str, str], tmp_path: Path) -> Done:
    return gpu_pool("login", server.url, env=home, text=f"{token}\n", cwd=tmp_path)


def config(home: dict[str, str]) -> Path:
    return Path(home["HOME"]) / ".config" / "gpu-pool" / "config.toml"


def test_the_two_lines_that_are_printed_let_the_user_in_at_once(server: ServerProcess) -> None:
    done = called("token", "add", "bob", server=server)

    url, token = done.out.splitlines()
    assert (done.code, len(done.out.splitlines())) == (0, 2)
    assert re.fullmatch(rf"export GPU_SERVICE_ENDPOINT=http://\S+:{server.port}", url)
    assert "The token is not shown again" in done.err
    assert "other machines cannot reach it; start it with --host 0.0.0.0" in done.err, "it listens on loopback alone"
    assert "localhost" not in url
    me = server.ask("/ui/data/me", headers={"Authorization": f"Bearer {token.removeprefix('export GPU_POOL_TOKEN=')}"})
    assert me.json == {"name": "bob", "is_admin": False, "role": "user"}


def test_tokens_are_listed_without_themselves_and_revoked_by_name_or_id(server: ServerProcess) -> None:
    first, second = add(server, "bob", "--note", "laptop"), add(server, "bob", "--role", "operator")
    add(server, "ann")

    shown = called("token", "list", server=server)
    listed = json.loads(called("token", "list", "--json", server=server).out)["tokens"]
    by_role = {token["role"]: token for token in listed if token["name"] == "bob"}
    assert "laptop" in shown.out
    assert first not in shown.out
    assert second not in str(listed)

    one = called("token", "revoke", by_role["operator"]["digest"][:12], server=server)
    all_ = called("token", "revoke", "bob", server=server)
    again = called("token", "revoke", "bob", server=server)

    assert (one.out, all_.out) == ("revoked 1 token of bob\n", "revoked 1 token of bob\n")
    assert again.code != 0
    assert "token list" in again.err
    assert [token["name"] for token in server.json("/admin/tokens")["tokens"]] == ["ann"]


def test_a_name_that_is_the_id_of_another_token_revokes_neither(server: ServerProcess) -> None:
    add(server, "ann")
    (ann,) = server.json("/admin/tokens")["tokens"]
    id_ = ann["digest"][:12]
    add(server, id_)

    done = called("token", "revoke", id_, server=server)

    assert done.code != 0
    assert f"ann ({ann['digest']})" in done.err
    assert f"{id_} (" in done.err
    assert {token["name"] for token in server.json("/admin/tokens")["tokens"]} == {"ann", id_}
    assert called("token", "revoke", ann["digest"], server=server).out == "revoked 1 token of ann\n"
    assert [token["name"] for token in server.json("/admin/tokens")["tokens"]] == [id_]


def test_only_administrators_make_tokens(server: ServerProcess) -> None:
    operator = {"GPU_POOL_TOKEN": add(server, "olga", "--role", "operator")}

    for arguments in (("add", "eve"), ("list",), ("revoke", "olga")):
        done = called("token", *arguments, server=server, env=operator)
        assert done.code != 0
        assert "Only an administrator may do this" in done.err
    assert "1 to 64 letters" in called("token", "add", "bob smith", server=server).err
    assert [token["name"] for token in server.json("/admin/tokens")["tokens"]] == ["olga"]


def test_a_login_is_kept_for_the_command_and_the_client(
    server: ServerProcess, home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = add(server, "bob")

    done = log_in(server, token, home, tmp_path)

    assert done.out == f"logged in at {server.url} as bob (user); kept in {config(home)}\n"
    assert stat.S_IMODE(config(home).stat().st_mode) == 0o600
    assert token not in done.out + done.err
    assert "T4" in called("status", env=home).out
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    for name in ("GPU_SERVICE_ENDPOINT", "GPU_SERVICE_ENDPOINTS", "GPU_STATS_SERVICE_ENDPOINTS", "GPU_POOL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with GPUWorkerPool() as client, client.gpu():
        assert [lease["owner"] for lease in server.json("/leases")["leases"]] == ["bob"]


def test_the_environment_goes_before_a_login(server: ServerProcess, home: dict[str, str], tmp_path: Path) -> None:
    log_in(server, add(server, "bob"), home, tmp_path)
    other = {**home, "GPU_POOL_TOKEN": add(server, "ann", "--role", "administrator")}

    assert called("token", "list", env=other).code == 0
    assert "role of user" in called("token", "list", env=home).err
    assert called("status", env={**home, "GPU_SERVICE_ENDPOINT": "http://127.0.0.1:9"}).code != 0


def test_a_token_is_typed_unseen(server: ServerProcess, home: dict[str, str]) -> None:
    token = add(server, "bob")

    with Terminal([*GPU_POOL, "login", server.url], environment(None, home)) as terminal:
        terminal.wait_for("Token for")
        terminal.type(f"{token}\n")
        terminal.wait_for("logged in")
        assert terminal.wait() == 0
        assert token.encode() not in terminal.all_output


@pytest.mark.parametrize(
    "before", ["", "export GPU_POOL_TOKEN=", "export GPU_SERVICE_ENDPOINT=u\nexport GPU_POOL_TOKEN="]
)
def test_the_lines_of_token_add_are_understood(
    server: ServerProcess, home: dict[str, str], tmp_path: Path, before: str
) -> None:
    assert log_in(server, f"{before}{add(server, 'bob')}", home, tmp_path).code == 0


def test_what_is_not_a_token_is_refused_at_once(server: ServerProcess, home: dict[str, str], tmp_path: Path) -> None:
    assert "more than 65536 characters" in log_in(server, "x" * 70_000, home, tmp_path).err
    assert "the line with the URL" in log_in(server, "export GPU_SERVICE_ENDPOINT=http://x", home, tmp_path).err
    assert not config(home).exists()


def test_plain_http_is_said_before_the_token_is_asked_for(home: dict[str, str]) -> None:
    with Terminal([*GPU_POOL, "login", "http://192.0.2.1:8000"], environment(None, home)) as terminal:
        terminal.wait_for("plain http")
        terminal.wait_for("Token for")
        terminal.type("\n")
        terminal.wait_for("there is no token")


def test_a_command_whose_logins_cannot_be_used_asks_no_other_server(home: dict[str, str]) -> None:
    config(home).parent.mkdir(parents=True)
    config(home).write_text("[[server", encoding="utf-8")
    config(home).chmod(0o600)

    done = called("status", env=home)

    assert done.code != 0
    assert "repair it, or remove it" in done.err
    assert "localhost" not in done.err


def test_what_cannot_be_checked_is_not_kept(server: ServerProcess, home: dict[str, str], tmp_path: Path) -> None:
    for url, token, word in (
        (server.url, "not-a-token-of-anybody", "nothing was kept"),
        ("http://127.0.0.1:9", "a-token-1234567", "nothing was kept"),
        ("ftp://gpu-1", "a-token-1234567", "http"),
        (server.url, "", "there is no token"),
    ):
        done = gpu_pool("login", url, env=home, text=token, cwd=tmp_path)
        assert done.code != 0
        assert word in done.err
        assert "not-a-token" not in done.err
    assert not config(home).exists()


def test_logging_out_forgets_one_server_or_all(server: ServerProcess, home: dict[str, str], tmp_path: Path) -> None:
    log_in(server, add(server, "bob"), home, tmp_path)
    with ServerProcess({"SIMULATED_GPUS": "1"}) as second:
        assert called("login", second.url, "--no-token", env=home).code == 0
    assert config(home).read_text(encoding="utf-8").count("[[server]]") == 2

    assert called("logout", second.url, env=home).code == 0
    assert "not logged in" in called("logout", second.url, env=home).err
    assert called("logout", env=home).code == 0

    assert "[[server]]" not in config(home).read_text(encoding="utf-8")
