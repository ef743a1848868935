"""Every Python block of the user's documents runs as it stands. What they say of the API is in test_seed_api.py.

Only the network is arranged: the documents' host names lead to servers on this machine. The documents are not part of
this repository; where they are not beside it these tests are skipped, and tests/client/api says the same in our own words.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import models
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.testing import ServerProcess
from tests.client.seeds import (
    BLOCKS,
    DOCUMENTS,
    SEEDS,
    Block,
    blocks_of,
    is_signature,
    namespace,
    shows_a_model,
    text_of,
)
from tests.server.leasing import eventually, wait_until_free

pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the user's documents are not in {SEEDS}")

TOKEN = "a-token-for-the-documents"  # noqa: S105 - of servers that live for a test
TWO_SERVERS = "http://server1:8000,http://server2:8000"
TLS_HOST = "gpu-service.company.com"


def serves(block: Block) -> bool:
    return "uvicorn.run(" in block.text


RUNNABLE = [block for block in BLOCKS if not is_signature(block) and not serves(block) and not shows_a_model(block)]

# What is printed, where a block prints something that is known beforehand.
PRINTED = {
    'print(f"Total endpoints: {status.total_endpoints}")\n    print(f"Healthy endpoints: {status.healthy_endpoints}")\n    print(f"Total GPUs across': r"Total endpoints: 2\nHealthy endpoints: 2\nTotal GPUs across all endpoints: 8\nAvailable GPUs: 8\nEndpoint server1: 4/4 GPUs\nEndpoint server2: 4/4 GPUs",
    'print(f"Assigned GPU {assignment.gpu_id}")': r"Assigned GPU [0-3]\n",
    'print(f"Assigned GPU {assignment.global_gpu_id}': r"Assigned GPU gpu-server-[123]:[0-3] from endpoint gpu-server-[123]\n",
    'print(f"Automatically assigned GPU {gpu_id}")': r"Automatically assigned GPU [0-3]\n",
    'print(f"Global GPU ID:': r"Global GPU ID: server([12]):([0-3])\nEndpoint ID: server\1\nLocal GPU ID: \2\n",
    'print(f"Degraded endpoints: {len(recovery_status': r"Healthy endpoints: 2\nDegraded endpoints: 0\n",
    "len(status['degradation_manager']['healthy_endpoints'])": r"Healthy endpoints: 2\nDegraded endpoints: 0\n",
    "metrics['pool_summary']": r"Pool efficiency: 0\.0%\nEndpoint server1:\n  GPUs: 4/4\n  Response time: [\d.]+ms\n  Health: Healthy\nEndpoint server2:\n(.*\n){3}Load balancing strategy: availability\nTotal requests: 0\nSuccess rate: 100\.0%\n",
    "# Print comprehensive recovery status": r"=== Error Recovery Status ===\nDegradation Status: None \(2/2 endpoints healthy\)\n(.*\n)+System operating normally\n",
    "# === Error Recovery Status ===": r"=== Error Recovery Status ===\nDegradation Status: None \(2/2 endpoints healthy\)\n",
    "print(f\"Thresholds: {metrics['thresholds']}\")": r"Total GPUs: 4\nAvailable GPUs: 4\nActive workers: 0\nThresholds: \{.*80\.0.*90\.0.*\}\n",
    "for endpoint in endpoints:\n    print(f\"{endpoint['endpoint_id']}: {endpoint['available_gpus']}": r"server1: 4/4 GPUs\nserver2: 4/4 GPUs\n",
    'print("Recovery triggered for server1")': r"Recovery triggered for server1\n",
    'print("Client configured for multi-endpoint operation")': r"Client configured for multi-endpoint operation\n",
    'print(f"Using GPU {gpu_id}")': r"Using GPU [0-3]\n",
    'print(f"Assigned GPU: {assignment.gpu_id}")': r"Assigned GPU: server[12]:[0-3]\n",
    "if hasattr(status, 'total_endpoints'):": r"Total GPUs: 8\nAvailable GPUs: 8\nTotal endpoints: 2\nHealthy endpoints: 2\n",
    "{endpoint['is_healthy']}": r"server1: True\nserver2: True\n",
    "{ep['response_time_ms']}ms": r"server1: [\d.]+ms\nserver2: [\d.]+ms\n",
    "import requests": r"Found 4 GPU\(s\)\nGPU 0: Simulated NVIDIA A100(.*\n)+Server status: healthy\nnvidia-smi available: ",
}


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    env = {"GPU_POOL_TOKENS": f"ada:{TOKEN}", "REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(env)) for _ in range(3)]


@dataclass(frozen=True)
class TlsServer:
    port: int
    ca_file: Path


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """The server of the documents with https: its certificate is good for its name, and for no other."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, so no certificate can be made")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", f"/CN={TLS_HOST}", "-addext", f"subjectAltName=DNS:{TLS_HOST}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, "req", *options, *names, *files], check=True, capture_output=True, timeout=30)
    uvicorn = (sys.executable, "-m", "uvicorn", "gpu_worker_pool.gpu_server:app", "--host", "127.0.0.1")
    tls = ("--port", "{port}", "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    with ServerProcess({"GPU_POOL_TOKENS": f"ada:{TOKEN}"}, command=(*uvicorn, *tls)) as server:
        wait_until_it_listens(server)
        yield TlsServer(server.port, certificate)


def wait_until_it_listens(server: ServerProcess) -> None:
    """Under uvicorn's own command the application is ready a moment before its address is."""

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    eventually(answers, "it listens")


@pytest.fixture
def network(servers: list[ServerProcess], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """Where (host, port) of the documents leads: the first host met to the first server, and so on. With a token, because
    only somebody who calls a server localhost is taken for a user of that machine.
    """
    real = socket.getaddrinfo
    leads_to: dict[tuple[str, int], int] = {}

    def look_up(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if port in {8000, 8080} or (host, port) in leads_to:
            place = leads_to.setdefault((host, port), servers[len(leads_to) % len(servers)].port)
            return real("127.0.0.1", place, *args, **options)
        return real(host, port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("GPU_POOL_TOKEN", TOKEN)
    return leads_to


# --- the blocks run --------------------------------------------------------------------------------------------------


def names_in(text: str) -> tuple[set[str], set[str]]:
    """The names that a text reads, and those that it binds."""
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    return (
        {node.id for node in names if isinstance(node.ctx, ast.Load)},
        {node.id for node in names if isinstance(node.ctx, ast.Store)},
    )


@asynccontextmanager
async def given_client(text: str) -> AsyncIterator[GPUWorkerPoolClient]:
    client = GPUWorkerPoolClient(service_endpoints=TWO_SERVERS)
    if "async with client:" in text:
        yield client
    else:
        async with client:
            await client.refresh()
            yield client


async def run_inside(text: str, names: dict[str, Any]) -> None:
    """As in a notebook: with `await` at the top."""
    code = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    reads, binds = names_in(text)
    async with asyncio.timeout(30):
        if "client" in reads and "client" not in binds:
            async with given_client(text) as names["client"]:
                await maybe(eval(code, names))  # noqa: S307 - the user's own document
            del names["client"]
        else:
            await maybe(eval(code, names))  # noqa: S307 - the user's own document
        await try_out(names)


async def maybe(result: Any) -> None:
    if result is not None:
        await result


async def try_out(names: Mapping[str, Any]) -> None:
    """What a block leaves is used: a client, or the settings for one."""
    client = names.get("client")
    if "config" in names:
        client = GPUWorkerPoolClient(**names["config"])
    if not isinstance(client, GPUWorkerPoolClient):
        return
    if "stopped" in repr(client):
        await client.start()
    try:
        assignment = await client.request_gpu(timeout=30)
        is_global = isinstance(assignment, models.GlobalGPUAssignment)
        assert is_global == client.is_multi_endpoint_mode()
        assert isinstance(assignment.gpu_id, str) == is_global
        await client.release_gpu(assignment)
    finally:
        await client.stop()


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_a_block_runs(
    block: Block,
    servers: list[ServerProcess],
    network: dict[tuple[str, int], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if "import requests" in block.text:
        pytest.importorskip("requests")
    if TLS_HOST in block.text:
        tls: TlsServer = request.getfixturevalue("tls_server")
        network[TLS_HOST, 443] = tls.port
        monkeypatch.setenv("GPU_POOL_CA_FILE", str(tls.ca_file))
    # The only thing that is filled in: some blocks leave out the URLs.
    text = block.text.replace('service_endpoints="..."', f'service_endpoints="{TWO_SERVERS}"')
    names = namespace()

    if "asyncio.run(" in text:
        exec(compile(text, str(block), "exec"), names)  # noqa: S102 - the user's own document
    else:
        asyncio.run(run_inside(text, names))

    printed = capsys.readouterr().out
    expected = [pattern for start, pattern in PRINTED.items() if start in block.text]
    assert all(re.search(pattern, printed) for pattern in expected), printed
    assert "Warning" not in printed
    for server in servers:
        pool = server.json("/pool")
        assert [lease for lease in pool["leases"] if lease["state"] == "active"] == []
        assert pool["queue"] == []
        wait_until_free(server)


def test_every_expectation_belongs_to_a_block() -> None:
    assert [start for start in PRINTED if not any(start in block.text for block in RUNNABLE)] == []


def test_there_are_as_many_blocks_as_the_documents_have() -> None:
    assert {document: text_of(document).count("```python") for document in DOCUMENTS} == {
        document: len(blocks_of(document)) for document in DOCUMENTS
    }
    assert len([block for block in BLOCKS if is_signature(block)]) == 1
    assert len([block for block in BLOCKS if serves(block)]) == 2


SERVING = """
import sys, uvicorn
run = uvicorn.run
# The address is this test's: the documents' ports may be taken on this machine, and 0.0.0.0 is for everybody.
uvicorn.run = lambda app, *, host, port, **options: run(app, host="127.0.0.1", port=int(sys.argv[1]), **options)
"""


@pytest.mark.parametrize("block", [block for block in BLOCKS if serves(block)], ids=str)
def test_a_block_serves(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVING + block.text, encoding="utf-8")
    with ServerProcess({"SIMULATED_GPUS": "2"}, command=(sys.executable, str(script), "{port}")) as server:
        wait_until_it_listens(server)
        assert server.json("/health")["status"] == "healthy"
        assert server.json("/gpu/count")["gpu_count"] == 2
        assert server.process is not None
        server.process.send_signal(signal.SIGINT)
        code = server.process.wait(timeout=20)
        if "reload=True" not in block.text:
            assert code == 0
        else:
            # Its second half asks uvicorn to reload an object, which uvicorn, of any version, refuses: only "reload"
            # of something that has a name can work.
            assert code != 0
            assert "You must pass the application as an import string" in server.log()


# --- what they say of the API is so ----------------------------------------------------------------------------------


def keys_in(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return {key for key in value if isinstance(key, str)}.union(*map(keys_in, value.values()))
    return set().union(*map(keys_in, value)) if isinstance(value, list) else set()


async def test_every_key_that_the_documents_read_is_there(network: dict[tuple[str, int], int]) -> None:
    """Also those in branches that a healthy pool does not take."""
    read = {
        node.slice.value
        for block in RUNNABLE
        if "import requests" not in block.text
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    assert len(read) >= 20
    async with GPUWorkerPoolClient(service_endpoints=TWO_SERVERS) as client:
        await client.refresh()
        recovery = client.get_error_recovery_status()
        metrics = client.get_detailed_metrics()
        infos = client.get_endpoints_info()
        status = client.get_pool_status()
    assert isinstance(status, models.MultiEndpointPoolStatus)
    assert read <= keys_in([recovery, metrics, infos])
    assert infos is not None
    for details in (*infos, *status.endpoint_details):
        assert details.keys() >= {field.name for field in dataclasses.fields(models.EndpointInfo)}
    for stats in recovery["circuit_breaker_stats"].values():
        assert stats.keys() >= {"state", "failure_rate"}
    json.dumps([recovery, metrics])  # plain values, which can be sent on
