"""The report in a real browser: nothing on the console, nothing from a network, everything visible on desktop and phone."""

import os

import pytest

from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.statistics import Bootstrap
from tests.bench.chromium import find_chromium, headless
from tests.bench.common import write_results

# On a machine of continuous integration, a browser that is missing is a failure.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None and not os.environ.get("CI"), reason="Chromium is not installed"),
]
WINDOWS = {"desktop": (1300, 900, False), "phone": (400, 844, True)}
_FIGURES = """
[...document.querySelectorAll("figure img")].map((image) => {
  image.scrollIntoView({behavior: "instant", block: "start"});
  const box = image.parentElement.getBoundingClientRect();  // in which wide figures scroll
  const hit = document.elementFromPoint(box.left + box.width / 2, Math.max(1, box.top + Math.min(box.height, 200) / 2));
  return {name: image.alt, left: box.left, right: box.right, width: box.width, height: box.height,
          drawn: image.complete && image.naturalWidth > 0, shown: hit === image};
})
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    runs = [
        {"env_id": env_id, "algorithm": algorithm, "seed": seed, "final": final + 30 * seed, "changed": changed}
        for env_id in ("HalfCheetah-v4", "Hopper-v4", "Own-v0")
        for algorithm, final in (("ppo", 2000), ("spo", 2100), ("ano:shaping=spo,desired_kl=0.01", 2400))
        for changed in ({}, {"learning_rate": "lin_0.001"})
        for seed in (0, 1)
    ]
    write_report(write_results(directory, runs), directory / "report", Settings(bootstrap=Bootstrap(reps=20)))
    return directory / "report" / "index.html"


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
    assert len(figures) == len(list((page.parent / "figures").glob("*.png"))) > 8
    for figure in figures:
        assert figure["drawn"], figure
        assert figure["shown"], figure
        assert 0 <= figure["left"] < figure["right"] <= width, figure
        assert min(figure["width"] / 300, figure["height"] / 40) >= 1, figure
    assert tab.evaluate("document.documentElement.scrollWidth") <= width  # the page itself does not scroll sideways
    assert tab.complaints() == []


# Review bench B7: wide tables were cut off on paper.
def test_nothing_is_cut_off_on_paper(page, tab):
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        tab.open(page, 720, 900, False)  # A4 with margins
        boxes = "[...document.querySelectorAll('table, img')].map(element => element.getBoundingClientRect().right)"
        assert tab.evaluate(f"Math.max(...{boxes})") <= 720
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


def test_complaints_and_requests_would_be_seen(tab, tmp_path):
    (tmp_path / "bad.html").write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('bad'); missing()</script>")
    tab.open(tmp_path / "bad.html", 800, 600, False)
    said = " ".join(tab.complaints())
    assert "bad" in said
    assert "missing is not defined" in said
    assert "request to http://127.0.0.1:9/x.png" in said
