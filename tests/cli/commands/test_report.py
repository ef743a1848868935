"""`gpu-pool report`: GPU-hours by owner, over one server and over several."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_worker_pool.cli.commands.report import COLUMNS, _as_text
from gpu_worker_pool.cli.commands.report import report as report_command
from gpu_worker_pool.failure import Failure
from gpu_worker_pool.testing import ServerProcess
from tests.cli.in_process import called
from tests.cli.own_process import Done, gpu_pool
from tests.client.foreign_servers import Behaviour, ForeignServer, not_found, saying, statistics
from tests.server.past_leases import past, server_with_past
from tests.server.running import free_port

SPAN = ("--since", "2026-03-01T00:00Z", "--until", "2026-03-02T00:00Z")
AWKWARD = 'eve, "the [red]second"'
PAST = (
    past("ada", 1, 0, 0, 2),  # pruned
    past("ada", 2, 2, 3, 6.25),
    past(AWKWARD, 1, 2, 3, 5, memory_mb=1000),
    past(None, 1, 6, 6, 7),
    past("bob", 1, 6, 9, 8),  # the clock was set back while it was held
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_with_past(PAST, pruned_to=4) as running:
        yield running


def report(server: ServerProcess, *arguments: str) -> Done:
    return gpu_pool("report", *arguments, server=server, env={"TZ": "UTC"})


# As a user runs it


def test_the_table_shows_who_used_how_much_and_says_what_it_does_not_know(server: ServerProcess) -> None:
    done = report(server, *SPAN)

    assert done.code == 0
    assert done.out.splitlines() == [
        "From 2026-03-01 00:00 UTC to 2026-03-02 00:00 UTC",
        "OWNER                   GPU-HOURS  SHARED  LEASES  RUNNING  LONGEST  WAITED  UNKNOWN",
        "ada                          6.50    0.00       1        0   3h 15m      1h        0",
        'eve, "the [red]second"       0.00    2.00       1        0       2h      1h        0',
        "(no owner)                   1.00    0.00       1        0       1h      0s        0",
        "bob                          0.00    0.00       0        0       0s      0s        1",
        "TOTAL                        7.50    2.00       3        0   3h 15m      2h        1",
    ]
    assert "some leases that ended before 2026-03-01T02:00:00.000Z are missing" in done.err
    assert "1 leases and 1 waits are not in these sums" in done.err
    assert "simulated" in done.err


@pytest.mark.parametrize("owner", ["=1+1", "+1", "-2", "@sum", "\tx", "\rx"])
def test_no_cell_of_csv_is_a_formula(owner: str) -> None:
    assert _as_text(owner) == f"'{owner}"
    assert _as_text(f"a{owner}") == f"a{owner}"


def test_csv_has_a_header_and_one_line_an_owner(server: ServerProcess) -> None:
    done = report(server, *SPAN, "--csv")

    assert done.code == 0
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert len(done.out.splitlines()) == len(rows) + 1
    assert [row["owner"] for row in rows] == ["ada", AWKWARD, "", "bob"]
    assert tuple(rows[0]) == ("owner", *COLUMNS)
    assert [row["gpu_hours"] for row in rows] == ["6.500000", "0.000000", "1.000000", "0.000000"]
    assert rows[1]["shared_gpu_hours"] == "2.000000"
    assert rows[3]["unknown_leases"] == "1"


def test_json_is_what_the_server_answers(server: ServerProcess) -> None:
    found = report(server, *SPAN, "--json").json

    assert (found["since"], found["until"]) == ("2026-03-01T00:00:00.000Z", "2026-03-02T00:00:00.000Z")
    assert (found["node"], found["is_complete"]) == ("box", False)
    assert [item["owner"] for item in found["owners"]] == ["ada", AWKWARD, None, "bob"]


def test_one_server_is_asked_and_where_it_does_not_answer_it_fails(server: ServerProcess) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    done = gpu_pool("report", server=away)
    assert (done.code, done.out) == (125, "")
    assert "there is no report: " in done.err
    both = called("report", "-e", f"{server.url},{away}")
    assert (both.code, "name one with --endpoint" in both.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"since": "2026-03-02", "until": "2026-03-01"}, "must be before --until"),
        ({"since": "9000-01-01"}, "must be before now"),
        ({"as_csv": True, "json": True}, "cannot be combined"),
    ],
)
def test_what_makes_no_sense_is_told_before_anybody_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Failure, match=words) as caught:
        report_command(**options)
    assert caught.value.code == 2


def test_a_span_that_ends_in_the_future_ends_now(server: ServerProcess) -> None:
    done = called("report", "--since", "0001-01-01", "--until", "9999-12-31", "--json", server=server)

    assert done.code == 0, done.err
    assert done.json["since"] == "1970-01-01T00:00:00.000Z"
    assert [item["owner"] for item in done.json["owners"]] == ["ada", AWKWARD, None, "bob"]


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        (statistics(), 125, "is not a GPU server with leases"),
        (not_found, 125, "is not a GPU server with leases"),
        (saying(200, b"null"), 125, "cannot be read"),
        (saying(200, b'{"owners": [{"owner": "ada"}]}'), 125, "cannot be read"),
        (saying(422, b'{"detail": "since: no."}'), 1, "there is no report: since: no."),
        (saying(503, b'{"detail": "the disk is full."}'), 125, "the disk is full."),
    ],
)
def test_a_server_that_reports_nothing_is_told_by_its_reason(behaviour: Behaviour, code: int, words: str) -> None:
    with ForeignServer(behaviour) as foreign:
        done = called("report", "-e", foreign.url)

    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert "None" not in done.err
