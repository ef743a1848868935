"""What the environment and .env do to a server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from gpu_worker_pool.gpu_server import get_bool_env, get_float_env, get_int_env
from gpu_worker_pool.server.logs import JsonFormatter, LogHandler, make_formatter
from gpu_worker_pool.server.settings import ServerSettings
from gpu_worker_pool.testing import ServerProcess

WORDS: list[tuple[str | None, tuple[bool, float, int]]] = [
    *((word, (True, 5.0, 5)) for word in ("true", "yes", "on", "TRUE", " Yes ")),
    *((word, (False, 5.0, 5)) for word in ("false", "no", "off")),
    ("1", (True, 1.0, 1)),
    ("0", (False, 0.0, 0)),
    ("12", (True, 12.0, 12)),
    ("twelve", (True, 5.0, 5)),
    (None, (True, 5.0, 5)),
]


@pytest.mark.parametrize(("word", "read"), WORDS)
def test_words_and_numbers_are_read_and_a_bad_one_is_logged_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str | None, read: tuple[bool, float, int]
) -> None:
    monkeypatch.delenv("SOMETHING", raising=False)
    if word is not None:
        monkeypatch.setenv("SOMETHING", word)
    found = get_bool_env("SOMETHING", True), get_float_env("SOMETHING", 5.0), get_int_env("SOMETHING", 5)
    assert found == read
    assert all(f"SOMETHING={word!r}" in message for message in caplog.messages)
    assert len(caplog.messages) == {None: 0, "twelve": 3, "12": 1, "1": 0, "0": 0}.get(word, 2)


@pytest.mark.parametrize(
    ("name", "bad", "must"),
    [
        ("PORT", "http", "it must be a whole number from 0 to 65535"),
        ("PORT", "70000", "it must be a whole number from 0 to 65535"),
        ("PORT", "7.5", "it must be a whole number from 0 to 65535"),
        ("REFRESH_INTERVAL", "nan", "it must be a number from 0.05 to 3600"),
        ("REFRESH_INTERVAL", "-1", "it must be a number from 0.05 to 3600"),
        ("RELOAD", "perhaps", "it must be true or false"),
        ("WORKERS", "", "it must be a whole number from 1 to 1024"),
        ("LOG_LEVEL", "loud", "it must be one of debug, info, warning, error, critical"),
        ("GPU_POOL_DURABILITY", "some", "it must be one of full, normal"),
        ("GPU_POOL_NODE", "box\u202e1", "it has characters that cannot be printed"),
        ("API_PREFIX", "no slash", "it must be a path that begins with a slash, of letters, digits and . _ - /"),
        ("GPU_POOL_MAX_TIME_LIMIT", "0.5", "it must be 1 to 31622400 seconds, or a time such as 2h"),
        *((name, "  ", "String should have at least 1 character") for name in ("TITLE", "VERSION", "HOST")),
        *(("SIMULATED_GPUS", spec, "") for spec in ("abc", "-1", "0", "4xFOO", "5000", "2,2")),
    ],
)
def test_a_bad_setting_is_replaced_by_its_default_and_the_log_says_what_it_must_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str, bad: str, must: str
) -> None:
    monkeypatch.chdir(tmp_path)
    default = ServerSettings.defaults()[name.lower()]
    monkeypatch.setenv(name, bad)
    assert getattr(ServerSettings.load(), name.lower()) == default
    (said,) = caplog.messages
    assert said.startswith(f"{name}={bad!r} is not usable ({must}")
    assert said.endswith(f"using the default {default!r}")


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


async def test_lines_of_calls_wait_for_each_other_and_no_other_line_overtakes_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = LogHandler()

    def log(name: str, text: str) -> None:
        handler.handle(logging.LogRecord(name, logging.INFO, "f", 1, text, (), None))

    log("uvicorn.access", "first")
    log("uvicorn.access", "second")
    assert capsys.readouterr().err == ""
    log("gpu_worker_pool", "third")
    assert capsys.readouterr().err == "first\nsecond\nthird\n"
    log("uvicorn.access", "fourth")
    handler.flush()
    assert capsys.readouterr().err == "fourth\n"


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
        ("", [], True),
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


def test_a_file_env_that_cannot_be_read_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfeTITLE=x")
    monkeypatch.chdir(tmp_path)

    assert ServerSettings.load().title == "GPU Statistics Server"
    assert ".env" in caplog.text
