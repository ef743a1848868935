#!/usr/bin/env python3
"""Make docs/images/top.svg: a picture of `gpu-pool top` on a real server with simulated GPUs and invented users.

Run it with `make pictures`. Nothing is drawn by hand: the picture shows what the server answered.
"""

from __future__ import annotations

import io
import time

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from seeded import ROOT, let_them_ask, seeded_server

from gpu_worker_pool.cli.commands.status import PoolsSeen, show
from gpu_worker_pool.cli.output import Console as TerminalConsole
from gpu_worker_pool.cli.pools.forecast import forecast_line
from gpu_worker_pool.cli.pools.reading import ask_pools
from gpu_worker_pool.cli.pools.servers import Servers

PICTURE = ROOT / "docs" / "images" / "top.svg"
COLUMNS = 120
LOOKS_PER_S = 1
STEP_S = 1.0

# As rich's own, but for the fonts: rich's are loaded from the internet, which a picture must not need.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <!-- Made by scripts/picture_of_top.py -->
    <style>
    .{unique_id}-matrix {{
        font-family: "DejaVu Sans Mono", Menlo, Consolas, "Liberation Mono", monospace;
        font-size: {char_height}px;
        line-height: {line_height}px;
    }}
    .{unique_id}-title {{
        font-size: 18px;
        font-weight: bold;
        font-family: system-ui, "DejaVu Sans", Arial, sans-serif;
    }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix" xml:space="preserve">
    {matrix}
    </g>
    </g>
</svg>
"""
THEME = TerminalTheme(
    (22, 24, 29),
    (214, 218, 224),
    [
        (40, 44, 52),
        (240, 98, 108),
        (126, 200, 110),
        (229, 186, 94),
        (97, 160, 240),
        (205, 130, 230),
        (86, 190, 205),
        (214, 218, 224),
    ],
    [
        (105, 112, 125),
        (255, 120, 130),
        (150, 220, 130),
        (245, 205, 120),
        (125, 180, 255),
        (220, 150, 245),
        (110, 210, 225),
        (255, 255, 255),
    ],
)


def main() -> None:
    """Start the server, let the invented users ask, take the picture, stop everything."""
    with seeded_server(looks_per_s=LOOKS_PER_S) as url:
        svg = _take(url)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE} is written")  # noqa: T201


def _take(url: str) -> str:
    let_them_ask(url, STEP_S)
    seen = Servers([url]).run(_look)
    drawn = io.StringIO()
    show(TerminalConsole(drawn, is_terminal=True, width=COLUMNS, has_colours=True), seen, time.time())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(drawn.getvalue()), end="")
    return console.export_svg(title="gpu-pool top", theme=THEME, code_format=SVG, unique_id="gpu-pool-top")


async def _look(servers: Servers) -> PoolsSeen:
    reports = await ask_pools(servers)
    return PoolsSeen(reports, await forecast_line(servers, reports, time.time()))


if __name__ == "__main__":
    main()
