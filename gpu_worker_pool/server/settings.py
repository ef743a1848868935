"""The settings of the server, from the environment and a file `.env` in the working directory."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from dotenv import dotenv_values

from gpu_worker_pool.amounts import parse_span
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.gpus.simulated import parse_spec
from gpu_worker_pool.wire.bounds import is_printable

from .http.tokens import Tokens
from .setting_rules import (
    FALSE_WORDS,
    PLAIN,
    RULE,
    TRUE_WORDS,
    Rule,
    Secret,
    like,
    number,
    one_of,
    optional,
    setting,
    text,
    whole,
    words,
)

logger = logging.getLogger(__name__)

# A client that waited takes up its grant within this time, or the next waiter gets the GPUs.
TAKE_UP_S = 5.0
DEFAULT_LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
NumberT = TypeVar("NumberT", int, float)


# Names that many programs use.
GENERIC_NAMES = frozenset(
    [
        "HOST",
        "PORT",
        "RELOAD",
        "LOG_LEVEL",
        "LOG_FORMAT",
        "ACCESS_LOG",
        "WORKERS",
        "TITLE",
        "DESCRIPTION",
        "VERSION",
        "DOCS_URL",
        "REDOC_URL",
        "ENABLE_CORS",
        "API_PREFIX",
        "CUDA_VISIBLE_DEVICES",
    ]
)
# All settings of the server and the client begin so, apart from those above.
OWN_PREFIXES = ("GPU_", "SIMULATED_GPUS", "REFRESH_INTERVAL", "MAX_HISTORY")


@contextmanager
def _without_host_of_tcsh(environ: MutableMapping[str, str]) -> Iterator[None]:
    """tcsh sets HOST to the name of the machine, beside HOSTTYPE and MACHTYPE; it is not meant for the server."""
    is_set_by_tcsh = {"HOSTTYPE", "MACHTYPE"} <= environ.keys() and environ.get("HOST") == socket.gethostname()
    host = environ.pop("HOST") if is_set_by_tcsh else None
    if host is not None:
        logger.warning("HOST=%s was set by tcsh and is left out; to bind to an address, set HOST to it", host)
    try:
        yield
    finally:
        if host is not None:
            environ["HOST"] = host


_path = like(r"(/[\w./-]*)?", "a path that begins with a slash, of letters, digits and . _ - /")


def _prefix(value: Any) -> str:
    return str(_path(value)).rstrip("/")


def _host(value: Any) -> str:
    """Without the brackets of an IPv6 address in a URL."""
    return str(words()(value)).strip("[]")


def _node(value: Any) -> str:
    name = str(words(253)(value))
    if not is_printable(name):
        raise ValueError("it has characters that cannot be printed")
    return name


def _devices(value: Any) -> str | None:
    """The text None means unset."""
    return None if value is None or text(value).strip() == "None" else text(value)


def _models(value: Any) -> str | None:
    """GPUs to simulate, of models that are known."""
    if value:
        parse_spec(text(value))
    return value or None


def _span(value: Any) -> float | None:
    """Seconds, or a text such as 2h; without a value there is no limit."""
    found = parse_span(value) if isinstance(value, str) and value else value or None
    return None if found is None else number(1.0, MAX_TIME_LIMIT_S)(found)


@dataclass(frozen=True, init=False)
class ServerSettings:
    """All settings of the server: the given values, else the environment, else the file. An invalid value is logged with its
    name, and the default is used.
    """

    host: str = setting("0.0.0.0", _host)  # noqa: S104 - the documented default: other machines ask for statistics
    port: int = setting(8000, whole(0, 65535))
    # The only documented default that is not kept: a server with leases must not restart because a file changed.
    reload: bool = False
    log_level: str = setting("info", one_of("debug", "info", "warning", "error", "critical"))
    access_log: bool = True
    workers: int = setting(1, whole(1, 1024))

    title: str = setting("GPU Statistics Server", words())
    description: str = "A server that provides GPU statistics including memory usage and utilization"
    version: str = setting("1.0.0", words())
    docs_url: str = setting("/docs", _path)
    redoc_url: str = setting("/redoc", _path)
    enable_cors: bool = True
    api_prefix: str = setting("", _prefix)

    cuda_visible_devices: str | None = setting(None, _devices)
    refresh_interval: float = setting(1.0, number(0.05, 3600.0))
    max_history: int = setting(100, whole(1, 100_000))
    log_format: str = setting(DEFAULT_LOG_FORMAT, words())

    simulated_gpus: str | None = setting(None, _models)
    simulated_outsiders: str | None = None
    gpu_pool_node: str = setting(socket.gethostname, _node)
    gpu_pool_dcgm_metrics: bool = False

    # The database of the fleet; its URL may hold a password. A server that cannot use it does not start without it.
    gpu_pool_fleet: Secret | None = None
    # Not checked here: with the default in its place, the server would join another pool.
    gpu_pool_fleet_pool: str | None = None
    # The URL at which the other boxes reach this server; by default its own address.
    gpu_pool_fleet_address: str | None = None
    # The secret that all boxes of a fleet share, itself or in a file. It is checked in fleet.py, where none is logged.
    gpu_pool_fleet_key: Secret | None = None
    gpu_pool_fleet_key_file: str | None = None
    gpu_pool_state_dir: str | None = None
    # "full": a grant is on the disk before it is answered. "normal": a crash of the machine may lose the last grants; a
    # crash of the server loses none.
    gpu_pool_durability: Literal["full", "normal"] = setting("full", one_of("full", "normal"))
    gpu_pool_tokens: Secret | None = None
    gpu_pool_tokens_file: str | None = None
    gpu_pool_socket: str | None = None
    # "socket": a forwarder of TCP connections, as ssh -L, makes callers from elsewhere look local.
    gpu_pool_local: Literal["loopback", "socket"] = setting("loopback", one_of("loopback", "socket"))
    gpu_pool_admin_group: str | None = None
    gpu_pool_operator_group: str | None = None
    gpu_pool_hooks_file: str | None = None
    gpu_memory_threshold_percent: float = setting(80.0, number(0.0, 100.0))
    gpu_utilization_threshold_percent: float = setting(90.0, number(0.0, 100.0))
    gpu_pool_outsiders: Literal["avoid", "thresholds"] | None = setting(None, optional(one_of("avoid", "thresholds")))
    gpu_pool_drain_limit: float = setting(60.0, number(0.0, 86_400.0))
    gpu_pool_max_queued: int = setting(10_000, whole(1, 100_000))
    gpu_pool_max_queued_per_owner: int = setting(1_000, whole(1, 100_000))
    gpu_pool_max_leases_per_owner: int = setting(1_000, whole(1, 100_000))
    gpu_pool_max_sharers: int = setting(64, whole(1, 1_024))
    gpu_pool_default_time_limit: float | None = setting(None, _span)
    gpu_pool_max_time_limit: float | None = setting(None, _span)
    gpu_pool_reserve_after: float = setting(600.0, number(0.0, 1e9))
    gpu_pool_book_ahead: float | None = setting(604_800.0, _span)
    gpu_pool_preempt_grace: float = setting(60.0, number(0.0, 86_400.0))
    gpu_pool_fair_share: bool = False
    gpu_pool_idle_after: float = setting(1800.0, number(1.0, 1e9))
    gpu_pool_idle_reclaim: bool = False
    gpu_pool_max_waiting: int = setting(4_000, whole(1, 60_000))

    # The names of settings that have usable values.
    _given: frozenset[str] = frozenset()
    # A file that cannot be read may contain tokens.
    _is_env_file_unreadable: bool = False

    def __init__(self, _env_file: str | None = ".env", **given: Any) -> None:
        in_file = {} if _env_file is None else dotenv_values(_env_file, encoding="utf-8")
        found = {name.lower(): value for name, value in (*in_file.items(), *os.environ.items()) if value is not None}
        usable = set()
        for name, default in self.defaults().items():
            value = given.get(name, found.get(name, MISSING))
            if value is not MISSING:
                try:
                    value = self.read(name, value)
                    usable.add(name)
                except ValueError as why:
                    logger.error("%s=%r is not usable (%s); using the default %r", name.upper(), value, why, default)  # noqa: TRY400
                    value = MISSING
            vars(self)[name] = default if value is MISSING else value
        vars(self)["_given"] = frozenset(usable)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The names of all settings, and their defaults."""
        return {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(cls)
            if not each.name.startswith("_")
        }

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        """The value of a setting that is given as a text, or as a program gives it; ValueError says what it must be."""
        return _rules()[name](value.strip() if isinstance(value, str) else value)

    @classmethod
    def load(cls, **given: Any) -> ServerSettings:
        """Load the given values, else the environment, else .env; a file that cannot be read is logged and ignored."""
        try:
            return cls.load_strictly(**given)
        except (UnicodeDecodeError, OSError) as error:
            logger.error(".env cannot be read (%s); it is left out", error)  # noqa: TRY400
            settings = cls(**given, _env_file=None)
            vars(settings)["_is_env_file_unreadable"] = True
            return settings

    @classmethod
    def load_strictly(cls, **given: Any) -> ServerSettings:
        """Load the same values; a file that cannot be read raises OSError or UnicodeDecodeError."""
        left_out = {"_env_file": None} if cls._is_foreign(Path(".env")) else {}
        with _without_host_of_tcsh(os.environ):
            return cls(**given, **left_out)

    @classmethod
    def _is_foreign(cls, file: Path) -> bool:
        """Whether a `.env` is another project's: it has settings unknown here, and none that only this server has."""
        names = {name.upper() for name in dotenv_values(file)}
        ours = {name.upper() for name in cls.defaults()}
        is_ours = any(name in ours - GENERIC_NAMES or name.startswith(OWN_PREFIXES) for name in names)
        if is_ours or names <= ours:
            return False
        if meant := sorted(names & GENERIC_NAMES):
            logger.warning(
                ".env in the working directory seems to be another project's, as it has %s; it is left out, with its %s. "
                "Set these in the environment, or add a setting of this server, such as GPU_POOL_NODE, to the file",
                min(names - ours),
                ", ".join(meant),
            )
        return True

    def pool_settings(self) -> PoolSettings:
        return PoolSettings(
            thresholds=Thresholds(self.gpu_memory_threshold_percent, self.gpu_utilization_threshold_percent),
            outsiders=self.gpu_pool_outsiders or ("thresholds" if self._has_thresholds else "by_request"),
            stale_after_s=self.stale_after_s,
            drain_limit_s=self.gpu_pool_drain_limit,
            max_queued=self.gpu_pool_max_queued,
            max_queued_per_owner=self.gpu_pool_max_queued_per_owner,
            max_leases_per_owner=self.gpu_pool_max_leases_per_owner,
            max_sharers=self.gpu_pool_max_sharers,
            default_time_limit_s=self.gpu_pool_default_time_limit,
            max_time_limit_s=self.gpu_pool_max_time_limit,
            reserve_after_s=self.gpu_pool_reserve_after,
            preempt_grace_s=self.gpu_pool_preempt_grace,
            fair_share=self.gpu_pool_fair_share,
            idle_after_s=self.gpu_pool_idle_after,
            idle_reclaim=self.gpu_pool_idle_reclaim,
            take_up_s=TAKE_UP_S,
        )

    @property
    def _has_thresholds(self) -> bool:
        names = {"gpu_memory_threshold_percent", "gpu_utilization_threshold_percent"}
        return bool(names & self._given)

    def load_tokens(self) -> Tokens:
        """Load the tokens. Those that cannot be read admit no caller, and do not count as "no tokens"."""
        texts = [self.gpu_pool_tokens.get_secret_value()] if self.gpu_pool_tokens else []
        try:
            if self.gpu_pool_tokens_file:
                texts.append(Path(self.gpu_pool_tokens_file).read_text(encoding="utf-8"))
            tokens = Tokens.parse("\n".join(texts))
        except (ValueError, OSError) as error:
            # A decoding error would quote a part of the tokens.
            reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error
            logger.error("GPU_POOL_TOKENS cannot be used (%s); no token of it is accepted until that is fixed", reason)  # noqa: TRY400
            return Tokens.broken()
        if tokens.is_unset and (texts or self._is_env_file_unreadable):
            logger.error(
                "GPU_POOL_TOKENS has no token, though it is set; no token of it is accepted until that is fixed"
            )
            return Tokens.broken()
        return tokens

    @property
    def stale_after_s(self) -> float:
        return max(5.0, 3 * self.refresh_interval)


@cache
def _rules() -> dict[str, Rule]:
    """The rule of each setting; those without one of their own have that of their type."""
    own = {each.name: each for each in fields(ServerSettings)}
    return {name: own[name].metadata.get(RULE) or PLAIN[str(own[name].type)] for name in ServerSettings.defaults()}


def get_bool_env(key: str, default: bool) -> bool:  # noqa: FBT001 - the documented signature
    """Read a truth value from the environment: true, 1, yes or on, in any case."""
    text = os.environ.get(key)
    if text is None:
        return default
    word = text.strip().lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        logger.error("%s=%r is neither true nor false; using the default %r", key, text, default)
        return default
    return word in TRUE_WORDS


def get_float_env(key: str, default: float) -> float:
    return _number_env(key, default, float)


def get_int_env(key: str, default: int) -> int:
    return _number_env(key, default, int)


def _number_env(key: str, default: NumberT, convert: type[NumberT]) -> NumberT:
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return convert(text)
    except ValueError:
        logger.error("%s=%r is not a number; using the default %r", key, text, default)  # noqa: TRY400
        return default
