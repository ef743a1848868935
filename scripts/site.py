"""Build the site: the documents of docs/, and a reference that is made from the code. `make docs` runs it.

    python scripts/site.py [--out site]

No page of the reference is written by hand: commands come from their declarations, settings from the class that reads them and from
`.env.example`, calls from the OpenAPI document, Python from signatures and docstrings, metrics from a server that runs. A link that leads
nowhere ends the build.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import gpu_worker_pool
from gpu_worker_pool import failure
from gpu_worker_pool.cli import app
from gpu_worker_pool.cli.declare import Parameter, parameters
from gpu_worker_pool.client.events import ClientEvent, EventKind
from gpu_worker_pool.gpu_server import app as server_app
from gpu_worker_pool.notify.notice import Notice, Occasion
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import ServerProcess

ROOT: Final = Path(__file__).parent.parent
CONFIG: Final = """\
[project]
site_name = "GPU Worker Pool"
site_description = "Hand out GPUs so that nobody collides"
docs_dir = "docs"
site_dir = "site"
nav = {nav}

[project.theme]
language = "en"
features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight"]
"""
# The kinds of pages, and their folders. The front page says in which order a folder's pages are shown.
KINDS: Final = {"Start": "start", "How to": "how-to", "Reference": "reference", "Why": "why"}


def nav() -> str:
    front = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {
        kind: list(dict.fromkeys(re.findall(rf"\(({folder}/[\w-]+\.md)", front))) for kind, folder in KINDS.items()
    }
    pages["Start"].insert(0, "index.md")
    pages["Reference"] = ["reference.md", *(f"reference/{name}.md" for name in PAGES), "glossary.md"]
    shown = (f'{{ "{kind}" = [{", ".join(map(repr, each))}] }}' for kind, each in pages.items())
    return f"[{', '.join(shown)}]"


def cell(text: object) -> str:
    """Text for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(*rows: tuple[object, ...]) -> Iterator[str]:
    head, *rest = rows
    yield "| " + " | ".join(map(cell, head)) + " |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    yield from ("| " + " | ".join(map(cell, row)) + " |" for row in rest)
    yield ""


def commands() -> Iterator[str]:
    yield "# Commands\n"
    for path in app.paths():
        function = app.function_of(*path)
        shown = [each for each in parameters(function) if not each.declared.hidden]
        words = [each.declared.metavar or each.name.upper() for each in shown if each.is_argument]
        yield f"## {' '.join(filter(None, path))}\n"
        yield f"`{' '.join(['gpu-pool', *filter(None, path), '[OPTIONS]', *words])}`\n"
        yield f"{inspect.getdoc(function)}\n"
        if shown:
            yield from table(("", ""), *((f"`{spelled(each)}`", each.declared.help) for each in shown))


def spelled(each: Parameter) -> str:
    if each.is_argument:
        return each.declared.metavar or each.name.upper()
    value = "" if each.type is bool else f" {each.declared.metavar or 'VALUE'}"
    return ", ".join(each.flags) + value


def exit_codes() -> Iterator[str]:
    """The comment above each code in `failure.py` says when it is used."""
    found = re.findall(r"^# (.*)\n[A-Z_]+: Final = (\d+)", inspect.getsource(failure), re.MULTILINE)
    yield "# Exit codes\n"
    yield "0 is success. `run` ends with the code of its command where there is one.\n"
    yield from table(("code", "when"), *((code, when) for when, code in sorted(found, key=lambda each: int(each[1]))))


def settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "Environment variables. The server also reads lines of a file `.env`; clients read the environment only.\n"
    schema = ServerSettings.model_json_schema()["properties"]
    meanings = described_settings()
    rows = []
    for name, field in ServerSettings.model_fields.items():
        described = schema.get(name, {})
        bounds = [f"{word} {described[key]}" for key, word in BOUNDS.items() if key in described]
        choices = " or ".join(f"`{word}`" for word in described.get("enum", ()))
        default = "" if field.default is None or field.is_required() else f"`{field.default}`"
        meaning = meanings.pop(name.upper())
        rows.append((f"`{name.upper()}`", default, ", ".join(filter(None, [choices, *bounds])), meaning))
    yield "## Of the server\n"
    yield from table(("variable", "default", "values", "meaning"), *rows)
    yield "## Of clients\n"
    yield from table(("variable", "meaning"), *((f"`{name}`", meaning) for name, meaning in meanings.items()))


