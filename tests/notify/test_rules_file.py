"""The operator's file of rules: what it may say, and what is said of a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_worker_pool.notify.notice import Occasion
from gpu_worker_pool.notify.rule import Mail, Program, Rule, Webhook
from gpu_worker_pool.notify.rules_file import RulesUnusable, read_rules
from tests.documents.blocks import all_blocks

GOOD = """
allow = ["https://hooks.lab/gpu", "http://127.0.0.1:9000"]

[[hook]]
on = ["lost", "idle"]
owner = "ada"
url = "https://hooks.lab/gpu/ada"
secret_file = "SECRET"
timeout_s = 5

[[hook]]
on = ["node_unknown"]
node = "gpu-*"
command = ["/usr/local/bin/page", "operator"]

[[hook]]
on = ["ended"]
mail = "ada@example.org"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "hooks.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def secret_in(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("0123456789abcdef\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def test_rules_are_read(tmp_path: Path) -> None:
    secret = secret_in(tmp_path)

    rules = read_rules(written(tmp_path, GOOD.replace("SECRET", str(secret))))

    assert rules == (
        Rule(
            frozenset({Occasion.LOST, Occasion.IDLE}),
            Webhook("https://hooks.lab/gpu/ada", "0123456789abcdef"),
            owner="ada",
            timeout_s=5,
            number=1,
        ),
        Rule(frozenset({Occasion.NODE_UNKNOWN}), Program(("/usr/local/bin/page", "operator")), node="gpu-*", number=2),
        Rule(frozenset({Occasion.ENDED}), Mail("ada@example.org"), number=3),
    )
    assert "0123456789abcdef" not in repr(rules)


def test_the_rules_in_the_document_are_rules(tmp_path: Path) -> None:
    (block,) = (block for block in all_blocks() if block.language == "toml")
    secret = secret_in(tmp_path)

    rules = read_rules(written(tmp_path, block.text.replace("/etc/gpu-worker-pool/hook-secret", str(secret))))

    assert len(rules) == block.text.count("[[hook]]") == 3


HOOK = '[[hook]]\non = ["lost"]\n'
ALLOW = 'allow = ["https://hooks.lab/gpu"]\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[hook", "is not TOML"),
        ("alow = []", "'alow' is not known"),
        ("allow = 'https://hooks.lab'", "allow must be a list"),
        ("hook = 3", "begin each with"),
        (HOOK, "hook 1: it has no target"),
        (f'{HOOK}mail = "a@b.c"\ncommand = ["/bin/true"]', "give one of url, command, mail"),
        (f'{HOOK}command = "/bin/true"', "command must be a list"),
        (f'{HOOK}command = ["true"]', "the path of a program"),
        (f'{HOOK}mail = "ada"', "it must be one address"),
        (f'{HOOK}mail = "ada@b.c, bob@b.c"', "it must be one address"),
        (f'{HOOK}url = "https://hooks.lab/gpu"', "`allow` does not name it"),
        (f'{ALLOW}{HOOK}url = "https://hooks.lab.evil.example/gpu"', "`allow` does not name it"),
        (f'{ALLOW}{HOOK}url = "https://hooks.lab/gpus"', "`allow` does not name it"),
        (f'{ALLOW}{HOOK}url = "http://hooks.lab/gpu"', "`allow` does not name it"),
        (f'{ALLOW}{HOOK}url = "https://ada:secret@hooks.lab/gpu"', "user name or password"),
        (f'{ALLOW}{HOOK}url = "file:///etc/passwd"', "http:// or https://"),
        (f'{ALLOW}{HOOK}url = "https://hooks.lab/gpu"\nsecret_file = "/nonexistent"', "cannot be read"),
        (f'{HOOK}mail = "a@b.c"\ntimeout_s = 0', "timeout_s is 0"),
        (f'{HOOK}mail = "a@b.c"\nowner = 3', "owner must be a text"),
        ('[[hook]]\nmail = "a@b.c"', "on names no occasion"),
        ('[[hook]]\non = ["granted", "gone"]\nmail = "a@b.c"', "on has 'gone'"),
        (f'{HOOK}mail = "a@b.c"\nuser = "x"', "'user' is not known"),
    ],
)
def test_a_mistake_is_said(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(RulesUnusable) as caught:
        read_rules(written(tmp_path, text))
    assert fault in str(caught.value)
    assert "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "/../other",
        "/%2e%2E/other",
        "/%252e%252e/other",
        "/..%2fother",
        "/./x",
        "/x/..",
        r"/..\\other",
        "/..;a/other",
        "/%5c",
    ],
)
def test_a_url_that_could_lead_out_of_what_is_allowed_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(RulesUnusable, match="could lead out of what `allow` names"):
        read_rules(written(tmp_path, f'{ALLOW}{HOOK}url = "https://hooks.lab/gpu{path}"'))


def test_dots_that_are_no_part_of_their_own_are_allowed(tmp_path: Path) -> None:
    (rule,) = read_rules(written(tmp_path, f'{ALLOW}{HOOK}url = "https://hooks.lab/gpu/v1.2/..x?to=../y"'))
    assert rule.target == Webhook("https://hooks.lab/gpu/v1.2/..x?to=../y")


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


def test_a_secret_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    secret = secret_in(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(secret)
    path = written(tmp_path, f'{ALLOW}{HOOK}url = "https://hooks.lab/gpu"\nsecret_file = "{link}"')
    secret.chmod(0o644)
    with pytest.raises(RulesUnusable, match=f"hook 1: every user can read .*0644.* chmod 600 {secret}"):
        read_rules(path)
    secret.chmod(0o660)
    with pytest.raises(RulesUnusable, match="other users could change secret_file"):
        read_rules(path)
    secret.chmod(0o640)
    assert len(read_rules(path)) == 1, "a group may be that of the server"
