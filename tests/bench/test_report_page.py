"""The report in a real browser: nothing on the console, nothing from a network, everything visible on desktop and phone."""

import os

import pytest

from sb3_ano.bench.cli import main
from tests.bench.chromium import find_chromium, headless
from tests.bench.synthetic_results import write_results

# On a machine of continuous integration, a browser that is missing is a failure.
pytestmark = pytest.mark.skipif(
    find_chromium() is None and not os.environ.get("CI"), reason="Chromium is not installed (apt-get install chromium)"
)
WINDOWS = {"desktop": (1280, 900, False), "phone": (390, 844, True)}
_FIGURES = """
[...document.querySelectorAll("figure img")].map((image) => {
  image.scrollIntoView({behavior: "instant", block: "start"});
  const box = image.getBoundingClientRect();
  const hit = document.elementFromPoint(box.left + box.width / 2, Math.max(1, box.top + Math.min(box.height, 200) / 2));
  return {name: image.closest("figure").id, left: box.left, right: box.right, width: box.width, height: box.height,
          drawn: image.complete && image.naturalWidth > 0, shown: hit === image};
})
"""
_COLUMN = """
(() => {
  const table = [...document.querySelectorAll("table")].find((one) => one.caption.textContent.startsWith("All settings"));
  const heading = [...table.tHead.rows[0].cells].find((one) => one.textContent === "IQM");
  const click = () => heading.querySelector("button").click();
  const values = () => [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[heading.cellIndex].textContent));
  click();
  const up = [heading.getAttribute("aria-sort"), values()];
  click();
  return [up, [heading.getAttribute("aria-sort"), values()]];
})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [
        {"env_id": env_id, "algorithm": algorithm, "seed": seed, "final": final * (1 - 100 * rate) + 30 * seed}
        | {"settings": {"learning_rate": rate, "clip_range": clip_range}}
        for env_id in ("HalfCheetah-v4", "Hopper-v4", "Own-v0")
        for algorithm, final in (("ppo", 2000), ("spo", 2100), ("ano", 2400))
        for rate, clip_range in ((3e-4, 0.1), (3e-4, 0.2), (1e-3, 0.2))
        for seed in (0, 1)
    ]
    write_results(folder / "results", runs)
    assert main(["report", str(folder / "results"), "--reps", "20"]) == 0
    return folder / "results" / "report" / "index.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    executable = find_chromium()
    assert executable is not None, "CI is set, and there is no Chromium"
    with headless(executable, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("window", WINDOWS)
def test_figures_are_visible_and_the_console_is_silent(page, tab, window, tmp_path):
    width, height, phone = WINDOWS[window]
    tab.open(page, width, height, phone)
    figures = tab.evaluate(_FIGURES)
    (tmp_path / f"{window}.png").write_bytes(tab.screenshot())
    assert len(figures) == len(list((page.parent / "figures").glob("*.png"))) > 10
    for figure in figures:
        assert figure["drawn"], figure
        assert figure["shown"], figure
        assert 0 <= figure["left"] < figure["right"] <= width, figure
        assert min(figure["width"] / 300, figure["height"] / 50) >= 1, figure
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # the page itself does not scroll sideways
    assert tab.complaints() == []


def test_complaints_and_requests_would_be_seen(tab, tmp_path):
    (tmp_path / "bad.html").write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('bad'); missing()</script>")
    tab.open(tmp_path / "bad.html", 800, 600, False)
    said = " ".join(tab.complaints())
    assert "bad" in said
    assert "missing is not defined" in said
    assert "request to http://127.0.0.1:9/x.png" in said


def test_tables_are_sorted_by_their_headings(page, tab):
    tab.open(page, 1280, 900, False)
    (up, rising), (down, falling) = tab.evaluate(_COLUMN)
    assert (up, down) == ("ascending", "descending")
    assert rising == sorted(rising)
    assert falling == sorted(rising, reverse=True)
    assert len(set(rising)) > 3


def test_runs_are_named_on_demand(page, tab):
    tab.open(page, 1280, 900, False)
    visible = "document.querySelector('tbody details code').checkVisibility()"
    assert tab.evaluate(visible) is False
    tab.evaluate("document.querySelector('tbody details summary').click()")
    assert tab.evaluate(visible) is True
    assert "__seed{0,1}" in tab.evaluate("document.querySelector('tbody details code').textContent")
