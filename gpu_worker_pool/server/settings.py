"""The settings of the server, from the environment and a file `.env` in the working directory."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S
from gpu_worker_pool.core.model.settings import PoolSettings, Thresholds
from gpu_worker_pool.core.model.span import parse_span
from gpu_worker_pool.gpus.simulated import parse_spec
from gpu_worker_pool.wire.bounds import is_printable

from .http.tokens import Tokens

logger = logging.getLogger(__name__)

DEFAULT_LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
# What the settings that are being made have found invalid.
_INVALID: ContextVar[set[str]] = ContextVar("_INVALID")
NumberT = TypeVar("NumberT", int, float)
TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})


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


def _known_models(spec: str | None) -> str | None:
    if spec:
        parse_spec(spec)
    return spec or None


def _printable(text: str | None) -> str | None:
    if text is not None and not is_printable(text):
        raise ValueError("it has characters that cannot be printed")
    return text


Path_ = Annotated[str, Field(pattern=r"^(/[\w./-]*)?$")]
Prefix = Annotated[Path_, AfterValidator(lambda path: path.rstrip("/"))]
# Without the brackets of an IPv6 address in a URL.
Host = Annotated[str, Field(min_length=1), AfterValidator(lambda host: host.strip("[]"))]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
]
# The text None means unset.
Devices = Annotated[str | None, AfterValidator(lambda text: None if (text or "").strip() == "None" else text)]
# Seconds, or a text such as 2h; without a value there is no limit.
Span = Annotated[
    float | None,
    Field(ge=1.0, le=MAX_TIME_LIMIT_S, allow_inf_nan=False),
    BeforeValidator(lambda value: parse_span(value) if isinstance(value, str) and value else value or None),
]
Models = Annotated[str | None, AfterValidator(_known_models)]


class ServerSettings(BaseSettings):
    """All settings of the server. An invalid value is logged with its name, and the default is used."""

    model_config = SettingsConfigDict(env_file=".env", env_file_encoding="utf-8", extra="ignore", frozen=True)

    host: Host = "0.0.0.0"  # noqa: S104 - the documented default: other machines ask for statistics
    port: int = Field(8000, ge=0, le=65535)
    # The only documented default that is not kept: a server with leases must not restart because a file changed.
    reload: bool = False
    log_level: LogLevel = "info"
    access_log: bool = True
    workers: int = Field(1, ge=1, le=1024)

    title: str = Field("GPU Statistics Server", min_length=1)
    description: str = "A server that provides GPU statistics including memory usage and utilization"
    version: str = Field("1.0.0", min_length=1)
    docs_url: Path_ = "/docs"
    redoc_url: Path_ = "/redoc"
    enable_cors: bool = True
    api_prefix: Prefix = ""

    cuda_visible_devices: Devices = None
    refresh_interval: float = Field(1.0, ge=0.05, le=3600.0, allow_inf_nan=False)
    max_history: int = Field(100, ge=1, le=100_000)
    log_format: str = Field(DEFAULT_LOG_FORMAT, min_length=1)

    simulated_gpus: Models = None
    simulated_outsiders: str | None = None
    gpu_pool_node: Annotated[str, AfterValidator(_printable)] = Field(
        default_factory=socket.gethostname, min_length=1, max_length=253
    )
    gpu_pool_dcgm_metrics: bool = False
    gpu_pool_peers: str | None = None

    # The database of the fleet; its URL may hold a password. A server that cannot use it does not start without it.
    gpu_pool_fleet: SecretStr | None = None
    # Not checked here: with the default in its place, the server would join another pool.
    gpu_pool_fleet_pool: str | None = None
    # The URL at which the other boxes reach this server; by default its own address.
    gpu_pool_fleet_address: str | None = None
    # The secret that all boxes of a fleet share, itself or in a file. It is checked in fleet.py, where none is logged.
    gpu_pool_fleet_key: SecretStr | None = None
    gpu_pool_fleet_key_file: str | None = None
    gpu_pool_state_dir: str | None = None
    # "full": a grant is on the disk before it is answered. "normal": a crash of the machine may lose the last grants; a
    # crash of the server loses none.
    gpu_pool_durability: Literal["full", "normal"] = "full"
    gpu_pool_tokens: SecretStr | None = None
    gpu_pool_tokens_file: str | None = None
    gpu_pool_socket: str | None = None
    # "socket": a forwarder of TCP connections, as ssh -L, makes callers from elsewhere look local.
    gpu_pool_local: Literal["loopback", "socket"] = "loopback"
    gpu_pool_admin_group: str | None = None
    gpu_pool_operator_group: str | None = None
    gpu_pool_hooks_file: str | None = None
    gpu_memory_threshold_percent: float = Field(80.0, ge=0.0, le=100.0, allow_inf_nan=False)
    gpu_utilization_threshold_percent: float = Field(90.0, ge=0.0, le=100.0, allow_inf_nan=False)
    gpu_pool_outsiders: Literal["avoid", "thresholds"] | None = None
    gpu_pool_workers_per_gpu: int = Field(1, ge=1, le=1024)
    gpu_pool_drain_limit: float = Field(60.0, ge=0.0, le=86_400.0, allow_inf_nan=False)
    gpu_pool_max_queued: int = Field(10_000, ge=1, le=100_000)
    gpu_pool_max_queued_per_owner: int = Field(1_000, ge=1, le=100_000)
    gpu_pool_max_leases_per_owner: int = Field(1_000, ge=1, le=100_000)
    gpu_pool_max_sharers: int = Field(64, ge=1, le=1_024)
    gpu_pool_default_time_limit: Span = None
    gpu_pool_max_time_limit: Span = None
    gpu_pool_reserve_after: float = Field(600.0, ge=0.0, le=1e9, allow_inf_nan=False)
    gpu_pool_book_ahead: Span = 604_800.0
    gpu_pool_preempt_grace: float = Field(60.0, ge=0.0, le=86_400.0, allow_inf_nan=False)
    gpu_pool_fair_share: bool = False
    gpu_pool_idle_after: float = Field(1800.0, ge=1.0, le=1e9, allow_inf_nan=False)
    gpu_pool_idle_reclaim: bool = False
    gpu_pool_max_waiting: int = Field(4_000, ge=1, le=60_000)

    # A file that cannot be read may contain tokens.
    _is_env_file_unreadable: bool = PrivateAttr(default=False)
    # The names of settings whose values were not usable.
    _invalid: frozenset[str] = PrivateAttr(default=frozenset())

    def __init__(self, **given: Any) -> None:
        token = _INVALID.set(set())
        try:
            super().__init__(**given)
            self._invalid = frozenset(_INVALID.get())
        finally:
            _INVALID.reset(token)

    @field_validator("*", mode="wrap")
    @classmethod
    def _default_if_invalid(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value.strip() if isinstance(value, str) else value)
        except ValidationError as error:
            name = info.field_name or ""
            default = cls.model_fields[name].get_default(call_default_factory=True)
            reason = error.errors()[0]["msg"]
            _INVALID.get().add(name)
            logger.error("%s=%r is not usable (%s); using the default %r", name.upper(), value, reason, default)  # noqa: TRY400
            return default

    @classmethod
    def load(cls, **given: Any) -> ServerSettings:
        """Load the given values, else the environment, else .env; a file that cannot be read is logged and ignored."""
        try:
            return cls.load_strictly(**given)
        except (UnicodeDecodeError, OSError) as error:
            logger.error(".env cannot be read (%s); it is left out", error)  # noqa: TRY400
            settings = cls(**given, _env_file=None)
            settings._is_env_file_unreadable = True
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
        ours = {name.upper() for name in cls.model_fields}
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
            workers_per_gpu=self.gpu_pool_workers_per_gpu,
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
        )

    @property
    def _has_thresholds(self) -> bool:
        names = {"gpu_memory_threshold_percent", "gpu_utilization_threshold_percent"}
        return bool(names & self.model_fields_set - self._invalid)

    def load_tokens(self) -> Tokens:
        """Load the tokens. Tokens that cannot be read admit no caller, and do not count as "no tokens"."""
        texts = [self.gpu_pool_tokens.get_secret_value()] if self.gpu_pool_tokens else []
        try:
            if self.gpu_pool_tokens_file:
                texts.append(Path(self.gpu_pool_tokens_file).read_text(encoding="utf-8"))
            tokens = Tokens.parse("\n".join(texts))
        except (ValueError, OSError) as error:
            # A decoding error would quote a part of the tokens.
            reason = "it is not UTF-8" if isinstance(error, UnicodeError) else error
            logger.error("the tokens cannot be used (%s); no token is accepted until that is fixed", reason)  # noqa: TRY400
            return Tokens.broken()
        if tokens.is_unset and (texts or self._is_env_file_unreadable):
            logger.error("no token was found where some were configured; none is accepted until that is fixed")
            return Tokens.broken()
        return tokens

    @property
    def stale_after_s(self) -> float:
        return max(5.0, 3 * self.refresh_interval)


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
