"""`gpu-pool serve --fleet` for a person who got something wrong: what it says, what goes on, and what it never shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.ledger.sqlite.custody import CustodyFile
from tests.cli.in_process import called
from tests.cli.own_process import gpu_pool, start_gpu_pool
from tests.e2e.fleet.fleet import until
from tests.e2e.worker import call
from tests.ledger.postgres.server import PostgresServer

SECRET = "not-to-be-seen"  # noqa: S105 - of nothing
KEY = {"GPU_POOL_FLEET_KEY": "a-key-of-these-tests"}
MISSING = "raise ModuleNotFoundError(\"No module named 'asyncpg'\", name='asyncpg')\n"


class Served:
    """A started `gpu-pool serve` that has said that it is ready."""

    def __init__(self, folder: Path, *flags: str, **env: str) -> None:
        settings = {
            "SIMULATED_GPUS": "1",
            "GPU_POOL_NODE": "box",
            "LOG_LEVEL": "debug",
            "HOST": "127.0.0.1",
            **KEY,
            **env,
        }
        flags = ("--port", "0", "--state-dir", str(folder), *flags)
        self.log = folder / "log"
        self.process = start_gpu_pool("serve", "--json", *flags, cwd=folder, env=settings)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.said: dict[str, Any] = json.loads(line)
        self.port = int(self.said["urls"][0].rpartition(":")[2])

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        return call(self.port, method, path, body, 20.0)

    def stop(self) -> str:
        """What it said from its start to its end, and on the command line."""
        command = Path(f"/proc/{self.process.pid}/cmdline").read_text()
        self.process.terminate()
        out, log = self.process.communicate(timeout=20.0)
        return json.dumps(self.said) + out + log + command


@contextmanager
def served(folder: Path, *flags: str, **env: str) -> Iterator[Served]:
    server = Served(folder, *flags, **env)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (
            ("--fleet", f"postgresql://ada:{SECRET}@box/db"),
            {},
            "set GPU_POOL_FLEET to the URL, or leave the password out",
        ),
        (("--fleet", f"postgresql://box/db?password={SECRET}"), {}, "set GPU_POOL_FLEET to the URL"),
        (("--fleet", ""), {}, "it is empty; write the URL of the database"),
        (("--fleet", "http://gpu-01,http://gpu-02"), {}, "a fleet needs a key"),
        (("--fleet", "postgresql://box/db"), {}, "make one with `openssl rand -hex 32`"),
        (("--fleet", "http://gpu-01,gpu-02"), {}, "has 'gpu-02'; a box that cannot lead needs the URLs of boxes"),
        (("--fleet", "http://gpu-01"), {"GPU_POOL_FLEET_KEY": SECRET}, "has 14 characters; a key needs at least 16"),
        (
            ("--fleet", "http://gpu-01"),
            {"GPU_POOL_FLEET_KEY_FILE": "missing"},
            "GPU_POOL_FLEET_KEY_FILE cannot be read",
        ),
        ((), {"GPU_POOL_FLEET": f"mysql://ada:{SECRET}@box/db"}, "is not of the form postgresql://user:password@host"),
        ((), {"GPU_POOL_FLEET": f"postgresql://ada:{SECRET}/?#@box/db"}, "write @ : / ? # and % in a user name"),
        (
            (),
            {"GPU_POOL_FLEET": f"postgresql://a:{SECRET}@b/c", "GPU_POOL_FLEET_POOL": "x" * 101},
            "1 to 100 printable",
        ),
        (
            (),
            {"GPU_POOL_FLEET": f"postgresql://a:{SECRET}@b/c", "GPU_POOL_FLEET_ADDRESS": "gpu-01"},
            "http://gpu-01:8000",
        ),
        (
            (),
            {"GPU_POOL_FLEET": "postgresql://a@b/c", "GPU_POOL_FLEET_ADDRESS": f"http://u:{SECRET}@gpu-01:8000"},
            "it must be the URL at which",
        ),
    ],
)
def test_it_does_not_start_as_a_pool_of_its_own(
    flags: tuple[str, ...], env: dict[str, str], says: str, tmp_path: Path
) -> None:
    done = gpu_pool("serve", "--port", "0", "--simulated-gpus", "1", *flags, env=env, cwd=tmp_path)

    assert done.code in {2, 125}
    assert says in " ".join(done.err.split())
    assert len(done.err.splitlines()) == 1
    assert SECRET not in done.err + done.out


def test_it_does_not_start_without_asyncpg(tmp_path: Path) -> None:
    (tmp_path / "asyncpg.py").write_text(MISSING)
    env = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}

    done = gpu_pool("serve", "--port", "0", "--fleet", "postgresql://box/db", env=env, cwd=tmp_path)

    assert done.code == 125
    assert "run pip install 'gpu-worker-pool[fleet]'" in done.err


def test_it_does_not_leave_its_fleet_while_it_keeps_leases_of_it(tmp_path: Path) -> None:
    """A pool of its own knows nothing of them: it would grant their GPUs again."""
    custody = CustodyFile(tmp_path / "custody-leases.sqlite3")
    custody.write({("lease", "run-1"): "{}"})
    custody.close()

    done = gpu_pool("serve", "--port", "0", "--state-dir", str(tmp_path), cwd=tmp_path)

    assert done.code != 0
    assert "still keeps 1 lease of its fleet" in done.err
    assert "move the file away" in done.err

    custody = CustodyFile(tmp_path / "custody-leases.sqlite3")
    custody.write({("lease", "run-1"): None})
    custody.close()
    with served(tmp_path) as alone:
        assert alone.call("GET", "/health")[1]["fleet"] is None


def test_it_does_not_join_a_fleet_while_leases_of_its_own_are_left(tmp_path: Path) -> None:
    """The fleet knows nothing of them: it would grant their GPUs again."""
    env = {"SIMULATED_GPUS": "1", "GPU_POOL_NODE": "box", "HOST": "127.0.0.1", **KEY}
    with served(tmp_path) as alone:
        assert alone.call("PUT", "/leases/a", {"ttl_s": 600.0})[0] == 201
        asked = {**env, "GPU_POOL_STATE_DIR": str(tmp_path), "GPU_POOL_FLEET": "postgresql://127.0.0.1:1/db"}
        assert "1 lease is left in this box's own journal" in called("doctor", env=asked).out
        assert alone.call("GET", "/leases/a")[1]["state"] == "active"
    flags = ("serve", "--port", "0", "--state-dir", str(tmp_path), "--fleet", "postgresql://127.0.0.1:1/db")

    done = gpu_pool(*flags, env=env, cwd=tmp_path)

    assert done.code == 125
    assert "1 lease is left in this box's own journal" in done.err
    assert "gpu-pool drain --all" in done.err
    with served(tmp_path) as alone:
        assert alone.call("DELETE", "/leases/a")[0] == 200
        until(lambda: alone.call("GET", "/pool")[1]["gpus"][0]["state"] == "free", "the GPU is free")
        alone.stop()
    with served(tmp_path, "--fleet", "postgresql://127.0.0.1:1/db") as joined:
        assert joined.call("GET", "/health")[1]["fleet"]["role"] == "follower"


@dataclass(frozen=True)
class Mistake:
    """A fault of a database that is told with `says` until `fix` is run there."""

    name: str
    makes: tuple[str, ...]
    says: str
    fix: str


MISTAKES = (
    Mistake(
        "nosuch", (), "there is no such database: create it (createdb), or correct its name", "CREATE DATABASE {0}"
    ),
    Mistake(
        "password",
        ("CREATE DATABASE {0}", "CREATE ROLE secret_role LOGIN SUPERUSER PASSWORD 'other'"),
        "the password or the role is wrong: correct them in the URL, in PGPASSWORD or in ~/.pgpass",
        f"ALTER ROLE secret_role PASSWORD '{SECRET}'",
    ),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_serves_statistics_says_what_to_do_and_recovers(
    postgres: PostgresServer, mistake: Mistake, tmp_path: Path
) -> None:
    for statement in mistake.makes:
        postgres.execute(statement.format(mistake.name))
    login = f"secret_role:{SECRET}" if mistake.name == "password" else "admin"

    with served(tmp_path, GPU_POOL_FLEET=postgres.url(mistake.name, login)) as server:
        seen = assert_in_trouble(server, mistake.says)
        postgres.execute(mistake.fix.format(mistake.name))
        until(lambda: server.call("GET", "/health")[1]["can_grant"], "it leads once the mistake is corrected")
        assert ask(server) == "active"
        seen += json.dumps([server.call("GET", path) for path in ("/config", "/health", "/pool", "/")])
        assert SECRET not in seen + server.stop()


def test_tables_of_a_newer_version_and_two_pools(postgres: PostgresServer, tmp_path: Path) -> None:
    """With the tables of one server that is stopped, so that one start is enough."""
    postgres.create_database("newer")
    url = postgres.url("newer")
    with served(tmp_path, "--fleet", url) as server:
        assert server.said["fleet"]["role"] == "leader"
        assert ask(server) == "active"
        assert server.said["state"] == url
        server.stop()
    postgres.execute("UPDATE gpu_pool.format SET version = version + 1", "newer")
    postgres.execute("INSERT INTO gpu_pool.pool (pool, pool_id) VALUES ('second', 'x')", "newer")

    with served(tmp_path, "--fleet", url) as server:
        assert_in_trouble(server, "install the newer one on this machine as well")
        postgres.execute("UPDATE gpu_pool.format SET version = version - 1", "newer")
        until(lambda: "several pools (pool, second)" in health(server)["reason"], "it sees two pools")
        assert_in_trouble(server, "set GPU_POOL_FLEET_POOL to the one that this machine belongs to", is_first=False)
        postgres.execute("DELETE FROM gpu_pool.pool WHERE pool = 'second'", "newer")
        until(lambda: health(server)["can_grant"], "it leads")
        assert server.call("GET", "/leases/a")[1]["state"] == "active", "nothing was lost"


def test_the_disk_of_the_database_is_full(tmp_path: Path) -> None:
    """Nothing is granted, what was granted stays, and it goes on when there is space."""
    rights = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    command = ["unshare", *rights, "--mount", sys.executable, "-m", "tests.e2e.fleet.small_disk"]
    disk = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert disk.stdin
    assert disk.stdout
    with disk:
        port = disk.stdout.readline().strip()
        if not port:
            said = disk.communicate()[1].strip()
            assert said.startswith(("unshare:", "mount:")), said
            pytest.skip(f"there can be no small disk here: {said}")
        with served(tmp_path, "--fleet", f"postgresql://admin@127.0.0.1:{port}/postgres") as server:
            assert ask(server) == "active"
            tell(disk, "fill")
            refused = until(partial(refused_for_space, server), "there is no space")
            assert "the disk of the database is full: free space there" in refused["detail"]
            assert server.call("GET", "/gpu/count")[0] == 200
            tell(disk, "free")
            until(lambda: health(server)["can_grant"], "it goes on")
            assert server.call("GET", "/leases/a")[1]["state"] == "active"
            assert server.call("DELETE", "/leases/a")[0] == 200
        disk.stdin.close()


def refused_for_space(server: Served) -> dict[str, Any] | None:
    """Ask for something big, so that it does not fit in what the tables have left."""
    name = f"big{time.monotonic_ns()}"
    status, answer = server.call("PUT", f"/leases/{name}", {"labels": {"text": "x" * 200}, "ttl_s": 5.0})
    return answer if status == 503 and "disk" in answer["detail"] else None


def tell(disk: subprocess.Popen[str], what: str) -> None:
    assert disk.stdin
    assert disk.stdout
    disk.stdin.write(f"{what}\n")
    disk.stdin.flush()
    assert disk.stdout.readline() == "done\n"


def assert_in_trouble(server: Served, says: str, *, is_first: bool = True) -> str:
    """It serves statistics and grants nothing. Callers hear that they wait, operators the reason. Returns all that it answered."""
    status, count = server.call("GET", "/gpu/count")
    assert (status, count["gpu_count"]) == (200, 1)
    _, asked = server.call("PUT", "/leases/a", {})
    _, renewed = server.call("POST", "/leases/renew", {"ids": ["unknown"]})
    _, pool = server.call("GET", "/pool")
    assert asked["status"] == renewed["status"] == 503
    for text in (asked["detail"], renewed["detail"], pool.get("trouble") or pool["detail"]):
        assert "no leader at the moment; waiting" in text.lower()
    assert says in health(server)["reason"]
    if is_first:
        assert says in server.said["trouble"]
    return json.dumps([asked, renewed, pool, server.said])


def ask(server: Served) -> str:
    """Ask for a GPU, take up what was set aside if it had yet to be read, and say what became of it."""
    assert server.call("PUT", "/leases/a", {"wait_s": 20.0})[0] in {201, 202}
    return str(server.call("GET", "/leases/a")[1]["state"])


def health(server: Served) -> dict[str, Any]:
    answer: dict[str, Any] = server.call("GET", "/health")[1]
    return answer
