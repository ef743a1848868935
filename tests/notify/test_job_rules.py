"""--on-granted and --notify, as rules."""

from __future__ import annotations

import os

import pytest

from gpu_worker_pool.notify.job_rules import SECRET_VARIABLE, job_rules
from gpu_worker_pool.notify.rule import Mail, Program, Webhook


def test_a_program_and_each_place_have_a_rule() -> None:
    env = {"PATH": os.environ["PATH"], SECRET_VARIABLE: "a secret of sixteen"}
    program, web, mail = job_rules(
        "echo 'two words' $HOME",
        ["https://example.org/x", "mailto:ada@example.org", "https://example.org/x"],
        env,
        "/usr",
    )
    assert isinstance(program.target, Program)
    assert program.target.arguments[1:] == ("two words", "$HOME")
    assert program.target.cwd == "/usr"
    assert web.target == Webhook("https://example.org/x", "a secret of sixteen")
    assert mail.target == Mail("ada@example.org")


@pytest.mark.parametrize(
    ("on_granted", "notify", "says"),
    [
        (None, "ftp://example.org", "must be a URL that begins with http:// or https://"),
        (None, "http://ada:secret@example.org", "has a user name or password"),
        (None, "mailto:ada", "must be one address"),
        (None, "http://[::1", "must be a URL"),
        (None, "http://example.org/a b", "must be a URL"),
        (None, "http://example.org:99999/", "must be a URL"),
        (None, "http://example.org/\r\nX: y", "must be a URL"),
        ("'open", None, "cannot be split into words"),
        ("", None, "is empty"),
        ("no-such-program now", None, "there is no program 'no-such-program'"),
    ],
)
def test_what_cannot_be_told_is_refused(on_granted: str | None, notify: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        job_rules(on_granted, [] if notify is None else [notify], {"PATH": os.environ["PATH"]}, "/")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="GPU_POOL_NOTIFY_SECRET has fewer than 16 characters"):
        job_rules(None, ["http://example.org"], {SECRET_VARIABLE: "short"}, "/")
