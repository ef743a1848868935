"""No password is shown, however the URL is written."""

from __future__ import annotations

import pytest

from gpu_worker_pool.ledger.journal import JournalError
from gpu_worker_pool.ledger.postgres.url import HIDDEN, parse_url, redacted
from tests.ledger.postgres.by_position import ByPosition

SECRETS = ("s3cret", "t0ken")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://host/pool", "postgresql://host/pool"),
        ("postgres://ada@host:5432/pool", "postgresql://ada@host:5432/pool"),
        ("postgresql://ada:s3cret@host:5432/pool", "postgresql://ada@host:5432/pool"),
        ("postgresql://ada:s3cret@t0ken@host/pool", "postgresql://ada@host/pool"),
        ("postgresql://ada:s3cret%40t0ken%2F@host/pool", "postgresql://ada@host/pool"),
        ("postgresql://ada:s3cret%@host/pool", "postgresql://ada@host/pool"),
        ("postgresql://ada:s3cret:t0ken@host/pool", "postgresql://ada@host/pool"),
        ("postgresql://:s3cret@host/pool", "postgresql://@host/pool"),
        ("postgresql://host/pool?user=ada&password=s3cret", "postgresql://host/pool"),
        ("postgresql://host/pool?p%61ssword=s3cret&t0ken", "postgresql://host/pool"),
        ("postgresql://ada:t0ken@host/pool?password=s3cret@host", "postgresql://ada@host/pool"),
        (
            "postgresql://ada:s3cret@db-1:5432,db-2:5433/pool?sslmode=require",
            "postgresql://ada@db-1:5432,db-2:5433/pool",
        ),
        ("postgresql://ada:s3cret@[::1]:5432/pool", "postgresql://ada@[::1]:5432/pool"),
        ("postgresql:///pool?host=/run/postgresql&password=s3cret", "postgresql:///pool"),
        # Characters that are not escaped divide the URL at the wrong place.
        ("postgresql://ada:s3cret/t0ken@host/pool", HIDDEN),
        ("postgresql://ada:12/s3cret@host/pool", HIDDEN),
        ("postgresql://ada:12?s3cret@host/pool", HIDDEN),
        ("postgresql://ada:s3cret?t0ken@host/pool", HIDDEN),
        ("postgresql://ada:12#s3cret@host/pool", HIDDEN),
        ("postgresql://ada:s3cret#t0ken@host/pool", HIDDEN),
        ("postgresql://ada:[s3cret@host/pool", HIDDEN),
        ("postgresql://ada s3cret@host/pool", HIDDEN),
        ("postgresql://host/pool?user=me@example&password=s3cret", HIDDEN),
        ("host=db user=ada password=s3cret", HIDDEN),
        ("s3cret", HIDDEN),
        ("mysql://ada:s3cret@host/pool", HIDDEN),
        ("", HIDDEN),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
    try:
        texts = [
            str(parse_url(url)),
            repr(parse_url(url)),
            repr(ByPosition(url)),
            repr(ByPosition(url)._reads),
        ]
    except JournalError as error:
        texts = [str(error), repr(error.__cause__), repr(error.__context__) if not error.__suppress_context__ else ""]
    for text in texts:
        assert not any(secret in text for secret in SECRETS), text


@pytest.mark.parametrize("url", ["postgresql://ada:s3cret/t0ken@host/pool", "mysql://host/pool", "host=db"])
def test_a_url_of_another_form_is_refused_with_the_right_one(url: str) -> None:
    with pytest.raises(
        JournalError, match=r"not of the form postgresql://user:password@host:5432/database; write @ : /"
    ):
        parse_url(url)


def test_parameters_that_cannot_be_read_are_refused() -> None:
    for query in ("t0ken", "connect_timeout=s3cret"):
        with pytest.raises(
            JournalError, match=r"parameters of the URL postgresql://ada@host/pool cannot be read"
        ) as caught:
            parse_url(f"postgresql://ada:s3cret@host/pool?{query}")
        assert not any(secret in str(caught.value) for secret in SECRETS)


def test_each_host_is_tried_alone_and_only_the_server_gets_the_servers_parameters() -> None:
    url = parse_url(
        "postgresql://ada:p@ss@a:1,[::1]:2/pool?sslmode=require&connect_timeout=7&keepalives=1&channel_binding=prefer&statement_cache_size=0"
        "&target_session_attrs=any"
    )
    assert url.by_host == (
        "postgresql://ada:p%40ss@a:1/pool?sslmode=require&target_session_attrs=any",
        "postgresql://ada:p%40ss@[::1]:2/pool?sslmode=require&target_session_attrs=any",
    )
    assert (url.connect_timeout_s, url.has_target, url.has_name, url.has_cache) == (7.0, True, False, False)
    assert parse_url("postgresql://a/b?connect_timeout=0").connect_timeout_s is None
