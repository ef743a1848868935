"""Whether a logout ends a process, by the files of systemd."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.host.systemd import logout_ends

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
UNIT = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/gpu-pool-jobs.service\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "ends"),
    [
        (SESSION, {"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, True),
        (UNIT, {"etc/systemd/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, False),
        (SESSION, {"etc/systemd/logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, False),
        (SESSION, {}, False),
        (SESSION, {"usr/lib/systemd/logind.conf.d/a.conf": "KillUserProcesses = true\n"}, True),
        (
            SESSION,
            {
                "etc/systemd/logind.conf": "KillUserProcesses=yes\n",
                "etc/systemd/logind.conf.d/50.conf": "KillUserProcesses=no\n",
            },
            False,
        ),
        (
            SESSION,
            {
                "usr/lib/systemd/logind.conf.d/50.conf": "KillUserProcesses=yes\n",
                "etc/systemd/logind.conf.d/50.conf": "[Login]\n",
            },
            False,
        ),
    ],
)
def test_a_logout_ends_what_belongs_to_a_session_where_systemd_is_told_so(
    tmp_path: Path, cgroup: str, files: dict[str, str], ends: bool
) -> None:
    for name, text in {"proc/7/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert logout_ends(7, tmp_path) is ends
