"""What the user's documents say of the API is so."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from typing import Any

import pytest

import gpu_worker_pool
from gpu_worker_pool import errors, models
from gpu_worker_pool.client import GPUWorkerPoolClient
from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.server.settings import ServerSettings
from tests.client.seeds import BLOCKS, DOCUMENTS, SEEDS, Block, is_signature, namespace, shows_a_model, text_of

pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason=f"the user's documents are not in {SEEDS}")


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
    # What can be asked for besides is named in a TypedDict, all of which may be left out.
    parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
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
    unread = named - environ.read - {name.upper() for name in ServerSettings.defaults()} - read_by_python

    assert len(named) >= 25
    assert unread == set()


@pytest.mark.parametrize("name", ["GPUWorkerPoolClient", "GPUContextManager", "gpu_worker_pool_client"])
def test_what_the_documents_import_has_types(name: str) -> None:
    thing = getattr(gpu_worker_pool, name)
    hints = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    assert hints
