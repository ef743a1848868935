"""The settings of the server: given values, else the environment, else a file `.env`.

A value that cannot be used is logged with its variable and with what it must be, and the default is used.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Set as AbstractSet
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gpu_worker_pool.amounts import parse_span
from gpu_worker_pool.core.model.bounds import Thresholds
from gpu_worker_pool.core.model.request import MAX_TIME_LIMIT_S
from gpu_worker_pool.core.model.settings import PoolSettings
from gpu_worker_pool.gpus.simulated import parse_spec
from gpu_worker_pool.wire.bounds import is_printable

from .http.tokens import MIN_TOKEN_LENGTH, Tokens

logger = logging.getLogger(__name__)

# A client that waited takes up its grant within this time, or the next waiter gets the GPUs.
TAKE_UP_S = 5.0
DEFAULT_LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
ENV_FILE = ".env"
# Settings of the server and the client that no other program has.
OWN_PREFIXES = ("gpu_", "simulated_", "refresh_interval", "max_history")
ValueT = TypeVar("ValueT", bool, int, float)


def _path(text: str) -> str:
    if re.fullmatch(r"(/[\w./-]*)?", text) is None:
        raise ValueError("it must be a path that begins with a slash, of letters, digits and . _ - /")
    return text


def _printable(name: str) -> str:
    if not is_printable(name):
        raise ValueError("it has characters that cannot be printed")
    return name


def _models(spec: str | None) -> str | None:
    if spec:
        parse_spec(spec)
    return spec or None


def _span(value: Any) -> float | None:
    """Seconds, or a text such as 2h; without a value there is no limit."""
    if value in (None, "", 0):
        return None
    found = parse_span(value, "it")
    if not 1 <= found <= MAX_TIME_LIMIT_S:
        raise ValueError(f"it must be 1 to {MAX_TIME_LIMIT_S:.15g} seconds, or a time such as 2h")
    return found


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Words = Annotated[str, Field(min_length=1, max_length=10_000)]
Host = Annotated[Words, AfterValidator(lambda text: text.strip("[]"))]  # an IPv6 address, as in a URL
NodeName = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_printable)]
UrlPath = Annotated[str, AfterValidator(_path)]
Prefix = Annotated[UrlPath, AfterValidator(lambda path: path.rstrip("/"))]
Devices = Annotated[str | None, AfterValidator(lambda text: None if text == "None" else text)]
Models = Annotated[str | None, AfterValidator(_models)]
Span = Annotated[float | None, BeforeValidator(_span)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)]
Durability = Annotated[Literal["full", "normal"], BeforeValidator(_lower)]
LocalBy = Annotated[Literal["loopback", "socket"], BeforeValidator(_lower)]
Outsiders = Annotated[Literal["avoid", "thresholds"] | None, BeforeValidator(_lower)]


class ServerSettings(BaseSettings):
    """All settings of the server; a variable has the name of its field. A file that cannot be read raises OSError or
    UnicodeDecodeError.
    """

    model_config = SettingsConfigDict(
        env_file=ENV_FILE, env_file_encoding="utf-8", extra="ignore", frozen=True, allow_inf_nan=False
    )

    host: Host = "0.0.0.0"  # noqa: S104 - the documented default: other machines ask for statistics
    port: int = Field(8000, ge=0, le=65535)
    # The only documented default that is not kept: a server with leases must not restart because a file changed.
    reload: bool = False
    log_level: LogLevel = "info"
    access_log: bool = True
    workers: int = Field(1, ge=1, le=1024)

    title: Words = "GPU Statistics Server"
    description: str = "A server that provides GPU statistics including memory usage and utilization"
    version: Words = "1.0.0"
    docs_url: UrlPath = "/docs"
    redoc_url: UrlPath = "/redoc"
    enable_cors: bool = True
    api_prefix: Prefix = ""

    cuda_visible_devices: Devices = None
    refresh_interval: float = Field(1.0, ge=0.05, le=3600.0)
    max_history: int = Field(100, ge=1, le=100_000)
    log_format: Words = DEFAULT_LOG_FORMAT

    simulated_gpus: Models = None
    simulated_outsiders: str | None = None
    gpu_pool_node: NodeName = Field(default_factory=socket.gethostname)
    gpu_pool_dcgm_metrics: bool = False

    # What the fleet is made of is checked in fleet.py: a server that cannot use it does not start without it.
    # The database of the fleet, whose URL may hold a password, or other boxes.
    gpu_pool_fleet: SecretStr | None = None
    gpu_pool_fleet_pool: str | None = None
    # The URL at which the other boxes reach this server; by default its own address.
    gpu_pool_fleet_address: str | None = None
    # The secret that all boxes of a fleet share, itself or in a file.
    gpu_pool_fleet_key: SecretStr | None = None
    gpu_pool_fleet_key_file: str | None = None
    gpu_pool_state_dir: str | None = None
    # "full": a grant is on the disk before it is answered. "normal": a crash of the machine may lose the last grants; a
    # crash of the server loses none.
    gpu_pool_durability: Durability = "full"
    gpu_pool_tokens: SecretStr | None = None
    gpu_pool_tokens_file: str | None = None
    gpu_pool_socket: str | None = None
    # "socket": a forwarder of TCP connections, as ssh -L, makes callers from elsewhere look local.
    gpu_pool_local: LocalBy = "loopback"
    gpu_pool_admin_group: str | None = None
    gpu_pool_operator_group: str | None = None
    gpu_pool_hooks_file: str | None = None
    gpu_memory_threshold_percent: float = Field(80.0, ge=0, le=100)
    gpu_utilization_threshold_percent: float = Field(90.0, ge=0, le=100)
    gpu_pool_outsiders: Outsiders = None
    gpu_pool_drain_limit: float = Field(60.0, ge=0, le=86_400)
    gpu_pool_max_queued: int = Field(10_000, ge=1, le=100_000)
    gpu_pool_max_queued_per_owner: int = Field(1_000, ge=1, le=100_000)
    gpu_pool_max_leases_per_owner: int = Field(1_000, ge=1, le=100_000)
    gpu_pool_max_sharers: int = Field(64, ge=1, le=1_024)
    gpu_pool_default_time_limit: Span = None
    gpu_pool_max_time_limit: Span = None
    gpu_pool_reserve_after: float = Field(600.0, ge=0, le=1e9)
    gpu_pool_book_ahead: Span = 604_800.0
    gpu_pool_preempt_grace: float = Field(60.0, ge=0, le=86_400)
    gpu_pool_fair_share: bool = False
    gpu_pool_idle_after: float = Field(1800.0, ge=1, le=1e9)
    gpu_pool_idle_reclaim: bool = False
    gpu_pool_max_waiting: int = Field(4_000, ge=1, le=60_000)

    # A file that cannot be read may contain tokens.
    _is_env_file_unreadable: bool = False

    @classmethod
    def load(cls, **given: Any) -> ServerSettings:
        """Load them for a server that starts in any case: a `.env` that cannot be read is logged and left out."""
        try:
            return cls(**given)
        except (UnicodeDecodeError, OSError) as error:
            logger.error("%s cannot be read (%s); it is left out", ENV_FILE, error)  # noqa: TRY400
            settings = cls(**given, _env_file=None)
            settings._is_env_file_unreadable = True
            return settings

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The names of all settings, and their defaults."""
        return {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}

    @classmethod
    def read(cls, name: str, value: Any) -> Any:
        """Read the value of one setting, such as a flag's; ValueError says what it must be."""
        field = cls.model_fields[name]
        kind: Any = Annotated[field.annotation, field]
        reader = TypeAdapter[Any](kind, config={"allow_inf_nan": False})
        try:
            return reader.validate_python(value.strip() if isinstance(value, str) else value)
        except ValidationError as error:
            raise ValueError(_why(field, error.errors()[0])) from None

    @model_validator(mode="wrap")
    @classmethod
    def _with_defaults_for_bad_values(
        cls, found: dict[str, Any], make: ModelWrapValidatorHandler[ServerSettings]
    ) -> ServerSettings:
        usable = {name: value.strip() if isinstance(value, str) else value for name, value in found.items()}
        try:
            return make(usable)
        except ValidationError as error:
            faults = {str(fault["loc"][0]): fault for fault in error.errors()}
        for name, fault in faults.items():
            field, default = cls.model_fields[name], cls.defaults()[name]
            shown = "**********" if field.annotation == SecretStr | None else repr(found[name])
            logger.error(
                "%s=%s is not usable (%s); using the default %r", name.upper(), shown, _why(field, fault), default
            )
            del usable[name]
        return make(usable)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave out what was not meant for this server: the HOST that tcsh sets, and the `.env` of another project."""
        del settings_cls, file_secret_settings
        assert isinstance(env_settings, EnvSettingsSource)  # noqa: S101 - for mypy
        assert isinstance(dotenv_settings, DotEnvSettingsSource)  # noqa: S101 - for mypy
        in_environment = env_settings.env_vars
        if {"hosttype", "machtype"} <= in_environment.keys() and in_environment.get("host") == socket.gethostname():
            logger.warning("HOST was set by tcsh and is left out; to bind to an address, set HOST to it")
            env_settings.env_vars = {name: value for name, value in in_environment.items() if name != "host"}
        if dotenv_settings.env_file == ENV_FILE and cls._is_foreign(dotenv_settings.env_vars.keys()):
            return init_settings, env_settings
        return init_settings, env_settings, dotenv_settings

    @classmethod
    def _is_foreign(cls, names: AbstractSet[str]) -> bool:
        """Whether a `.env` is another project's: it has settings unknown here, and none that only this server has."""
        known = cls.model_fields.keys()
        if names <= known or any(name.startswith(OWN_PREFIXES) for name in names):
            return False
        if meant := sorted(names & known):
            logger.warning(
                ".env in the working directory seems to be another project's, as it has %s; it is left out, with its %s. "
                "Set these in the environment, or add a setting of this server, such as GPU_POOL_NODE, to the file",
                min(names - known).upper(),
                ", ".join(meant).upper(),
            )
        return True

    def pool_settings(self) -> PoolSettings:
        has_thresholds = {"gpu_memory_threshold_percent", "gpu_utilization_threshold_percent"} & self.model_fields_set
        variables = {field.name: f"gpu_pool_{field.name.removesuffix('_s')}" for field in fields(PoolSettings)}
        given = {name: getattr(self, variable) for name, variable in variables.items() if hasattr(self, variable)}
        given["outsiders"] = self.gpu_pool_outsiders or ("thresholds" if has_thresholds else "by_request")
        thresholds = Thresholds(self.gpu_memory_threshold_percent, self.gpu_utilization_threshold_percent)
        return PoolSettings(**given, thresholds=thresholds, stale_after_s=self.stale_after_s, take_up_s=TAKE_UP_S)

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
        if tokens.too_short:
            logger.error(
                "GPU_POOL_TOKENS: the token of entry %s has fewer than %d characters and can be guessed, so it is not "
                "accepted; make one by `gpu-pool token add NAME`, or write a random one: openssl rand -hex 16",
                ", ".join(map(str, tokens.too_short)),
                MIN_TOKEN_LENGTH,
            )
        return tokens

    @property
    def stale_after_s(self) -> float:
        return max(5.0, 3 * self.refresh_interval)


