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
from typing import TYPE_CHECKING

from gpu_worker_pool.core.hooks.pending import Delivery
from gpu_worker_pool.core.hooks.rule import Mail, Program, Webhook

from .body import as_json, in_words

if TYPE_CHECKING:
    import aiohttp

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
        self._session: aiohttp.ClientSession | None = None

    async def tell(self, delivery: Delivery) -> Failed | None:
        """Tell the target; None if it was told."""
        target, limit_s = delivery.rule.target, delivery.rule.timeout_s
        match target:
            case Webhook():
                return await self._post(delivery, target)
            case Program():
                return await self._run(target.arguments, as_json(delivery), self._env(delivery), limit_s)
            case Mail():
                return await self._mail(delivery, target)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, delivery: Delivery, target: Webhook) -> Failed | None:
        import aiohttp  # noqa: PLC0415 - most servers have no webhooks

        if self._session is None:
            # No proxies, cookies or redirects: no request goes where the operator has not said.
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)
        body = as_json(delivery)
        headers = {"Content-Type": "application/json", "User-Agent": "gpu-worker-pool"}
        if target.secret is not None:
            headers[SIGNATURE] = sign(target.secret, body, int(time.time()))
        limit = aiohttp.ClientTimeout(total=delivery.rule.timeout_s)
        try:
            async with self._session.post(
                target.url, data=body, headers=headers, timeout=limit, allow_redirects=False
            ) as answer:
                return _judge(answer.status, answer.headers.get("Retry-After"))
        except TimeoutError:
            return Failed(f"it has not answered within {delivery.rule.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Failed(str(error) or type(error).__name__)
        except ValueError as error:  # a URL that aiohttp does not take
            return Failed(str(error), is_final=True)

    async def _mail(self, delivery: Delivery, target: Mail) -> Failed | None:
        sendmail = shutil.which("sendmail", path=f"{self._environ.get('PATH', '')}:{_SENDMAIL_PLACES}")
        if sendmail is None:
            return Failed("this machine has no sendmail", is_final=True)
        message = EmailMessage()
        message["To"] = target.address
        message["Subject"] = f"GPU pool: {in_words(delivery.notice)}"
        message.set_content(f"{in_words(delivery.notice)}.\n\n{as_json(delivery).decode()}\n")
        arguments = (sendmail, "-i", "--", target.address)
        return await self._run(arguments, message.as_bytes(), self._environ, delivery.rule.timeout_s)

    def _env(self, delivery: Delivery) -> dict[str, str]:
        notice = delivery.notice
        said = {
            "GPU_POOL_EVENT": notice.occasion.value,
            "GPU_POOL_NOTICE_ID": delivery.id,
            "GPU_POOL_LEASE_ID": notice.lease_id,
            "GPU_POOL_OWNER": notice.owner,
            "GPU_POOL_EVENT_NODE": ",".join(notice.nodes),
            "GPU_POOL_REASON": notice.reason,
        }
        # A NUL cannot be passed on.
        return {**self._environ, **{name: text.replace("\0", "") for name, text in said.items() if text}}

    @staticmethod
    async def _run(arguments: tuple[str, ...], sent: bytes, env: Mapping[str, str], limit_s: float) -> Failed | None:
        # Not cancelled half-way: what the program has started by then would stay.
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            is_final = isinstance(error, FileNotFoundError | PermissionError)
            return Failed(f"{arguments[0]} cannot be started: {error.strerror}", is_final=is_final)
        except asyncio.CancelledError:
            with suppress(OSError):
                await _kill(await starting)
            raise
        try:
            await asyncio.wait_for(process.communicate(sent), limit_s)
        except TimeoutError:
            return Failed(f"{arguments[0]} has not ended within {limit_s:g} s")
        finally:
            await _kill(process)
        if process.returncode:
            return Failed(f"{arguments[0]} ended with {process.returncode}")
        return None


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End a program, with all that it has started."""
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
