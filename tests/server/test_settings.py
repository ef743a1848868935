"""What the environment and .env do to a server."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from pathlib import Path

import pytest

from gpu_worker_pool.gpu_server import get_bool_env, get_float_env, get_int_env
from gpu_worker_pool.server.logs import JsonFormatter, make_formatter
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import ServerProcess


@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "TRUE", " Yes "])
def test_these_words_are_true(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("SOME_FLAG", word)

    assert get_bool_env("SOME_FLAG", False) is True


@pytest.mark.parametrize("word", ["false", "0", "no", "off"])
def test_these_words_are_false(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("SOME_FLAG", word)

    assert get_bool_env("SOME_FLAG", True) is False


def test_what_is_not_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)

    assert (get_bool_env("NOT_SET", True), get_float_env("NOT_SET", 1.5), get_int_env("NOT_SET", 7)) == (True, 1.5, 7)


def test_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NUMBER", "12")

    assert get_float_env("SOME_NUMBER", 0.0) == 12.0
    assert get_int_env("SOME_NUMBER", 0) == 12


def test_a_bad_value_is_the_default_and_logged_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SOME_NUMBER", "twelve")

    assert get_int_env("SOME_NUMBER", 5) == 5
    assert get_float_env("SOME_NUMBER", 5.0) == 5.0
    assert get_bool_env("SOME_NUMBER", True) is True
    assert all("SOME_NUMBER" in record.message and "twelve" in record.message for record in caplog.records)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("PORT", "70000"),
        ("PORT", "http"),
        ("REFRESH_INTERVAL", "-1"),
        ("REFRESH_INTERVAL", "nan"),
        ("MAX_HISTORY", "0"),
        ("LOG_LEVEL", "loud"),
        ("RELOAD", "perhaps"),
        ("API_PREFIX", "no slash"),
        ("WORKERS", ""),
        ("GPU_POOL_NODE", "box\u202e1"),
    ],
)
def test_a_bad_setting_is_replaced_by_its_default_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str, bad: str
) -> None:
    monkeypatch.chdir(tmp_path)
    default = ServerSettings.defaults()[name.lower()]
    monkeypatch.setenv(name, bad)

    assert getattr(ServerSettings.load(), name.lower()) == default
    assert any(name in record.message and repr(bad) in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("name", "bad", "must"),
    [
        ("PORT", "http", "it must be a whole number from 0 to 65535"),
        ("PORT", "7.5", "it must be a whole number from 0 to 65535"),
        ("REFRESH_INTERVAL", "nan", "it must be a number from 0.05 to 3600"),
        ("RELOAD", "perhaps", "it must be true or false"),
        ("GPU_POOL_DURABILITY", "some", "it must be one of full, normal"),
        ("API_PREFIX", "no slash", "it must be a path that begins with a slash, of letters, digits and . _ - /"),
        ("GPU_POOL_MAX_TIME_LIMIT", "0.5", "it must be 1 to 31622400 seconds, or a time such as 2h"),
    ],
)
def test_the_log_says_what_the_value_must_be_and_what_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str, bad: str, must: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, bad)
    ServerSettings.load()
    default = ServerSettings.defaults()[name.lower()]
    assert caplog.messages == [f"{name}={bad!r} is not usable ({must}); using the default {default!r}"]


def test_each_of_several_bad_values_has_its_line_and_good_ones_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("WORKERS=none\nMAX_HISTORY=7\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT", "http")
    monkeypatch.setenv("GPU_MEMORY_THRESHOLD_PERCENT", "101")

    settings = ServerSettings.load()

    assert (settings.port, settings.workers, settings.max_history) == (8000, 1, 7)
    assert {message.split("=")[0] for message in caplog.messages} == {"PORT", "WORKERS", "GPU_MEMORY_THRESHOLD_PERCENT"}
    # A threshold that cannot be used does not count as one that the operator has set.
    assert settings.pool_settings().outsiders == "by_request"


def test_secrets_are_neither_logged_nor_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GPU_POOL_TOKENS", "GPU_POOL_FLEET", "GPU_POOL_FLEET_KEY"):
        monkeypatch.setenv(name, "SECRET")
    monkeypatch.setenv("PORT", "http")

    settings = ServerSettings.load()

    assert settings.gpu_pool_tokens is not None
    assert settings.gpu_pool_tokens.get_secret_value() == "SECRET"
    assert "SECRET" not in f"{settings!r} {settings} {settings.gpu_pool_tokens} {caplog.text}"


def test_settings_are_not_changed_after_they_were_made() -> None:
    settings = ServerSettings(_env_file=None)
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ServerSettings.defaults())
def test_the_default_of_each_setting_is_a_value_that_can_be_given(name: str) -> None:
    default = ServerSettings.defaults()[name]
    assert ServerSettings.read(name, default) == default


def test_reload_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert ServerSettings().reload is False
    monkeypatch.setenv("RELOAD", "true")
    assert ServerSettings().reload is True


def test_a_file_env_in_the_working_directory_is_read_and_the_environment_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("TITLE=From the file\nMAX_HISTORY=7\nSOMETHING_ELSE=1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAX_HISTORY", "9")

    settings = ServerSettings()

    assert (settings.title, settings.max_history) == ("From the file", 9)


def test_a_log_format_that_is_no_good_is_replaced() -> None:
    record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})

    assert "hello" in make_formatter("%(nonsense)s").format(record)
    assert make_formatter("%(levelname)s|%(message)s").format(record) == "INFO|hello"


def test_json_logs_are_one_object_a_line() -> None:
    error = ValueError("broken")
    record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "it %s", ("went wrong",), (ValueError, error, None))

    line = json.loads(JsonFormatter().format(record))

    assert (line["level"], line["logger"], line["message"]) == ("error", "a.b", "it went wrong")
    assert "broken" in line["exception"]


@pytest.mark.parametrize(
    ("visible", "shown", "is_filtering"),
    [
        ("0,2", [0, 2], True),
        ("0 2", [0, 2], True),
        ("0,1 2", [0, 1, 2], True),
        ("1", [1], True),
        ("", [], True),
        ("-1", [], True),
        ("0,9", [0], True),
        ("7,8", [0, 1, 2, 3], False),
    ],
)
def test_the_filter_shows_these_gpus(visible: str, shown: list[int], is_filtering: bool) -> None:
    with ServerProcess({"CUDA_VISIBLE_DEVICES": visible}) as server:
        filtering = server.json("/config")["gpu_filtering"]

        assert [gpu["gpu_id"] for gpu in server.json("/gpu/stats")["gpus"]] == shown
        assert [gpu["gpu_id"] for gpu in server.json("/gpu/summary")["gpus_summary"]] == shown
        assert server.json("/gpu/count")["gpu_count"] == len(shown)
        assert filtering == {
            "cuda_visible_devices": visible,
            "visible_gpu_ids": shown,
            "filtering_active": is_filtering,
            "total_system_gpus": 4,
            "visible_gpu_count": len(shown),
        }
        if "9" in visible:
            assert "GPU 9 in CUDA_VISIBLE_DEVICES not found on system" in server.log()
        assert server.json("/health")["status"] == "healthy"


def test_a_gpu_can_be_chosen_by_the_beginning_of_its_uuid() -> None:
    with ServerProcess() as server:
        uuid = server.json("/gpu/stats")["gpus"][2]["uuid"]
        node = server.env.get("GPU_POOL_NODE", "")
    with ServerProcess({"CUDA_VISIBLE_DEVICES": uuid[:16], **({"GPU_POOL_NODE": node} if node else {})}) as server:
        assert [gpu["gpu_id"] for gpu in server.json("/gpu/stats")["gpus"]] == [2]


def test_the_prefix_really_prefixes() -> None:
    with ServerProcess({"API_PREFIX": "/gpu-api/"}) as server:
        assert server.json("/gpu-api/gpu/count")["gpu_count"] == 4
        assert server.ask("/gpu/count").status == 404
        assert server.ask("/gpu-api/docs").status == 200
        assert "/gpu-api/gpu/stats" in server.json("/gpu-api/")["endpoints"]


def test_pages_and_cors_can_be_switched_off() -> None:
    with ServerProcess({"DOCS_URL": "", "REDOC_URL": "", "ENABLE_CORS": "false"}) as server:
        assert server.ask("/docs").status == 404
        assert server.ask("/redoc").status == 404
        assert "/docs" not in server.json("/")["endpoints"]
        headers = server.ask("/gpu/summary", headers={"Origin": "http://elsewhere.example"}).headers
        assert "access-control-allow-origin" not in headers


def test_dcgm_names_are_there_when_asked_for() -> None:
    with ServerProcess({"GPU_POOL_DCGM_METRICS": "true"}) as server:
        assert b"DCGM_FI_DEV_GPU_UTIL{" in server.ask("/metrics").body


@pytest.mark.parametrize("name", ["TITLE", "VERSION", "HOST", "LOG_FORMAT"])
def test_an_empty_value_where_there_must_be_one_is_replaced_by_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "  ")

    assert getattr(ServerSettings.load(), name.lower()) == ServerSettings.defaults()[name.lower()]


@pytest.mark.parametrize("spec", ["abc", "-1", "0", "4xFOO", "5000", "2,2"])
def test_gpus_that_cannot_be_simulated_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIMULATED_GPUS", spec)

    assert ServerSettings.load().simulated_gpus is None
    assert any("SIMULATED_GPUS" in record.message for record in caplog.records)


def test_blanks_around_a_value_do_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOST": "127.0.0.1 ", "ACCESS_LOG": "False ", "LOG_LEVEL": " DEBUG"}.items():
        monkeypatch.setenv(name, value)

    settings = ServerSettings()

    assert (settings.host, settings.access_log, settings.log_level) == ("127.0.0.1", False, "debug")


def test_the_word_none_is_as_if_nothing_were_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "None")

    assert ServerSettings().cuda_visible_devices is None


def test_a_file_env_that_cannot_be_read_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfeTITLE=x")
    monkeypatch.chdir(tmp_path)

    assert ServerSettings.load().title == "GPU Statistics Server"
    assert ".env" in caplog.text


def test_debug_tells_more_about_the_filter() -> None:
    with ServerProcess({"CUDA_VISIBLE_DEVICES": "0,2", "LOG_LEVEL": "debug"}) as server:
        assert "the indices (0, 2) are shown, filtering: True" in server.log()


def test_json_logs_come_from_uvicorn_too() -> None:
    with ServerProcess({"LOG_FORMAT": "json"}) as server:
        server.ask("/health")
        lines = [json.loads(line) for line in server.log().splitlines()]

        assert {"gpu_worker_pool.server.app", "uvicorn.error"} <= {line["logger"] for line in lines}


def test_the_env_file_of_another_project_configures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ".env"
    file.write_text("DATABASE_URL=postgres://x\nHOST=10.9.8.7\nPORT=5000\n", encoding="utf-8")
    settings = ServerSettings.load()
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)  # noqa: S104 - the default
    assert "another project's, as it has DATABASE_URL" in caplog.text
    assert "HOST, PORT" in caplog.text
    # As in the documents: a file with these alone is the server's own, and so is one with a setting that only it has.
    file.write_text("HOST=10.9.8.7\nPORT=5000\nLOG_LEVEL=info\n", encoding="utf-8")
    assert ServerSettings.load().port == 5000
    file.write_text("DATABASE_URL=postgres://x\nPORT=5000\nGPU_POOL_NODE=box1\n", encoding="utf-8")
    assert ServerSettings.load().port == 5000


def test_the_host_that_tcsh_sets_is_not_an_address_to_bind_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOST", socket.gethostname())
    assert ServerSettings.load().host == socket.gethostname()
    monkeypatch.setenv("HOSTTYPE", "x86_64-linux")
    monkeypatch.setenv("MACHTYPE", "x86_64")
    assert ServerSettings.load().host == "0.0.0.0"  # noqa: S104 - the default
    assert os.environ["HOST"] == socket.gethostname()
    monkeypatch.setenv("HOST", "127.0.0.1")
    assert ServerSettings.load().host == "127.0.0.1"


def test_a_log_format_shows_what_it_asks_for() -> None:
    """Threads, processes and lines of the code are looked up only where the format shows them."""
    asked = "%(threadName)s %(processName)s %(process)d %(module)s:%(lineno)d %(message)s"
    with ServerProcess({"LOG_FORMAT": asked}) as server:
        server.stop()
        found = re.search(r"^MainThread MainProcess (\d+) serving:\d+ listening on http", server.log(), re.MULTILINE)
        assert found, server.log()
