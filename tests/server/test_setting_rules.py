"""What a value of a setting must be, and what is said of one that is not."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker_pool.server.setting_rules import (
    Rule,
    Secret,
    like,
    number,
    one_of,
    optional,
    secret,
    text,
    truth,
    whole,
    words,
)
from gpu_worker_pool.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("rule", "given", "found"),
    [
        (whole(0, 10), "7", 7),
        (whole(0, 10), 7, 7),
        (whole(0, 10), "7.0", 7),
        (number(0, 10), "0.5", 0.5),
        (number(0, 1000), "1e2", 100.0),
        (truth, "Yes", True),
        (truth, "0", False),
        (truth, "n", False),
        (truth, False, False),
        (one_of("one", "two"), "TWO", "two"),
        (words(3), "abc", "abc"),
        (like("/[a-z]*", "a path"), "/ab", "/ab"),
        (optional(text), None, None),
        (optional(text), "", ""),
        (secret, "", None),
        (secret, "s", Secret("s")),
        (secret, Secret("s"), Secret("s")),
    ],
)
def test_a_value_that_is_usable(rule: Rule, given: object, found: object) -> None:
    read = rule(given)
    assert (type(read), read) == (type(found), found)


@pytest.mark.parametrize(
    ("rule", "given", "says"),
    [
        (whole(0, 10), "11", "a whole number from 0 to 10"),
        (whole(0, 10), "7.5", "a whole number from 0 to 10"),
        (whole(0, 10), "inf", "a whole number from 0 to 10"),
        (whole(0, 10), "", "a whole number from 0 to 10"),
        (whole(0, 10), None, "a whole number from 0 to 10"),
        (number(0.5, 10), "nan", "a number from 0.5 to 10"),
        (number(0.5, 10), "0.4", "a number from 0.5 to 10"),
        (truth, "perhaps", "true or false"),
        (truth, None, "true or false"),
        (one_of("one", "two"), "three", "one of one, two"),
        (words(3), "", "1 to 3 characters"),
        (words(3), "abcd", "1 to 3 characters"),
        (like("/[a-z]*", "a path"), "/ab\n", "a path"),
        (text, 5, "a text"),
    ],
)
def test_a_value_that_is_not_usable_is_told_what_it_must_be(rule: Rule, given: object, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^it must (be|have) {says}$"):
        rule(given)


@pytest.mark.parametrize("name", ServerSettings.defaults())
def test_the_default_of_each_setting_keeps_its_rule(name: str) -> None:
    default: Any = ServerSettings.defaults()[name]
    assert ServerSettings.read(name, default) == default


def test_a_secret_is_not_shown_with_its_settings() -> None:
    settings = ServerSettings(_env_file=None, gpu_pool_tokens="alice:SECRET", gpu_pool_fleet_key="SECRET")
    assert "SECRET" not in repr(settings)
    assert settings.gpu_pool_tokens is not None
    assert "SECRET" not in f"{settings.gpu_pool_tokens} {settings.gpu_pool_tokens!r}"
    assert settings.gpu_pool_tokens.get_secret_value() == "alice:SECRET"


def test_settings_are_not_changed_after_they_were_made() -> None:
    settings = ServerSettings(_env_file=None)
    with pytest.raises(AttributeError):
        settings.port = 1  # type: ignore[misc]
