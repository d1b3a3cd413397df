"""README in a browser as a code host shows it: GitHub-flavoured Markdown, GitHub's sizes, 1280 x 900 pixels.

python -m tests.house.readme_page readme.png    # the first screen; needs chromium and readme-renderer[md]
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1280, 900
COLUMN = 830  # of text, beside the sidebar of a repository's page

PAGE = """<!doctype html><meta charset="utf-8"><base href="{base}"><style>
body {{ margin: 0 auto; width: {column}px; padding: 32px; background: #fff; color: #1f2328; word-wrap: break-word;
  font: 16px/1.5 -apple-system, BlinkMacSystemFont, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; }}
h1, h2 {{ margin: 24px 0 16px; font-weight: 600; line-height: 1.25; border-bottom: 1px solid #d1d9e0b3; }}
h1 {{ font-size: 2em; padding-bottom: .3em; margin-top: 0; }} h2 {{ font-size: 1.5em; padding-bottom: .3em; }}
p, pre, table, ul {{ margin: 0 0 16px; }} a {{ color: #0969da; text-decoration: none; }}
code, pre {{ font: 13.6px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }}
pre {{ padding: 16px; overflow: auto; background: #f6f8fa; border-radius: 6px; }}
:not(pre) > code {{ padding: .2em .4em; background: #818b981f; border-radius: 6px; }}
table {{ display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse; }}
th, td {{ padding: 6px 13px; border: 1px solid #d1d9e0; }} tr:nth-child(2n) td {{ background: #f6f8fa; }}
img {{ max-width: 100%; }} img[align=right] {{ padding-left: 20px; box-sizing: content-box; }}
</style>{body}<pre id="report" style="display: none"></pre><script>
onload = () => {{
  const boxes = [...document.querySelectorAll("h1, h2, p, pre, img, table")].map(each => {{
    const box = each.getBoundingClientRect();
    const cut = each.tagName === "PRE" && each.scrollWidth > each.clientWidth;
    return {{ tag: each.tagName.toLowerCase(), text: each.innerText || "", top: box.top, bottom: box.bottom,
              right: box.right, height: box.height, shown: each.naturalWidth !== 0, cut }};
  }}).filter(each => each.height > 0);
  document.querySelector("#report").textContent = JSON.stringify(boxes);
}};
</script>"""


def find_browser() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def page_of(text: str) -> str:
    """Return a page with the text rendered as GitHub-flavoured Markdown, its relative links from the repository."""
    from readme_renderer.markdown import render

    body = render(text)
    assert body is not None
    return PAGE.format(base=f"{ROOT.as_uri()}/", column=COLUMN, body=body)


def look(text: str, picture: Path | None = None) -> list[dict]:
    """Return the place of every heading, paragraph, block of code, picture and table on the page, from the top down."""
    import matplotlib.image as plt

    browser = find_browser()
    assert browser is not None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(page_of(text))
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--allow-file-access-from-files", f"--user-data-dir={folder}/profile",
            f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=5000",
        ]  # fmt: skip
        environment = {**os.environ, "HOME": folder}
        run = {"check": True, "timeout": 150, "capture_output": True, "text": True, "env": environment}
        if picture is not None:  # a browser's window is lower than it says
            taller = f"--window-size={WIDTH},{HEIGHT + 200}"
            subprocess.run([browser, *flags, taller, f"--screenshot={picture}", page.as_uri()], **run)
            plt.imsave(picture, plt.imread(picture)[:HEIGHT])
        out = subprocess.run([browser, *flags, "--dump-dom", page.as_uri()], **run).stdout
    found = re.search(r'<pre id="report"[^>]*>(\[.*?\])</pre>', out, re.DOTALL)
    assert found, out[-2000:]
    return json.loads(html.unescape(found[1]))


if __name__ == "__main__":
    for box in look((ROOT / "README.md").read_text(), Path(sys.argv[1]).resolve()):
        print(
            f"{box['top']:6.0f} {box['bottom']:6.0f}  {box['tag']:5} {'CUT ' if box['cut'] else ''}{box['text'][:70]!r}"
        )
