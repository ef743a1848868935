"""The promises, over random histories."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.core.pool_machine import PoolMachine

TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