def _why(field: FieldInfo, fault: ErrorDetails) -> str:
    """Say what the value of a setting must be."""
    bounds = {name: getattr(each, name) for each in field.metadata for name in ("ge", "le") if hasattr(each, name)}
    if bounds:
        kind = "whole number" if field.annotation is int else "number"
        return f"it must be a {kind} from {bounds['ge']:.15g} to {bounds['le']:.15g}"
    if field.annotation is bool:
        return "it must be true or false"
    kinds = (field.annotation, *get_args(field.annotation))
    if choices := [word for kind in kinds for word in get_args(kind) if isinstance(word, str)]:
        return f"it must be one of {', '.join(choices)}"
    return fault["msg"].removeprefix("Value error, ")


def get_bool_env(key: str, default: bool) -> bool:  # noqa: FBT001 - the documented signature
    """Read a truth value from the environment: true, 1, yes or on, in any case."""
    return _env(key, default, bool, "is neither true nor false")


def get_float_env(key: str, default: float) -> float:
    return _env(key, default, float, "is not a number")


def get_int_env(key: str, default: int) -> int:
    return _env(key, default, int, "is not a number")


def _env(key: str, default: ValueT, kind: type[ValueT], fault: str) -> ValueT:
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return TypeAdapter(kind).validate_python(text.strip())
    except ValidationError:
        logger.error("%s=%r %s; using the default %r", key, text, fault, default)  # noqa: TRY400
        return default
