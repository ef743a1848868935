"""Settings of a client: from its constructor, else from the environment, else the user's logins, else the defaults.

A bad value in the constructor is a ValueError, because the programmer is there to see it. A bad value in the environment
is logged as an error, and the default is used. Logins that cannot be used are a ValueError, unless an endpoint is given.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from .core.model.bounds import DEFAULT_THRESHOLDS, DEFAULT_TTL_S, MAX_TTL_S, check_number, check_whole
from .logins import TOKEN, Login, LoginsUnusable, find_logins
from .urls import EndpointUrl, assign_ids, parse_endpoint, parse_endpoints, split_endpoints, unique_endpoints

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "http://localhost:8000"
# client/endpoints/balancing.py has what they mean.
STRATEGIES = ("availability", "round_robin", "weighted")
DEFAULT_STRATEGY = "availability"
Scope = Literal["box", "fleet"]
PLURAL_VARIABLES = ("GPU_STATS_SERVICE_ENDPOINTS", "GPU_SERVICE_ENDPOINTS")
SINGULAR_VARIABLE = "GPU_SERVICE_ENDPOINT"
STRATEGY_VARIABLE = "GPU_LOAD_BALANCING_STRATEGY"
TOKEN_VARIABLE = "GPU_POOL_TOKEN"  # noqa: S105 - a name
CA_FILE_VARIABLE = "GPU_POOL_CA_FILE"


class _Number(NamedTuple):
    """A number setting: its parameter, its variable and its bounds."""

    parameter: str
    variable: str | None
    default: float
    low: float
    high: float
    is_whole: bool = False

    def check(self, name: str, value: object) -> float:
        """Return the value; a ValueError if it is out of bounds."""
        if self.is_whole:
            check_whole(name, value, int(self.low), int(self.high))
        else:
            check_number(name, value, self.low, self.high)
        assert isinstance(value, int | float)  # noqa: S101 - by the check; for mypy
        return value if self.is_whole else float(value)

    def asked(self, given: object, environ: Mapping[str, str]) -> float | None:
        """The user's value; None if there is none, or a bad one in the environment."""
        if given is not None:
            return self.check(self.parameter, given)
        if self.variable is None or (text := _text(environ, self.variable)) is None:
            return None
        value: object = text
        with suppress(ValueError):
            value = int(text) if self.is_whole else float(text)
        try:
            return self.check(self.variable, value)
        except ValueError as error:
            logger.error("%s; using the default %g", error, self.default)  # noqa: TRY400
            return None


_NUMBERS = {
    number.parameter: number
    for number in (
        _Number("memory_threshold", "GPU_MEMORY_THRESHOLD_PERCENT", DEFAULT_THRESHOLDS.memory_percent, 0, 100),
        _Number(
            "utilization_threshold", "GPU_UTILIZATION_THRESHOLD_PERCENT", DEFAULT_THRESHOLDS.utilization_percent, 0, 100
        ),
        _Number("polling_interval", "GPU_POLLING_INTERVAL", 5.0, 0.05, 3600),
        _Number("worker_timeout", None, 300.0, 0, 1e9),
        _Number("request_timeout", None, 30.0, 0.01, 3600),
        _Number("endpoint_timeout", "GPU_ENDPOINT_TIMEOUT", 10.0, 0.01, 3600),
        _Number("endpoint_max_retries", "GPU_ENDPOINT_MAX_RETRIES", 3, 0, 100, is_whole=True),
        _Number("endpoint_health_check_interval", "GPU_ENDPOINT_HEALTH_CHECK_INTERVAL", 30.0, 0.05, 86_400),
        _Number("ttl_s", "GPU_POOL_TTL", DEFAULT_TTL_S, 0.1, MAX_TTL_S),
    )
}


class EndpointOptions(TypedDict, total=False):
    """What the constructor of a client may say of its endpoints, beside `service_endpoint`; None means not given."""

    service_endpoints: str | list[str] | tuple[str, ...] | None
    load_balancing_strategy: str | None
    memory_threshold: float | None
    utilization_threshold: float | None
    polling_interval: float | None
    worker_timeout: float
    request_timeout: float
    endpoint_timeout: float | None
    endpoint_max_retries: int | None
    endpoint_health_check_interval: float | None
    token: str | Mapping[str, str] | None
    scope: Scope | None


