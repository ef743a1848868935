"""Every Python block of the user's documents runs as it stands, and what they say of the API is so.

Only the network is arranged: the documents' host names lead to servers on this machine. The documents are not part of
this repository; where they are not beside it these tests are skipped, and tests/client/test_api.py says the same in our
own words.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import typing
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool import errors, models
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.server.settings import ServerSettings
from tests.server.leasing import eventually, wait_until_free
from tests.server.running import RunningServer

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
DOCUMENTS = ("README.md", "SERVER.md", "MIGRATION_GUIDE.md", "MULTI_ENDPOINT_DESIGN.md")
pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the user's documents are not in {SEEDS}")

TOKEN = "a-token-for-the-documents"  # noqa: S105 - of servers that live for a test
TWO_SERVERS = "http://server1:8000,http://server2:8000"
TLS_HOST = "gpu-service.company.com"
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<text>.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def text_of(document: str) -> str:
    path = SEEDS / document
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def blocks_of(document: str) -> list[Block]:
    text = text_of(document)
    return [
        Block(document, text.count("\n", 0, found.start()) + 2, textwrap.dedent(found["text"]))
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def is_signature(block: Block) -> bool:
    """A call with annotations in it is no Python: it is how the documents show a constructor."""
    return block.text.startswith("GPUWorkerPoolClient(\n    service_endpoint: Optional[str]")


def serves(block: Block) -> bool:
    return "uvicorn.run(" in block.text


def shows_a_model(block: Block) -> bool:
    return block.text.startswith("@dataclass")


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
def servers() -> Iterator[list[RunningServer]]:
    env = {"GPU_POOL_TOKENS": f"ada:{TOKEN}", "REFRESH_INTERVAL": "0.05", "GPU_POOL_DURABILITY": "normal"}
    with ExitStack() as stack:
        yield [stack.enter_context(RunningServer(env)) for _ in range(3)]


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
    with RunningServer({"GPU_POOL_TOKENS": f"ada:{TOKEN}"}, command=(*uvicorn, *tls)) as server:
        wait_until_it_listens(server)
        yield TlsServer(server.port, certificate)


def wait_until_it_listens(server: RunningServer) -> None:
    """Under uvicorn's own command the application is ready a moment before its address is."""

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    eventually(answers, "it listens")


@pytest.fixture
def network(servers: list[RunningServer], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
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


def namespace() -> dict[str, Any]:
    """What a block may take for granted that is shown alone: what the documents imported further up."""
    names: dict[str, Any] = {name: getattr(gpu_worker_pool, name) for name in gpu_worker_pool.__all__}
    return names | {
        "__name__": "__main__",
        "asyncio": asyncio,
        "dataclass": dataclass,
        "datetime": datetime,
        "List": list,
        "Dict": dict,
    }


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
    servers: list[RunningServer],
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
    with RunningServer({"SIMULATED_GPUS": "2"}, command=(sys.executable, str(script), "{port}")) as server:
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


@pytest.mark.parametrize("block", [block for block in BLOCKS if shows_a_model(block)], ids=str)
def test_a_model_has_the_fields_of_the_document(block: Block) -> None:
    names = namespace()
    exec(compile(block.text, str(block), "exec"), names)  # noqa: S102 - the user's own document
    shown = next(node for node in ast.parse(block.text).body if isinstance(node, ast.ClassDef))
    fields = [
        node.target.id for node in shown.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    model = getattr(models, shown.name)
    ours = [field.name for field in dataclasses.fields(model) if not field.kw_only]
    if shown.bases:
        base = shown.bases[0]
        assert isinstance(base, ast.Name)
        inherited = [field.name for field in dataclasses.fields(getattr(models, base.id))]
        assert issubclass(model, getattr(models, base.id))
        ours = [name for name in ours if name not in inherited]
    if shown.name == "MultiEndpointPoolStatus":
        # Two documents show it differently: it has the fields of both.
        assert set(fields) <= set(ours) | {field.name for field in dataclasses.fields(model)}
        assert ours[: len(fields)] == fields or block.document == "MULTI_ENDPOINT_DESIGN.md"
    else:
        assert ours == fields
    assert getattr(gpu_worker_pool, shown.name) is model


def test_the_constructor_has_the_parameters_and_defaults_of_the_document() -> None:
    (block,) = [block for block in BLOCKS if is_signature(block)]
    arguments = block.text.removeprefix("GPUWorkerPoolClient")
    definition = ast.parse(f"def __init__{arguments.rstrip()}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    shown = {
        argument.arg: ast.literal_eval(default)
        for argument, default in zip(definition.args.args, definition.args.defaults, strict=True)
    }

    parameters = list(inspect.signature(GPUWorkerPoolClient).parameters.values())

    assert {parameter.name: parameter.default for parameter in parameters[: len(shown)]} == shown
    assert [parameter.name for parameter in parameters[: len(shown)]] == list(shown)
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters[: len(shown)])
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[len(shown) :])
    extra = {"endpoint_timeout", "endpoint_max_retries", "endpoint_health_check_interval", "token", "on_lost"}
    assert extra <= {parameter.name for parameter in parameters}


