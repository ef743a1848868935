"""The limit of open files: raised as far as it goes, and scarce before it is reached."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.host.connections import ENOUGH, is_scarce, raise_limit
from tests.server.running import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")


class TestDescriptors:
    def test_the_limit_is_raised_as_far_as_it_goes(self) -> None:
        program = (
            "import resource; from gpu_worker_pool.host.connections import raise_limit\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
            "print(raise_limit(), raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
        )
        answer = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )

        assert answer.stdout.split() == ["300", "300", "300", "300"]

    def test_the_last_quarter_is_scarce(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

        assert not is_scarce(10)
        assert is_scarce(limit - 1)

    def test_it_says_what_is_in_force(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= max(ENOUGH, before[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
