"""Take screenshots of the built site, light and dark, wide and narrow, for a review before a release. They are not
committed.

python -m sphinx -W -n docs build/docs
python -m benchmarks.screenshots build/screenshots

Needs chromium. Exits with 1 if a page scrolls sideways.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).parents[1] / "build" / "docs"
PAGES = (
    "index",
    "tutorial",
    "reference/attention",
    "reference/masks",
    "troubleshooting",
    "notebooks/masks_and_plans",
    "hybrids",
    "command_line",
)
HEIGHT, WIDTHS = 1600, (1280, 400)
# Elements that scroll by themselves, and those outside of the page until they are opened.
MAY_BE_WIDE = "pre, p, .table-wrapper, .sidebar-drawer, .toc-drawer, .highlight, .cell_output, label, svg"
# A window cannot be as narrow as a phone, but a frame can, and media queries use the frame.
FRAME = """<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="{scheme}">
<style>
:root {{ color-scheme: {scheme} }} body {{ margin: 0 }}
iframe {{ border: 0; width: {width}px; height: {height}px; color-scheme: {scheme} }}
</style>
<iframe src="{page}"></iframe><pre id="report"></pre>
<script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  page.body.dataset.theme = "{scheme}";
  page.defaultView.scrollTo({{ top: {down}, behavior: "instant" }});
  const wide = [...page.querySelectorAll("body *")].filter(each => {{
    const box = each.getBoundingClientRect();
    return box.right > root.clientWidth + 1 && box.width > 0 && !each.closest("{may_be_wide}");
  }}).map(each => each.tagName + "." + each.className).slice(0, 8);
  const report = {{ scroll: root.scrollWidth, width: root.clientWidth, wide }};
  document.querySelector("#report").textContent = JSON.stringify(report);
}}
</script>"""


def chromium(*words: str) -> str:
    """Return the browser's output, with flags for a machine without a screen."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is not installed. Install it: apt-get install chromium.")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]
    done = subprocess.run([browser, *flags, *words], capture_output=True, text=True, timeout=120)
    return done.stdout


def shot(page: str, width: int, scheme: str, folder: Path, down: int = 0) -> dict:
    """Take one screenshot at a scroll offset; return the widths that the page reports."""
    name = f"{page.replace('/', '-')}-{width}-{scheme}{f'-{down}' if down else ''}.png"
    about = {"page": f"{(SITE / page).as_uri()}.html", "down": down, "may_be_wide": MAY_BE_WIDE}
    with tempfile.TemporaryDirectory() as place:
        frame = Path(place) / "frame.html"
        frame.write_text(FRAME.format(scheme=scheme, width=width, height=HEIGHT, **about))
        size = f"--window-size={max(width, 520)},{HEIGHT}"
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        words = [*dark, size, "--virtual-time-budget=6000"]
        chromium(*words, f"--screenshot={folder / name}", frame.as_uri())
        output = chromium(*words, "--dump-dom", frame.as_uri())
    report = re.search(r'<pre id="report">(\{.*?\})</pre>', output, re.DOTALL)
    return {"picture": name, **(json.loads(report[1]) if report else {})}


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/screenshots").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bad = 0
    for page in sys.argv[2:] or PAGES:
        name, _, down = page.partition("@")  # tutorial@2000: scrolled down
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                result = shot(name, width, scheme, folder, int(down or 0))
                sideways = result.get("scroll", 0) > result.get("width", 0)
                bad += sideways or "scroll" not in result
                print(result["picture"], "SCROLLS SIDEWAYS" if sideways else "", result.get("wide", "no report"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
