"""Run the examples, each in its own process, and say how it went.

python run_examples.py                          # all of them
python run_examples.py config_examples ...      # these
python run_examples.py --list                   # what there is

They start their own servers with simulated GPUs, unless --endpoint or GPU_SERVICE_ENDPOINT names yours.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
EXAMPLES = ROOT / "examples"
NAMES = (
    "basic_client_usage",
    "multi_endpoint_usage",
    "multi_endpoint_demo",
    "config_examples",
    "test_integration_error_handling",
)
# The others always start their own servers, or need none.
USE_YOUR_SERVER = frozenset({"basic_client_usage", "multi_endpoint_usage"})
# No example takes nearly as long; one that hangs has failed.
MOST_S = 120.0


def description(name: str) -> str:
    """Return the first line of its docstring."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]


def command(name: str) -> list[str]:
    """Return its command: pytest for tests, Python for programs."""
    path = str(EXAMPLES / f"{name}.py")
    return [sys.executable, *(("-m", "pytest", "-q", "--no-header") if name.startswith("test_") else ()), path]


def run(name: str, env: dict[str, str]) -> str:
    """Run one, and return how it went in a word or two."""
    if name.startswith("test_") and importlib.util.find_spec("pytest") is None:
        return "left out: pytest is not installed"
    try:
        code = subprocess.run(command(name), env=env, cwd=ROOT, timeout=MOST_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"failed: not at its end after {MOST_S:g} s"
    return "ok" if code == 0 else f"failed: exit code {code}"


def fault_of_your_server(endpoint: str | None) -> str | None:
    """Return why the server that you named cannot be used; None if it answers, or you named none."""
    sys.path[:0] = [str(EXAMPLES), str(ROOT)]
    from example_servers import NoServerError, your_servers  # noqa: PLC0415 - a list of the examples needs no imports

    try:
        your_servers(endpoint)
    except NoServerError as error:
        return str(error)
    return None


def main() -> int:
    """Run the chosen examples; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description="Runs the examples, each in its own process.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default; there are {', '.join(NAMES)}")
    parser.add_argument("--list", action="store_true", help="list the examples, and run nothing")
    parser.add_argument("--endpoint", metavar="URL", help="your GPU server, or several, separated by commas")
    options = parser.parse_args()
    chosen = [Path(name).stem for name in options.names] or list(NAMES)
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        parser.error(f"there is no example {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if options.list:
        for name in chosen:
            print(f"{name:<33}{description(name)}")
        return 0
    # Use the code beside this file, whatever else is installed.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    if options.endpoint:
        env["GPU_STATS_SERVICE_ENDPOINTS"] = options.endpoint
    if USE_YOUR_SERVER.intersection(chosen) and (fault := fault_of_your_server(options.endpoint)):
        print(f"run_examples: {fault}", file=sys.stderr)
        return 1
    rows = []
    for name in chosen:
        print(f"\n{'=' * 20} {name}: {description(name)}\n", flush=True)
        began = time.monotonic()
        rows.append((name, run(name, env), f"{time.monotonic() - began:.1f} s"))
    print(f"\n{'example':<33}{'took':>7}  result")
    for name, result, took in rows:
        print(f"{name:<33}{took:>7}  {result}")
    return 1 if any(result.startswith("failed") for _, result, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
