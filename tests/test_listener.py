"""A connection is closed with the listener that accepted it, however far it has come by then."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from contextlib import suppress

import pytest

from tests.listener import Listener


async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    del writer
    await reader.read()
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", range(8))
def test_no_connection_is_left_over(turns: int) -> None:
    async def connect_and_stop() -> socket.socket:
        listener = Listener(never_ends)
        listener.start()
        client = socket.create_connection(("127.0.0.1", listener.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.stop()
        return client

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with asyncio.run(connect_and_stop()) as client:
            client.settimeout(10)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        gc.collect()  # pytest reports what is found unclosed


def test_it_listens_on_the_same_port_again() -> None:
    async def stop_and_start() -> None:
        listener = Listener(never_ends)
        listener.start()
        port = listener.port
        for _ in range(3):
            socket.create_connection(("127.0.0.1", port)).close()
            await listener.stop()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            listener.start()
        assert listener.port == port
        await listener.stop()

    asyncio.run(stop_and_start())
