"""The report in a real browser: no sideways scroll on a phone, nothing loaded, nothing complained of, prints.

Needs Chromium: the system's, or playwright's own (`python -m playwright install chromium`). Skipped where neither is.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_runs import failed_record, figures, record, write_run

from analysis.report import Report, load_sources, write
from executor.record import append_result

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

LONG = "a-model-with-a-name-that-nobody-would-break/at-a-dash-or-slash_because_it_has_none_where_it_matters"


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        found = next(filter(None, map(shutil.which, names)), own)
        if not Path(found).exists():
            pytest.skip(f"no Chromium: none of {', '.join(names)} on the PATH, and playwright has none of its own")
        opened = started.chromium.launch(executable_path=found)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of one run, and one of many with all that is wide: long names, failures, seven losses."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [
        write_run(folder / f"run-{number}", record(f"{number} {LONG}", measured=500.0 + number, ideal=figures(646.0)))
        for number in range(3)
    ]
    append_result(folder / "failed.json", failed_record(LONG, message=f"host memory short by 41 GiB: {LONG * 3}"))
    sources = {"one": runs[:1], "many": [*runs, folder / "failed.json"]}
    return {
        which: write(folder / which, (), "report.html", Report(load_sources(named)).html())[-1]
        for which, named in sources.items()
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("which", ["one", "many"])
def test_page_fits_its_window_in_silence(browser, pages, which, width, scheme):
    said, asked = [], []
    context = browser.new_context(viewport={"width": width, "height": 740}, color_scheme=scheme)
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(pages[which].as_uri())  # until all that it names is loaded; it has no script that could ask later
    assert page.locator("script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("innerWidth") == width  # a page that is too wide would have been zoomed out
    assert said == []
    assert asked == [pages[which].as_uri()]
    # What is wider than its place scrolls in its own box; nothing else sticks out.
    outside = page.evaluate(
        """width => [...document.querySelectorAll("body *")]
            .filter(e => !e.closest(".scroll") && !e.closest("svg g") && e.getBoundingClientRect().right > width + 1)
            .map(e => e.outerHTML.slice(0, 80))""",
        width,
    )
    assert outside == []
    context.close()


def test_wide_table_scrolls_in_its_box_on_a_phone(browser, pages):
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(pages["many"].as_uri())
    table = page.locator(".comparison-table .scroll")
    assert table.evaluate("e => e.scrollWidth > e.clientWidth")
    assert table.evaluate("e => { e.scrollLeft = 1e6; return e.scrollLeft; }") > 0
    page.close()


def test_text_of_figures_is_large_enough_on_a_phone(browser, pages):
    page = browser.new_page(viewport={"width": 360, "height": 740})
    page.goto(pages["one"].as_uri())
    heights = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].filter(e => e.textContent.trim())"
        ".map(e => Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) * parseFloat(getComputedStyle(e).fontSize))"
    )
    assert len(heights) > 50
    assert min(heights) >= 8  # CSS pixels
    page.close()


def test_links_of_the_comparison_lead_to_the_sections(browser, pages):
    page = browser.new_page(viewport={"width": 1200, "height": 700})
    page.goto(pages["many"].as_uri())
    page.locator("table.comparison a").nth(2).click()
    assert page.url.endswith("#run-3")
    assert page.locator("#run-3 h2").evaluate("e => e.getBoundingClientRect().top < innerHeight")
    page.close()


def test_contrast_of_text_is_enough_in_both_schemes(browser, pages):
    """WCAG 2.1, 1.4.3: 4.5 to 1."""

    def luminance(colour: str) -> float:
        channels = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(pages["many"].as_uri())
        ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (ground < 0.2) == (scheme == "dark")
        for selector in ("h1", "p", "figcaption", "footer p", "table a", "td", ".failed"):
            text = luminance(page.locator(selector).first.evaluate("e => getComputedStyle(e).color"))
            assert (max(text, ground) + 0.05) / (min(text, ground) + 0.05) >= 4.5, (scheme, selector)
        context.close()


def test_page_prints(browser, pages, tmp_path):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    for which in ("one", "many"):
        page.goto(pages[which].as_uri())
        written = page.pdf(format="A4", path=tmp_path / f"{which}.pdf")
        assert written.startswith(b"%PDF-")
        assert written.count(b"/Type /Page\n") >= {"one": 2, "many": 6}[which]  # each run begins a page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"  # saves toner
    page.set_viewport_size({"width": 680, "height": 980})  # A4 between the margins, in CSS pixels
    assert page.evaluate("document.documentElement.scrollWidth") <= 680  # nothing is cut off on paper
    context.close()
