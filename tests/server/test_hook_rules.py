"""The operator's file of rules: what it may say, and what is said of a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_worker_pool.notify.notice import Occasion
from gpu_worker_pool.notify.rules import AppriseUrl, Program, Rule
from gpu_worker_pool.server.hooks import RulesUnusable, read_rules
from tests.documents.blocks import all_blocks

GOOD = """
[[hook]]
on = ["lost", "idle"]
owner = "ada"
url = "ntfy://a-secret-topic"
timeout_s = 5

[[hook]]
on = ["node_unknown"]
node = "gpu-*"
command = ["/usr/local/bin/page", "operator"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "hooks.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def test_rules_are_read(tmp_path: Path) -> None:
    rules = read_rules(written(tmp_path, GOOD))

    assert rules == (
        Rule(
            frozenset({Occasion.LOST, Occasion.IDLE}),
            AppriseUrl("ntfy://a-secret-topic"),
            owner="ada",
            timeout_s=5,
            number=1,
        ),
        Rule(frozenset({Occasion.NODE_UNKNOWN}), Program(("/usr/local/bin/page", "operator")), node="gpu-*", number=2),
    )
    assert "a-secret-topic" not in f"{rules} {rules[0]}"


def test_the_rules_in_the_document_are_rules(tmp_path: Path) -> None:
    (block,) = (block for block in all_blocks() if block.language == "toml")

    rules = read_rules(written(tmp_path, block.text))

    assert len(rules) == block.text.count("[[hook]]") == 3


HOOK = '[[hook]]\non = ["lost"]\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[hook", "is not TOML"),
        ("allow = []", "'allow' is not known here"),
        ("hook = 3", "begin each with"),
        (HOOK, "hook 1: give it a url or a command"),
        (f'{HOOK}url = "ntfy://s3cr3t"\ncommand = ["/bin/true"]', "and not both"),
        (f'{HOOK}command = "/bin/true"', "hook 1: command: "),
        (f'{HOOK}command = ["true"]', "the path of a program"),
        (
            f'{HOOK}url = "carrier-pigeon://s3cr3t"',
            "hook 1 (carrier-pigeon://…) cannot be used: Apprise does not know it",
        ),
        (f'{HOOK}url = "https://lab.example/s3cr3t"', "write jsons:// instead of https://"),
        (f'{HOOK}url = "s3cr3t"', "hook 1 (…) cannot be used: Apprise does not know it; it must begin with ntfy://"),
        (
            f'{HOOK}command = ["/bin/true"]\ntimeout_s = 0',
            "timeout_s: 0 cannot be used; it must be a number from 0.1 to 300",
        ),
        ('[[hook]]\ncommand = ["/bin/true"]', "on is missing"),
        ('[[hook]]\non = ["granted", "gone"]\ncommand = ["/bin/true"]', 'on.1: "gone" cannot be used'),
        (f'{HOOK}mail = "a@b.c"', "mail: there is no such field; it must be one of on, owner, node, url, command"),
        (f'{GOOD}{HOOK}url = "foo://s3cr3t"', "hook 3 (foo://…) cannot be used"),
    ],
)
def test_a_mistake_is_said_without_a_secret(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(RulesUnusable) as caught:
        read_rules(written(tmp_path, text))
    assert fault in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_a_file_with_urls_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    path.chmod(0o644)
    with pytest.raises(RulesUnusable, match=f"every user can read .*0644.* chmod 600 {path}"):
        read_rules(path)
    path.chmod(0o640)
    assert len(read_rules(path)) == 2, "a group may be that of the server"


def test_a_file_that_others_can_change_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    path.chmod(0o666)

    with pytest.raises(RulesUnusable, match=f"chmod go-w {path}"):
        read_rules(path)
    with pytest.raises(RulesUnusable, match="cannot be read"):
        read_rules(tmp_path / "none")


def test_a_file_that_others_can_replace_is_refused_also_behind_links(tmp_path: Path) -> None:
    opened = tmp_path / "open"
    opened.mkdir()
    path = written(opened, "")
    link = tmp_path / "link"
    link.symlink_to("open/../open/hooks.toml")
    over = tmp_path / "over"
    over.symlink_to(link)
    for asked in (path, link, over):
        assert read_rules(asked) == ()

    opened.chmod(0o777)
    for asked in (path, link, over):
        with pytest.raises(RulesUnusable, match=f"other users could change .*{opened} .*; chmod go-w"):
            read_rules(asked)
    opened.chmod(0o1777)
    assert read_rules(path) == (), "none can replace a file of another user there"

    link.unlink()
    link.symlink_to(over)
    with pytest.raises(RulesUnusable, match="cannot be read"):
        read_rules(over)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given", ["link", "hooks.toml", "."])
def test_a_file_or_link_of_another_user_is_refused(tmp_path: Path, given: str) -> None:
    written(tmp_path, "")
    (tmp_path / "link").symlink_to("hooks.toml")
    os.chown(tmp_path / given, 4242, 4242, follow_symlinks=False)

    with pytest.raises(RulesUnusable, match=r"belongs to another user \(uid 4242\)"):
        read_rules(tmp_path / "link")
