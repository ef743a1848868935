"""One run of the comparison: what it measures, in which order, and the tables and plots that show it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders import measures, restarts
from benchmarks.contenders.field import COMMAND, HOW, SHORT_TTL_S, Contender, Pace
from benchmarks.contenders.figures import CROWD, OURS, crowd_figures, hand_over_figures, reclaim_figures
from benchmarks.contenders.measures import Clients, Failed, Patience, Running, awake, running, taking_turns
from benchmarks.contenders.order import BEGINNING_S, MARGIN_S, Verdict, crowd_row
from benchmarks.contenders.processes import memory_mb
from benchmarks.contenders.promises import promises
from benchmarks.contenders.servers import REDIS_TTL_S
from benchmarks.contenders.takers import FILELOCK_SLEEP_S, LOOK_S, REDIS_SLEEP_S
from benchmarks.shared.processes import cpu_s
from benchmarks.shared.results import Cell, Results, duration, ecdf
from benchmarks.shared.rounds import ENOUGH_FOR_P99, percentile, spread, spread_s

GPUS = 8


@dataclass(frozen=True)
class Effort:
    """How much of everything, by the pace of a contender where that differs."""

    start_rounds: int
    # For request + release, of one client and of many.
    rounds: int
    alone_s: float
    round_s: float
    many: tuple[int, ...]
    hand_over_rounds: int
    hand_overs: Mapping[Pace, int]
    kill_rounds: int
    kills: Mapping[Pace, int]
    never_s: float
    crowd: int
    crowd_s: float


WHOLE = Effort(
    start_rounds=2,
    rounds=4,
    alone_s=0.3,
    round_s=0.5,
    many=(CROWD,),
    hand_over_rounds=4,
    hand_overs={"fast": 15, "looks": 4, "slow": 1},
    kill_rounds=5,
    kills={"fast": 4, "looks": 2, "slow": 1},
    never_s=3.0,
    crowd=64,
    crowd_s=5.0,
)
QUICK = Effort(
    start_rounds=1,
    rounds=2,
    alone_s=0.1,
    round_s=0.1,
    many=(8,),
    hand_over_rounds=1,
    hand_overs={"fast": 3, "looks": 3, "slow": 1},
    kill_rounds=1,
    kills={"fast": 1, "looks": 1, "slow": 1},
    never_s=1.0,
    crowd=16,
    crowd_s=0.5,
)
# A server that fails or hangs must not take the time of the others.
PATIENCE_S = 45.0
STARTS = f"Schedulers of jobs start a process for each grant, while ours starts none. `{COMMAND}` is that start without a queue."


class Comparison:
    """One run, which adds to the results as it measures."""

    def __init__(self, contenders: Sequence[Contender], effort: Effort, results: Results, folder: Path) -> None:
        self._contenders = contenders
        self._effort = effort
        self._results = results
        self._folder = folder
        self._ready_s: dict[str, list[float]] = {}
        self._weight_mb: dict[str, float] = {}
        self._crowded_mb: dict[str, float] = {}
        self._alone: dict[str, list[float]] = {}
        self._patience = Patience(PATIENCE_S, results.skip)
        # What the run has seen of the promises.
        self._reclaimed: dict[str, str] = {}
        self._restarted: dict[str, str] = {}
        self._verdicts: dict[str, Verdict] = {}

    def run(self) -> None:
        """Measure first the waiters for one GPU, then all contenders on eight."""
        one_gpu = [each for each in self._contenders if each.has_hand_over or each.has_reclaim]
        with running(one_gpu, 1, self._folder, self._results.skip) as run:
            present = {each.name for each in run.contenders}
            absent = {each.server for each in one_gpu} - set(run.servers)
            self._note_starts(run)
            with Clients(run) as clients:
                self.hand_over(run, clients)
                self.reclaim(run, clients)
                present_still = self._patience.left(each for each in run.contenders if each.has_hand_over)
                failed = self._failed("restart", clients)
                self._restarted = restarts.table(self._results, run, clients, present_still, failed)
        # A server that could not run before is not tried again, because that takes time.
        eight_gpus = [
            each for each in self._contenders if (each.rates or each.crowd_share) and each.server not in absent
        ]
        with running(eight_gpus, GPUS, self._folder, self._results.skip) as run:
            self._note_starts(run)
            self.latency(run)
            self.rates(run)
            self.crowd(run)
            self.start_and_memory(run)
            present |= {each.name for each in run.contenders}
        self._tell_what_is_left_out(present)
        families = [family for family in HOW if any(name.startswith(family) for name in present)]
        self._results.table("How each is used here", ["", "how"], [[family, HOW[family]] for family in families])
        promises(self._results, families, self._reclaimed, self._verdicts, self._restarted)

    def _tell_what_is_left_out(self, present: set[str]) -> None:
        """Note what is left out by design, for the contenders that are installed."""
        effort = self._effort
        for each in self._contenders:
            parts = {
                "hand-over": each.has_hand_over,
                "kill -9": each.has_reclaim,
                "request + release": bool(each.rates),
                **{f"{number} clients": number in each.rates for number in effort.many if each.rates},
                "the crowd": bool(each.crowd_share),
            }
            missing = [part for part, is_measured in parts.items() if not is_measured]
            if missing and each.name in present:
                self._results.skip(f"{each.name} ({', '.join(missing)})", each.left_out)
        looks, slow = effort.hand_overs["looks"], effort.hand_overs["slow"]
        self._results.note(
            "Some contenders are measured less often, so that the run ends in time. There are at most "
            f"{effort.hand_over_rounds * looks} hand-overs for a contender that polls, {effort.hand_over_rounds * slow} for one "
            "that starts a process for each grant or shows it late, and "
            f"{effort.hand_over_rounds * effort.hand_overs['fast']} for any other. For the slow ones, "
            f"at most {effort.kill_rounds * effort.kills['slow']} holders are killed, for the others at most {effort.kill_rounds * effort.kills['fast']}. "
            "The crowd is shorter for a contender that claims nothing."
        )

    def hand_over(self, run: Running, clients: Clients) -> None:
        """Measure the time from a release to the next waiter."""
        found = taking_turns(
            self._patience.left(each for each in run.contenders if each.has_hand_over),
            awake(run, lambda each: measures.hand_overs(clients, each, self._effort.hand_overs[each.pace])),
            self._effort.hand_over_rounds,
            self._failed("hand-over", clients),
        )
        note = f"A waiter tries the Redis lock every {REDIS_SLEEP_S:g} s and filelock every {FILELOCK_SLEEP_S:g} s, their defaults. It reads the statistics every {LOOK_S:g} s. {STARTS}"
        self._distribution("From a release to the next waiter, in another process, with 1 GPU", found, note)
        self._plot("hand-over", "From a release to the next waiter, in another process", found)
        hand_over_figures(self._results, found)

    def reclaim(self, run: Running, clients: Clients) -> None:
        """Measure the time from the death of a holder to the next waiter."""
        never = "redis-list"
        found = taking_turns(
            self._patience.left(each for each in run.contenders if each.has_reclaim and each.kind != never),
            awake(run, lambda each: measures.reclaims(clients, each, self._effort.kills[each.pace], SHORT_TTL_S + 10)),
            self._effort.kill_rounds,
            self._failed("kill -9", clients),
        )
        # These come last: a GPU that they lose does not come back.
        lost: list[list[Cell]] = []
        for contender in run.contenders:
            if contender.kind == never:
                try:
                    found[contender.name] = [measures.reclaims(clients, contender, 1, self._effort.never_s)]
                except TimeoutError:  # this is the expected outcome
                    told = self._reclaimed[contender.name] = f"not within {self._effort.never_s:g} s"
                    lost.append([contender.name, told, None, None, 1])
        for name, rounds in found.items():
            self._reclaimed[name] = (
                f"after {duration(statistics.median(time_s for times in rounds for time_s in times))}"
            )
        note = f"A Redis lock ends with its timeout. People set it to {REDIS_TTL_S:g} s or more; here it is {SHORT_TTL_S:g} s, so that the benchmark can wait for it. With Ray and the schedulers of jobs, the killed process is the one that uses the GPU; with all others, it is the one that took it. {STARTS}"
        self._distribution(
            "From kill -9 of the holder to the next waiter, in another process, with 1 GPU", found, note, lost
        )
        self._plot("reclaim", "From kill -9 of the holder to the next waiter", found)
        reclaim_figures(self._results, found)

    def latency(self, run: Running) -> None:
        """Measure request + release of one client."""
        contenders = self._patience.left(each for each in run.contenders if each.rates)
        with Clients(run) as clients:
            found = taking_turns(
                contenders,
                awake(run, lambda each: measures.cycles(clients, each, self._effort.alone_s)),
                self._effort.rounds,
                self._failed("request + release", clients),
            )
            self._alone = {name: [len(times) / sum(times) for times in rounds] for name, rounds in found.items()}
            for server, serving in run.servers.items():
                self._weight_mb[server] = memory_mb(serving.pids)
        note = (
            "For the tasks of Ray and Dask, this is a task that does nothing, from its submission to its answer; for srun, a job that does nothing, to its end. For simple-gpu-scheduler, HyperQueue and sbatch, it is the time from the submission to the start of a command, which is a Python without its site packages. "
            + STARTS
        )
        self._distribution(f"Request + release, one client, {GPUS} GPUs", found, note)

    def rates(self, run: Running) -> None:
        """Show the rates of one client, as `latency` measured them, and measure those of many."""
        effort = self._effort
        found: dict[int, dict[str, list[float]]] = {1: self._alone}
        crowded: dict[str, list[list[float]]] = {}
        shares: list[float] = []
        for number in effort.many:
            with measures.racing(run, number) as rate:
                rounds: dict[str, list[list[float]]] = {}
                for has_long_round in (False, True):
                    rounds |= taking_turns(
                        self._patience.left(
                            each
                            for each in run.contenders
                            if number in each.rates and (each.round_s is not None) == has_long_round
                        ),
                        awake(
                            run,
                            partial(_rate_and_share, run, rate, effort.round_s, shares if number == CROWD else []),
                        ),
                        1 if has_long_round else effort.rounds,
                        self._failed(f"{number} clients"),
                    )
            found[number] = {name: [one for (one,) in rates] for name, rates in rounds.items()}
            crowded = rounds if number == CROWD else crowded
        crowd_figures(self._results, crowded, shares)
        table: dict[str, list[Cell]] = {each.name: [each.name] for each in run.contenders if each.rates}
        points: dict[str, list[tuple[float | str, float]]] = {}
        for number, by_name in found.items():
            for name, row in table.items():
                rates = by_name.get(name, [])
                row.extend([statistics.median(rates), spread(rates)] if rates else [None, None])
                if rates and statistics.median(rates) > 0:
                    points.setdefault(name, []).append((number, statistics.median(rates)))
        natures = {each.name: each.client for each in run.contenders}
        columns = [text for number in found for text in (f"{number} client{'s' * (number > 1)}, 1/s", "rounds")]
        self._results.table(
            f"Requests + releases a second, {GPUS} GPUs",
            ["", *columns, "a client is"],
            [[*row, natures[name]] for name, row in table.items()],
            note=f"Medians of {effort.rounds} alternating rounds of {effort.round_s:g} s, each counted from when the rate no longer grew, or of {effort.alone_s:g} s for one client, counted from its second grant on; fewer rounds for some, and one long round for Slurm, which starts a waiting job seconds later with its default settings. The cycle of Ray and Dask is an empty task. Statistics only: the client reads them and claims nothing. With more clients than GPUs, the other clients wait meanwhile.",
            is_headline=True,
        )
        self._results.plot(
            "rate", "Request + release", kind="line", x="clients", y="1/s", log_x=True, log_y=True, series=points, is_headline=True
        )  # fmt: skip

    def crowd(self, run: Running) -> None:
        """Let many clients loose at once, with a lock file for each GPU as a witness."""
        effort = self._effort
        rows: list[list[Cell]] = []
        for contender in [each for each in run.contenders if each.crowd_share]:
            if not self._patience.left([contender]):
                continue
            seconds = max(0.5, effort.crowd_s * contender.crowd_share)
            began = time.monotonic()
            try:
                watch = awake(run, lambda each: measures.crowd(run, each, effort.crowd, seconds))  # noqa: B023 - called at once
                verdict, weight_mb = watch(contender)
            except measures.Trouble as trouble:
                self._failed("crowd")(contender, str(trouble), time.monotonic() - began)
                continue
            self._crowded_mb[contender.server] = max(weight_mb, self._crowded_mb.get(contender.server, 0.0))
            self._verdicts[contender.name] = verdict
            claim = contender.order if contender.claims_exclusion else "claims nothing"
            rows.append(crowd_row(contender.name, verdict, seconds, claim))
        low_s, high_s = measures.WORKLOAD_HOLD_S
        self._results.table(
            f"{effort.crowd} clients on {GPUS} GPUs, each holds for {low_s * 1000:g} to {high_s * 1000:g} ms, and one is killed halfway",
            [
                "", "duration", "grants", "GPUs held twice", "overtaken", "by how many, at most", "lateness of processes, p99",
                "longest wait", "the killed client's GPU is used again after", "promised order",
            ],
            rows,
            note=f"Held twice: a holder locks a file of its GPU, whatever the contender says, and finds it locked. Overtaken: another client asked more than {MARGIN_S * 1000:g} ms later and ran more than {MARGIN_S * 1000:g} ms earlier. A client that still waits at the end is not counted, nor is one that asks in the first {duration(min(BEGINNING_S, effort.crowd_s / 4))}, while all begin at once. Lateness: how long after its wake-up time a process runs again. Where it exceeds the margin, some clients that seem overtaken were only late. The Redis list serves in order of arrival, so what it shows is only lateness.{measures.own_order_told(run)} Statistics are about as old here as a GPU is held for. Clients that hold for hours collide only with clients that read at the same moment.",
            is_headline=True,
        )  # fmt: skip

    def start_and_memory(self, run: Running) -> None:
        """Measure the time from nothing to the first grant, and the memory. It comes last, when the crowd has released all."""
        contenders = self._patience.left(each for each in run.contenders if each.rates)
        weights: dict[str, float] = {}

        def start(contender: Contender) -> list[float]:
            took_s, weights[contender.name] = measures.first_grant(run, contender)
            return [took_s]

        found = taking_turns(contenders, awake(run, start), self._effort.start_rounds, self._failed("start"))
        rows: list[list[Cell]] = []
        for contender in contenders:
            times_s = [time_s for (time_s,) in found.get(contender.name, [])]
            ready_s = self._ready_s.get(contender.server)
            rows.append(
                [
                    contender.name,
                    duration(statistics.median(ready_s)) if ready_s else None,
                    duration(statistics.median(times_s)) if times_s else None,
                    spread_s(times_s) if times_s else None,
                    self._weight_mb.get(contender.server) or None,
                    self._crowded_mb.get(contender.server) or None,
                    weights.get(contender.name),
                ]
            )
        self._results.table(
            "Start and memory",
            [
                "", "server ready after", "client's first GPU after", "rounds", "server, MB",
                f"server with {self._effort.crowd} clients, MB", "a client, MB",
            ],
            rows,
            note="Memory is PSS: memory that processes share is divided among them. A client is a Python process that holds a GPU. With Ray and Dask, it is a driver and the process of its task or actor; with the schedulers of jobs, it includes the command. Creating the files of a new PostgreSQL is not counted. Contenders that share a server show the same values for it.",
            is_headline=True,
        )  # fmt: skip

    def _note_starts(self, run: Running) -> None:
        for name, serving in run.servers.items():
            if serving.ready_s is not None:
                self._ready_s.setdefault(name, []).append(serving.ready_s)

    def _failed(self, what: str, clients: Clients | None = None) -> Failed:
        """Return a function that notes a failure in this part, and ends the clients that have failed."""

        def note(contender: Contender, reason: str, took_s: float) -> None:
            self._results.skip(f"{contender.name}, {what}", reason)
            self._patience.lost(contender, took_s)
            if clients is not None:
                clients.end(contender)

        return note

    def _distribution(
        self, title: str, found: dict[str, list[list[float]]], note: str, more: Sequence[Sequence[Cell]] = ()
    ) -> None:
        rows: list[Sequence[Cell]] = []
        for name, rounds in found.items():
            times_s = [time_s for times in rounds for time_s in times]
            medians = [statistics.median(times) for times in rounds]
            number = len(times_s)
            tail = (
                duration(percentile(times_s, 99)) if number >= ENOUGH_FOR_P99 else f"longest: {duration(max(times_s))}"
            )
            rows.append([name, duration(statistics.median(times_s)), tail, spread_s(medians), number])
        self._results.table(
            title, ["", "p50", "p99", "medians of rounds", "number"], [*rows, *more], note, is_headline=True
        )

    def _plot(self, plot_id: str, title: str, found: dict[str, list[list[float]]]) -> None:
        series = {
            name: ecdf([time_s * 1000 for times in rounds for time_s in times])
            for name, rounds in found.items()
            if rounds
        }
        self._results.plot(plot_id, title, kind="ecdf", x="ms", y="share", log_x=True, series=series)


def _rate_and_share(
    run: Running,
    rate: Callable[[Contender, float], float],
    seconds: float,
    shares: list[float],
    contender: Contender,
) -> list[float]:
    """Return the rate of a round, and note the share of a core that our server used meanwhile."""
    if contender.name != OURS:
        return [rate(contender, contender.round_s or seconds)]
    (pid,) = run.servers[contender.server].pids
    began, used_s = time.monotonic(), cpu_s(pid)
    found = rate(contender, seconds)
    shares.append((cpu_s(pid) - used_s) / (time.monotonic() - began))
    return [found]
