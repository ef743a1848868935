"""The promises, over random histories."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.core.pool_machine import PoolMachine
from tests.core.queue_machine import QueueMachine

TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
