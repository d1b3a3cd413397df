"""What `longspan plan --model` says is near published training runs, and the command that shows it can fail."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_models
from benchmarks.published_models import MAX_MEMORY, MAX_TIME, OF_SUSTAINED, Figure, figures, fixed_share
from benchmarks.published_runs import CONFIGS, FIXED, HOST, SOURCES, SUSTAINED, runs
from longspan.planning.machine import A100, B200, H100
from longspan.sizing import sizes_of

PUBLISHED = {"qwen3-0.6b": 0.596, "qwen3-4b": 4.02, "llama2-7b": 6.74, "llama2-13b": 13.0, "llama2-70b": 69.0}
"""Parameters in 1e9, as their makers say."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_are_those_that_ran(name):
    assert abs(sizes_of(CONFIGS[name]).params / 1e9 / PUBLISHED[name] - 1) < 0.01


def test_every_judged_figure_is_within_its_bar_and_the_command_says_so(capsys):
    assert published_models.main([]) == 0
    out = capsys.readouterr().out
    assert "figures judged, 0 further off than 25% (time) or 15% (memory)" in out
    assert "Not represented:" in out
    for source in SOURCES:
        assert f"\n{source}: " in out


def test_the_page_shows_every_judged_figure(capsys):
    assert published_models.main(["--page"]) == 0
    table = capsys.readouterr().out
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert table in text
    assert table.count("\n") - 2 == sum(len(figures(run)) for run in runs() if not run.unjudged)
    ours = {f"{machine.flops * machine.matmul_share / 1e12:,.0f}" for machine in (H100, B200, A100)}
    (said,) = re.findall(r"(\d+) TFLOP/s on an H100, (\d+) on a B200, (\d+) on an A100", text)
    assert set(said) == ours
    hosts = sum(run.unjudged == HOST for run in runs())
    assert (hosts, "ten runs whose optimizer" in text) == (10, True)


def test_enough_is_judged():
    judged = [figure for run in runs() if not run.unjudged for figure in figures(run)]
    assert sum(figure.what == "time" for figure in judged) >= 15
    assert sum(figure.what == "memory" for figure in judged) >= 4
    assert len({figure.run.source for figure in judged}) >= 4
    assert not any(run.tokens == FIXED.tokens and not run.recipe.checkpointing for run in runs())


def test_what_may_be_the_hosts_time_is_not_judged():
    found = [run for run in runs() if run.unjudged == HOST]
    assert found
    for run in found:
        shortest = min(one.seconds for one in runs() if one.source == run.source and one.machine == run.machine)
        assert 10 * shortest > run.seconds


def test_a_figure_that_is_too_far_off_is_noticed(monkeypatch, capsys):
    run = next(run for run in runs() if not run.unjudged and run.peak is not None)
    for what, bar in (("time", MAX_TIME), ("memory", MAX_MEMORY)):
        assert Figure(run, what, 100.0, 100.0 * (1 + bar) + 1).outside
        assert Figure(run, what, 100.0, 100.0 * (1 - bar) - 1).outside
        assert not Figure(run, what, 100.0, 100.0 * (1 + bar) - 1).outside
        assert not Figure(replace(run, unjudged="a reason"), what, 100.0, 1000.0).outside
    monkeypatch.setattr(published_models, "runs", lambda: [replace(run, seconds=run.seconds / 2)])
    assert published_models.main([]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_rate_of_products_is_the_one_that_was_fixed(monkeypatch):
    factor = fixed_share() * FIXED.machine.flops / SUSTAINED
    assert abs(factor / OF_SUSTAINED - 1) < 0.02
    assert FIXED.machine.matmul_share * FIXED.machine.flops / SUSTAINED == pytest.approx(OF_SUSTAINED)
    monkeypatch.setattr(published_models, "OF_SUSTAINED", 0.8)
    monkeypatch.setattr(published_models, "runs", list)
    assert published_models.main([]) == 1
