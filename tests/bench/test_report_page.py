"""The report in a real browser: figures fit on desktop, phone and paper."""

import html
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
    const box = image.parentElement.getBoundingClientRect();  // in which wide figures scroll
    return [image.naturalWidth, box.left, box.right, box.height];
  });
  const right = Math.max(...[...page.querySelectorAll("table, img")].map((item) => item.getBoundingClientRect().right));
  document.body.textContent = JSON.stringify({figures, right, width: page.documentElement.scrollWidth});
};
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    for changed in ({}, {"learning_rate": "lin_0.001"}):
        labels = ["ppo", "spo", "ano:shaping=spo,desired_kl=0.01"]
        write_results(directory, runs(["HalfCheetah-v4", "Hopper-v4", "Own-v0"], labels, (0, 1), changed=changed))
    write_report(directory, directory / "report", Settings(bootstrap=Bootstrap(reps=20)))
    return directory / "report" / "index.html"


# Review bench B7: wide tables were cut off on paper.
@pytest.mark.parametrize(("medium", "width"), [("screen", 1300), ("screen", 400), ("print", 720)])  # A4 with margins
def test_figures_and_tables_fit(page, medium, width):
    page.with_name("page.html").write_text(page.read_text().replace(f"@media {medium}", "@media all"))
    frame = page.with_name("frame.html")
    frame.write_text(SCRIPT.replace("PAGE", "page.html").replace("WIDTH", str(width)))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files"]
    options += ["--dump-dom", "--virtual-time-budget=10000", f"--user-data-dir={page.parent / 'profile'}"]
    finished = subprocess.run([CHROMIUM, *options, frame.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    measured = json.loads(html.unescape(re.search("<body[^>]*>(.*)</body>", finished.stdout, re.DOTALL)[1]))
    assert 0 < measured["width"] <= width  # the page itself does not scroll sideways
    assert medium == "screen" or measured["right"] <= width
    assert len(measured["figures"]) == len(list((page.parent / "figures").glob("*.png"))) > 8
    for pixels, left, right, height in measured["figures"]:
        assert pixels > 0
        assert 0 <= left < left + 300 < right <= width
        assert height > 40