@dataclass(frozen=True)
class ClientConfig:
    """All settings of a client, checked; make it with `build`.

    `endpoints` and `tokens` are by endpoint id; an endpoint without a token is not in `tokens`. Times are in seconds.
    `asked_..._threshold` is None if the user set none: then a server's own applies.
    """

    endpoints: Mapping[str, EndpointUrl]
    is_multi: bool
    strategy: str
    memory_threshold: float
    utilization_threshold: float
    asked_memory_threshold: float | None
    asked_utilization_threshold: float | None
    polling_interval: float
    worker_timeout: float
    request_timeout: float
    endpoint_timeout: float
    endpoint_max_retries: int
    endpoint_health_check_interval: float
    ttl_s: float
    ca_file: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    # Whether the user named the endpoints. The default endpoint may be reached by a socket that the user named.
    is_named: bool = True
    # Of endpoints that belong to a fleet: GPUs of the whole fleet, or of these boxes. None: by the number of endpoints.
    scope: Scope | None = None
    # Where a socket of a server on this machine is looked for: see host/unix_socket.py.
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False, compare=False)

    @property
    def uses_fleets(self) -> bool:
        """Whether endpoints of a fleet are entry points of the whole fleet. One endpoint alone stands for its own box."""
        return self.scope == "fleet" or (self.scope is None and len(self.endpoints) > 1)

    @classmethod
    def build(
        cls,
        service_endpoint: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **given: Unpack[EndpointOptions],
    ) -> ClientConfig:
        """Build from the values of a constructor, which win over the environment.

        A ValueError names the parameter, its value (never that of a token) and what is allowed.
        """
        environ = os.environ if environ is None else environ
        several, scope = given.get("service_endpoints"), given.get("scope")
        is_given = service_endpoint is not None or several is not None or _names_endpoints(environ)
        logins = _logins(environ, is_needed=not is_given)
        endpoints, is_multi = _endpoints(service_endpoint, several, environ, logins)
        if scope not in (None, "box", "fleet"):
            raise ValueError(f"scope is {scope!r}; it must be box or fleet, or be left out")
        asked = {name: one.asked(given.get(name), environ) for name, one in _NUMBERS.items()}
        numbers: dict[str, Any] = {
            name: _NUMBERS[name].default if value is None else value for name, value in asked.items()
        }
        return cls(
            endpoints=endpoints,
            is_multi=is_multi or scope == "fleet",  # GPUs of several boxes need names that tell them apart
            strategy=_strategy(given.get("load_balancing_strategy"), environ),
            asked_memory_threshold=asked["memory_threshold"],
            asked_utilization_threshold=asked["utilization_threshold"],
            **numbers,
            ca_file=_text(environ, CA_FILE_VARIABLE),
            tokens=_tokens(given.get("token"), endpoints, environ, logins),
            scope=scope,
            is_named=is_given or bool(logins),
            environ=dict(environ),
        )


def _text(environ: Mapping[str, str], variable: str) -> str | None:
    """The value of a variable; None if it is blank."""
    return environ.get(variable, "").strip() or None


def _strategy(given: object, environ: Mapping[str, str]) -> str:
    possible = f"it must be one of {', '.join(STRATEGIES)}"
    if given is not None:
        if given not in STRATEGIES:
            raise ValueError(f"load_balancing_strategy is {given!r}; {possible}")
        return str(given)
    text = _text(environ, STRATEGY_VARIABLE)
    if text is None or text.lower() in STRATEGIES:
        return (text or DEFAULT_STRATEGY).lower()
    logger.error("%s is %r; %s; using the default %r", STRATEGY_VARIABLE, text, possible, DEFAULT_STRATEGY)
    return DEFAULT_STRATEGY


def _names_endpoints(environ: Mapping[str, str]) -> bool:
    return any(split_endpoints(environ.get(variable, "")) for variable in (*PLURAL_VARIABLES, SINGULAR_VARIABLE))


def _logins(environ: Mapping[str, str], *, is_needed: bool) -> list[Login]:
    """The logins. A ValueError if they cannot be used and no endpoint is given: no other server must take their place."""
    try:
        return find_logins(environ)
    except LoginsUnusable as why:
        if is_needed:
            raise ValueError(str(why)) from None
        logger.error("%s", why)  # noqa: TRY400
        return []