def test_what_is_none_has_the_default_of_the_documents_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `[^`]+` \| `([^`]+)` \| ", text_of("README.md"), re.MULTILINE)
    config = ClientConfig.build(environ={})
    ours = {"load_balancing_strategy": config.strategy} | {
        name: getattr(config, name) for name, _ in rows if hasattr(config, name)
    }

    shown = {name: ast.literal_eval(default) for name, default in rows}

    assert len(shown) == 8
    assert {name: ours.get(name) for name in shown} == shown


METHODS = re.findall(r"^##### `(async )?(\w+)\((.*?)\)(?: -> (.*))?`$", text_of("README.md"), re.MULTILINE)


@pytest.mark.parametrize(("is_async", "name", "shown", "returns"), METHODS, ids=[method[1] for method in METHODS])
def test_a_method_is_as_the_api_reference_shows_it(is_async: str, name: str, shown: str, returns: str) -> None:
    definition = ast.parse(f"def f({shown}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    method = getattr(GPUWorkerPoolClient, name)
    parameters = [parameter for parameter in inspect.signature(method).parameters.values() if parameter.name != "self"]
    positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

    assert inspect.iscoroutinefunction(method) == bool(is_async)
    assert [parameter.name for parameter in positional] == [argument.arg for argument in definition.args.args]
    assert [parameter.default for parameter in positional if parameter.default is not parameter.empty] == [
        ast.literal_eval(default) for default in definition.args.defaults
    ]
    assert all(parameter.default is not parameter.empty for parameter in parameters if parameter not in positional)


def test_all_methods_of_the_api_reference_were_found() -> None:
    assert len(METHODS) == text_of("README.md").count("\n##### `")


def test_every_exception_of_the_documents_is_there() -> None:
    section = text_of("README.md").partition("### Common Exceptions")[2].partition("###")[0]
    names = re.findall(r"^- `(\w+)`: ", section, re.MULTILINE)
    assert set(names) == {"WorkerTimeoutError", "StaleAssignmentError", "ServiceUnavailableError", "ValueError"}
    for name in set(names) - {"ValueError"}:
        assert issubclass(getattr(errors, name), Exception)
        assert getattr(gpu_worker_pool, name) is getattr(errors, name)


def test_every_import_of_the_documents_works() -> None:
    lines = {
        line.strip()
        for document in DOCUMENTS
        for line in text_of(document).splitlines()
        if re.match(r"\s*from gpu_worker_pool[\w.]* import ", line)
    }
    assert len(lines) >= 4
    for line in lines:
        exec(line, {})  # noqa: S102 - the user's own document


class NotingWhatIsRead(dict[str, str]):
    """An environment that notes what is looked for in it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return default


def test_every_environment_variable_of_the_documents_is_read() -> None:
    exported = r"^\s*export ([A-Z_]+)="
    listed = r"^- `([A-Z_]+)` - "
    in_a_file = r"^([A-Z][A-Z_]+)="
    in_a_docker_call = r"-e ([A-Z_]+)="
    in_a_table = r"^\| `(GPU_[A-Z_]+)` \|"
    patterns = (exported, listed, in_a_file, in_a_docker_call, in_a_table)
    named = {
        name
        for document in DOCUMENTS
        for pattern in patterns
        for name in re.findall(pattern, text_of(document), re.MULTILINE)
    }
    environ = NotingWhatIsRead()
    ClientConfig.build(environ=environ)

    read_by_python = {"PYTHONPATH"}
    unread = named - environ.read - {name.upper() for name in ServerSettings.model_fields} - read_by_python

    assert len(named) >= 25
    assert unread == set()


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
    json.dumps([recovery, metrics])  # plain values, for whoever sends them on


@pytest.mark.parametrize("name", ["GPUWorkerPoolClient", "GPUContextManager", "gpu_worker_pool_client"])
def test_what_the_documents_import_has_types(name: str) -> None:
    thing = getattr(gpu_worker_pool, name)
    hints = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    assert hints
