"""One attempt to tell a target of a notice: a webhook, a program, or a mail. Each is bounded in time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import EmailMessage

from .body import as_json, in_words
from .pending import Delivery
from .post import post
from .program import run_program
from .rule import Mail, Program, Webhook

# What a receiver checks: the time, and the HMAC of the time, a dot and the body.
SIGNATURE = "GPU-Pool-Signature"
# What a target asks for at most, by Retry-After.
MAX_AFTER_S = 600.0
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/sbin"
# What a program of the operator needs to run at all. Nothing else of the server's environment is passed on.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True, slots=True)
class Failed:
    """Why an attempt failed. A final one would fail again."""

    why: str
    is_final: bool = False
    after_s: float = 0.0


class Courier:
    """Makes attempts. `environ` is what programs get to see of the environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: environ[name] for name in _PASSED_ON if name in environ}

    async def tell(self, delivery: Delivery) -> Failed | None:
        """Tell the target; None if it was told."""
        target, limit_s = delivery.rule.target, delivery.rule.timeout_s
        match target:
            case Webhook():
                return await self._post(delivery, target)
            case Program():
                env = self._environ if target.env is None else dict(target.env)
                why = await run_program(target, as_json(delivery), {**env, **_said(delivery)}, limit_s)
                return None if why is None else Failed(why)
            case Mail():
                return await self._mail(delivery, target)

    async def _post(self, delivery: Delivery, target: Webhook) -> Failed | None:
        body = as_json(delivery)
        signed = {} if target.secret is None else {SIGNATURE: sign(target.secret, body, int(time.time()))}
        try:
            status, after = await post(target.url, body, signed, delivery.rule.timeout_s)
        except TimeoutError:
            return Failed(f"it has not answered within {delivery.rule.timeout_s:g} s")
        except OSError as error:
            known = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            return Failed(known or str(error) or type(error).__name__)
        except ValueError as error:  # a host whose name cannot be looked up
            return Failed(str(error), is_final=True)
        return _judge(status, after)

    async def _mail(self, delivery: Delivery, target: Mail) -> Failed | None:
        sendmail = shutil.which("sendmail", path=f"{self._environ.get('PATH', '')}:{_SENDMAIL_PLACES}")
        if sendmail is None:
            return Failed("this machine has no sendmail", is_final=True)
        message = EmailMessage()
        message["To"] = target.address
        message["Subject"] = f"GPU pool: {in_words(delivery.notice)}"
        message.set_content(f"{in_words(delivery.notice)}.\n\n{as_json(delivery).decode()}\n")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sendmail, "-i", "--", target.address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environ,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return Failed(f"{sendmail} cannot be started: {error.strerror}")
        limit_s = delivery.rule.timeout_s
        try:
            await asyncio.wait_for(process.communicate(message.as_bytes()), limit_s)
        except TimeoutError:
            return Failed(f"{sendmail} has not ended within {limit_s:g} s")
        finally:
            await _kill(process)
        return Failed(f"{sendmail} ended with {process.returncode}") if process.returncode else None


def _said(delivery: Delivery) -> dict[str, str]:
    """What a program finds in its environment."""
    notice = delivery.notice
    said = {
        "GPU_POOL_EVENT": notice.occasion.value,
        "GPU_POOL_NOTICE_ID": delivery.id,
        "GPU_POOL_LEASE_ID": notice.lease_id,
        "GPU_POOL_OWNER": notice.owner,
        "GPU_POOL_EVENT_NODE": ",".join(notice.nodes),
        "GPU_POOL_REASON": notice.reason,
        "GPU_POOL_JOB_ID": notice.job,
    }
    # A NUL cannot be passed on.
    return {name: text.replace("\0", "") for name, text in said.items() if text}


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End a sendmail and its group. What it has put into a session of its own goes on: some deliver in the background."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


def sign(secret: str, body: bytes, at: int) -> str:
    """The header by which a receiver knows who sent a body, and when."""
    digest = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def _judge(status: int, retry_after: str | None) -> Failed | None:
    if 200 <= status < 300:
        return None
    after_s = min(float(retry_after), MAX_AFTER_S) if retry_after and retry_after.isdigit() else 0.0
    if status in {408, 425, 429} or status >= 500:
        return Failed(f"it answered {status}", after_s=after_s)
    if 300 <= status < 400:
        return Failed(f"it answered {status}, a redirect, which is not followed: name the final URL", is_final=True)
    return Failed(f"it answered {status}", is_final=True)