def described_settings() -> dict[str, str]:
    """What the comment above each variable of `.env.example` says."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in (ROOT / ".env.example").read_text(encoding="utf-8").splitlines():
        if variable := re.match(r"(?:# )?([A-Z_]+)=", line):
            found[variable[1]], comment = " ".join(comment), []
        elif line.startswith("# ") and not line.startswith("# ---"):
            comment.append(line[2:])
        else:
            comment = []
    return found


BOUNDS: Final = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}


def calls() -> Iterator[str]:
    document = server_app.openapi()
    yield "# HTTP\n"
    yield "The same is at `/docs` and `/redoc` of every server, with forms to try it, and at `/openapi.json`.\n"
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            yield f"## {method.upper()} {path}\n"
            yield f"{call.get('summary', '')}\n\n{call.get('description', '')}\n"
            if given := [
                (f"`{each['name']}`", each["in"], kind_of(each.get("schema", {})), each.get("description", ""))
                for each in call.get("parameters", ())
            ]:
                yield from table(("parameter", "in", "type", ""), *given)
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if fields := fields_of(document, body):
                yield "Body:\n"
                yield from table(("field", "type", ""), *fields)
            codes = [(code, answer.get("description", "")) for code, answer in call.get("responses", {}).items()]
            yield from table(("answer", ""), *codes)


def fields_of(document: dict[str, Any], schema: dict[str, Any]) -> list[tuple[object, ...]]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    properties = schema.get("properties", {})
    return [(f"`{name}`", kind_of(each), each.get("description", "")) for name, each in properties.items()]


def kind_of(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(kind_of, schema["anyOf"])))
    kind = str(schema.get("type") or schema.get("$ref", "").rpartition("/")[2] or "any")
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([kind, *bounds])


def python() -> Iterator[str]:
    yield "# Python\n"
    for name in gpu_worker_pool.__all__:
        found = getattr(gpu_worker_pool, name)
        yield f"## {name}\n"
        yield f"```text\n{name}{signature(found)}\n```\n\n{inspect.getdoc(found) or ''}\n"
        if not inspect.isclass(found):
            continue
        for part, member in inspect.getmembers(found):
            is_code = isinstance(member, property) or callable(member)
            if part.startswith("_") or part not in vars(found) or not is_code or not inspect.getdoc(member):
                continue
            shown = f"`{part}`" if isinstance(member, property) else f"`{part}{signature(member)}`"
            yield f"- {shown}: {cell(inspect.getdoc(member))}"
        yield ""


def signature(found: Callable[..., Any]) -> str:
    try:
        return re.sub(r"\bself, |\bself\b", "", str(inspect.signature(found))).replace("'", "")
    except (TypeError, ValueError):
        return ""


def metrics() -> Iterator[str]:
    yield "# Metrics\n"
    yield "What `GET /metrics` of a server has.\n"
    with ServerProcess() as server:
        text = server.ask("/metrics").body.decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    rows = [
        (f"`{name}`", kinds.get(name, ""), meaning)
        for name, meaning in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
        if not name.endswith("_created")
    ]
    yield from table(("metric", "kind", "meaning"), *rows)


def events() -> Iterator[str]:
    yield "# Events\n"
    yield "## Of a server: GET /events\n"
    yield f"{server_app.openapi()['paths']['/events']['get'].get('description', '')}\n"
    yield "## Of a Python client: `on_event`, and the logger `gpu_worker_pool.client`\n"
    yield f"{inspect.getdoc(ClientEvent)} `kind` is {', '.join(f'`{kind}`' for kind in get_args(EventKind))}.\n"
    yield "## Of hooks and `--notify`\n"
    yield f"{', '.join(f'`{each}`' for each in Occasion)}. What a program is told on its standard input, as JSON:\n"
    yield from table(("field",), *((f"`{each.name}`",) for each in dataclasses.fields(Notice)))


PAGES: Final = {
    "commands": commands, "exit-codes": exit_codes, "settings": settings, "http": calls, "python": python, "metrics": metrics,
    "events": events,
}  # fmt: skip


def inside_the_site(page: Path, folder: Path) -> str:
    """A document without what only the tests read beside the language of a block, and without links to files that are not in the
    site: their names stay.
    """

    def link(found: re.Match[str]) -> str:
        path, _, _ = found[2].partition("#")
        is_elsewhere = path.startswith("..") and not (page.parent / path).resolve().is_relative_to(folder.resolve())
        return found[1] if is_elsewhere else found[0]

    text = re.sub(r"^(```\w+) .*$", r"\1", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]*)\)", link, text)


def write_pages(folder: Path) -> None:
    """The documents and the reference, as Markdown."""
    shutil.copytree(ROOT / "docs", folder)
    for page in folder.rglob("*.md"):
        page.write_text(inside_the_site(page, folder), encoding="utf-8")
    (folder / "reference").mkdir()
    for name, make in PAGES.items():
        (folder / f"reference/{name}.md").write_text("\n".join(make()) + "\n", encoding="utf-8")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "site", help="where the site goes [site]")
    out: Path = options.parse_args().out
    with tempfile.TemporaryDirectory(prefix="gpu-pool-site-") as folder:
        work = Path(folder)
        write_pages(work / "docs")
        (work / "zensical.toml").write_text(CONFIG.format(nav=nav()), encoding="utf-8")
        built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=work, check=False)
        if built.returncode == 0:
            shutil.copytree(work / "site", out, dirs_exist_ok=True)
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
