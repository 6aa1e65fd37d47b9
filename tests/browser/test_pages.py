"""Pages as a browser shows them: every curve, as wide as a desk and as a telephone, and nothing from elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exogym_core.results import report
from netgym.cli.main import main
from netsim.units import format_seconds

sys.path.insert(0, str(Path(__file__).parent))
from folders import NAMES, write_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

pytestmark = [pytest.mark.browser, pytest.mark.pictures]

WIDTHS = (390, 1400)
# Of a chart: its curves that are switched on, and whether their colour is on the canvas.
DRAWN = """(chart) => netgym.charts[chart].options.curves.map((curve, position) => {
    const { chart: plot, places } = netgym.charts[chart];
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(curve.colour.slice(at, at + 2), 16));
    const { width, height } = plot.ctx.canvas;
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(plot.ctx.canvas, 0, 0);
    const pixels = copy.getImageData(0, 0, width, height).data;
    let found = 0;
    for (let at = 0; at < pixels.length; at += 4) {
        const [r, g, b, alpha] = [pixels[at], pixels[at + 1], pixels[at + 2], pixels[at + 3]];
        if (alpha > 200 && Math.abs(r - red) + Math.abs(g - green) + Math.abs(b - blue) < 24) found++;
    }
    return [curve.name, plot.series[places[position]].show, found];
})"""
# Elements beyond the right edge that no scrolling box holds.
BEYOND = """() => [...document.querySelectorAll("body *")].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > document.documentElement.clientWidth + 1 && !element.closest(".scroll, pre");
}).map((element) => element.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    one = write_run(folder / "one", is_traced=True)
    assert main(["report", str(one)]) == 0
    others = [
        write_run(folder / f"run-{number}", 1.0 + number, batch_size=8 * number) for number in (1, 2, 3)
    ]
    several = folder / "several.html"
    assert main(["report", *map(str, others), "--group-by", "batch_size", "--out", str(several)]) == 0
    return {"one": one / "report.html", "several": several}


@contextmanager
def opened(browser: Browser, page: Path, width: int = 1400, **options: Any) -> Iterator[Tab]:
    """The page in a tab, of which nothing may go wrong, and from which nothing may be asked for."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on("dialog", lambda dialog: wrong.append("dialog"))
    tab.on("request", lambda request: wrong.append(f"request: {request.url}"))
    tab.goto(page.as_uri())
    try:
        yield tab
        assert wrong == [f"request: {page.as_uri()}"]
    finally:
        context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "several"])
def test_every_curve_is_there_and_nothing_overflows(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    with opened(browser, pages[name], width) as tab:
        for align in ("time", "steps", "bytes"):
            tab.click(f"#curves button:text-is('{align}')")
            drawn = tab.evaluate(DRAWN, 0)
            assert len(drawn) == (len(NAMES) if name == "one" else 3 * len(NAMES))
            for curve, is_shown, pixels in drawn[:8]:
                assert is_shown, curve
                assert pixels > 10, (align, curve)
        assert all(pixels > 10 for _, _, pixels in tab.evaluate(DRAWN, 1)[:8]), "use of the network"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(BEYOND) == []
        is_cut = tab.evaluate("(box => box.scrollWidth > box.clientWidth)(document.querySelector('.scroll'))")
        assert tab.is_visible(".cue") == is_cut, "who must scroll is told so"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "several"])
def test_axe_finds_nothing_serious(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    # Its script is put in from outside, which the page's own policy forbids, as it should.
    with opened(browser, pages[name], width, bypass_csp=True) as tab:
        tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        found = axe.Axe().run(tab).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in serious] == []


def test_curves_are_switched_zoomed_and_read(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["one"]) as tab:
        legend = tab.locator("#curves .legend button").first
        legend.click()
        assert tab.evaluate(DRAWN, 0)[0][1] is False
        legend.click()
        span = "netgym.charts[0].span"
        everything = tab.evaluate(span)
        box = tab.locator("#curves .u-over").bounding_box()
        left, middle = box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2
        tab.mouse.move(left, middle)
        assert "at " in (tab.text_content("#curves .readout") or "")
        tab.mouse.down()
        tab.mouse.move(left + box["width"] * 0.25, middle + 4, steps=4)
        tab.mouse.up()
        zoomed = tab.evaluate(span)
        assert everything[0] < zoomed[0] < zoomed[1] < everything[1]
        tab.click("#curves button:text-is('Show all')")
        assert tab.evaluate(span) == everything
        for axis, scale in (("x", 4), ("y", 1)):
            tab.click(f"#curves button:text-is('log {axis}')")
            assert tab.evaluate(f"netgym.charts[0].chart.scales.{axis}.distr") == scale
        tab.focus("#curves .plot")
        for key in ("+", "ArrowRight", "ArrowRight"):
            tab.keyboard.press(key)
        assert tab.evaluate(span) != everything
        tab.select_option("#curves select", "accuracy")
        assert len(tab.evaluate(DRAWN, 0)) == len(NAMES)


def test_outages_and_absences_are_shown_under_the_cursor(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["one"]) as tab:
        read = """(seconds) => { const { chart, readout } = netgym.charts[0];
            chart.setCursor({ left: chart.valToPos(seconds, "x"), top: 50 }); return readout.textContent; }"""
        assert "down" in tab.evaluate(read, 12.0)
        assert "DiLoCo: without rank 1" in tab.evaluate(read, 13.0)
        assert tab.evaluate(read, 30.0) == "at 30 s"


def test_links_show_what_they_carried(browser: Browser, pages: dict[str, Path]) -> None:
    with opened(browser, pages["one"]) as tab:
        colour = "getComputedStyle(document.querySelector('svg .link[data-link=\"ann->exchange\"]')).stroke"
        move = "(at) => { const slider = document.getElementById('instant'); slider.value = at ?? slider.max;"
        move += " slider.dispatchEvent(new Event('input')); }"
        tab.evaluate(move, 9)
        busy = tab.evaluate(colour)
        assert "busiest is ann to exchange with 100 %" in (tab.text_content("#use .readout") or "")
        tab.select_option("#use select", label="DiLoCo")
        assert "busiest is ann to exchange with 50 %" in (tab.text_content("#use .readout") or "")
        assert tab.evaluate(colour) != busy
        tab.evaluate(move, None)
        assert tab.evaluate(colour) != busy


def test_the_trace_is_handed_to_perfetto_with_the_zoomed_span(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with opened(browser, pages["one"]) as tab:
        tab.evaluate("""() => {
            window.sent = [];
            const other = { postMessage: (message, origin) => {
                sent.push([message, origin]);
                if (message !== "PING") return;
                window.dispatchEvent(Object.assign(new MessageEvent("message",
                    { data: "PONG", origin: "https://ui.perfetto.dev" })));
            } };
            const made = MessageEvent.prototype;
            Object.defineProperty(made, "source", { get: () => other });
            window.open = () => other;
            netgym.charts[0].zoom(2);
        }""")
        tab.click("#perfetto")
        tab.evaluate("new Promise((done) => setInterval(() => sent.length >= 3 && done(), 20))")
        sent = tab.evaluate(
            "sent.map(([message, origin]) => [message.perfetto ? Object.keys(message.perfetto) : message, origin])"
        )
        assert {origin for _, origin in sent} == {"https://ui.perfetto.dev"}
        assert sent[1][0] == ["buffer", "title", "fileName"]
        assert sent[2][0] == ["timeStart", "timeEnd", "viewPercentage"]
        assert tab.evaluate("new Uint8Array(sent[1][0].perfetto.buffer)[0]") == 0x1F, "gzip"


@pytest.mark.parametrize("name", ["one", "several"])
def test_without_javascript_the_pictures_stand(browser: Browser, pages: dict[str, Path], name: str) -> None:
    with opened(browser, pages[name], java_script_enabled=False) as tab:
        pictures = tab.locator("figure.static img")
        assert pictures.count() == 3
        assert pictures.first.is_visible()
        assert not tab.is_visible("#curves")


def test_no_other_script_runs(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["one"].read_text()
    page = tmp_path / "changed.html"
    page.write_text(text.replace("</body>", "<script>window.evil = 1</script></body>"))
    tab = browser.new_page()
    refused: list[str] = []
    tab.on("console", lambda message: refused.append(message.text))
    tab.goto(page.as_uri())
    assert tab.evaluate("window.evil") is None
    assert "Content Security Policy" in refused[0]
    tab.close()


def test_long_times_are_in_their_units(browser: Browser) -> None:
    """As `format_seconds` writes them: five minutes were labelled 1 min."""
    script = (Path(report.__file__).parent / "scripts" / "elements.js").read_text(encoding="utf-8")
    tab = browser.new_page()
    try:
        shown = tab.evaluate(
            f"(() => {{ {script}; return [90, 154, 300, 9240, 172800].map((each) => seconds(each)); }})()"
        )
    finally:
        tab.close()
    assert shown == [format_seconds(each) for each in (90, 154, 300, 9240, 172800)]
