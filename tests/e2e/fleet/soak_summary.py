"""What a soak did and found: the faults that were injected, how often each promise was judged, and how often it was broken.

The checkers of the journal count by themselves. What the checker of the workers' lines judges is counted here from the same lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.history_check import Violation
from tests.e2e.run_history import LeaseRecord, RunHistory

from .journal_check import Tally

TAKE_OVER_S = 5.0

FAULTS = {
    "kill_leader": "leader killed",
    "hand_over": "leader ended by SIGTERM",
    "stop_leader": "leader frozen",
    "cut_leader_from_database": "leader cut off from its database",
    "lose_requests_of_leader": "statements of the leader to its database lost",
    "lose_answers_to_leader": "answers of the database to the leader lost",
    "cut_boxes_from_leader": "other boxes cut off from the leader",
    "lose_requests_to_leader": "messages to the leader lost",
    "lose_answers_of_leader": "messages of the leader lost",
    "cut_network_of_box": "box that does not lead cut off from the others",
    "kill_database": "database killed",
    "stop_database": "database frozen",
    "fail_over": "primary lost, standby promoted",
    "kill_box": "box that does not lead killed",
    "stop_box": "box that does not lead frozen",
    "reboot_box": "box rebooted",
    "duplicate_box": "second box with the name of a running one",
    "duplicate_dead_box": "second box with the name of a dead one",
    "kill_worker": "client killed",
}

KEPT = "what the harness's own client was told is kept (leases and queue positions)"
# Each with what one count of it is. The keys are the kinds of violations; several kinds may break one promise.
PROMISES = {
    "held_twice": "no GPU has two holders (neighbouring tenures of one GPU)",
    "overfull": "no GPU has two holders (neighbouring tenures of one GPU)",
    "lock": "the lock of a granted GPU is free (locks taken)",
    "stale_write": "no write is too late within its writer's safe time (writes to one GPU, each with the one before)",
    "fence": "a later grant of a GPU has a higher fence (neighbouring grants of one GPU)",
    "order": "requests of one owner for the same are granted in order (pairs of waiting requests)",
    "unserved": "a request for one GPU that waits when all faults are over is served, refused or ended (requests that waited then)",
    "lost": KEPT,
    "resurrected": KEPT,
    "short": "a renewal gives the whole TTL (renewals)",
    "answer": "no honest call of the harness's own client is refused, apart from 'later' and 'not here' (answers)",
    "dead_holder": "the GPU of a killed holder is granted again (GPUs)",
    "left_over": "the pool can be read and nothing is left in it when all clients have gone (ends of a crowd, and of all faults)",
    "gap": "the journal has no gap (neighbouring events)",
    "epoch": "no deposed leader writes (events)",
    "unannounced": "no grant on a box that has not joined the leader (grants)",
    "obeyed": "no box obeys an older leader (neighbouring leaders of one box)",
    "twin": "no second box of one name is taken (second boxes that asked a leader)",
    "acknowledged": "a grant that a client was told of is in the journal (grants)",
    "expired": "no lease expires within a TTL of a renewal (renewals of leases that expired later)",
    "outage": "no lease ends by an outage (leases held through one)",
    "take_over": f"another leader grants within {TAKE_OVER_S:.0f} s (leaders broken while all else was well)",
    "ended": "the fleet recovers from all faults (runs)",
}


def judged(history: RunHistory) -> Tally:
    """How often tests.e2e.history_check judged each promise of a fleet in these lines."""
    lines = Counter(line["what"] for line in history.lines)
    last_of = {lease.who: lease for lease in history.tenures}
    killed = [lease for who in history.killed if (lease := last_of.get(who)) is not None and lease.was_killed]
    return Counter(
        held_twice=sum(len(tenures) - 1 for tenures in history.holders().values()),
        lock=lines["witness"] + lines["witness_busy"],
        stale_write=sum(len(writes) - 1 for writes in history.resources.values() if writes),
        lost=sum(_was_told(lease) for lease in history.leases.values()),
        short=lines["renewed"],
        answer=lines["answered"],
        dead_holder=sum(len(lease.uuids) for lease in killed),
        left_over=lines["final"],
    )


def _was_told(lease: LeaseRecord) -> bool:
    """Whether the harness's own client was told of a place in line or of a grant. The package's client writes no answers."""
    return any(line["what"] == "answered" and line.get("state") in {"queued", "active"} for line in lease.lines)


@dataclass
class SoakSummary:
    """Of all runs so far. Take-overs that never came are infinite."""

    commit: str
    seeds: list[int] = field(default_factory=list)
    faults: Tally = field(default_factory=Counter)
    faults_that_did_not_come: int = 0
    commits_lost: int = 0
    checked: Tally = field(default_factory=Counter)
    violations: Tally = field(default_factory=Counter)
    grants: int = 0
    # What the package's own client met while faults were injected. Its own leases have a short TTL, so this is no violation.
    of_client: Tally = field(default_factory=Counter)
    take_overs_s: list[float] = field(default_factory=list)
    hand_overs_s: list[float] = field(default_factory=list)

    def add_workers(self, history: RunHistory) -> None:
        """Those of one part of a run: the grants, what was judged, and what the package's own client met."""
        self.grants += len(history.tenures)
        self.checked += judged(history)
        self.of_client["requests"] += sum(lease.who.startswith("new") for lease in history.leases.values())
        self.of_client["requests that failed"] += sum(
            line.get("call") == "request_gpu" for line in history.of_kind("failed")
        )
        self.of_client["leases that were lost"] += sum(
            line["who"].startswith("new") and line["why"] == "lost" for line in history.of_kind("left")
        )

    def add_violations(self, found: Iterable[Violation]) -> None:
        """Those of one run. The journal is read after each part of a run, so it may show a violation twice."""
        self.violations.update(violation.kind for violation in set(found))

    def add_take_overs(self, took_s: Collection[float], *, is_told: bool = False) -> list[str]:
        """Of leaders that were told to stop, or of those that were broken. Returns what was too late."""
        (self.hand_overs_s if is_told else self.take_overs_s).extend(took_s)
        late_s = [each_s for each_s in took_s if each_s > TAKE_OVER_S]
        self.checked["take_over"] += len(took_s)
        self.violations["take_over"] += len(late_s)
        return [f"take_over: another leader granted after {each_s:.2f} s" for each_s in late_s]

    def told_take_overs(self) -> list[str]:
        """Of all runs, for people."""
        both = {"broken": self.take_overs_s, "told to stop": self.hand_overs_s}
        return [f"leaders that were {how}, until another one granted: {times(all_s)}" for how, all_s in both.items()]

    def written(self, minutes: float) -> dict[str, Any]:
        checked = dict.fromkeys(PROMISES.values(), 0)
        violations = dict(checked)
        faults = dict.fromkeys(FAULTS.values(), 0)
        # A kind without a text is shown by its name: none is left out.
        named = (
            (checked, self.checked, PROMISES),
            (violations, self.violations, PROMISES),
            (faults, self.faults, FAULTS),
        )
        for counts, kinds, texts in named:
            for kind, number in kinds.items():
                text = texts.get(kind, kind)
                counts[text] = counts.get(text, 0) + number
        return {
            "minutes": round(minutes, 1),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": self.commit,
            "seeds": self.seeds,
            "machine": f"{len(os.sched_getaffinity(0))} cores",
            "faults": faults,
            "faults_that_did_not_come": self.faults_that_did_not_come,
            "commits_lost": self.commits_lost,
            "grants": self.grants,
            "of_client": dict(self.of_client),
            "checked": checked,
            "violations": violations,
            "take_overs_s": times(self.take_overs_s),
            "hand_overs_s": times(self.hand_overs_s),
        }

    def write(self, path: Path, minutes: float) -> None:
        """Whole or not at all, so that a soak that is cut leaves the summary of the runs before."""
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(self.written(minutes), indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def times(all_s: Collection[float]) -> dict[str, float]:
    """How many came, how many never did, and how long those took that came."""
    ended_s = [each_s for each_s in all_s if each_s < inf]
    found: dict[str, float] = {"count": len(ended_s), "never": len(all_s) - len(ended_s)}
    if ended_s:
        found |= {name: round(of(ended_s), 2) for name, of in (("min", min), ("median", median), ("max", max))}
    return found
