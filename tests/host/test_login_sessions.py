"""Whether a logout ends a process, as systemd says it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_worker_pool.host.systemd import logout_ends

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
UNIT = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/gpu-pool-jobs.service\n"


@pytest.mark.parametrize(
    ("cgroup", "says", "ends"),
    [
        (SESSION, "b true", True),
        (SESSION, "b false", False),
        (SESSION, "", False),
        (UNIT, "b true", False),
    ],
)
def test_a_logout_ends_what_belongs_to_a_session_where_systemd_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, says: str, ends: bool
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(cgroup, encoding="utf-8")
    busctl = tmp_path / "busctl"
    busctl.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    busctl.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert logout_ends(7, tmp_path) is ends
