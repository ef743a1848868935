"""Commands declare their options in their signatures; what was typed reaches them, or is refused with what to do."""

from __future__ import annotations

import re
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest

from gpu_worker_pool.cli.app import ALIASES, COMMANDS, EVERYDAY, function_of, paths
from gpu_worker_pool.cli.completion import candidates
from gpu_worker_pool.cli.declare import Argument, HelpWanted, Option, help_of, parser_of, read
from gpu_worker_pool.cli.options import Json
from gpu_worker_pool.failure import USAGE, Failure
from tests.cli.in_process import called


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def paint(
    rooms: Annotated[list[str] | None, Argument(metavar="[ROOM]...", help="Which.")] = None,
    *,
    coats: Annotated[int, Option("--coats", "-c", min=1, max=9, help="How many.")] = 2,
    colour: Annotated[Colour, Option("--colour", help="Which colour.")] = Colour.RED,
    brushes: Annotated[list[Path] | None, Option("--brush", help="With these.")] = None,
    is_quick: Annotated[bool, Option("--quick", help="Quickly.")] = False,
    json: Json = False,
) -> None:
    """Paint rooms."""


def start(
    command: Annotated[list[str], Argument(metavar="-- CMD [ARG]...")], *, gpus: Annotated[int, Option("-g")] = 1
) -> None:
    """Start a command."""


def test_what_was_typed_reaches_the_command_in_its_types() -> None:
    nothing = read("x paint", paint, [])
    assert nothing == {
        "rooms": None,
        "coats": 2,
        "colour": Colour.RED,
        "brushes": None,
        "is_quick": False,
        "json": False,
    }
    typed = ["hall", "-c3", "--colour=blue", "--brush", "a", "kitchen", "--brush", "b", "--quick", "--json"]
    assert read("x paint", paint, typed) == {
        "rooms": ["hall", "kitchen"],
        "coats": 3,
        "colour": Colour.BLUE,
        "brushes": [Path("a"), Path("b")],
        "is_quick": True,
        "json": True,
    }


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["-g", "2", "--", "python", "-g", "3"], ["python", "-g", "3"]),
        (["-g", "2", "python", "x.py", "--help"], ["python", "x.py", "--help"]),
        (["-g", "2", "--", "-odd", "--"], ["-odd", "--"]),
    ],
)
def test_what_follows_the_first_word_belongs_to_the_command(typed: list[str], command: list[str]) -> None:
    assert read("x start", start, typed) == {"command": command, "gpus": 2}


@pytest.mark.parametrize(
    ("function", "typed", "words"),
    [
        (paint, ["--coats", "10"], "--coats: '10' is not a whole number from 1 to 9"),
        (function_of("logs"), ["--tail", "-1"], "--tail: '-1' is not a whole number from 0 to 1000000000"),
        (paint, ["--coats", "1.5"], "--coats: '1.5' is not a whole number"),
        (paint, ["--coats"], "--coats: needs a value"),
        (paint, ["--colour", "green"], "--colour: 'green' is unknown; write red or blue"),
        (paint, ["--coat", "3"], "there is no option --coat; did you mean --coats?"),
        (paint, ["--job-name", "x"], "there is no option --job-name here: write --name TEXT"),
        (start, [], "give -- CMD [ARG]..."),
        (start, ["-g", "2"], "give -- CMD [ARG]..."),
    ],
)
def test_what_is_not_understood_is_refused_with_what_to_do(function: Any, typed: list[str], words: str) -> None:
    with pytest.raises(Failure) as caught:
        read("x", function, typed)
    assert words in str(caught.value)
    assert caught.value.code == USAGE


def test_help_shows_the_options_and_names_the_common_ones() -> None:
    with pytest.raises(HelpWanted) as shown:
        read("x paint", paint, ["hall", "--help"])
    text = str(shown.value)
    assert text.startswith("Usage: x paint [OPTIONS] [ROOM]...\n\nPaint rooms.\n")
    assert "-c, --coats NUMBER" in text
    assert "Also --json: see `x --help`." in text


def test_every_command_has_help_that_fits_a_screen_and_a_line_in_the_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, part in paths():
        text = parser_of(f"gpu-pool {name} {part}", function_of(name, part)).format_help()
        assert all(len(line) <= 80 for line in (text + called(name, "--help").out).splitlines()), (name, part)
        assert not re.search(r"[a-z]-$", text, re.MULTILINE), "a word is broken at its hyphen"
        if name in EVERYDAY:
            assert len(help_of(f"gpu-pool {name}", function_of(name)).splitlines()) <= 40, name
    assert len(EVERYDAY) == 10
    of_jobs = called("jobs", "--help").out
    assert ("  --all " in of_jobs, "\n  hold " in of_jobs, "hold|release" in of_jobs) == (True, True, False)
    short, whole = called("run", "--help").out, called("help", "run").out
    assert "More options: --gpu, --min-memory, --exclude" in short
    assert "`gpu-pool help run` explains these" in short
    assert "--grace 10s" in whole
    assert "Exit codes are those of timeout(1)" in whole
    shown = called("help").out
    assert len(shown.splitlines()) <= 40
    assert all(f"  {name} " in shown + called("help", "operate").out for name in (*COMMANDS, *ALIASES))


def test_the_shell_is_given_commands_options_and_parts() -> None:
    assert ("status", "Show every GPU, who holds it, and who waits --watch follows it.") in candidates(["stat"])
    assert [word for word, _ in candidates(["drain", "--w"])] == ["--wait"]
    assert {word for word, _ in candidates(["quota", ""])} == {"list", "set", "remove"}
    assert candidates(["nonsense", ""]) == []


def test_bash_completes_by_the_script_that_is_printed() -> None:
    script = called("completion", "bash").out
    asks = "gpu-pool() { test $1 = --complete && test $2 = sta && printf 'status\tShow\n'; }"
    typed = f'{script}\n{asks}\nCOMP_WORDS=(gpu-pool sta); COMP_CWORD=1; _gpu_pool; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["/bin/bash", "-c", typed], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("status\n", "")
    assert called("--complete", "sta").out.startswith("status\tShow every GPU")
    assert called("completion", "csh").code == USAGE
