"""How a keeper answers the commands of its user."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_worker_pool.cli.tasks import cancel_and_wait

from .job_store import JobStore
from .keeper import Keeper
from .keeper_link import FACTS_FILE, is_own_peer

_WRITE_AGAIN_S: Final = 1.0
_MOST_BYTES: Final = 1 << 24
# The facts always have this length, so that they can be written over others where a disk has no room for a new file.
_FACTS_BYTES: Final = 128


async def serve(keeper: Keeper, store: JobStore, on_ready: Callable[[str | None], None]) -> None:
    """Answer commands of this user while the keeper runs. Its address is in a file that only this user can read. `on_ready`
    is called when it is, with the reason if that file cannot be written.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if is_own_peer(writer):
                # A keeper that is stopped does not get so far; one that is busy does.
                writer.write(b"{}\n")
                question = json.loads(await reader.readline())
                writer.write(json.dumps(await keeper.answer(question)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError) as error:
            with suppress(OSError):
                writer.write(json.dumps({"error": f"the keeper cannot do that: {error}"}).encode() + b"\n")
        finally:
            writer.close()

    address = f"gpu-worker-pool/keeper/{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    server = await asyncio.start_unix_server(answer, sock=listener, limit=_MOST_BYTES)
    facts = store.root / FACTS_FILE
    writing = asyncio.create_task(write_facts(facts, address, on_ready))
    await asyncio.sleep(0)  # its first try comes before all jobs are read
    try:
        await keeper.run()
    finally:
        await cancel_and_wait(writing)
        server.close()
    facts.unlink(missing_ok=True)


async def write_facts(path: Path, address: str, on_ready: Callable[[str | None], None]) -> None:
    data = json.dumps({"pid": os.getpid(), "address": address}).ljust(_FACTS_BYTES).encode()
    new = path.with_suffix(".new")
    while True:
        try:
            try:
                _write(new, data, os.O_CREAT | os.O_TRUNC)
                new.replace(path)
            except OSError:
                _write(path, data, 0)
        except OSError as error:
            on_ready(f"{path} cannot be written: {error.strerror}; make room on the disk")
            await asyncio.sleep(_WRITE_AGAIN_S)
        else:
            on_ready(None)
            return


def _write(path: Path, data: bytes, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(28, "No space left on device")
    finally:
        os.close(descriptor)
