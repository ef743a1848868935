"""Where commands print, and what becomes of them where they cannot."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from gpu_worker_pool.cli.output import Console, Text
from gpu_worker_pool.cli.table import make_table, print_table
from gpu_worker_pool.testing import ServerProcess
from tests.cli.own_process import GPU_POOL, environment, gpu_pool
from tests.server.leasing import take


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess({"SIMULATED_GPUS": "2"}) as running:
        take(running, owner="zoë", ttl_s=600, labels={"command": "🚀 [red]fly"})
        yield running


def shell(line: str, server: ServerProcess, **env: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, with gpu-pool for `$G`."""
    command = ["/bin/bash", "-c", line.replace("$G", shlex.join(GPU_POOL))]
    return subprocess.run(command, env=environment(server, env), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", ["status", "--help", "status --json"])
def test_a_pipe_that_is_closed_ends_it_as_sigpipe_would(server: ServerProcess, arguments: str) -> None:
    done = shell(f"$G {arguments} | true; echo ${{PIPESTATUS[0]}}", server)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("has_reader", [False, True])
def test_only_an_output_whose_reader_is_gone_is_broken(has_reader: bool) -> None:
    """An error of a disk or of a connection may have the same number, and is said."""
    script = "import os; from gpu_worker_pool.cli.output import is_output_broken; os.write(2, repr(is_output_broken()).encode())"
    reading, writing = os.pipe()
    if not has_reader:
        os.close(reading)
    command = [GPU_POOL[0], "-c", script]
    done = subprocess.run(command, env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    if has_reader:
        os.close(reading)
    assert done.stderr == repr(not has_reader)


@pytest.mark.parametrize("arguments", ["status", "--version"])
def test_what_cannot_be_written_is_one_line(server: ServerProcess, arguments: str) -> None:
    done = shell(f"$G {arguments} > /dev/full", server)
    assert done.returncode == 125
    assert done.stderr.splitlines() == ["gpu-pool: cannot continue: [Errno 28] No space left on device"]


def test_closed_streams_are_no_fault(server: ServerProcess) -> None:
    assert shell("$G status <&- >&- 2>&-", server).returncode == 0


def test_what_a_terminal_cannot_show_does_not_end_the_command(server: ServerProcess) -> None:
    done = shell("$G status", server, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "[red]fly" in done.stdout
    assert done.stdout.isascii()


def test_every_line_on_standard_error_says_who_speaks(server: ServerProcess) -> None:
    done = gpu_pool("status", env={"GPU_STATS_SERVICE_ENDPOINTS": f"ftp://box,{server.url}"})
    assert done.code == 0
    assert done.err.startswith("gpu-pool: GPU_STATS_SERVICE_ENDPOINTS: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("nonsense",), "there is no command 'nonsense'"),
        (("squeue",), "`gpu-pool jobs` lists"),
        (("run", "--gres", "gpu:1", "--", "true"), "write --gpus 2"),
        (("run", "--gup", "1", "--", "true"), "did you mean --gpu or --gpus"),
        (("status", "--endpoint", "ftp://box"), "--endpoint: "),
        (("status", "--endpoint", "http://127.0.0.1:9"), "cannot connect: Connection refused"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_what_to_do(arguments: tuple[str, ...], hint: str) -> None:
    done = gpu_pool(*arguments)
    assert done.code in {2, 125}
    assert done.out == ""
    assert hint in done.err
    assert len(done.err.splitlines()) == 1


def test_no_package_is_needed() -> None:
    """The command works where only the client is installed."""
    hidden = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; sys.argv[1:] = ['status', '--help'];"
    program = f"{hidden} import gpu_worker_pool.__main__ as m; sys.exit(m.main())"
    done = subprocess.run([GPU_POOL[0], "-c", program], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- tables ----------------------------------------------------------------------------------------------------------


def shown(*rows: tuple[str, str, str], width: int | None = None) -> list[str]:
    table = make_table("ID", "HOW", "COMMAND", whole=("ID",))
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    print_table(Console(file, is_terminal=width is not None, width=width, has_colours=False), table)
    return file.getvalue().splitlines()


LONG = "the request was refused because no GPU of this pool has as much memory as it asks for, and none ever will"


def test_one_long_message_does_not_push_the_other_lines_of_a_pipe_apart() -> None:
    """The lab's bug 11: `history | less` was 250 columns wide after one refused job."""
    heading, short, long = shown(("1", "released", "train.py"), ("2", LONG, "eval.py"))
    assert heading == "ID  HOW       COMMAND"
    assert short == "1   released  train.py"
    assert long == f"2   {LONG}  eval.py"


def test_on_a_terminal_lines_are_broken_between_words() -> None:
    lines = shown(("1", "released", "train.py"), ("2", LONG, "eval.py"), width=40)
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].split() == ["1", "released", "train.py"]
    words = " ".join(line[4:30] for line in lines[2:]).split()
    assert [word for word in words if word not in {"eval.py", "|"}][:8] == LONG.split()[:8]


def test_what_is_a_line_is_cut_and_not_wrapped() -> None:
    file = io.StringIO()
    Console(file, is_terminal=True, width=20, has_colours=False).print(
        Text("a very long command that goes on", is_line=True)
    )
    assert file.getvalue() == "a very long comma...\n"
