"""The examples of the adapters, each in a process of its own; where the package that it is for is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from gpu_worker_pool.testing import ServerProcess
from tests.client.blocking.programs import active
from tests.server.leasing import eventually
from tests.server.running import ROOT

FOUR = "".join(rf"task {number} on GPU \d\n" for number in range(4))
# What each needs, and what it prints.
PRINTED = {
    "executor_sweep": (None, r"(rate 0\.\d on GPU \d: loss 0\.0\d0\n){4}"),
    "decorated_function": (
        None,
        r"the first on GPU \d\nthe second on GPU \d\nafter that, CUDA_VISIBLE_DEVICES is None\n",
    ),
    "process_pool": (None, FOUR),
    "joblib_sweep": ("joblib", FOUR),
    "optuna_study": ("optuna", r"8 trials; the best rate is 0\.\d\d\n"),
    "dask_cluster": ("distributed", FOUR),
}
EXAMPLES = ROOT / "examples" / "adapters"


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_says_and_leaves_no_lease(server: ServerProcess, name: str) -> None:
    package, printed = PRINTED[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout), (done.stdout, done.stderr)
    eventually(lambda: active(server) == set(), "every lease has ended")
