"""A driver that leads, follows, and leads again."""

from __future__ import annotations

import pytest

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model.request import Request
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.ledger.driver import Driver

from .memory import InlineWriter, MemoryJournal


async def test_the_time_in_which_it_followed_is_not_a_standstill(caplog: pytest.LogCaptureFixture) -> None:
    now, writer = [100.0], InlineWriter(MemoryJournal())
    driver = Driver(PoolSettings(), clock=lambda: now[0])
    driver.lead(driver.state, writer, boot_id="boot", wall_clock=lambda: 1.7e9, epoch=1, node="box")
    await driver.do(cmd.RequestLease("waits", Request()))
    driver.step_down("another one leads")
    now[0] += 3600.0

    driver.lead(driver.state, writer, boot_id="boot", wall_clock=lambda: 1.7e9 + 3600.0, epoch=2, node="box")

    assert "took no heartbeat" not in caplog.text
    driver.close()
