"""Pictures of a run's page as a desk and a telephone show it, and of its network.

    netgym compare examples/home_worker.yaml --out runs/home
    python benchmarks/page_pictures.py runs/home --docs docs

Needs a browser: see `make test-browser`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import harness

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {390: 2400, 1400: 1900}
"""Pixels across, and how many down are kept."""
MOVE = """() => { const slider = document.getElementById("instant"), line = document.querySelector("#use .readout");
    const at = (value) => { slider.value = value; slider.dispatchEvent(new Event("input"));
        return Number((line.textContent.match(/with ([\\d.]+) %/) || [0, 0])[1]); };
    const shares = [...Array(Number(slider.max) + 1).keys()].map(at);
    at(shares.indexOf(Math.max(...shares))); }"""
"""Move the slider over the network to the instant at which a link is busiest."""
NETWORK = """() => { const box = (element) => element.getBoundingClientRect();
    const first = box(document.querySelector("svg.wide-drawing")), last = box(document.getElementById("use"));
    return { x: first.x, y: first.y + scrollY, width: first.width, height: last.bottom - first.y }; }"""
"""Box of the drawing and of the slider below it."""


def main() -> None:
    """Open the page at each width, and keep what is seen."""
    parser = harness.parser(__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--docs", type=Path, required=True, help="where the pictures go")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright  # of the extra `browser`

    page = (given.run / "report.html").resolve()
    with sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width, height in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.goto(page.as_uri())
            tab.evaluate(MOVE)
            tab.screenshot(path=given.docs / f"page-{width}.png")
            if width == max(WIDTHS):
                box = tab.evaluate(NETWORK)
                tab.screenshot(path=given.docs / "page-network.png", full_page=True, clip=box)
            tab.close()
        browser.close()


if __name__ == "__main__":
    main()
