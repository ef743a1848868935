"""The servers of the examples: yours, or their own with simulated GPUs.

Your server is the one in --endpoint, GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS or GPU_SERVICE_ENDPOINT. The
examples hold its GPUs only for a moment, and leave out what would disturb other users.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpu_worker_pool.cli.pools.servers import ServerAnswer, Servers
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.testing import ServerProcess

VARIABLES = ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINT")
# A server that is there answers in a fraction of it.
ANSWER_S = 3.0


@contextmanager
def example_servers(*gpus: str) -> Iterator[list[ServerProcess]]:
    """Servers with these simulated GPUs, "2" or "1xA100-80GB,1xT4" each; ended whatever happens in the block."""
    with ExitStack() as ends:
        servers = [ServerProcess({"SIMULATED_GPUS": simulated}) for simulated in gpus]
        for server in servers:
            ends.callback(server.close)
            server.launch()
        for server in servers:
            server.wait_until_ready()
        yield servers


class NoServerError(Exception):
    """You named servers, and none of them can be used."""


def your_servers(endpoint: str | None) -> list[str]:
    """Return the servers that you named, those that answer first; none if you named none. NoServerError says what to do."""
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    given, source = (endpoint, "--endpoint") if endpoint else (os.environ.get(variable, ""), variable)
    urls = [url.strip() for url in given.split(",") if url.strip()]
    if not urls:
        return []
    advice = f"{'leave out' if endpoint else 'unset'} {source}, and the examples start servers of their own"
    try:
        answers = asyncio.run(_ask(urls))
    except Failure as failure:
        raise NoServerError(f"{str(failure).replace('--endpoint', source, 1)}; correct it, or {advice}") from None
    if not any(answer.is_ok for answer in answers):
        reasons = "; ".join(f"{answer.url}: {str(answer.error).rstrip('.')}" for answer in answers)
        raise NoServerError(f"your GPU server cannot be used ({reasons}); fix it, or {advice}")
    return [answer.url for answer in sorted(answers, key=lambda answer: not answer.is_ok)]


async def _ask(urls: Sequence[str]) -> list[ServerAnswer]:
    async with Servers(urls, timeout_s=ANSWER_S) as servers:
        return await servers.ask_all("/gpu/summary")


@dataclass(frozen=True)
class Pool:
    """The servers of an example. `servers` are its own; there are none if it uses yours."""

    urls: Sequence[str]
    servers: Sequence[ServerProcess] = ()


@contextmanager
def example_pool(description: str, *gpus: str) -> Iterator[Pool]:
    """Use your servers if you named any, else start servers with these GPUs; print which."""
    # The examples print what happens, so the client need not log it too.
    logging.getLogger("gpu_worker_pool").addHandler(logging.NullHandler())
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--endpoint", metavar="URL", help="your GPU server; several are separated by commas")
    try:
        urls = your_servers(parser.parse_args().endpoint)
    except NoServerError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
    if urls:
        print(f"Using your GPU server: {', '.join(urls)}")
        yield Pool(urls)
        return
    with example_servers(*gpus) as servers:
        urls = [server.url for server in servers]
        print(f"Started with simulated GPUs, for this example only: {', '.join(urls)}")
        yield Pool(urls, servers)


def title(text: str) -> None:
    """Print the headline of the next part."""
    print(f"\n--- {text}", flush=True)  # before other programs print
