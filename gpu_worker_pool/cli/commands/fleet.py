"""`gpu-pool fleet`: the boxes of a fleet, who leads it, and which of them are not heard of."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, out, plain, print_body
from gpu_worker_pool.cli.pools.servers import FLEET, ServerAnswer, Servers, call, failure_of, nobody_answered
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import count, show_duration
from gpu_worker_pool.failure import REFUSED, Failure
from gpu_worker_pool.wire.fleet import BoxView, FleetList
from gpu_worker_pool.wire.reader import read

NO_FLEET = "it belongs to no fleet; start it with `gpu-pool serve --fleet postgresql://…` to make it one"


def show_fleet(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """Show the boxes of the fleet: who leads, who follows, which are agents only, and which are not heard of.

    Ends with 0 if the fleet is led, with 1 if the server belongs to none, with 125 if no server answers.
    """
    answer, listed = Servers(endpoint).run(_ask)
    if json:
        print_body(answer.data)
        return
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
    if unknown := [box.node for box in listed.boxes if box.state != "up"]:
        console.print(
            f"Not heard of: {', '.join(unknown)}. Nothing is granted there; leases there go on. "
            "`gpu-pool fleet forget NODE` removes a box that will not come back."
        )


def forget_node(
    node: Annotated[str, Argument(metavar="NODE", help="The node, as `gpu-pool fleet` shows it.")],
    endpoint: Endpoints = None,
    *,
    json: Json = False,
) -> None:
    """Remove a box that will not come back: its leases end, and its GPUs are gone from the fleet. For administrators.

    It is refused while the box is heard of.
    """

    async def forget(servers: Servers) -> None:
        await _ask(servers)
        await call(servers, f"{FLEET}/nodes/{quote(node, safe='')}", "DELETE", what=f"{node} was not forgotten")

    Servers(endpoint).run(forget)
    if json:
        print_body({"forgotten": node})
    else:
        out().print(f"{node} is forgotten; if it comes back, it joins the fleet as a new box")


def _role(box: BoxView) -> str:
    if box.is_leader:
        return "leader"
    return "unknown" if box.is_candidate is None else "follower" if box.is_candidate else "agent"


async def _ask(servers: Servers) -> tuple[ServerAnswer, FleetList]:
    """What the first server that answers knows of its fleet."""
    answers = await servers.ask_all(FLEET)
    for answer in answers:
        listed = read(FleetList, answer.data, clean=plain) if answer.is_ok else None
        if listed is not None:
            return answer, listed
    if all(answer.status is None for answer in answers):
        raise nobody_answered(answers)
    reasons = "; ".join(
        f"{answer.endpoint} ({answer.url}): {NO_FLEET if answer.status == HTTPStatus.NOT_FOUND else plain(answer.error)}"
        for answer in answers
    )
    is_none = all(answer.status in {None, HTTPStatus.NOT_FOUND} for answer in answers)
    raise Failure(f"no fleet can be shown: {reasons}", REFUSED if is_none else failure_of(answers[0], "").code)
