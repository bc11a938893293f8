"""A browser window on a dashboard."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

PAGES = ("curves", "graph", "timeline", "samples", "buffer", "workers", "weights", "alerts")
TIMEOUT_MS = 60_000
"""Limit for one page on a busy machine."""


class Look:
    """A window, and the complaints of its console.

    Args:
        browser: Playwright's browser.
        address: address of the dashboard, with its token.
        width: width of the window in pixels.
        dark: prefer dark colours.
    """

    def __init__(self, browser: Any, address: str, width: int, dark: bool) -> None:
        scheme = "dark" if dark else "light"
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.complaints: list[str] = []
        self.forgiven: list[str] = []
        """Prefixes of paths that may respond with an error."""
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"{self.page.url}: {error}"))
        self.page.on(
            "dialog",
            lambda dialog: (self.complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()),
        )
        self.home = address.partition("?")[0]
        self.page.goto(address)
        self.page.wait_for_selector("#main[data-shows]")

    def _said(self, message: Any) -> None:
        place = str(message.location.get("url", ""))
        if message.type == "error" and not any(
            path in place for path in ("/favicon.ico", *self.forgiven)
        ):
            self.complaints.append(f"{self.page.url}: {message.text} ({place})")

    def show(self, page: str, **params: object) -> Any:
        """Follow a link to a page, wait until it shows its data, and return its `main`."""
        asked = f"#{page}?{urlencode(params)}" if params else f"#{page}"
        self.page.evaluate("asked => { delete main.dataset.shows; location.hash = asked; }", asked)
        return self.shown(page)

    def shown(self, page: str) -> Any:
        """Wait until a page shows its data."""
        self.page.wait_for_selector(f'#main[data-shows*=\'"{page}"\'], #main[data-shows="problem"]')
        return self.page.locator("#main")

    def open(self, page: str, **params: object) -> Any:
        """Do the same with a fresh document, like a shared link."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.home}#{page}?{urlencode(params)}")
        return self.shown(page)

    def too_wide(self) -> int:
        """Return by how many pixels the document is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")

    def close(self) -> None:
        self._context.close()
