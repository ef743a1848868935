"""What the accessibility checker axe has to say about a page."""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Page

_SOURCE = files("axe_playwright_python") / "axe.min.js"
_RUN = "async () => (await axe.run(document, {resultTypes: ['violations'], selectors: false})).violations"


def findings(page: Page) -> list[str]:
    """A line for each element that axe finds something wrong with, as the page is now."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_SOURCE.read_text(encoding="utf-8"))  # by the debugger, which no policy of the page stops
    return [
        f"{rule['id']} ({rule['impact']}): {element['html']}: {element['failureSummary']}"
        for rule in page.evaluate(_RUN)
        for element in rule["nodes"]
    ]