def _endpoints(
    single: str | None, several: str | Sequence[str] | None, environ: Mapping[str, str], logins: Sequence[Login]
) -> tuple[dict[str, EndpointUrl], bool]:
    """The endpoints by id, and whether this is multi-endpoint mode."""
    if several is not None:
        name, given = "service_endpoints", several
    elif single is not None:
        name, given = "service_endpoint", [single]
    else:
        return _endpoints_from(environ, logins)
    try:
        urls = parse_endpoints(given)
        if several is None and len(urls) > 1:
            raise ValueError("there are several URLs in it; give them as service_endpoints")  # noqa: TRY301
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return assign_ids(urls), several is not None


def _endpoints_from(environ: Mapping[str, str], logins: Sequence[Login]) -> tuple[dict[str, EndpointUrl], bool]:
    """Use the first variable that is not blank, else the logins. Bad URLs in a variable are logged and left out."""
    variables = (*PLURAL_VARIABLES, SINGULAR_VARIABLE)
    found = ((variable, split_endpoints(environ.get(variable, ""))) for variable in variables)
    here = [login.endpoint.url for login in logins] or [DEFAULT_ENDPOINT]
    variable, texts = next(((variable, texts) for variable, texts in found if texts), ("", here))
    if variable == SINGULAR_VARIABLE and len(texts) > 1:
        place = PLURAL_VARIABLES[0]
        logger.error("%s has several URLs, which belong in %s; using the default %s", variable, place, DEFAULT_ENDPOINT)
        texts = [DEFAULT_ENDPOINT]
    urls, bad = [], 0
    for text in texts:
        try:
            urls.append(parse_endpoint(text))
        except ValueError as error:
            bad += 1
            logger.error("%s: %s; it is left out", variable, error)  # noqa: TRY400
    if not urls:
        logger.error("%s has no endpoint that can be used; using the default %s", variable, DEFAULT_ENDPOINT)
        urls = [parse_endpoint(DEFAULT_ENDPOINT)]
        bad -= 1  # the default replaces one of them
    urls = unique_endpoints(urls)
    # A URL that was left out counts: a typo must not turn the ids of all GPUs from texts into numbers.
    return assign_ids(urls), len(urls) + bad > 1


def _tokens(
    given: object, endpoints: Mapping[str, EndpointUrl], environ: Mapping[str, str], logins: Sequence[Login]
) -> dict[str, str]:
    """The tokens by endpoint id. With a token from the constructor, the environment's token is not sent; with either, none
    of the logins is.
    """
    if isinstance(given, Mapping):
        return _tokens_by_endpoint(given, endpoints)
    if given is not None:
        return dict.fromkeys(endpoints, _checked_token("token", given))
    text = _text(environ, TOKEN_VARIABLE)
    if text is None:
        kept = {login.endpoint.identity: login.token for login in logins if login.token is not None}
        return {id_: kept[url.identity] for id_, url in endpoints.items() if url.identity in kept}
    try:
        return dict.fromkeys(endpoints, _checked_token(TOKEN_VARIABLE, text))
    except ValueError as error:
        logger.error("%s; no token is used", error)  # noqa: TRY400
        return {}


def _tokens_by_endpoint(given: Mapping[str, object], endpoints: Mapping[str, EndpointUrl]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for position, (key, value) in enumerate(given.items(), start=1):
        # An entry is named by its position only: in a mistaken {token: URL} the key is the secret.
        endpoint_id = _find_endpoint(key, endpoints)
        if endpoint_id is None:
            possible = ", ".join(f"{known_id} ({endpoint.url})" for known_id, endpoint in endpoints.items())
            raise ValueError(f"token: entry {position} names no known endpoint; it must be one of {possible}")
        token = _checked_token(f"token: entry {position}", value)
        if tokens.setdefault(endpoint_id, token) != token:
            raise ValueError(f"token: {endpoint_id} has two different ones; give it one, by its id or by its URL")
    return tokens


def _find_endpoint(key: object, endpoints: Mapping[str, EndpointUrl]) -> str | None:
    if not isinstance(key, str):
        return None
    if key in endpoints:
        return key
    try:
        identity = parse_endpoint(key.strip()).identity
    except ValueError:
        return None
    return next((known_id for known_id, endpoint in endpoints.items() if endpoint.identity == identity), None)


def _checked_token(name: str, token: object) -> str:
    if not isinstance(token, str) or not TOKEN.fullmatch(token.strip()):
        raise ValueError(
            f"{name} is not usable (its value is not shown); it must be 1 to 1024 printable ASCII characters"
        )
    return token.strip()
