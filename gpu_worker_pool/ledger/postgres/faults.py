"""Faults of a fleet's database, as messages that say what to do."""

from __future__ import annotations

import socket
import ssl

import asyncpg

from gpu_worker_pool.ledger.journal import JournalDamaged, JournalError

from .url import DatabaseUrl

# All that asyncpg raises for faults of the server, of the connection and of the network; a timeout is an OSError.
ASYNCPG_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)

_POOLER = (
    "a connection pooler in transaction mode mixes up prepared statements: add statement_cache_size=0 to the URL, or use "
    "PgBouncer 1.21 or newer with max_prepared_statements"
)

# By the code of the server, or the beginning of one.
_ADVICE = {
    "28P01": "the password or the role is wrong: correct them in the URL, in PGPASSWORD or in ~/.pgpass",
    "28000": "the server does not let this role in: create it (CREATE ROLE ... LOGIN), or allow it and its TLS mode in the "
    "server's pg_hba.conf",
    "3D000": "there is no such database: create it (createdb), or correct its name in the URL",
    "42501": "the role may not do this: for the first start, GRANT CREATE ON DATABASE to it, or let an administrator create "
    "the schema (CREATE SCHEMA gpu_pool AUTHORIZATION the_role); if the tables are there, from a backup for example, make it "
    "their owner (ALTER SCHEMA and ALTER TABLE ... OWNER TO)",
    "53100": "the disk of the database is full: free space there",
    "53200": "the database server has too little memory",
    "53300": "the database has too many connections: raise its max_connections, or the role's CONNECTION LIMIT, or end other programs' connections; each "
    "candidate needs two, and one for each report",
    "53": "the database server is short of resources",
    "25006": "it can only be read: if it is a standby, name the primary in the URL, or name all servers (host1,host2) so "
    "that the primary is found; if it is the primary, turn default_transaction_read_only off for the role and the database",
    "26000": _POOLER,
    "42P05": _POOLER,
    "08": "check the network and the server's log",
    "57P03": "the database server is starting, stopping or recovering: wait for it",
    "57P": "the database server ended the connection",
    "42704": "it does not know a parameter of the URL: correct it, or leave it out",
    "42P01": "a table of the pool is gone: restore the schema gpu_pool from a backup",
    "3F000": "the schema gpu_pool is gone: restore it from a backup",
    "40": "another statement was in the way; it may be repeated",
    "55P03": "another statement holds a lock",
    "57014": "the statement was cancelled on the server: check its statement_timeout",
}

# The server says so although the commit may have happened: it ended the connection, or was about to answer.
_UNKNOWN_OUTCOME = ("57P01", "57P02", "57P05", "08", "40003")

_DAMAGE = ("XX001", "XX002")


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether a statement that failed like this may have been carried out."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_UNKNOWN_OUTCOME)
    return not isinstance(error, ValueError)  # an argument that was refused before it was sent


def is_worth_another_host(error: BaseException) -> bool:
    """Whether another server of the same database may answer: this one is away, a standby or not ready."""
    return isinstance(
        error,
        OSError
        | asyncpg.TargetServerAttributeNotMatched
        | asyncpg.CannotConnectNowError
        | asyncpg.ConnectionDoesNotExistError,
    )


def as_journal_error(error: BaseException, where: DatabaseUrl, kind: type[JournalError] = JournalError) -> JournalError:
    """The error that a journal promises, for an error of asyncpg or of the network."""
    if (getattr(error, "sqlstate", None) or "").startswith(_DAMAGE):
        return JournalDamaged(
            f"the database {where} is damaged ({error}): restore it from a backup, or promote a standby"
        )
    unknown = "; it is not known whether the change was made" if kind is not JournalError else ""
    return kind(f"the database {where} cannot be used: {_reason(error)}{unknown}")


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return _ADVICE["25006"]
    if isinstance(error, asyncpg.PostgresError):
        code = error.sqlstate or ""
        advice = next((_ADVICE[code[:length]] for length in (5, 3, 2) if code[:length] in _ADVICE), None)
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{said}: {advice}" if advice else f"{said} (code {code})"
    return _network_reason(error)


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason or type(error).__name__


def _network_reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time: check the network, the host's firewall and the server's load"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there: check the host, the port and that the server runs and listens on that address"
    if isinstance(error, socket.gaierror):
        return f"the host's name is not known ({error.strerror}): correct it in the URL"
    if isinstance(error, ssl.SSLError):
        return (
            f"TLS failed ({_tls_reason(error)}): check sslmode and sslrootcert in the URL, and the server's certificate"
        )
    if isinstance(error, FileNotFoundError | PermissionError):
        return f"a file that its URL names cannot be read ({error.strerror}): check sslrootcert, sslcert, sslkey and host in it"
    if isinstance(error, ConnectionError) and "SSL" in str(error):
        return "the server does not speak TLS: turn it on there (ssl = on), or give the URL another sslmode"
    if isinstance(error, ValueError):
        return (
            "a parameter of its URL is not right: check those after the ?; sslmode=verify-ca and verify-full need "
            "sslrootcert=FILE, the certificate that signed the server's"
        )
    if isinstance(error, asyncpg.ConnectionDoesNotExistError | asyncpg.InterfaceError | ConnectionError):
        return "the connection was lost: check the network and the server's log"
    if isinstance(error, OSError):
        return f"{error.strerror or type(error).__name__}: check the host and the network"
    return type(error).__name__
