"""`gpu-pool fleet`: the boxes of a fleet, who leads it, and which of them are not heard of."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument, Option
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, out, print_body
from gpu_worker_pool.cli.pools.servers import FLEET, ServerAnswer, Servers, call, failure_of, one_server, read_answer
from gpu_worker_pool.cli.serve.command import without_password
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import count, show_duration
from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.wire.pool import BoxView, FleetList
from gpu_worker_pool.wire.service import Health

from .backup import JournalFile, meant_journal, own_journal, server_settings

NO_FLEET = "it is not part of a fleet; `gpu-pool serve --lead` makes it one"


def show_fleet(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """Show the boxes of the fleet: who leads, who follows, which are agents only, and which do not answer.

    Without a leader, say what the box that is asked knows of it. Ends with 0 if the fleet is led, with 1 if the server belongs to
    none, with 125 if nobody leads it or no server answers.
    """
    answer = one_server(endpoint).run(_ask)
    if json:
        print_body(answer.data)
        return
    listed = read_answer(FleetList, answer)
    led = f"led by {listed.leader}" if listed.leader else "led by nobody"
    number = f"{len(listed.boxes)} {'box' if len(listed.boxes) == 1 else 'boxes'}"
    gpus = count(sum(box.gpus for box in listed.boxes), "GPU")
    console = out()
    console.print(f"fleet {(listed.id or 'without an id')[:8]}: {number}, {gpus}, {led} (epoch {listed.epoch})")
    table = make_table("NODE", "ROLE", "STATE", "GPUS", "LEASES", "HEARD", "VERSION", "URL", whole=("NODE", "STATE"))
    for box in listed.boxes:
        heard = "-" if box.heard_ago_s is None else f"{show_duration(box.heard_ago_s)} ago"
        table.add_row(
            box.node,
            _role(box),
            Text(box.state, "" if box.state == "up" else "bold red"),
            str(box.gpus),
            str(box.leases),
            heard,
            box.version or "-",
            box.url or "-",
        )
    print_table(console, table)
    for box in listed.boxes:
        if box.trouble:
            console.print(f"{box.node} cannot keep leases, so nothing is granted there: {box.trouble}")
    if unknown := [box.node for box in listed.boxes if box.state != "up"]:
        console.print(
            f"No contact with {', '.join(unknown)}: nothing is granted there, and leases there go on. "
            "If a box will not come back, run `gpu-pool fleet forget NODE`."
        )


def forget_node(
    node: Annotated[str, Argument(metavar="NODE", help="The node, as `gpu-pool fleet` shows it.")],
    endpoint: Endpoints = None,
) -> None:
    """Remove a box that will not come back: its leases end, and its GPUs are gone from the fleet. For administrators.

    It is refused while the leader still hears from the box.
    """

    async def forget(servers: Servers) -> None:
        await _ask(servers)
        await call(servers, f"{FLEET}/nodes/{quote(node, safe='')}", "DELETE", what=f"{node} was not forgotten")

    one_server(endpoint).run(forget)
    out().print(f"{node} is forgotten; if it comes back, it joins the fleet as a new box")


def show_key(journal: JournalFile = None, endpoint: Endpoints = None) -> None:
    """Print the line that starts a server on another box as a box of this fleet. Run it on the box that leads.

    A machine that has the key can be a box of the fleet: paste it, do not mail it.
    """
    from gpu_worker_pool.host.state_dir import StateDirError  # noqa: PLC0415 - slow, as all of the server
    from gpu_worker_pool.server.fleet import (  # noqa: PLC0415
        join_line,
        kept_key,
        key_path,
        own_address,
    )

    settings = server_settings(journal)
    if journal is not None:
        settings = settings.model_copy(update={"gpu_pool_state_dir": str(journal.absolute().parent)})
    try:
        path, key = key_path(settings), kept_key(settings)
    except (OSError, StateDirError) as error:
        raise Failure(f"the key of the fleet cannot be read: {error}") from None
    if not key:
        raise Failure(
            f"this box keeps no key of a fleet in {path}; `gpu-pool serve --lead` makes one; "
            "if the server has another state directory, name its journal with --journal",
            REFUSED,
        )
    answer = one_server(endpoint).run(lambda servers: servers.ask(servers.ids[0], "/health"))
    known = answer.data.get("fleet") or {} if isinstance(answer.data, dict) else {}
    out().print(join_line(key, known.get("leader_url") or own_address(settings, settings.port)))


def move_fleet(
    to: Annotated[
        str, Option("--to", metavar="URL", help="The database: postgresql://host/name.", parser=without_password)
    ],
    journal: JournalFile = None,
) -> None:
    """Move the fleet that this box leads to PostgreSQL, so that another box can take over. Run it while the server is stopped.

    Leases, queue, tokens, quotas and accounting are copied, and every lease stays alive: holders go on meanwhile. Start the
    server again with --fleet and the same URL afterwards. The other boxes need no change.
    """
    from gpu_worker_pool.ledger.journal import JournalError, JournalInUse  # noqa: PLC0415 - slow
    from gpu_worker_pool.server.fleet import FleetUnusable  # noqa: PLC0415
    from gpu_worker_pool.server.own_history import move_journal  # noqa: PLC0415

    settings = server_settings(journal)
    path = journal or meant_journal(own_journal(settings))
    try:
        moved = move_journal(path, to, settings.gpu_pool_fleet_pool or None, settings.pool_settings())
    except JournalInUse as error:
        raise Failure(f"the server runs; stop it first: holders keep their leases meanwhile ({error})") from None
    except (JournalError, FleetUnusable) as error:
        raise Failure(str(error)) from None
    leases = f"{count(moved.leases, 'lease')}, {moved.waiting} waiting"
    out().print(f"{leases} and the accounting are in {moved.database}. The old journal is kept as {moved.kept}.")
    out().print(f"Start this server with: gpu-pool serve --fleet {moved.database}")


def _role(box: BoxView) -> str:
    if box.is_leader:
        return "leader"
    return "unknown" if box.is_candidate is None else "follower" if box.is_candidate else "agent"


async def _ask(servers: Servers) -> ServerAnswer:
    """What the server knows of its fleet."""
    answer = await servers.ask(servers.ids[0], FLEET)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise Failure(f"no fleet can be shown: {answer.endpoint} ({answer.url}): {NO_FLEET}", REFUSED)
    if not answer.is_ok:
        why = f"{answer.endpoint} ({answer.url}): {answer.why_not}"
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            health = await servers.ask(servers.ids[0], "/health")
            if health.is_ok and (known := read_answer(Health, health).fleet) is not None:
                name = "its fleet" if known.id is None else f"fleet {known.id[:8]}"
                why = f"{answer.endpoint} ({answer.url}) is a box of {name}: {known.trouble or answer.why_not}"
        raise failure_of(answer, f"no boxes can be shown: {why}; each box keeps its leases meanwhile")
    return answer
