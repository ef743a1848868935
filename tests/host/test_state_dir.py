"""Where the state is kept when nobody says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker_pool.host.state_dir import StateDirError, state_dir

HOME = {"HOME": "/home/ann"}
SYSTEMD = {"STATE_DIRECTORY": "/var/lib/one:/var/lib/two"}


@pytest.mark.parametrize(
    ("configured", "environ", "platform", "uid", "expected"),
    [
        ("/srv/pool", SYSTEMD | HOME, "linux", 0, "/srv/pool"),
        ("~/pool", HOME, "linux", 1000, "/home/ann/pool"),
        ("~", HOME, "linux", 1000, "/home/ann"),
        ("~bob/pool", HOME, "linux", 1000, "~bob/pool"),
        ("here", HOME, "linux", 1000, "here"),
        (None, SYSTEMD | HOME, "linux", 0, "/var/lib/one"),
        (None, SYSTEMD | HOME, "linux", 1000, "/var/lib/one"),
        ("", SYSTEMD, "linux", 0, "/var/lib/one"),
        (None, {"STATE_DIRECTORY": ""} | HOME, "linux", 0, "/var/lib/gpu-worker-pool"),
        (None, HOME | {"XDG_STATE_HOME": "/x"}, "linux", 0, "/var/lib/gpu-worker-pool"),
        (None, HOME, "linux", 1000, "/home/ann/.local/state/gpu-worker-pool"),
        (None, HOME | {"XDG_STATE_HOME": "/x"}, "linux", 1000, "/x/gpu-worker-pool"),
        (None, HOME | {"XDG_STATE_HOME": ""}, "linux", 1000, "/home/ann/.local/state/gpu-worker-pool"),
        (None, HOME | {"XDG_STATE_HOME": "x"}, "linux", 1000, "/home/ann/.local/state/gpu-worker-pool"),
        (None, HOME, "darwin", 501, "/home/ann/Library/Application Support/gpu-worker-pool"),
        (None, HOME, "darwin", 0, "/home/ann/Library/Application Support/gpu-worker-pool"),
        (None, HOME, "freebsd14", 0, "/home/ann/.local/state/gpu-worker-pool"),
    ],
)
def test_the_place(configured: str | None, environ: dict[str, str], platform: str, uid: int, expected: str) -> None:
    assert state_dir(configured, environ, platform=platform, uid=uid) == Path(expected)


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    with pytest.raises(StateDirError, match="GPU_POOL_STATE_DIR"):
        state_dir(None, {}, platform="linux", uid=2**31 - 7)
