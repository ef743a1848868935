"""Tables and lists in the documents say what the code does, and leave nothing out."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import gpu_worker_pool
from gpu_worker_pool import config, models
from gpu_worker_pool.client.events import EventKind
from gpu_worker_pool.client.options import DEFAULTS
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.core.model import lease
from gpu_worker_pool.core.model.gpu_names import MAX_NAMES
from gpu_worker_pool.core.queue import verdicts
from gpu_worker_pool.gpus.simulated import MODELS
from gpu_worker_pool.host import unix_socket
from gpu_worker_pool.jobs.job_spec import ARRAY_ID_VARIABLE, ARRAY_INDEX_VARIABLE, RESTART_VARIABLE
from gpu_worker_pool.jobs.job_store import JOBS_DIR_VARIABLE
from gpu_worker_pool.jobs.keeper import KEEP_VARIABLE
from gpu_worker_pool.jobs.notices import JOB_ID_VARIABLE
from gpu_worker_pool.server.app import PoolApp, create_app
from gpu_worker_pool.server.forms import LeaseForm
from gpu_worker_pool.server.settings import ServerSettings
from tests.documents.blocks import ROOT, all_blocks, documents, without_blocks

# Read by nobody but the tests, or not a setting.
NOT_SETTINGS = frozenset(
    {
        "GPU_POOL_FAILPOINT",
        "GPU_POOL_LOCK_SCOPE",
        # What `gpu-pool run` and `batch` tell the command.
        "GPU_POOL_LEASE_ID",
        "GPU_POOL_LEASE_GPUS",
        "GPU_POOL_LEASE_UUIDS",
        "GPU_POOL_LEASE_MEMORY_MB",
        "GPU_POOL_LEASE_ENDPOINT",
        "GPU_POOL_LEASE_URL",
        "GPU_POOL_NODES",
        "GPU_POOL_NODE_RANK",
        "GPU_POOL_LEASE_FENCE",
        "GPU_POOL_LEASE_SCOPE",
        "GPU_POOL_GUARD",
        "GPU_POOL_BATCH_LINE",
        # What a hook's program is told.
        "GPU_POOL_EVENT",
        "GPU_POOL_EVENT_NODE",
        "GPU_POOL_OWNER",
        "GPU_POOL_REASON",
        # What a submitted job is told, and where and for how long such jobs are kept.
        JOB_ID_VARIABLE,
        ARRAY_ID_VARIABLE,
        ARRAY_INDEX_VARIABLE,
        RESTART_VARIABLE,
        JOBS_DIR_VARIABLE,
        KEEP_VARIABLE,
    }
)


def document(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """From a heading to the next of its depth."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", document(name), re.DOTALL | re.MULTILINE)
    assert found is not None, (name, heading)
    return found[2]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows that begin with code."""
    return [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line[:3] == "| `"]


def code_in(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def shown(cell: str) -> str | None:
    return code_in(cell)[0] if "`" in cell else None


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def app() -> PoolApp:
    return create_app(ServerSettings(_env_file=None, simulated_gpus="1"))


# --- SERVER.md -------------------------------------------------------------------------------------------------------


def test_the_settings_of_the_server_are_all_there_with_their_defaults() -> None:
    table = {code_in(name)[0]: shown(default) for name, default, *_ in rows(section("SERVER.md", "Settings"))}
    assert table.keys() == {name.upper() for name in ServerSettings.defaults()}
    for name, default in {**ServerSettings.defaults(), "gpu_pool_node": None}.items():
        assert table[name.upper()] == (as_text(default) if default not in {None, ""} else None), name


def test_what_can_be_asked_for_is_all_there_with_its_defaults() -> None:
    table = {name: row[1] for row in rows(section("SERVER.md", "Leases")) if len(row) == 4 for name in code_in(row[0])}
    assert table.keys() == {field.name for field in fields(LeaseForm)}
    for name, shown_default in table.items():
        default = getattr(LeaseForm(), name)
        assert default in (None, {}) or default is False or float(shown_default) == default, name


def test_the_bound_of_among_is_that_of_the_code() -> None:
    among = next(row for row in rows(section("SERVER.md", "Leases")) if row[0] == "`among`")
    assert among[2] == f"up to {MAX_NAMES} names"


def test_every_call_is_described(app: PoolApp) -> None:
    text = document("SERVER.md").replace("{id}", "{lease_id}")
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            named = f"`{path}`" in text or f"`{path}?" in text if method == "get" else False
            assert named or re.search(rf"`{method.upper()} {re.escape(path)}[`?]", text), (method, path)


def test_every_metric_is_described_and_no_other(app: PoolApp) -> None:
    text = asyncio.run(app.statistics.metrics.text()).decode()
    made = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    named = set(re.findall(r"`(gpupool_\w+)", section("SERVER.md", "Metrics")))
    assert named == {name for name in made if not name.endswith("_created")}


def test_every_verdict_every_state_and_every_model_is_named() -> None:
    text = set(code_in(document("SERVER.md")))
    assert verdicts.SENTENCES.keys() <= text
    assert text >= MODELS.keys()
    assert {str(reason) for reason in lease.EndReason} <= set(code_in(document("PROTOCOL.md")))


# --- API.md ----------------------------------------------------------------------------------------------------------


def test_every_public_name_is_described() -> None:
    assert set(gpu_worker_pool.__all__) <= set(re.findall(r"\w+", " ".join(code_in(document("API.md")))))


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("GPUWorkerPoolClient", gpu_worker_pool.GPUWorkerPoolClient.__init__),
        ("request_gpu", gpu_worker_pool.GPUWorkerPoolClient.request_gpu),
        ("GPUExecutor", gpu_worker_pool.GPUExecutor.__init__),
    ],
)
def test_every_parameter_is_in_the_table_with_its_default(heading: str, function: Any) -> None:
    listed = [row for row in rows(section("API.md", heading)) if "(" not in row[0] and not row[0].endswith("Error`")]
    table = {name: default for names, default, *_ in listed for name in code_in(names)}
    parameters = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    if parameters.pop("wishes", None) is not None:
        parameters |= DEFAULTS
    assert table.keys() == parameters.keys() - {"self"}
    for name, cell in table.items():
        default = parameters[name]
        assert default in (None, inspect.Parameter.empty) or shown(cell) == as_text(default), name


def test_every_method_is_described() -> None:
    client = gpu_worker_pool.GPUWorkerPoolClient
    methods = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
    assert methods == set(re.findall(r"^### `?(?:await )?(\w+)\(?", section("API.md", "Methods"), re.MULTILINE))


def test_every_field_of_a_model_is_described() -> None:
    text = section("API.md", "Models")
    names = [name for name in gpu_worker_pool.__all__ if hasattr(models, name)]
    for name in names:
        row = next(row for row in rows(text) if row[0] == f"`{name}`")
        told = set(code_in(row[1]))
        assert told >= {field.name for field in fields(getattr(models, name))}, name


def test_every_event_is_described() -> None:
    assert {row[0].strip("`") for row in rows(section("API.md", "Events"))} == set(get_args(EventKind))


def test_the_variables_of_the_client_are_all_there() -> None:
    names = {row[0].strip("`"): row[1] for row in rows(section("API.md", "Environment variables"))}
    assert names.keys() == client_variables()
    default = ClientConfig.build(environ={})
    assert float(shown(names["GPU_POOL_TTL"]) or "") == default.ttl_s
    assert float(shown(names["GPU_POLLING_INTERVAL"]) or "") == default.polling_interval


def client_variables() -> set[str]:
    """Every name of a variable that stands in the client's configuration, and the one of the transport."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {unix_socket.VARIABLE, *(text for text in texts if re.fullmatch(r"GPU_[A-Z_]+", text))}


# --- everywhere ------------------------------------------------------------------------------------------------------


def test_every_variable_that_a_document_names_is_read_by_somebody() -> None:
    known = client_variables() | {name.upper() for name in ServerSettings.defaults()} | NOT_SETTINGS
    for path in documents():
        named = set(re.findall(r"\bGPU_[A-Z]+(?:_[A-Z]+)*\b(?!_)", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


def test_a_file_of_settings_has_settings_in_it() -> None:
    known = client_variables() | {name.upper() for name in ServerSettings.defaults()}
    for block in all_blocks():
        if block.language == "env":
            assert set(re.findall(r"^(\w+)=", block.text, re.MULTILINE)) <= known, block
