"""Reports: self-contained, escaped, true to the plan, repeatable, and shown by a browser that is asked for nothing."""

import html
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import longspan as ls
from longspan.cli import main
from longspan.cli.workload import drawn_lengths
from longspan.formatting import bytes_text, seconds_text
from longspan.planning.machine import H100
from longspan.viz import report_html
from longspan.viz.plan_pictures import runs

pytest.importorskip("matplotlib")

HOSTILE = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "link", "img", "br"}
ALLOWED = {
    "html", "head", "meta", "link", "title", "style", "body", "h1", "h2", "p", "div", "b", "span", "table", "tr", "th",
    "td", "figure", "figcaption", "pre", "footer", "svg", "desc", "g", "defs", "path", "use", "clippath", "rect",
    "text",
}  # fmt: skip


class Reader(HTMLParser):
    """Tags, attributes and text of a page; refuses tags that do not close."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check_safe(page: str) -> Reader:
    """Only our own tags, nothing that runs, nothing that is fetched."""
    found = Reader(page)
    assert set(found.tags) <= ALLOWED, set(found.tags) - ALLOWED
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in {"src", "action", "srcset", "formaction"}, (tag, name)
        assert name != "href" or (tag, value) == ("link", "data:,")
        assert name != "xlink:href" or re.fullmatch(r"#\w+", value)  # a marker of the same page
        assert name != "style" or tag in {"path", "use", "text", "g"} or re.fullmatch(r"width:[\d.]+%", value)
    policies = [value for tag, name, value in found.attributes if (tag, name) == ("meta", "content")]
    assert any(value.startswith("default-src 'none';") for value in policies)
    assert not re.search(r"@import|url\((?!#)|expression\(", page)
    return found


def made(ranks=4, lengths=(700, 1200, 148), **more):
    mask = ls.masks.documents(list(lengths)) & ls.masks.causal()
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    return ls.plan(mask, ls.layouts.balanced(mask, world_size=ranks), **sizes, **more)


def test_a_report_says_what_the_plan_says():
    plan = made()
    text = check_safe(report_html(plan, command="longspan report", python="import longspan", version="1.2.3")).text
    for reason in plan.reasons:
        assert reason.scheme in text
        if not reason.at_least:
            assert seconds_text(reason.seconds) in text
            assert bytes_text(reason.bytes_received) in text
    for rank in range(4):
        received = [bytes_text(plan.bytes_received(rank, way)) for way in ("forward", "backward")]
        tokens = f"{int(plan.layout.num_tokens[rank]):,}"
        assert re.search(
            rf"\b{rank} {tokens} [\d.]+% {received[0]} {received[1]} {bytes_text(plan.peak_bytes(rank))}", text
        )
    totals = [sum(plan.bytes_received(rank, way) for rank in range(4)) for way in ("forward", "backward")]
    assert f"({totals[0]:,} and {totals[1]:,} bytes)" in text
    for words in (
        "nothing here was run on a GPU", "documents(3) & causal()", "3 that do not see each other, of 148 to 1,200",
        f"{plan.imbalance:.3f}", plan.machine.source, "No machine was named", "longspan 1.2.3", plan.fingerprint,
        "Chosen scheme, and why", f"{len(plan.reasons)} schemes were compared", "Reproduce",
    ):  # fmt: skip
        assert words in text, words


def test_the_lead_gives_the_largest_figures_of_all_ranks():
    plan = made(16, drawn_lengths("mixed", 1 << 16), scheme="exchange")
    most = max(sum(plan.bytes_received(rank, way) for way in ("forward", "backward")) for rank in range(16))
    peak = max(plan.peak_bytes(rank) for rank in range(16))
    assert most == plan.reasons[0].bytes_received
    assert peak >= plan.reasons[0].peak_bytes  # which looks at a few ranks only
    text = check_safe(report_html(plan)).text
    assert f"with at most {bytes_text(most)} received and {bytes_text(peak)} of extra memory" in text


def test_a_named_scheme_and_a_named_machine():
    text = check_safe(report_html(made(scheme="ring", machine="a100", keep=True))).text
    assert "The scheme ring was requested by name" in text
    assert "No machine was named" not in text
    assert "kept for backward" in text


def test_five_pictures():
    page = report_html(made())
    assert check_safe(page).tags.count("svg") == 5
    for title in ("What may attend", "Who holds", "When every rank", "Who sends", "Memory over time"):
        assert title in page


def test_many_ranks_leave_out_what_would_take_minutes():
    plan = made(160, scheme="exchange")
    found = check_safe(report_html(plan))
    assert found.tags.count("svg") == 2
    assert "Timeline, traffic and memory are left out" in found.text


def test_hostile_names():
    mask = ls.masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 64, name=HOSTILE + '"\x00\x1b')
    layout = ls.layouts.Layout.from_spans(64, [[(0, 30)], [(30, 64)]], name=HOSTILE)
    machine = replace(H100, name=HOSTILE, source=HOSTILE)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32", machine=machine)
    page = report_html(
        plan, title=HOSTILE, command=HOSTILE, python=HOSTILE, extra_inputs=((HOSTILE, HOSTILE),), version=HOSTILE
    )
    found = check_safe(page)
    assert found.text.count(HOSTILE) >= 8
    assert "\x00" not in page
    assert "\x1b" not in page


# -- the command ----------------------------------------------------------------------------------------------------

WORKLOADS = [
    ["--docs", "700,1200,148", "--ranks", "4"],
    ["--seq", "8k", "--ranks", "3", "--layout", "zigzag", "--scheme", "ring", "--keep"],
    ["--seq", "8k", "--docs", "longtail", "--seed", "3", "--ranks", "4", "--window", "512", "--machine", "a100"],
    ["--seq", "4k", "--docs", "full", "--ranks", "2", "--layout", "striped", "--dtype", "float32", "--batch", "2"],
    ["--seq", "4k", "--docs", "mixed", "--ranks", "2", "--layout", "per_document", "--v-head-dim", "64"],
    ["--seq", "4k", "--ranks", "2", "--layout", "round_robin_by_work", "--fetch-bytes", "1M", "--scheme", "exchange"],
]


@pytest.mark.parametrize("words", WORKLOADS, ids=lambda words: " ".join(words)[:40])
def test_report_can_be_repeated(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words, "--out", "report.html"]) == 0
    said = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    check_safe(page)
    command, python = (html.unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", page, flags=re.S))
    scope = {}
    exec(python, scope)  # it asserts the fingerprint itself
    assert scope["plan"].fingerprint[:12] in said
    assert command.startswith("longspan report ")
    assert main(shlex.split(command)[1:]) == 0
    assert (tmp_path / "report.html").read_text() == page


def test_report_of_a_file_of_lengths(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(0).integers(20, 90, 40)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    assert main(["report", "--docs", "lengths.txt", "--ranks", "2", "--title", HOSTILE]) == 0
    page = (tmp_path / "report.html").read_text()
    assert check_safe(page).text.count(HOSTILE) >= 2
    exec(html.unescape(re.findall(r"<pre>(.*?)</pre>", page, flags=re.S)[1]), {})


def test_report_json_and_refusals(capsys, tmp_path):
    out = tmp_path / "r.html"
    assert main(["report", *WORKLOADS[0], "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["out"] == str(out)
    assert answer["num_bytes"] == out.stat().st_size
    assert main(["report", "--ranks", "4"]) == 2
    assert "--seq" in capsys.readouterr().err
    assert main(["report", *WORKLOADS[0], "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert "there is no directory" in capsys.readouterr().err


MODELS = [
    ["--model", "qwen3-8b", "--seq", "32k", "--ranks", "4", "--memory", "80", "--price", "2.5"],
    [
        "--model",
        "qwen3-8b",
        "--docs",
        "longtail",
        "--seq",
        "32k",
        "--offload",
        "inputs,optimizer",
        "--mlp-chunks",
        "4",
        "--lora",
        "8",
    ],
    ["--model", "gpt-oss-20b", "--seq", "16k", "--ranks", "2", "--no-checkpointing"],
]


@pytest.mark.parametrize("words", MODELS, ids=lambda words: " ".join(words)[:40])
def test_report_of_a_model_says_what_plan_says(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert main(["report", *words]) == 0
    page = (tmp_path / "report.html").read_text()
    text = check_safe(page).text
    assert figures["model"]["name"] in text
    assert bytes_text(figures["peak_bytes"]) in text
    (command,) = (html.unescape(part) for part in re.findall(r"<pre>(.*?)</pre>", page, flags=re.S))
    assert main(shlex.split(command)[1:]) == 0
    assert (tmp_path / "report.html").read_text() == page


def test_report_of_a_model_that_does_not_fit_and_refusals(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--model", "qwen3-8b", "--seq", "1M", "--ranks", "1", "--memory", "24"]) == 1
    assert "in 24 GB: no, because" in check_safe((tmp_path / "report.html").read_text()).text
    for words, name in (
        (["--model", "qwen3-8b", "--seq", "32k", "--gpus", "8"], "--gpus"),
        (["--model", "qwen3-8b", "--seq", "32k", "--q-heads", "8"], "--q-heads"),
        (["--seq", "32k", "--memory", "80"], "--memory"),
    ):
        assert main(["report", *words]) == 2
        assert name in capsys.readouterr().err


# -- a browser ------------------------------------------------------------------------------------------------------


class Recorder(http.server.BaseHTTPRequestHandler):
    """A proxy that knows one page and writes down what else was asked for."""

    page = b""
    asked: list[str]

    def do_GET(self):
        type(self).asked.append(self.path)
        known = self.path == "http://report.test/"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.page) if known else 0))
        self.end_headers()
        if known:
            self.wfile.write(self.page)

    def do_CONNECT(self):
        type(self).asked.append(self.path)
        self.send_error(403)

    def log_message(self, *_):
        pass


def browser() -> str:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        if os.environ.get("LONGSPAN_CI"):
            pytest.fail("LONGSPAN_CI is set, and no chromium is installed: apt-get install -y chromium")
        pytest.skip("no chromium is installed (apt-get install -y chromium)")
    return found


def shown(page: str, folder, *more: str):
    """(pixels, what was asked for) of a page in a browser whose every request goes through the recorder."""
    imread = pytest.importorskip("matplotlib.image").imread
    handler = type("Handler", (Recorder,), {"page": page.encode(), "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shot = folder / "shot.png"
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        f"--user-data-dir={folder / 'profile'}", f"--proxy-server=127.0.0.1:{server.server_port}",
        "--window-size=1000,2400", f"--screenshot={shot}", *more,
    ]  # fmt: skip
    try:
        subprocess.run([browser(), *flags, "http://report.test/"], check=True, timeout=150, capture_output=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return np.asarray(imread(shot))[..., :3], list(handler.asked)


def of_the_page(asked: list[str]) -> list[str]:
    """Requests without those that a browser makes for itself, to its maker's servers."""
    return [path for path in asked if not re.match(r"(http://)?[\w.-]+\.(google|googleapis|gvt1)\.com[:/]", path)]


def test_a_browser_shows_the_report_and_asks_for_nothing_else(tmp_path):
    page = report_html(made(), title=HOSTILE)
    (tmp_path / "light").mkdir()
    (tmp_path / "dark").mkdir()
    light, asked = shown(page, tmp_path / "light")
    assert of_the_page(asked) == ["http://report.test/"]
    levels = (light.reshape(-1, 3) * 255).round().astype(np.int64) @ [65536, 256, 1]
    assert len(np.unique(levels)) > 200
    assert float(light.std()) > 0.03
    for band in np.array_split(light, 6):  # every part of the page shows something
        assert float(band.std()) > 0.01
    dark, _ = shown(page, tmp_path / "dark", "--blink-settings=preferredColorScheme=0")
    assert float(light.mean()) > 0.8
    assert float(dark.mean()) < 0.35


def test_the_recorder_would_have_seen_a_request(tmp_path):
    page = '<!DOCTYPE html><body>x<img src="http://elsewhere.test/pixel.png"><script src="/code.js"></script></body>'
    _, asked = shown(page, tmp_path)
    assert {"http://elsewhere.test/pixel.png", "http://report.test/code.js"} <= set(asked)


def test_runs_are_kept():
    plan = made()
    assert runs(plan) is runs(plan)
