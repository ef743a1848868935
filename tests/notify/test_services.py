"""Apprise against real servers: a webhook, ntfy, and mail."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.rules import AppriseUrl, check_services, rules_of_command
from gpu_worker_pool.notify.sender import Sender
from tests.notify.notices import NOTICE, rule
from tests.notify.receiver import mail_server, receiver

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-topic"  # noqa: S105 - of no service


async def send(url: str, *, timeout_s: float = 30.0, number: int | None = None) -> None:
    sender = Sender(boot_time)
    sender.tell(NOTICE, [rule(AppriseUrl(url), timeout_s=timeout_s, number=number)])
    await sender.finish(60.0)
    assert len(sender) == 0


async def test_a_webhook_gets_a_title_and_a_text() -> None:
    with receiver() as at:
        await send(at.url)
        got = at.next()

    assert got.title == NOTICE.title()
    assert got.json["message"] == NOTICE.text()
    assert got.json["type"] == "failure"


async def test_ntfy_gets_a_title_and_a_text() -> None:
    with receiver() as at:
        await send(f"ntfy://127.0.0.1:{at.port}/{SECRET}")
        got = at.next()

    assert (got.json["topic"], got.title, got.json["message"]) == (SECRET, NOTICE.title(), NOTICE.text())


async def test_a_mail_has_the_title_as_its_subject() -> None:
    with mail_server() as (port, received):
        await send(f"mailto://127.0.0.1:{port}?from=pool@lab.example&to=ada@lab.example")
        mail = received.get(timeout=60)

    assert mail.recipients == ["ada@lab.example"]
    assert mail.message["Subject"] == NOTICE.title()
    body = mail.message.get_body(("plain",))
    assert body is not None
    assert body.get_content().split() == NOTICE.text().split()


async def test_a_failure_is_logged_without_any_secret(caplog: pytest.LogCaptureFixture) -> None:
    with receiver(*[500] * 5) as at, caplog.at_level(logging.WARNING):
        await send(f"ntfy://ada:password@127.0.0.1:{at.port}/{SECRET}", number=2)

    (said,) = caplog.messages
    assert said.startswith("the notice lost was not sent to hook 2 (ntfy://…): ")
    assert "500" in said
    assert not [secret for secret in (SECRET, "password", "127.0.0.1") if secret in said]


async def test_a_server_that_hangs_costs_the_time_of_its_rule(caplog: pytest.LogCaptureFixture) -> None:
    with receiver(None, None) as at, caplog.at_level(logging.WARNING):
        await send(f"{at.url}?rto=60", timeout_s=2.0)

    assert caplog.messages == ["the notice lost was not sent to json://…: Apprise has not ended within 2 s"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://lab.example/s3cr3t", "for a webhook, write jsons:// instead of https://"),
        ("http://lab.example/s3cr3t", "for a webhook, write json:// instead of http://"),
        ("slack://s3cr3t", "Slack takes slack://{access_token}/ or slack://"),
        ("carrier-pigeon://s3cr3t", "Apprise does not know it"),
    ],
)
def test_a_url_that_apprise_cannot_use_is_refused_without_its_secret(url: str, says: str) -> None:
    good, bad = rule(AppriseUrl("ntfy://topic"), number=1), rule(AppriseUrl(url), number=2)
    with pytest.raises(ValueError, match=r"^hook 2 \(") as caught:
        check_services([good, bad])

    assert says in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_without_apprise_it_is_said_how_to_install_it() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from gpu_worker_pool.notify.rules import check_services, rules_of_command\n"
        "check_services(rules_of_command(None, ['ntfy://s3cr3t'], {}, '/'))\n"
    )
    # -S: without the packages that are installed.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)

    assert "is not installed; run pip install 'gpu-worker-pool[notify]'" in done.stderr.splitlines()[-1]
    assert "s3cr3t" not in done.stderr.splitlines()[-1]


def test_a_url_may_be_in_a_variable_where_other_users_do_not_see_it() -> None:
    (found,) = rules_of_command(None, ["MY_TOPIC", "MY_TOPIC"], {"MY_TOPIC": "ntfy://topic"}, "/")
    assert found.target == AppriseUrl("ntfy://topic")
    assert "topic" not in repr(found)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("mailto:ada@lab.example", "mailto://USER:PASSWORD@SERVER\\?to=ADDRESS"),
        ("ADA", "'ADA' is neither"),
        ("", "'' is neither"),
    ],
)
def test_what_is_not_a_url_is_refused(where: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rules_of_command(None, [where], {"PATH": "/bin"}, "/")
