"""The report in a real browser: an empty console, no request, and visible figures on desktop, phone and paper."""

import html
import itertools
import json
import os
import re
import shutil
import subprocess

import pytest

from sb3_ano.bench.report import Settings, write_report
from sb3_ano.bench.statistics import Bootstrap
from tests.bench.common import runs, write_results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# On a machine of continuous integration, a browser that is missing is a failure.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="Chromium is not installed"),
]
# Measures the page in a frame of the given width, and leaves the numbers as the frame's page.
SCRIPT = """<body style="margin: 0"><iframe src="PAGE" style="width: WIDTHpx; height: 800px; border: 0"></iframe><script>
document.querySelector("iframe").onload = (event) => {
  const page = event.target.contentDocument;
  const figures = [...page.querySelectorAll("figure img")].map((image) => {
    image.scrollIntoView({behavior: "instant", block: "start"});
    const box = image.parentElement.getBoundingClientRect();  // in which wide figures scroll
    const hit = page.elementFromPoint(box.left + box.width / 2, Math.max(1, box.top + Math.min(box.height, 200) / 2));
    return {left: box.left, right: box.right, width: box.width, height: box.height,
            visible: image.complete && image.naturalWidth > 0 && hit === image};
  });
  const right = Math.max(0, ...[...page.querySelectorAll("table, img")].map(item => item.getBoundingClientRect().right));
  const requests = event.target.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name);
  document.body.textContent = JSON.stringify({figures, right, requests, width: page.documentElement.scrollWidth});
};
</script>"""


def opened(page, width):
    """Return the measurements of a page, and the messages of its console."""
    frame = page.with_name("frame.html")
    frame.write_text(SCRIPT.replace("PAGE", page.name).replace("WIDTH", str(width)))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files"]
    options += ["--dump-dom", "--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1400,900"]
    command = [CHROMIUM, *options, f"--user-data-dir={page.parent / 'profile'}", frame.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    body = html.unescape(re.search("<body[^>]*>(.*)</body>", finished.stdout, re.DOTALL)[1])
    return json.loads(body), [line for line in finished.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    tasks, rates = ["HalfCheetah-v4", "Hopper-v4", "Own-v0"], ({}, {"learning_rate": "lin_0.001"})
    finals = {"ppo": 2000, "spo": 2100, "ano:shaping=spo,desired_kl=0.01": 2400}
    for changed, name in itertools.product(rates, finals):
        write_results(directory, runs(tasks, [name], (0, 1), finals[name], changed=changed))
    write_report(directory, directory / "report", Settings(bootstrap=Bootstrap(reps=20)))
    return directory / "report" / "index.html"


# Review bench B7: wide tables were cut off on paper.
@pytest.mark.parametrize(("medium", "width"), [("screen", 1300), ("screen", 400), ("print", 720)])  # A4 with margins
def test_figures_are_visible_and_the_console_is_silent(page, medium, width):
    shown = page.with_name(f"{medium}.html")
    shown.write_text(page.read_text().replace(f"@media {medium}", "@media all"))
    measured, console = opened(shown, width)
    assert measured["requests"] == console == []
    assert 0 < measured["width"] <= width  # the page itself does not scroll sideways
    assert medium == "screen" or measured["right"] <= width
    assert len(measured["figures"]) == len(list((page.parent / "figures").glob("*.png"))) > 8
    for figure in measured["figures"]:
        assert figure["visible"], figure
        assert 0 <= figure["left"] < figure["right"] <= width, figure
        assert min(figure["width"] / 300, figure["height"] / 40) >= 1, figure


def test_messages_and_requests_would_be_seen(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('bad'); missing()</script>")
    measured, console = opened(bad, 800)
    assert measured["requests"] == ["http://127.0.0.1:9/x.png"]
    assert [part in line for part, line in zip(('"bad"', "missing is not defined"), console, strict=True)] == [True, True]
