"""Where the examples get their GPUs: from your server, or from servers of their own with simulated GPUs.

Your own server is the one in --endpoint, GPU_STATS_SERVICE_ENDPOINTS, GPU_SERVICE_ENDPOINTS or GPU_SERVICE_ENDPOINT.
Nothing is taken from it for longer than a moment, and what would disturb others is left out there.
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

from gpu_worker_pool.cli.failure import Failure
from gpu_worker_pool.cli.pools.servers import Answer, Servers
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
    """The servers that you named, those first that answer; none if you named none. NoServerError says what to do."""
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
        raise NoServerError(f"your GPU server cannot be used ({reasons}); see to it, or {advice}")
    return [answer.url for answer in sorted(answers, key=lambda answer: not answer.is_ok)]


async def _ask(urls: Sequence[str]) -> list[Answer]:
    async with Servers(urls, timeout_s=ANSWER_S) as servers:
        return await servers.ask_all("/gpu/summary")


@dataclass(frozen=True)
class Pool:
    """What an example works with. `servers` are the example's own; there are none where it uses yours."""

    urls: Sequence[str]
    servers: Sequence[ServerProcess] = ()


@contextmanager
def example_pool(description: str, *gpus: str) -> Iterator[Pool]:
    """Your servers if you named any, else servers of the example's own with these GPUs; says which."""
    # The client logs what happens, too. Here it is printed, and need not be said twice.
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
    """The headline of what comes next."""
    print(f"\n--- {text}", flush=True)  # before what other programs print
