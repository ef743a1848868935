"""`gpu-pool fleet`: the boxes of a fleet, who leads it, and which of them are not heard of."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import quote

from gpu_worker_pool.cli.declare import Argument
from gpu_worker_pool.cli.failure import REFUSED, Failure
from gpu_worker_pool.cli.options import Endpoints, Json
from gpu_worker_pool.cli.output import Text, out, plain, print_json
from gpu_worker_pool.cli.pools.refusals import failure_of
from gpu_worker_pool.cli.pools.servers import FLEET, ServerAnswer, Servers, nobody_answered
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.cli.units import count, show_duration
from gpu_worker_pool.wire.fleet import BoxView, FleetList
from gpu_worker_pool.wire.reader import read
from gpu_worker_pool.wire.service import FleetView, Health

NO_FLEET = "it belongs to no fleet; start it with `gpu-pool serve --fleet postgresql://…` to make it one"


@dataclass(frozen=True, slots=True)
class SeenBox:
    """A box as the leader knows it, and as it says itself when it is asked; `error` says why it could not be."""

    view: BoxView
    fleet: FleetView | None = None
    error: str | None = None

    @property
    def role(self) -> str:
        if self.view.is_leader:
            return "leader"
        if self.view.is_candidate is None:
            return "unknown"
        return "follower" if self.view.is_candidate else "agent"

    def as_json(self) -> dict[str, Any]:
        lag_s = None if self.fleet is None else self.fleet.lag_s
        return {**asdict(self.view), "role": self.role, "lag_s": lag_s, "error": self.error}


def show_fleet(endpoint: Endpoints = None, *, json: Json = False) -> None:
    """Show the boxes of the fleet: who leads, who follows, which are agents only, and which are not heard of.

    Ends with 0 if the fleet is led, with 1 if the server belongs to none, with 125 if no server answers.
    """
    listed, boxes = Servers(endpoint).run(_ask)
    if json:
        facts = {"id": listed.id, "epoch": listed.epoch, "leader": listed.leader}
        print_json("fleet", {**facts, "boxes": [box.as_json() for box in boxes]})
        return
    led = f"led by {listed.leader}" if listed.leader else "led by nobody"
    number = f"{len(boxes)} {'box' if len(boxes) == 1 else 'boxes'}"
    gpus = count(sum(box.view.gpus for box in boxes), "GPU")
    out().print(
        f"fleet {(listed.id or 'without an id')[:8]}: {number}, {gpus}, {led} (epoch {listed.epoch})",
    )
    table = make_table(
        "NODE", "ROLE", "STATE", "GPUS", "LEASES", "HEARD", "LAG", "VERSION", "URL", whole=("NODE", "STATE")
    )
    for box in boxes:
        view = box.view
        lag_s = None if box.fleet is None else box.fleet.lag_s
        table.add_row(
            Text(view.node),
            Text(box.role),
            Text(view.state, "" if view.state == "up" else "bold red"),
            str(view.gpus),
            str(view.leases),
            "-" if view.heard_ago_s is None else f"{show_duration(view.heard_ago_s)} ago",
            "-" if lag_s is None else f"{lag_s:.1f}s",
            Text(view.version or "-"),
            Text(view.url or "-"),
        )
    print_table(out(), table)
    if unknown := [box.view.node for box in boxes if box.view.state != "up"]:
        out().print(
            f"{', '.join(unknown)}: not heard of, so nothing is granted there; the leases there go on. A box that will not "
            "come back is removed by `gpu-pool fleet forget NODE`.",
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

    async def forget(servers: Servers) -> ServerAnswer:
        found, _ = await _ask_list(servers)
        return await servers.ask(found.endpoint, f"{FLEET}/nodes/{quote(node, safe='')}", "DELETE")

    answer = Servers(endpoint).run(forget)
    if not answer.is_ok:
        raise failure_of(answer, f"{node} was not forgotten: {plain(answer.error)}")
    if json:
        print_json("fleet", {"forgotten": node})
    else:
        out().print(f"{node} is forgotten; if it comes back, it joins the fleet as a new box")


async def _ask(servers: Servers) -> tuple[FleetList, list[SeenBox]]:
    _, listed = await _ask_list(servers)
    return listed, list(await asyncio.gather(*(_ask_box(servers, box) for box in listed.boxes)))


async def _ask_list(servers: Servers) -> tuple[ServerAnswer, FleetList]:
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


async def _ask_box(servers: Servers, box: BoxView) -> SeenBox:
    if box.url is None:
        return SeenBox(box)
    answer = await servers.ask_url(box.url, "/health")
    health = read(Health, answer.data, clean=plain) if answer.data else None
    if health is None:
        return SeenBox(
            box, error=plain(answer.why_not) if not answer.is_ok else "its answer is not one about its health"
        )
    return SeenBox(box, health.fleet)
