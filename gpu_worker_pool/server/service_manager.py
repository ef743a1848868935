"""Tell systemd how the service is doing (sd_notify), where it asked to be told."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send a state such as READY=1; whether there was anybody to tell."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), address)
    except OSError:
        return False
    return True
