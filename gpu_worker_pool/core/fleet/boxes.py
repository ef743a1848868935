"""What the leader does about the boxes of its fleet: it tells them what was written, and hears how their leases fare.

A box is told of a grant or an end only once it is written. So the leases that are told are followed by the written events
alone: the pool's state is ahead of the journal. Times named `now` are pool times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from gpu_worker_pool.core.model import commands as cmd
from gpu_worker_pool.core.model import events as ev
from gpu_worker_pool.core.model.gpu import Reading
from gpu_worker_pool.core.model.lease import EndReason, KeptLease
from gpu_worker_pool.core.model.state import PoolState

from .admission import why_rejected
from .box_actions import BoxAction, Close, Confirmed, Do, NeverKept, Outdated, Tell
from .messages import (
    AgentMessage,
    Announce,
    CannotKeep,
    GrantKept,
    HolderIsDead,
    LeaseOver,
    Orders,
    Rejected,
    Report,
    Welcome,
)
from .written_leases import WrittenLeases

# While no request waits, GPUs that leases have left are read after so long: many ends share one look.
LATE_LOOK_S = 0.1
# How often an agent hears from the leader.
SIGN_OF_LIFE_S = 1.0
# An agent that has said nothing for this long is silent. One that has read no GPU yet has more time.
SILENT_S = 3.0
FIRST_REPORT_S = 30.0

Urls = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BoxInfo:
    """A box that announced itself in this epoch. `heard_at` is the pool time at which it was last heard. `trouble` is why it
    cannot keep leases.
    """

    url: str
    version: str
    is_candidate: bool
    is_up: bool
    heard_at: float
    trouble: str | None = None


@dataclass(slots=True)
class BoxSession:
    """A connection from an agent, which speaks for its own node and no other."""

    node: str
    heard_at: float
    instance: str = ""
    is_welcome: bool = False
    # The leases of its announcement, with their fences.
    listed: dict[str, int] = field(default_factory=dict)
    # Its last readings, what the last report had heard, and the time of those that the pool has.
    readings: dict[str, Reading] = field(default_factory=dict)
    reported: float = -inf
    observed: float = -inf
    # The URLs that it was told last.
    urls: Urls = ()

    def is_another(self, instance: str, now: float) -> bool:
        """Whether another process than this one is the agent, and lives. One that was killed has lost its connection."""
        return self.instance != instance and now < self.heard_at + SILENT_S

    def is_silent(self, now: float) -> bool:
        return now >= self.heard_at + (FIRST_REPORT_S if self.reported == -inf else SILENT_S)


class Boxes:
    """The boxes of one epoch. It does no I/O: it returns actions, to be carried out in order.

    Call `written` with the events of each step, durable and volatile, once the durable ones are written; first with those
    of the take-over. After the leadership is lost, close all sessions and throw this away.
    """

    def __init__(self, epoch: int, pool_id: str) -> None:
        self.epoch, self.pool_id = epoch, pool_id
        self._sessions: dict[int, BoxSession] = {}
        self._session_of: dict[str, int] = {}
        self._infos: dict[str, BoxInfo] = {}
        # Announcements of a node that are not written yet.
        self._announcing: dict[str, int] = {}
        self._written: WrittenLeases | None = None
        self._next_round = -inf
        # The URLs of all boxes, as they were in the last round; the same tuple while they are.
        self._urls: Urls = ()
        # The nodes whose boxes are to read GPUs that leases have left, and when that is due.
        self._late_looks: dict[str, float] = {}

    @property
    def boxes(self) -> Mapping[str, BoxInfo]:
        """The nodes that announced themselves in this epoch."""
        for session in self._sessions.values():
            if self._infos[session.node].heard_at != session.heard_at:
                self._change(session.node, heard_at=session.heard_at)
        return self._infos

    def is_confirmed(self, lease_id: str) -> bool:
        """Whether all boxes of a lease have it. Leases from before the take-over count as confirmed."""
        return self._written is not None and lease_id not in self._written.unconfirmed

    def session_of(self, node: str) -> int | None:
        """The session of the agent of this node; None if it is not connected, or not welcome yet."""
        session = self._session_of.get(node)
        return session if session is not None and self._sessions[session].is_welcome else None

    def next_due_at(self) -> float:
        """When `tick` is to be called at the latest; infinite if nothing is due."""
        is_needed = self._sessions or (self._written and self._written.unconfirmed)
        return min(self._next_round, *self._late_looks.values(), inf) if is_needed else inf

    # --- from the agents ---------------------------------------------------------------------------------------------

    def receive(self, session: int, message: AgentMessage, state: PoolState, now: float) -> list[BoxAction]:
        """What a message of an agent leads to."""
        if isinstance(message, Announce):
            return self._announced(session, message, state, now)
        known = self._sessions.get(session)
        if known is None:
            return [Close(session, "its first message was not an announcement")]
        known.heard_at = now
        match message:
            case Report():
                return self._reported(known, message, state)
            case GrantKept():
                return self._kept(known.node, message.lease_id, message.fence)
            case CannotKeep():
                return self._cannot_keep(known.node, message.why)
            case LeaseOver():
                return self._over(session, known.node, message, now)
            case HolderIsDead():
                return self._holder_died(known.node, message, state)

    def _announced(self, session: int, message: Announce, state: PoolState, now: float) -> list[BoxAction]:
        node, former = message.node, self._session_of.get(message.node)
        why = self._why_rejected(message, state, now)
        if why is not None:
            refused: list[BoxAction] = [Tell(session, Rejected(why)), Close(session, why)]
            return [*refused, Outdated(message.epoch_seen)] if message.epoch_seen > self.epoch else refused
        actions: list[BoxAction] = []
        if former not in (None, session):
            actions.append(Close(former, f"the agent of {node} has connected again"))
            self._drop(former)
        self._sessions[session] = BoxSession(node, now, message.instance)
        self._session_of[node] = session
        if self._next_round == -inf:
            self._next_round = now + SIGN_OF_LIFE_S
        never_kept = self._never_kept(message, state)
        info = BoxInfo(message.url, message.version, message.is_candidate, is_up=True, heard_at=now)
        self._infos[node] = info
        self._announcing[node] = self._announcing.get(node, 0) + 1
        self._sessions[session].listed = {kept.id: kept.fence for kept in message.leases}
        for kept in message.leases:
            actions += self._kept(node, kept.id, kept.fence)
        return [*actions, *never_kept, *map(Do, self._commands_of(message))]

    def _why_rejected(self, message: Announce, state: PoolState, now: float) -> str | None:
        why, former = why_rejected(message, state, self.epoch, self._leases_of), self._session_of.get(message.node)
        if why is None and former is not None and self._sessions[former].is_another(message.instance, now):
            return (
                f"the server at {self._infos[message.node].url} is the agent of {message.node} already, with the same state "
                "directory or a copy of it; stop one of them, and give another box a state directory and a name of its own"
            )
        return why

    def _cannot_keep(self, node: str, why: str) -> list[BoxAction]:
        """Nothing is granted on this node until it announces itself again; what it has not confirmed goes back to the queue."""
        self._change(node, trouble=why)
        withdrawn = [] if self._written is None else self._written.take_back(node)
        return [Do(cmd.SilenceNode(node)), *(Do(cmd.WithdrawGrant(lease_id)) for lease_id in withdrawn)]

    def _never_kept(self, message: Announce, state: PoolState) -> list[NeverKept]:
        """The leases of earlier leaders that came after all that the box has seen. A box that lost its file, or its last
        writes by a loss of power, may have had them.
        """
        known = state.nodes.get(message.node)
        is_whole = message.epoch_seen > 0 and known is not None and known.boot_id == message.boot_id
        if not is_whole or message.node in self._infos:
            return []
        there = {each.id for each in message.leases} | {each.lease_id for each in message.over}
        later = [kept for kept in self._leases_of(message.node).values() if kept.fence > message.fence_seen]
        return [NeverKept(kept.id) for kept in later if kept.id not in there]

    def _commands_of(self, message: Announce) -> list[cmd.Command]:
        """What an announcement leads to. Silence first: then the announcement is written as an event, and the Welcome
        follows it. Leases are brought back before the fences rise to what the box has seen.
        """
        node, there = message.node, {each.id for each in message.leases} | {each.lease_id for each in message.over}
        commands: list[cmd.Command] = [cmd.SilenceNode(node)]
        commands += [command for over in message.over if (command := self._end_of(node, over)) is not None]
        # What the box has seen and does not have any more has ended, or was granted on another box; the database lost that.
        gone = [kept for kept in self._leases_of(node).values() if kept.fence <= message.fence_seen]
        commands += [cmd.EndKept(kept.id, node, kept.fence, None) for kept in gone if kept.id not in there]
        commands += [cmd.RecoverLease(kept, node) for kept in sorted(message.leases, key=lambda kept: kept.fence)]
        announced = cmd.AnnounceNode(node, message.boot_id, message.gpus, message.machine_id, message.fence_seen)
        return [*commands, announced]

    def _reported(self, session: BoxSession, message: Report, state: PoolState) -> list[BoxAction]:
        if not session.is_welcome or message.heard < session.reported:
            return []
        session.reported = message.heard
        if self._infos[session.node].trouble is not None:
            return []
        for uuid in message.gone:
            session.readings.pop(uuid, None)
        for reading in message.changed:
            if reading.gpu.key.node == session.node:
                session.readings[reading.gpu.key.uuid] = reading
        readings: Iterable[Reading] = message.changed
        # Those that did not change would grow stale before the next report but one.
        if message.heard - session.observed >= state.settings.stale_after_s / 2:
            session.observed = message.heard
            readings = session.readings.values()
        stamped = tuple(
            replace(reading, at=message.heard) for reading in readings if reading.gpu.key.node == session.node
        )
        return [Do(cmd.Observe(stamped))] if stamped else []

    def _kept(self, node: str, lease_id: str, fence: int) -> list[BoxAction]:
        written = self._written
        return [Confirmed(lease_id)] if written is not None and written.confirm(lease_id, node, fence) else []

    def _over(self, session: int, node: str, over: LeaseOver, now: float) -> list[BoxAction]:
        if (command := self._end_of(node, over)) is not None:
            return [Do(command)]
        if over.lease_id in self._leases_of(node):
            return []  # it has a later fence, so it is another lease
        return [Tell(session, Orders(self.epoch, now, ended=(over.lease_id,)))]

    def _end_of(self, node: str, over: LeaseOver) -> cmd.Command | None:
        """The command that ends what a box has ended; None if it has ended already."""
        kept = self._leases_of(node).get(over.lease_id)
        if kept is None or over.fence not in (None, kept.fence):
            return None
        return cmd.EndKept(over.lease_id, node, kept.fence, over.reason)

    def _leases_of(self, node: str) -> Mapping[str, KeptLease]:
        return {} if self._written is None else self._written.of(node)

    def _holder_died(self, node: str, message: HolderIsDead, state: PoolState) -> list[BoxAction]:
        lease = state.leases.get(message.lease_id)
        is_its_own = lease is not None and lease.request.holder.node == node
        return [Do(cmd.EndLease(message.lease_id, EndReason.HOLDER_DIED))] if is_its_own else []

    # --- to the agents -----------------------------------------------------------------------------------------------

    def written(self, events: Sequence[ev.Event], state: PoolState, now: float) -> list[BoxAction]:
        """Tell the boxes what was written."""
        if self._written is None:
            self._written = WrittenLeases(state)
            return []
        news = self._written.take(events, state, now)
        actions: list[BoxAction] = []
        for node in [event.node for event in events if isinstance(event, ev.NodeAnnounced)]:
            self._announcing[node] = max(self._announcing.get(node, 0) - 1, 0)
            session = self._session_of.get(node)
            if session is not None and not self._announcing[node] and not self._sessions[session].is_welcome:
                news.pop(node, None)  # the Welcome has it all
                actions += self._welcomed(session, self._sessions[session], state, now)
        if any(isinstance(event, ev.Configured) and event.table == "tokens" for event in events):
            orders = Orders(self.epoch, now, tokens=tuple(state.tokens.values()))
            actions += [Tell(session, orders) for session, known in self._sessions.items() if known.is_welcome]
        for node in [event.node for event in events if isinstance(event, ev.NodeForgotten)]:
            if node not in self._session_of:
                self._infos.pop(node, None)
        for node, of_node in news.items():
            session = self._session_of.get(node)
            if session is not None and self._sessions[session].is_welcome:
                if of_node.look and not state.queue:
                    of_node.look = False
                    self._late_looks.setdefault(node, now + LATE_LOOK_S)
                elif of_node.look:
                    self._late_looks.pop(node, None)
                actions.append(Tell(session, of_node.orders(self.epoch, now)))
        return [*actions, *self._looks(inf, now)] if state.queue and self._late_looks else actions

    def _looks(self, until: float, now: float) -> list[BoxAction]:
        """Tell the boxes to look whose late looks are due until then."""
        due = [node for node, at in self._late_looks.items() if at <= until]
        for node in due:
            del self._late_looks[node]
        sessions = [self._session_of[node] for node in due if node in self._session_of]
        return [Tell(each, Orders(self.epoch, now, look=True)) for each in sessions if self._sessions[each].is_welcome]

    def _welcomed(self, session: int, known: BoxSession, state: PoolState, now: float) -> list[BoxAction]:
        written, node = self._written, known.node
        assert written is not None  # noqa: S101 - it was there for the announcement
        known.is_welcome, known.heard_at, known.urls = True, now, self._urls_now()
        confirmed = [id_ for id_, fence in known.listed.items() if written.confirm(id_, node, fence)]
        known.listed = {}
        actions: list[BoxAction] = [Confirmed(lease_id) for lease_id in confirmed]
        leases, watches = tuple(written.of(node).values()), tuple(written.watches_of(node))
        tokens = tuple(state.tokens.values())
        welcome = Welcome(self.epoch, now, self.pool_id, leases, watches, known.urls, tokens)
        actions.append(Tell(session, welcome))
        if warnings := written.warnings_of(node, now):
            actions.append(Tell(session, Orders(self.epoch, now, warnings=warnings)))
        return actions

    def closed(self, session: int, now: float) -> list[BoxAction]:  # noqa: ARG002 - as all others
        """The connection is gone."""
        return self._silenced(session) if session in self._sessions else []

    def tick(self, state: PoolState, now: float) -> list[BoxAction]:  # noqa: ARG002 - as all others
        """Time has passed: tell all agents the time, close those that are silent, and take back what they do not confirm."""
        actions = self._looks(now, now)
        if now < self._next_round:
            return actions
        self._next_round = now + SIGN_OF_LIFE_S
        for session in [id_ for id_, each in self._sessions.items() if each.is_silent(now)]:
            node = self._sessions[session].node
            why = f"the agent of {node} has said nothing for too long"
            actions += [Close(session, why), *self._silenced(session)]
        if self._written is not None:
            given_up = self._written.give_up(now, lambda node: node not in self._session_of)
            actions += [Do(cmd.WithdrawGrant(lease_id)) for lease_id in given_up]
        # One message for all that have heard the same, so that it need be encoded only once. While many boxes join, their list
        # changes again and again: it is told once it has not changed for a round.
        urls = self._urls_now()
        is_settled, self._urls = urls is self._urls, urls
        time, time_and_urls = Orders(self.epoch, now), Orders(self.epoch, now, boxes=urls)
        for session, known in self._sessions.items():
            if known.is_welcome:
                is_news = is_settled and known.urls is not urls and known.urls != urls
                actions.append(Tell(session, time_and_urls if is_news else time))
                known.urls = urls if is_settled else known.urls
        return actions

    def _silenced(self, session: int) -> list[BoxAction]:
        node = self._sessions[session].node
        self._drop(session)
        self._change(node, is_up=False)
        return [Do(cmd.SilenceNode(node))]

    def _drop(self, session: int) -> None:
        gone = self._sessions.pop(session)
        self._change(gone.node, heard_at=gone.heard_at)
        del self._session_of[gone.node]

    def _change(self, node: str, **changed: Any) -> None:
        self._infos[node] = replace(self._infos[node], **changed)

    def _urls_now(self) -> Urls:
        urls = tuple((node, info.url) for node, info in self._infos.items())
        return self._urls if urls == self._urls else urls

    def __repr__(self) -> str:
        return f"<Boxes of epoch {self.epoch}: {len(self._sessions)} of {len(self._infos)} are up>"
