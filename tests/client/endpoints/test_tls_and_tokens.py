"""https with a CA of one's own, and tokens that go where they belong and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool import GPUWorkerPoolClient, RequestRefusedError, ServiceUnavailableError
from gpu_worker_pool.testing import ServerProcess
from tests.client.fault_tools import QUICK, client_of, healthy, nothing_left, running, soon
from tests.client.foreign_servers import Behaviour, ForeignServer, ScriptedLeases, redirecting

TOKEN = "alice-secret-0123456789"  # noqa: S105 - of a test
OTHER_TOKEN = "bob-secret-9876543210"  # noqa: S105


@pytest.fixture(scope="module")
def guarded() -> Iterator[list[ServerProcess]]:
    with running(1, GPU_POOL_TOKENS=f"alice:{TOKEN},bob:{OTHER_TOKEN},admin:admin-secret-00000000") as servers:
        yield servers


@pytest.fixture
def server(guarded: list[ServerProcess]) -> ServerProcess:
    return guarded[0]


# --- https -----------------------------------------------------------------------------------------------------------


class SecureServer(ForeignServer):
    """The same over TLS."""

    def __init__(self, behaviour: Behaviour, tls: ssl.SSLContext) -> None:
        super().__init__(behaviour, tls=tls)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA (ca.pem) and a certificate of 127.0.0.1 that it signed (server.pem, with its key)."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command here to make a CA with")
    folder = tmp_path_factory.mktemp("papers")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=our own CA", "-days", "2")
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n", encoding="ascii")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    run("x509", "-req", "-in", "server.csr", *signed_by, "-out", "server.crt", "-days", "2", "-extfile", "names")
    (folder / "server.pem").write_bytes((folder / "server.crt").read_bytes() + (folder / "server.key").read_bytes())
    return folder


@pytest.fixture
def secure(papers: Path) -> Iterator[SecureServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(papers / "server.pem")
    with SecureServer(ScriptedLeases().behaviour(), context) as server:
        yield server


async def test_a_server_with_a_certificate_of_ones_own_ca_is_trusted_by_the_ca_file(
    secure: SecureServer, papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_CA_FILE", str(papers / "ca.pem"))
    async with client_of(secure, token=TOKEN) as client:
        assignment = await client.request_gpu(timeout=30)
        await client.release_gpu(assignment)
    assert {seen.headers.get("authorization") for seen in secure.seen} == {f"Bearer {TOKEN}"}


async def test_without_the_ca_file_it_is_refused_and_sees_no_token(
    secure: SecureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPU_POOL_CA_FILE", raising=False)
    async with client_of(secure, token=TOKEN) as client:
        with pytest.raises(ServiceUnavailableError, match=r"(?i)certificate"):
            await client.request_gpu(timeout=0.5)
    assert secure.seen == []


async def test_a_ca_file_that_cannot_be_used_is_said_at_the_start(
    secure: SecureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        if path.name == "empty.pem":
            path.write_text("no certificate", encoding="ascii")
        monkeypatch.setenv("GPU_POOL_CA_FILE", str(path))
        client = client_of(secure)
        with pytest.raises(ValueError, match="GPU_POOL_CA_FILE"):
            await client.start()
        with pytest.raises(RuntimeError):
            await client.request_gpu()


# --- redirects and whose token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_single", [True, False])
async def test_a_redirect_is_refused_and_nothing_is_sent_to_where_it_leads(is_single: bool) -> None:
    with ForeignServer(ScriptedLeases().behaviour()) as trap, ForeignServer(redirecting(trap.url)) as foreign:
        where: dict[str, Any] = {"service_endpoint": foreign.url} if is_single else {"service_endpoints": [foreign.url]}
        async with GPUWorkerPoolClient(**where, **QUICK, token=TOKEN) as client:
            with pytest.raises(ServiceUnavailableError, match="redirect"):
                await client.request_gpu(timeout=0.5)
    assert foreign.seen
    assert trap.seen == []


async def test_a_heartbeat_and_a_release_are_not_redirected_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_TTL", "0.6")
    with ForeignServer(ScriptedLeases().behaviour()) as trap, ForeignServer(ScriptedLeases().behaviour()) as foreign:
        async with client_of(foreign, token=TOKEN) as client:
            assignment = await client.request_gpu(timeout=30)
            foreign.behaviour = redirecting(trap.url)
            await asyncio.wait_for(assignment.lost.wait(), 20)  # type: ignore[union-attr]
            await soon(lambda: foreign.asked("DELETE"), "it was tried to give it back")
    assert foreign.asked("POST")
    assert trap.seen == []


async def test_a_token_goes_to_its_own_endpoint_only() -> None:
    servers = [ForeignServer(ScriptedLeases().behaviour()) for _ in range(3)]
    with servers[0] as one, servers[1] as two, servers[2] as none:
        tokens = {one.url: TOKEN, two.url: OTHER_TOKEN}
        async with client_of(one, two, none, token=tokens) as client:
            await healthy(client, one, two, none)
            held = [await client.request_gpu(timeout=30) for _ in range(3)]
            for assignment in held:
                await client.release_gpu(assignment)
        wanted = {one: f"Bearer {TOKEN}", two: f"Bearer {OTHER_TOKEN}", none: None}
        for server, header in wanted.items():
            assert {seen.method for seen in server.seen} >= {"GET", "PUT", "DELETE"}
            assert {seen.headers.get("authorization") for seen in server.seen} == {header}
            sent = repr([(seen.target, seen.headers, seen.body) for seen in server.seen])
            assert (TOKEN in sent, OTHER_TOKEN in sent) == (server is one, server is two)


# --- a server that wants one -------------------------------------------------------------------------------------------


async def test_with_the_right_token_a_gpu_is_granted_to_its_owner(server: ServerProcess) -> None:
    async with client_of(server, token=TOKEN) as client:
        assignment = await client.request_gpu(timeout=30)
        (lease,) = server.json("/leases")["leases"]
        assert lease["owner"] == "alice"
        await client.release_gpu(assignment)
    await nothing_left(server)


async def test_with_a_wrong_token_the_request_is_refused_at_once_and_says_so(server: ServerProcess) -> None:
    token = "wrong-secret-5555555555"  # noqa: S105 - of a test
    async with client_of(server, token=token) as client:
        with pytest.raises(RequestRefusedError, match="token") as raised:
            await client.request_gpu(timeout=30)
    assert token not in f"{raised.value!r} {raised.value} {raised.value.reasons}"
    await nothing_left(server)


async def test_no_token_is_in_logs_or_in_what_is_shown(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    events: list[Any] = []
    with ForeignServer(redirecting("http://127.0.0.1:1")) as bad:
        tokens = {server.url: TOKEN, bad.url: OTHER_TOKEN}
        async with client_of(server, bad, token=tokens, on_event=events.append) as client:
            assignment = await client.request_gpu(timeout=30)
            client.print_error_recovery_summary()
            places = client._started_client.places  # type: ignore[union-attr]
            shown = [repr(client), repr(client._config), repr(assignment), str(assignment), repr(places)]
            shown += [repr(endpoint) for endpoint in places.endpoints.values()]
            shown += [repr(client.get_detailed_metrics()), repr(client.get_endpoints_info()), repr(vars(assignment))]
            await client.release_gpu(assignment)
            bad_only = client_of(bad, token=OTHER_TOKEN)
            async with bad_only:
                with pytest.raises(ServiceUnavailableError) as raised:
                    await bad_only.request_gpu(timeout=0.3)
            shown += [repr(raised.value), str(raised.value)]
    shown += [repr(events), caplog.text, repr([vars(record) for record in caplog.records]), *capsys.readouterr()]
    for token in (TOKEN, OTHER_TOKEN):
        assert not any(token in text for text in shown)
