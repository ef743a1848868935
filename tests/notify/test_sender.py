"""What is said of targets that fail."""

from __future__ import annotations

import logging

import pytest

from gpu_worker_pool.host.clock import boot_time
from gpu_worker_pool.notify.notice import Notice, Occasion
from gpu_worker_pool.notify.rule import Mail, Program, Rule, Target, Webhook
from gpu_worker_pool.notify.sender import Sender, shown
from tests.notify.receiver import receiver

TOLD = frozenset({Occasion.GRANTED})


@pytest.mark.parametrize(
    ("target", "number", "text"),
    [
        (Webhook("http://hooks.lab:9000/gpu/secret"), 3, "hook 3 (http://hooks.lab:9000)"),
        (Webhook("http://hooks.lab:9000/gpu/secret"), None, "http://hooks.lab:9000"),
        (Program(("/bin/page", "a-secret")), 1, "hook 1 (/bin/page)"),
        (Mail("ada@example.org"), 2, "hook 2 (ada@example.org)"),
    ],
)
def test_a_hook_is_named_by_its_number_and_without_secrets(target: Target, number: int | None, text: str) -> None:
    assert shown(Rule(TOLD, target, number=number)) == text


async def test_a_target_that_fails_is_named_at_once_and_when_it_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with receiver(500, 404) as at, caplog.at_level(logging.WARNING):
        sender = Sender(boot_time)
        sender.tell(Notice(Occasion.GRANTED, 0.0), [Rule(TOLD, Webhook(at.url), number=2)])
        await sender.finish(30.0)

    host = at.url.removesuffix("/hook")
    assert caplog.messages == [
        f"hook 2 ({host}): it answered 500; it is tried again for up to an hour",
        f"the notice granted was not sent to hook 2 ({host}): it answered 404",
    ]
