"""The hooks of JupyterHub. A spawner is stood in for: a hub needs a proxy of Node, and the hooks see only these of its names."""

from __future__ import annotations

import logging
import os
import pwd
import subprocess
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker_pool.adapters.jupyterhub import GpuHooks, NoGpuError
from gpu_worker_pool.testing import ServerProcess
from tests.other_user import python_as
from tests.server.leasing import eventually


@dataclass
class Spawner:
    """What `jupyterhub.spawner.Spawner` has."""

    user: Any = field(default_factory=lambda: SimpleNamespace(name=pwd.getpwuid(os.geteuid()).pw_name))
    name: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    user_options: dict[str, Any] = field(default_factory=dict)
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("hub"))


@pytest.fixture(autouse=True)
def _no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_SOCKET", "")


def active(server: ServerProcess) -> dict[str, str]:
    return {
        lease["labels"]["name"]: lease["owner"]
        for lease in server.json("/leases")["leases"]
        if lease["state"] == "active"
    }


async def test_a_server_holds_its_gpus_until_it_has_stopped_also_if_the_hub_was_restarted(
    server: ServerProcess,
) -> None:
    one, other = Spawner(), Spawner(name="second", user_options={"gpus": "2"})
    hooks = GpuHooks(time="1h")
    for spawner in (one, other):
        await hooks.pre_spawn(spawner)
    assert [len(each.environment["CUDA_VISIBLE_DEVICES"].split(",")) for each in (one, other)] == [1, 2]
    assert active(server) == {"jupyterhub default": one.user.name, "jupyterhub second": one.user.name}
    # Another object, as after a restart.
    await GpuHooks().post_stop(Spawner())
    eventually(lambda: list(active(server)) == ["jupyterhub second"], "the first is released")
    await hooks.post_stop(other)
    eventually(lambda: not active(server), "the second is released")


HUB = """
import asyncio
from types import SimpleNamespace
from gpu_worker_pool.adapters.jupyterhub import GpuHooks
spawner = SimpleNamespace(user=SimpleNamespace(name="nobody"), name="", environment={}, user_options={})
asyncio.run(GpuHooks(time="1h").pre_spawn(spawner))
print(spawner.environment["GPU_POOL_LEASE_ID"], flush=True)
input()
asyncio.run(GpuHooks().post_stop(spawner))
"""


def test_the_owner_is_the_user_of_the_server_where_the_hub_is_root(server: ServerProcess) -> None:
    # As root, by a Python that other users can run.
    command = python_as(0, "-c", HUB)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None
        assert hub.stdout.readline().strip()
        assert active(server) == {"jupyterhub default": "nobody"}
        hub.communicate("stop\n")
    eventually(lambda: not active(server), "it is released")


async def test_a_user_may_ask_for_none_and_is_told_where_there_is_none(server: ServerProcess) -> None:
    without = Spawner(user_options={"gpus": 0})
    await GpuHooks().pre_spawn(without)
    assert (without.environment, active(server)) == ({"CUDA_VISIBLE_DEVICES": "-1"}, {})
    with pytest.raises(NoGpuError) as refused:
        await GpuHooks(gpus=64).pre_spawn(Spawner())
    assert "No GPU: " in refused.value.jupyterhub_message
    assert "64 GPUs" in refused.value.jupyterhub_message
    await GpuHooks(gpus=4).pre_spawn(Spawner())
    with pytest.raises(NoGpuError, match=r"none was free within 2 s"):
        await GpuHooks(timeout_s=2).pre_spawn(Spawner(name="late"))
    assert server.json("/pool")["queue_length"] == 0
    await GpuHooks().post_stop(Spawner())
    eventually(lambda: not active(server), "it is released")
