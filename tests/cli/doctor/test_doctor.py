"""`gpu-pool doctor`: what it thinks of made-up facts, and a few looks at real processes."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker_pool.cli.doctor import client, gpus, server
from gpu_worker_pool.cli.doctor.client import EndpointFacts
from gpu_worker_pool.cli.doctor.command import endpoint_findings
from gpu_worker_pool.cli.doctor.finding import Check, Finding
from gpu_worker_pool.cli.doctor.gpus import Driver, Probed
from gpu_worker_pool.cli.pools.servers import Answer, Servers
from gpu_worker_pool.cli.serve.port_holder import PortHolder
from gpu_worker_pool.core.model.gpu import Gpu, GpuKey, Reading
from gpu_worker_pool.server.http.access import Tokens
from gpu_worker_pool.urls import parse_endpoint
from tests.cli.own_process import Done, gpu_pool
from tests.client.foreign_servers import (
    Behaviour,
    ForeignServer,
    Seen,
    answering,
    internal_error,
    not_found,
    statistics,
)
from tests.gpus.fake_nvidia_smi import install
from tests.gpus.stub_nvml import StubConfig, StubGpu, build
from tests.server.running import ROOT, RunningServer, free_port

TOKEN = "a-long-secret"  # noqa: S105 - of nothing
NOWHERE = {"PATH": "/nonexistent", "LD_LIBRARY_PATH": ""}


def reading(index: int, name: str = "A100", fault: str | None = None) -> Reading:
    return Reading(Gpu(GpuKey("box", f"GPU-{index}"), index, name), 0.0, fault=fault)


LOADED = Driver("550.54.14", ("nvidia0", "nvidia1"))
NO_DRIVER = Driver(None, ())
WORKS = Probed((reading(0), reading(1)), took_s=0.1)
MISSING = Probed(unavailable="it was not found: install it")
HANGS = Probed(error="it has not answered for 20 s")


# --- the GPUs of this machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "nvml", "smi", "expected"),
    [
        (NO_DRIVER, MISSING, MISSING, ("warning", "skipped", "skipped")),
        (LOADED, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, WORKS, MISSING, ("ok", "ok", "ok")),
        (LOADED, MISSING, WORKS, ("ok", "warning", "ok")),
        (LOADED, MISSING, MISSING, ("ok", "problem", "problem")),
        (LOADED, HANGS, HANGS, ("ok", "problem", "problem")),
        (LOADED, Probed(), Probed(), ("ok", "problem", "problem")),
        # A container that was not given the GPUs of its machine.
        (Driver("550.54.14", ()), MISSING, MISSING, ("problem", "problem", "problem")),
        # WSL: the driver is Windows'.
        (NO_DRIVER, WORKS, WORKS, ("ok", "ok", "ok")),
        (LOADED, Probed((reading(0), reading(1, fault="it is lost"))), WORKS, ("ok", "problem", "ok")),
        (LOADED, WORKS, Probed((reading(0),)), ("ok", "ok", "warning")),
        (LOADED, WORKS, replace(WORKS, took_s=3.0), ("ok", "ok", "warning")),
    ],
)
def test_what_the_driver_nvml_and_nvidia_smi_come_to(
    driver: Driver, nvml: Probed, smi: Probed, expected: tuple[str, str, str]
) -> None:
    judges = (gpus.judge_driver, gpus.judge_nvml, gpus.judge_nvidia_smi)
    found = [judge(driver, nvml, smi) for judge in judges]

    assert tuple(finding.status for finding in found) == expected
    assert all(finding.advice for finding in found if finding.status in {"warning", "problem"})


def test_a_machine_without_a_gpu_is_told_how_to_try_it_all_the_same() -> None:
    finding = gpus.judge_driver(NO_DRIVER, MISSING, MISSING)

    assert "SIMULATED_GPUS=4" in str(finding.advice)


def test_mig_devices_are_not_taken_for_a_disagreement() -> None:
    mig = Probed((Reading(Gpu(GpuKey("box", "MIG-1"), 100, "A100 MIG"), 0.0),))

    assert gpus.judge_nvidia_smi(LOADED, mig, WORKS).status == "ok"


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, "ok", "all GPUs are shown"),
        ("1", "ok", "these are shown: 1"),
        ("-1", "warning", "hides all"),
        ("", "warning", "hides all"),
        ("0,7", "warning", "GPU 7 in CUDA_VISIBLE_DEVICES not found"),
        ("first", "warning", "neither a GPU index nor a GPU UUID"),
    ],
)
def test_visible_devices_as_they_would_be_understood(value: str | None, status: str, words: str) -> None:
    finding = gpus.judge_visible_devices(value, WORKS.readings)

    assert finding.status == status
    assert words in finding.message


def test_the_order_of_devices_matters_where_the_models_differ() -> None:
    mixed = (reading(0), reading(1, "T4"))

    assert gpus.judge_device_order(None, WORKS.readings).status == "ok"
    assert gpus.judge_device_order(None, mixed).status == "warning"
    assert gpus.judge_device_order("PCI_BUS_ID", mixed).status == "ok"
    assert gpus.judge_device_order("PCI", WORKS.readings).status == "warning"


def test_the_driver_is_found_by_what_the_system_shows(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version: 12.2.0\n"
    )
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()

    assert Driver.here(tmp_path) == LOADED


# --- as a server ---------------------------------------------------------------------------------------------------

IN_USE = OSError(errno.EADDRINUSE, "in use")
OURS = PortHolder("http://localhost:8000", "box", 4, "nvml")


@pytest.mark.parametrize(
    ("port", "is_client_only", "status"),
    [
        (server.Port("0.0.0.0", 8000), False, "ok"),  # noqa: S104 - nothing listens
        (server.Port("127.0.0.1", 8000, IN_USE, OURS), False, "ok"),
        (server.Port("127.0.0.1", 8000, IN_USE), False, "problem"),
        (server.Port("127.0.0.1", 8000, IN_USE), True, "warning"),
        (server.Port("no.such.host", 8000, socket.gaierror(-2, "unknown")), False, "problem"),
        (server.Port("127.0.0.1", 80, PermissionError(errno.EACCES, "no")), False, "problem"),
    ],
)
def test_a_port_is_free_or_ours_or_somebody_elses(port: server.Port, is_client_only: bool, status: str) -> None:
    finding = server.judge_port(port, is_client_only=is_client_only)

    assert finding.status == status
    assert status == "ok" or finding.advice


STATE = server.StateDir(
    Path("/s/leases.sqlite3"), Path("/s"), is_writable=True, free_mb=1e5, file_system="ext4", holder_pid=7
)


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        (STATE, "ok", "in use by the server with pid 7"),
        (replace(STATE, nearest=Path("/"), holder_pid=None), "ok", "can be made"),
        (replace(STATE, is_writable=False), "problem", "cannot be written to"),
        (replace(STATE, nearest=Path("/"), is_writable=False), "problem", "cannot be made"),
        (replace(STATE, free_mb=100.0), "warning", "only 100 MiB are free"),
        (replace(STATE, free_mb=5.0), "problem", "only 5 MiB are free"),
        (replace(STATE, file_system="tmpfs"), "warning", "in memory"),
        (replace(STATE, file_system="nfs4"), "warning", "network file system"),
        (replace(STATE, file_system="fuse.sshfs"), "warning", "network file system"),
        (replace(STATE, file_system=None), "ok", "there"),
    ],
)
def test_where_the_leases_are_kept(state: server.StateDir, status: str, words: str) -> None:
    (finding,) = server.judge_state_dir(state)

    assert finding.status == status
    assert words in finding.message


def test_the_file_system_is_that_of_the_innermost_mount_and_of_the_last_one_there() -> None:
    mounts = (
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:40 / /mnt/my\\040lab rw shared:1 - nfs4 box:/lab rw\n"
        "31 22 0:41 / /mnt/twice rw - ext4 /dev/vdb rw\n"
        "32 31 0:42 / /mnt/twice rw - tmpfs none rw\n"
    )

    found = [server.file_system_of(Path(path), mounts) for path in ("/mnt/my lab/s", "/mnt/mylab", "/mnt/twice/x")]

    assert found == ["nfs4", "ext4", "tmpfs"]
    assert server.file_system_of(Path("/x"), "") is None


def test_tokens_that_everybody_can_read_are_a_problem(tmp_path: Path) -> None:
    tokens = Tokens.parse(f"ada:{TOKEN}")

    assert [finding.status for finding in server.judge_tokens(tokens, [], None)] == ["ok"]
    assert [finding.status for finding in server.judge_tokens(tokens, [], "/etc/tokens")] == ["problem"]
    assert [finding.status for finding in server.judge_tokens(Tokens.broken(), ["why"], None)] == ["problem"]
    assert [finding.status for finding in server.judge_tokens(Tokens(), [], None)] == ["ok"]
    # The folders of pytest are for one user only, so that the mode of a file in them does not matter.
    (tmp_path / "tokens").touch(0o644)
    assert not server.can_everybody_read(tmp_path / "tokens")
    assert server.can_everybody_read(Path("/etc/passwd"))


def test_a_settings_file_that_cannot_be_read_is_one_problem_and_not_taken_for_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00bad")
    monkeypatch.chdir(tmp_path)
    for name in ("GPU_POOL_TOKENS", "GPU_POOL_TOKENS_FILE"):
        monkeypatch.delenv(name, raising=False)

    settings, heard = server.load_settings()
    (problem,) = server.judge_settings(heard)
    (tokens,) = server.check_tokens(settings, heard)

    assert ".env cannot be read" in problem.message
    assert "mend that file" in str(problem.advice)
    assert "variable" not in str(problem.advice)
    assert tokens.status == "skipped"
    assert ".env" in tokens.message


def test_simulated_gpus_that_hide_real_ones_are_a_warning() -> None:
    assert server.judge_simulated(None, has_gpus=True) is None
    assert [
        finding.status
        for has_gpus in (False, True)
        if (finding := server.judge_simulated("4", has_gpus=has_gpus)) is not None
    ] == ["ok", "warning"]


# --- as a client ---------------------------------------------------------------------------------------------------

FREE_GPU = {"gpu_id": 0, "memory_total_mb": 1000, "memory_outside_mb": 10, "leases": [], "processes": []}
POOL: dict[str, Any] = {
    "gpus": [FREE_GPU],
    "thresholds": {"memory_percent": 80.0, "utilization_percent": 90.0},
    "can_grant": True,
    "source": "nvml",
}
FACTS = EndpointFacts("box", parse_endpoint("http://box:8000"), has_token=False, took_s=0.01, pool=POOL)


@pytest.mark.parametrize(
    ("environ", "given", "status", "words"),
    [
        ({}, None, "ok", "default"),
        ({"GPU_SERVICE_ENDPOINT": "http://box"}, None, "ok", "by GPU_SERVICE_ENDPOINT"),
        ({"GPU_SERVICE_ENDPOINT": "http://box"}, ["http://x"], "ok", "by --endpoint"),
        (
            {"GPU_SERVICE_ENDPOINT": "http://box", "GPU_SERVICE_ENDPOINTS": "http://box"},
            None,
            "warning",
            "GPU_SERVICE_ENDPOINTS wins",
        ),
        (
            {"GPU_SERVICE_ENDPOINTS": "http://b", "GPU_STATS_SERVICE_ENDPOINTS": "http://a"},
            None,
            "warning",
            "GPU_STATS_SERVICE_ENDPOINTS wins",
        ),
        (
            {"GPU_STATS_SERVICE_ENDPOINTS": ",,"},
            None,
            "warning",
            "the default: http://box; GPU_STATS_SERVICE_ENDPOINTS=',,' names nothing and is ignored",
        ),
        (
            {"GPU_STATS_SERVICE_ENDPOINTS": ",,", "GPU_SERVICE_ENDPOINT": "http://box"},
            None,
            "warning",
            "by GPU_SERVICE_ENDPOINT: http://box; GPU_STATS_SERVICE_ENDPOINTS=',,' names nothing",
        ),
    ],
)
def test_which_variable_decides(environ: dict[str, str], given: list[str] | None, status: str, words: str) -> None:
    finding = client.judge_variables(environ, given, ["http://box"])

    assert finding.status == status
    assert words in finding.message


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (FACTS, "ok", "1 GPU (nvml)"),
        (replace(FACTS, same_as="other"), "warning", "it is the same server as other"),
        (replace(FACTS, pool=None, stats=POOL), "warning", "statistics only"),
        (replace(FACTS, pool={**POOL, "can_grant": False, "trouble": "disk full"}), "problem", "disk full"),
        (replace(FACTS, pool={**POOL, "gpus": []}), "warning", "no GPU"),
        (replace(FACTS, took_s=2.0), "warning", "slow"),
        (replace(FACTS, pool=None, error="refused"), "problem", "refused"),
    ],
)
def test_what_an_endpoint_is_good_for(facts: EndpointFacts, status: str, words: str) -> None:
    finding = client.judge_reachable(facts, is_wanted=True)

    assert (finding.status, finding.endpoint) == (status, "box")
    assert words in finding.message


def test_a_server_with_two_addresses_is_found_out() -> None:
    first = replace(FACTS, pool={**POOL, "server_id": "x"})
    stranger = replace(FACTS, id="stranger", pool={**POOL, "server_id": "y"})
    older = [
        replace(FACTS, id="old"),
        replace(FACTS, id="older"),
        replace(FACTS, id="down", pool=None, error="refused"),
    ]

    found = client.mark_same([first, stranger, replace(first, id="again"), *older])

    assert [facts.same_as for facts in found] == [None, None, "box", None, None, None]


async def only_a_summary(seen: Seen) -> tuple[int, Any]:
    shown = {"gpus_summary": [{"gpu_id": 0}]}
    return (200, shown) if seen.path == "/gpu/summary" else (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        (statistics(gpus=1), "warning", "1 GPU (source unknown), answers in"),
        (answering(only_a_summary), "warning", "it has statistics only"),
        (not_found, "problem", "its answer is not a GPU server's"),
        (internal_error, "problem", "status 500"),
    ],
)
def test_a_server_with_statistics_only_is_told_from_none(behaviour: Behaviour, status: str, words: str) -> None:
    with ForeignServer(behaviour) as foreign:
        (finding,) = endpoint_findings(Servers([foreign.url]), is_wanted=True)

    assert finding.status == status
    assert words in finding.message
    assert status == "problem" or "only the workers of one process are coordinated" in str(finding.advice)


def test_certificates_that_cannot_be_used_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_CA_FILE", "/nonexistent")

    (finding,) = endpoint_findings(Servers(["https://box"]), is_wanted=True)

    assert finding.status == "problem"
    assert "GPU_POOL_CA_FILE" in str(finding.advice)


def test_the_default_endpoint_need_not_be_there() -> None:
    finding = client.judge_reachable(replace(FACTS, pool=None, error="refused"), is_wanted=False)

    assert finding.status == "warning"
    assert "gpu-pool serve" in str(finding.advice)


@pytest.mark.parametrize(
    ("status", "has_token", "expected", "advice"),
    [
        (422, False, "ok", ""),
        (422, True, "ok", ""),
        (401, False, "problem", "set GPU_POOL_TOKEN"),
        (401, True, "problem", "unset GPU_POOL_TOKEN"),
        (503, True, "warning", "again"),
    ],
)
def test_whether_we_may_ask_is_known_by_a_call_that_changes_nothing(
    status: int, has_token: bool, expected: str, advice: str
) -> None:
    finding = client.judge_right(replace(FACTS, has_token=has_token, right=Answer("box", "", status, None, "why")))

    assert finding is not None
    assert finding.status == expected
    assert advice in str(finding.advice)


@pytest.mark.parametrize(
    ("url", "has_token", "is_open"),
    [
        ("http://box:8000", True, True),
        ("http://10.0.0.7:8000", True, True),
        ("http://box:8000", False, False),
        ("https://box", True, False),
        ("http://localhost:8000", True, False),
        ("http://127.0.0.2:8000", True, False),
        ("http://[::1]:8000", True, False),
    ],
)
def test_a_token_over_a_network_without_tls_is_a_warning(url: str, has_token: bool, is_open: bool) -> None:
    finding = client.judge_open_token(replace(FACTS, url=parse_endpoint(url), has_token=has_token))

    assert (finding is not None and finding.status == "warning") == is_open


@pytest.mark.parametrize(("off_s", "status"), [(0.4, "ok"), (-4.0, "ok"), (60.0, "warning"), (-3600.0, "warning")])
def test_a_clock_that_is_off_is_a_warning(off_s: float, status: str) -> None:
    finding = client.judge_clock(replace(FACTS, clock_off_s=off_s))

    assert finding is not None
    assert finding.status == status
    assert client.judge_clock(FACTS) is None, "one that does not tell"


def test_thresholds_that_can_never_be_met() -> None:
    never = replace(FACTS, pool={**POOL, "thresholds": {"memory_percent": 0.0, "utilization_percent": 0.0}})

    assert client.judge_thresholds(FACTS, None, None) == []
    assert [finding.status for finding in client.judge_thresholds(never, None, None)] == ["problem", "problem"]
    assert len(client.judge_thresholds(never, 50.0, None)) == 1, "what the client asks for takes the server's place"
    assert [finding.status for finding in client.judge_own_thresholds(0.0, None)] == ["problem"]
    assert client.judge_own_thresholds(None, 10.0) == []


def test_a_gpu_that_somebody_outside_keeps_over_the_threshold_is_told_with_his_name() -> None:
    desktop = [{"pid": 17, "name": "Xorg", "used_mb": 850.0}, {"pid": 18, "name": None, "used_mb": None}]
    busy = {**FREE_GPU, "gpu_id": 3, "memory_outside_mb": 850, "processes": desktop}
    leased = {**busy, "leases": ["somebody"]}
    unknown = {**busy, "memory_outside_mb": None}

    (finding,) = client.judge_thresholds(
        replace(FACTS, pool={**POOL, "gpus": [FREE_GPU, busy, leased, unknown]}), None, None
    )

    assert finding.status == "warning"
    assert "GPU 3 of box" in finding.message
    assert "Xorg (pid 17, 850 MiB), an unknown program (pid 18)" in finding.message
    assert "/admin/ignored-processes/Xorg" in str(finding.advice)
    assert client.judge_thresholds(replace(FACTS, pool={**POOL, "gpus": [busy]}), 90.0, None) == []


# --- what a terminal would obey ------------------------------------------------------------------------------------


def test_what_comes_from_outside_is_made_plain() -> None:
    evil = "a\x1b[31m\x07\x9b\u202eb\nc"
    pool = {**POOL, "source": evil, "can_grant": False, "trouble": evil}
    facts = replace(FACTS, pool=pool, version=evil)

    (judged,) = Check("x", lambda: client.judge_reachable(facts, is_wanted=True)).run()
    (advised,) = Check("x", lambda: Finding("x", "problem", "m", evil)).run()

    assert judged.message.count("a\N{REPLACEMENT CHARACTER}[31m") == 3
    assert judged.message.isprintable()
    assert str(advised.advice).isprintable()


# --- a check that goes wrong ---------------------------------------------------------------------------------------


def test_a_check_that_raises_or_hangs_is_a_finding_itself() -> None:
    def break_down() -> Finding:
        raise ZeroDivisionError("by nothing")

    for_ever = threading.Event()

    def hang() -> Finding:
        for_ever.wait()
        return Finding("hangs", "ok", "it went on")

    (broken,) = Check("breaks", break_down).run()
    (hung,) = Check("hangs", hang).run(limit_s=0.01)
    for_ever.set()

    assert (broken.check, broken.status) == ("breaks", "problem")
    assert "ZeroDivisionError: by nothing" in broken.message
    assert (hung.check, hung.status) == ("hangs", "problem")
    assert "did not end" in hung.message


# --- real processes ------------------------------------------------------------------------------------------------


def found(done: Done) -> dict[str, list[dict[str, Any]]]:
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in done.json["findings"]:
        assert finding.keys() == {"check", "status", "message", "advice", "endpoint"}
        by_check.setdefault(finding["check"], []).append(finding)
    return by_check


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with RunningServer({"GPU_POOL_TOKENS": f"ada:{TOKEN}"}) as running:
        yield running


def test_it_is_calm_on_a_machine_without_a_gpu_and_without_the_servers_packages(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('not here', name='fastapi')")
    endpoint = f"http://127.0.0.1:{free_port()}"

    done = gpu_pool(
        "doctor", server=endpoint, env={**NOWHERE, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, cwd=tmp_path
    )

    assert "Traceback" not in done.err
    assert done.err == ""
    assert "warning  driver" in done.out
    assert "SIMULATED_GPUS=4" in done.out
    assert "skipped  server-packages" in done.out
    assert "pip install 'gpu-worker-pool[server]'" in done.out
    assert "problem  endpoint" in done.out, "somebody said that it is there"
    assert done.out.splitlines()[-1] == "1 problem, 1 warning"
    assert done.code == 1


def test_all_is_well_with_a_driver_and_a_server(running: RunningServer, tmp_path: Path) -> None:
    library = build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler to build the stub of the driver's library with")
    stub = StubConfig(tmp_path / "nvml.conf", [StubGpu.numbered(0), StubGpu.numbered(1)])
    stub.write()
    smi = install(tmp_path)
    smi.say("".join(f"{n}, {gpu.uuid}, {gpu.name}, 81920, 0, 0, 35, 60, 400\n" for n, gpu in enumerate(stub.gpus)))
    env = {
        **stub.environment(library),
        **smi.environment(),
        "HOST": "127.0.0.1",
        "PORT": str(running.port),
        "GPU_POOL_STATE_DIR": str(running.state_dir),
        "GPU_POOL_TOKEN": TOKEN,
        "CUDA_VISIBLE_DEVICES": "1",
    }

    done = gpu_pool("doctor", "--json", server=running, env=env, cwd=tmp_path)
    checks = found(done)

    assert done.json["schema"] == "gpu-pool/doctor/1"
    assert (done.code, done.json["is_ok"], done.json["problems"]) == (0, True, 0)
    assert checks["nvml"][0]["message"].startswith("2 GPUs: NVIDIA A100")
    assert checks["nvidia-smi"][0]["message"].startswith("2 GPUs, both queries in ")
    assert checks["visible-devices"][0]["message"].endswith("of 2 GPUs these are shown: 1")
    assert "4 GPUs, simulated" in checks["port"][0]["message"]
    assert checks["right"][0]["message"] == "127.0.0.1: we may ask for GPUs, with GPU_POOL_TOKEN"
    assert TOKEN not in done.out + done.err


def test_what_is_wrong_is_told_all_at_once(running: RunningServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def accept_and_hang_up() -> None:
            stranger.accept()[0].close()

        hang_up = threading.Thread(target=accept_and_hang_up, daemon=True)
        hang_up.start()
        env = {
            **NOWHERE,
            "HOST": "127.0.0.1",
            "PORT": str(stranger.getsockname()[1]),
            "MAX_HISTORY": "many",
            "GPU_POLLING_INTERVAL": "-3",
            "GPU_POOL_TOKENS_FILE": "/nonexistent/tokens",
            "GPU_POOL_STATE_DIR": "/proc/nothing/here",
            "GPU_POOL_TOKEN": f"not-{TOKEN}",
            "GPU_MEMORY_THRESHOLD_PERCENT": "0",
            "GPU_STATS_SERVICE_ENDPOINTS": running.url,
        }
        done = gpu_pool("doctor", "--json", server=running, env=env, cwd=tmp_path)
        hang_up.join()
    checks = found(done)

    assert done.code == 1
    problems = {name for name, findings in checks.items() if any(f["status"] == "problem" for f in findings)}
    assert problems == {"server-settings", "port", "state-dir", "tokens", "client-settings", "thresholds", "right"}
    assert checks["endpoints"][0]["status"] == "warning"
    assert "MAX_HISTORY='many'" in checks["server-settings"][0]["message"]
    assert "This token is not known" in checks["right"][0]["message"]
    assert TOKEN not in done.out + done.err
    assert done.err == ""
