"""A release: wheel and sdist from one command, the version from one place, and a clean environment where it works."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from types import SimpleNamespace

import pytest

import longspan
from tests.house.test_docs import ROOT
from tests.house.test_docs import blocks as readme_blocks


def output_of(command, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What `python -m build` made: the sdist, and from it the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    output_of([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return SimpleNamespace(wheel=wheel, sdist=sdist)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A new environment with the wheel; torch and numpy are borrowed from this one, and nothing else of it is taken."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    output_of([*pip, "install", "--quiet", "--no-deps", "--no-index", built.wheel])
    paths = output_of([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    # Only after pip, which would count an editable install over there as ours. Its .pth files are not followed.
    with open(os.path.join(paths.strip(), "borrowed.pth"), "w") as file:
        file.write(sysconfig.get_path("purelib") + "\n")
    return folder


def test_wheel_has_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built.wheel).namelist()
    assert "longspan/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"longspan", f"longspan-{longspan.__version__}.dist-info"}
    packed = {name for name in names if name.endswith(".py")}
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert packed == source
    assert not [name for name in packed if re.search(r"(^|/)(test_|conftest)", name)]


def test_wheel_says_what_it_is(built):
    archive = zipfile.ZipFile(built.wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(archive.read(name).decode())
    assert (said["Name"], said["Version"], said["License-Expression"]) == (
        "longspan",
        longspan.__version__,
        "Apache-2.0",
    )
    needed = [text for text in said.get_all("Requires-Dist") if "extra ==" not in text]
    assert sorted(re.match(r"\w+", text)[0] for text in needed) == ["numpy", "torch"]


def test_sdist_can_be_tested(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "conftest.py", "docs/conf.py"]
    assert {*wanted, "src/longspan/py.typed", "tests/pool.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_version_stands_in_one_place():
    """Everything else reads it: the build, the package, the documentation, the command."""
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "docs", ".")
        for path in (ROOT / folder).glob("*.*" if folder == "." else "**/*.*")
        if path.suffix in (".py", ".toml", ".cff") and longspan.__version__ in path.read_text()
    ]
    assert len(found) == 1, found
    assert f'path = "{found[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_readme_example_runs_in_a_clean_environment(installed, tmp_path):
    code = next(code for kind, code in readme_blocks("README.md") if not kind)
    printed = output_of([installed / "bin" / "python", "-c", code + "\nprint(ls.__file__)"], cwd=tmp_path)
    assert "tensor(True)" in printed
    assert printed.splitlines()[-1].startswith(str(installed))


def test_command_answers_in_a_clean_environment(installed, tmp_path):
    command = installed / "bin" / "longspan"
    assert "plan" in output_of([command, "--help"], cwd=tmp_path)
    assert longspan.__version__ in output_of([command, "--version"], cwd=tmp_path)
    said = output_of([command, "plan", "--seq", "1M", "--ranks", "64", "--docs", "longtail", "--plain"], cwd=tmp_path)
    assert "1,048,576 tokens on 64 ranks" in said


def test_changelog_and_citation():
    said = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## ({re.escape(longspan.__version__)}|Unreleased)\b", said, re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text()
    for key in ("cff-version", "message", "title", "authors", "license"):
        assert re.search(rf"^{key}:", cited, re.MULTILINE), key
    assert "Apache-2.0" in cited
