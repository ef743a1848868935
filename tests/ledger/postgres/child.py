"""A candidate in a process of its own, to be killed: `python -m tests.ledger.postgres.child URL POOL`.

It says one line of JSON for each thing it has done.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tests.ledger.examples import ended, note
from tests.ledger.postgres.by_position import ByPosition

BATCH = 3


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


async def write(database: ByPosition) -> None:
    """Batch after batch, with a snapshot after the second and the fourth."""
    row = await database.claim("child", "child", "http://child", 0)
    assert row is not None
    head: int | None = row.end.position
    for number in range(6):
        assert head is not None
        first = number * BATCH
        events = [note(first + offset) for offset in range(BATCH)]
        head = await database.write(row.epoch, "child", head, f"b{number}", events, [ended(f"lease{number}")])
        say(appended=number)
        if number in {1, 3}:
            assert head is not None
            await database.snapshot(head, [note(place) for place in range(head)])
            say(snapshot=head)


async def main(url: str, pool: str) -> None:
    database = ByPosition(url, pool, command_timeout_s=60.0)
    await database.open()
    await write(database)
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
