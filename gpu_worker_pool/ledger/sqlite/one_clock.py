"""The migration to one clock that never goes back (version 4).

Before, the pool's clock was the boot clock of the machine: it began again with every boot, and the event PoolOpened, which
named the boot, moved all times to come. Now TakenOver says what must be added to the boot clock. A journal also kept the
names that its node once had, and was read under the present one; now all events have the last of them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any
from zlib import crc32

from gpu_worker_pool.ledger.sql_files import load_queries

Line = dict[str, Any]

# Besides `at`, the fields that are on the pool's clock. Fields that end in `_at` are times of day.
_ON_POOL_CLOCK = {"LeaseGranted": "limit", "LeaseWarned": "ends", "UseCounted": "as_of"}
_WITH_GPUS = {"LeaseGranted": "gpus", "LeaseEnded": "draining"}
_WITH_GPU = {"GpuDrained", "ProcessesAttributed", "GpuExcluded", "GpuIncluded"}


def rewrite(connection: sqlite3.Connection) -> None:
    """Rewrite all events, in the transaction of the caller."""
    sql = load_queries(__package__)
    rows = connection.execute(sql["read_rows"]).fetchall()
    crc = 0
    for index, line in enumerate(on_one_clock([json.loads(body) for _, body in rows])):
        body = json.dumps(line, separators=(",", ":"))
        crc = crc32(body.encode(), crc)
        row = (line["at"], line["kind"], body, crc)
        if index < len(rows):
            connection.execute(sql["rewrite_event"], (*row, rows[index][0]))
        else:
            connection.execute(sql["append_event"], (rows[-1][0] + 1, *row))


def on_one_clock(lines: list[Line]) -> Iterator[Line]:
    """The lines with one clock and one name of the node. If both are known, one more says which boot the node is of, so
    that a later one is noticed.
    """
    node = next((name for line in reversed(lines) for name in _names(line)), None)
    base, clock, wall_offset_s, boot_id = 0.0, -inf, 0.0, None
    for old in lines:
        line = dict(old)
        if line["kind"] == "PoolOpened":
            at, offset_s = line["at"], line["wall_offset_s"]
            if boot_id not in (None, line["boot_id"]):
                base = max(clock, at + offset_s - wall_offset_s) - at
            boot_id, wall_offset_s = line["boot_id"], offset_s - base
            line = {"kind": "TakenOver", "at": at, "epoch": 0, "boot_id": boot_id}
            line |= {"clock_base": base, "wall_offset_s": wall_offset_s}
        for name in ("at", _ON_POOL_CLOCK.get(line["kind"])):
            if base and name is not None and line.get(name) is not None:
                line[name] += base
        clock = max(clock, line["at"])
        yield _on_node(line, node)
    if node is not None and boot_id is not None:
        yield {"kind": "NodeJoined", "at": clock, "node": node, "boot_id": boot_id, "gpus": None}


def _names(line: Line) -> Iterable[str]:
    """The names of nodes in a line."""
    kind = line["kind"]
    if kind in _WITH_GPUS:
        return [name for name, _ in line[_WITH_GPUS[kind]]]
    if kind in _WITH_GPU:
        return [line["gpu"][0]]
    if kind == "GpusBooked":
        return [name for name, _ in line["booking"]["gpus"]]
    return [name for name, _ in line["fences"]] if kind == "HistoryCondensed" else ()


def _on_node(line: Line, node: str | None) -> Line:
    """The line with this name in place of all others."""
    kind = line["kind"]
    if kind in _WITH_GPUS:
        line[_WITH_GPUS[kind]] = [[node, uuid] for _, uuid in line[_WITH_GPUS[kind]]]
    elif kind in _WITH_GPU:
        line["gpu"] = [node, line["gpu"][1]]
    elif kind == "GpusBooked":
        line["booking"] = {**line["booking"], "gpus": [[node, uuid] for _, uuid in line["booking"]["gpus"]]}
    elif kind == "HistoryCondensed" and line["fences"]:
        # A fence must not go back.
        line["fences"] = [[node, max(fence for _, fence in line["fences"])]]
    return line
