"""The file of a user's logins: what is read from it, and what is not."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker_pool.config import ClientConfig
from gpu_worker_pool.logins import (
    Login,
    LoginsUnusable,
    change_logins,
    read_logins,
    with_login,
    write_logins,
)
from gpu_worker_pool.urls import parse_endpoint

FIRST, SECOND = parse_endpoint("http://gpu-1:8000"), parse_endpoint("https://gpu-2/pool")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "gpu-pool" / "config.toml"


@given(tokens=st.lists(st.none() | st.from_regex(r"[!-~]{1,40}", fullmatch=True), max_size=3))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, tokens: list[str | None]) -> None:
    path = tmp_path_factory.mktemp("logins") / "config.toml"
    logins = [Login(parse_endpoint(f"http://gpu-{place}:8000"), token) for place, token in enumerate(tokens)]

    write_logins(path, logins)

    assert read_logins(path) == logins


def test_only_the_user_can_read_what_is_written_also_over_a_file_that_was_open(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch(0o644)

    write_logins(path, [Login(FIRST, "a-token")])

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - no draft is left


def test_a_file_that_others_can_read_or_write_is_refused(path: Path) -> None:
    write_logins(path, [Login(FIRST, "a-secret-token")])
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(LoginsUnusable, match="chmod 600") as caught:
            read_logins(path)
        assert "a-secret-token" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[[server",
        "server = ['a-secret-token']",
        "[[server]]\nurl = 'ftp://a-secret-token'",
        "[[server]]\nurl = 'http://gpu-1'\ntoken = ['a-secret-token']",
        "[[server]]\nurl = 'http://gpu-1'\ntoken = 'a-secret-token\\nX-Header: 1'",
        f"[[server]]\nurl = 'http://gpu-1'\ntoken = '{'a-secret-token' * 100}'",
    ],
)
def test_a_file_of_another_kind_is_refused_and_not_quoted(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")

    with pytest.raises(LoginsUnusable, match="repair it, or remove it") as caught:
        read_logins(path)
    assert "a-secret-token" not in str(caught.value)


def test_a_pipe_is_refused_and_does_not_stop_the_command(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path, 0o600)

    with pytest.raises(LoginsUnusable, match="is not a file"):
        read_logins(path)


def test_changes_at_the_same_time_are_all_kept(path: Path) -> None:
    logins = [Login(parse_endpoint(f"http://gpu-{number}:8000"), "a-token") for number in range(40)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda login: change_logins(path, lambda known: with_login(known, login)), logins))

    assert sorted(map(str, read_logins(path))) == sorted(map(str, logins))


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles.toml"
    write_logins(target, [Login(FIRST, "one")])
    path.parent.mkdir(parents=True)
    path.symlink_to(target)

    change_logins(path, lambda known: with_login(known, Login(SECOND, "two")))

    assert path.is_symlink()
    assert read_logins(target) == [Login(FIRST, "one"), Login(SECOND, "two")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_link_to_a_file_of_another_user_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs.toml"
    write_logins(target, [Login(FIRST, "one")])
    os.chown(target, 12345, 12345)
    path.parent.mkdir(parents=True)
    path.symlink_to(target)

    with pytest.raises(PermissionError, match="another user"):
        write_logins(path, [])


def test_logins_that_cannot_be_used_are_replaced_by_no_other_server(path: Path) -> None:
    write_logins(path, [Login(FIRST, "one")])
    path.chmod(0o644)
    environ = {"XDG_CONFIG_HOME": str(path.parent.parent)}

    with pytest.raises(ValueError, match="chmod 600"):
        ClientConfig.build(environ=environ)
    with pytest.raises(ValueError, match="chmod 600"):
        ClientConfig.build(environ={**environ, "GPU_POOL_TOKEN": "a-token"})
    assert ClientConfig.build(service_endpoint=SECOND.url, environ=environ).tokens == {}
    assert ClientConfig.build(environ={**environ, "GPU_SERVICE_ENDPOINT": SECOND.url}).tokens == {}


def test_the_client_uses_all_logins_and_gives_each_token_to_its_server_and_to_no_other(path: Path) -> None:
    write_logins(path, [Login(FIRST, "one"), Login(SECOND, None)])
    environ = {"XDG_CONFIG_HOME": str(path.parent.parent)}

    config = ClientConfig.build(environ=environ)
    assert [endpoint.url for endpoint in config.endpoints.values()] == [FIRST.url, SECOND.url]
    assert (list(config.tokens.values()), config.is_multi, config.is_named) == (["one"], True, True)
    named = {**environ, "GPU_SERVICE_ENDPOINTS": f"{FIRST.url},http://elsewhere:8000"}
    assert list(ClientConfig.build(environ=named).tokens.values()) == ["one"]
    assert ClientConfig.build(service_endpoint="http://elsewhere:8000", environ=environ).tokens == {}
    assert [*ClientConfig.build(environ={**environ, "GPU_POOL_TOKEN": "env"}).tokens.values()] == ["env"] * 2
    assert [*ClientConfig.build(token="given", environ=environ).tokens.values()] == ["given"] * 2  # noqa: S106
