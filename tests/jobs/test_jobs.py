"""How jobs by torchrun are run and judged: each kind of bad end is seen. The jobs: `python -m tests.jobs`."""

import re
from collections import Counter

import pytest

from tests.jobs import pages
from tests.jobs.runner import NOISE, Ended, torchrun
from tests.jobs.scripts import ENDINGS
from tests.jobs.table import Job, chosen, complaints

OK = "import time, os, sys, subprocess\nrank = int(os.environ['RANK'])\nprint('is right', flush=True)\n"


def ran(code, line="is right", root=None, **options):
    job = Job(
        "test", "job", ("--nproc-per-node", "2", "job.py"), OK + code, line, root, int(root is not None), **options
    )
    return complaints(job, job.run())


def test_56_jobs_hold_every_page_and_example_and_all_kinds():
    jobs = chosen(56)
    assert len(jobs) == 56
    assert jobs == chosen(56)
    assert len({str(job) for job in jobs}) == 56
    kinds = Counter(job.kind for job in jobs)
    assert kinds["page"] == len(pages.blocks()) >= 10
    assert kinds["example"] == len(pages.examples()) >= 5
    assert kinds["longspan"] >= 15
    assert kinds["gloo"] >= 5
    assert {job.ranks for job in jobs} == {2, 3, 4}
    assert {job.root is None for job in jobs if job.kind == "longspan"} == {True, False}


def test_three_hundred_jobs_hold_every_ending_and_control():
    jobs = chosen(300)
    assert len(jobs) == 300
    assert {job.name for job in jobs if job.kind == "longspan"} == set(ENDINGS)
    assert {job.name for job in jobs if job.kind == "gloo"} == {n for n, e in ENDINGS.items() if e.gloo is True}
    assert {job.name for job in jobs if job.kind == "command"} >= {"-m longspan verify"}
    most = Counter(str(job) for job in jobs).most_common(1)[0][1]
    assert most <= 4


def test_pages_say_what_their_jobs_are_asked_for():
    """Every example is listed with a line, and every page with a line exists."""
    assert set(pages.EXAMPLES) == set(pages.examples()) >= set(pages.ARGUMENTS)
    assert {page for page, _, _ in pages.blocks()} >= set(pages.LINES)


def test_small_errors_are_small():
    for text in ("0.0e+00", "3.1e-07", "9.9e-05", "1.0e-16"):
        assert re.fullmatch(pages.SMALL, text)
    for text in ("1.0e+00", "1.2e-04", "nan", "2.0e-01"):
        assert not re.fullmatch(pages.SMALL, text)


@pytest.mark.timeout(300)
def test_a_good_job_is_not_complained_about():
    assert ran("") == []
    assert ran("if rank == 1: sys.exit(3)\ntime.sleep(9)", root=("last", 3)) == []


@pytest.mark.share(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("if rank == 1: os.abort()", ("status 1 instead of 0", "it said 'SIGABRT'", "rank 1 failed with -6")),
        ("print('Exception ignored in: nobody', file=sys.stderr)", ("it said 'Exception ignored'",)),
        ("if rank: subprocess.Popen(['sleep', '60'], start_new_session=True)", ("left behind: sleep 60",)),
        ("if rank == 1: sys.exit(3)", ("status 1 instead of 0", "rank 1 failed with 3")),
    ],
)
def test_bad_ends_are_seen(code, said):
    found = ran(code)
    assert set(said) <= set(found), found


@pytest.mark.timeout(300)
def test_the_wrong_root_cause_and_a_missing_line_are_seen():
    found = ran("if rank == 1: sys.exit(3)\ntime.sleep(9)", root=(0, 3), line="never said")
    assert found == ["it never said 'never said'", "root cause (rank, exit code) (1, 3) instead of (0, 3)"]
    found = ran("if rank == 1: sys.exit(4)\ntime.sleep(9)", root=("last", 3))
    assert found == ["root cause (rank, exit code) (1, 4) instead of (1, 3)"]


@pytest.mark.timeout(300)
def test_a_job_that_hangs_is_ended_with_all_its_processes(tmp_path):
    (tmp_path / "job.py").write_text("import time\ntime.sleep(600)")
    ended = torchrun(["--nproc-per-node", "2", "job.py"], tmp_path, timeout=8.0)
    assert ended.status is None
    assert len(ended.left) >= 1
    assert complaints(Job("test", "job", ("--nproc-per-node", "2", "job.py")), ended) == ["it did not end in time"]


def test_noise_is_found_in_both_outputs():
    for words in NOISE:
        assert Ended(0, "", f"... {words} ...", (), (), 1.0).noise() == [words]
        assert Ended(0, f"{words}", "", (), (), 1.0).noise() == [words]
