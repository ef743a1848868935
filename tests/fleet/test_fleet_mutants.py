"""Each guard is removed in turn, and the simulation must notice."""

from __future__ import annotations

import pytest

from tests.fleet.agent_mutants import FleetMutant
from tests.fleet.fleet_mutants import MUTANTS
from tests.fleet.histories import HISTORIES, collecting_seldom
from tests.fleet.simulation import simulate


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.guard)
def test_a_fleet_without_the_guard_is_caught(mutant: FleetMutant) -> None:
    # KeyError, AssertionError and TypeError come from a pool that is not what its events add up to.
    with pytest.raises((AssertionError, KeyError, TypeError)):
        search(mutant)


def search(mutant: FleetMutant) -> None:
    with collecting_seldom() as collect_after:
        for seed in range(mutant.near, mutant.near + HISTORIES):
            simulate(seed, mutant.fleet)
            collect_after(seed)
