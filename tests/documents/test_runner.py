"""What runs the documents notices what is wrong with one; otherwise none of them would be tested."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.documents.blocks import Block, chains_in, parse
from tests.documents.names import hosts_in, port_for
from tests.documents.network import TOKENS, Network
from tests.documents.python_blocks import run_chain
from tests.documents.shell_blocks import Shell

NOBODY = Network({}, {"here": 1, "odd": 2, "even": 3, "old": 4})


def blocks(text: str) -> list[Block]:
    return parse("TEST.md", textwrap.dedent(text))


def run_shell(folder: Path, text: str) -> None:
    (chain,) = chains_in(blocks(text), "bash")
    Shell(folder, NOBODY, chain).run()


def run_python(text: str) -> None:
    (chain,) = chains_in(blocks(text), "python")
    run_chain(chain)


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        ("python -m gpu_worker_pool.gpu_server", True),
        ("uvicorn gpu_worker_pool.gpu_server:app", True),
        ("gpu-pool status", False),
        ("echo python -m gpu_worker_pool.gpu_server", False),
    ],
)
def test_what_starts_a_server_is_seen(command: str, serves: bool) -> None:
    (block,) = blocks(f"```bash\n{command}\n```\n")
    assert block.serves == serves


def test_python_blocks_go_on_where_the_one_before_ended() -> None:
    run_python("""
        ```python
        import asyncio
        ready = asyncio.Event()
        ```
        Text.
        ```python continues
        ready.set()
        await ready.wait()
        print("took", 0.123, "s")
        # took ... s
        ```
    """)


@pytest.mark.parametrize("promise", ["", "# two", "# one\n# two", "# ...two"])
def test_a_python_block_that_prints_something_else_is_noticed(promise: str) -> None:
    with pytest.raises(AssertionError, match=r"TEST.md:1 printed \['one'\]"):
        run_python(f"```python\nprint('one')\n{promise}\n```\n")


def test_shell_blocks_share_a_shell_and_are_held_against_their_json(tmp_path: Path) -> None:
    run_shell(
        tmp_path,
        """
        ```bash
        export WHO=ada
        echo '{"first": 1}'
        ```
        ```json
        {"first": 2}
        ```
        ```bash continues
        echo "{\\"owner\\": \\"$WHO\\"}"
        ```
        ```json
        {"owner": "bob"}
        ```
        """,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```bash\nfalse\necho on\n```\n", "TEST.md:1"),
        ("```bash fails\ntrue\n```\n", "TEST.md:1"),
        ("```bash\npip install numpy\n```\n", "mark this block not-run"),
        ('```bash\necho \'{"a": 1}\'\n```\n```json\n{"b": 1}\n```\n', r"TEST.md:4: \$.b is missing"),
        ("```bash runs-on\ntrue\n```\n", "printed nothing"),
    ],
)
def test_a_shell_block_that_does_something_else_is_noticed(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        run_shell(tmp_path, text)


def test_names_lead_to_servers_and_a_token_goes_along_where_it_is_needed() -> None:
    assert hosts_in("curl gpu-1:8000/pool http://localhost:8000 http://elsewhere:9000") == {"gpu-1", "localhost"}
    hosts = ("localhost", "127.0.0.1", "gpu-1", "gpu-2", "old-box", "box")
    assert [port_for(host, NOBODY.ports) for host in hosts] == [1, 1, 2, 3, 4, 2]
    assert NOBODY.environment("http://gpu-1:8000")["GPU_POOL_TOKEN"] == TOKENS["ada"]
    for text in ("http://localhost:8000", "http://old-box:8000", f"http://gpu-1:8000 {TOKENS['ada']}"):
        assert "GPU_POOL_TOKEN" not in NOBODY.environment(text)
