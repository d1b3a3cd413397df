"""A release: wheel and sdist from one command, the version from one place, and a clean environment where it works."""

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
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


@pytest.fixture(scope="module")
def check():
    """What looks at a release: .ci/release_check.py."""
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheel_and_sdist_have_what_they_should(built, check):
    assert list(check.wrong_wheel(built.wheel)) == []
    assert list(check.wrong_sdist(built.sdist)) == []


@pytest.mark.parametrize("name", ["longspan/notes.txt", "longspan/test_new.py", "tests/pool.py"])
def test_a_stray_file_in_the_wheel_is_found(built, check, tmp_path, name):
    path = tmp_path / built.wheel.name
    shutil.copy(built.wheel, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "")
    assert list(check.wrong_wheel(path)) == [f"the wheel has {name}"]


@pytest.mark.parametrize(
    ("lost", "added", "said"),
    [
        ("longspan/py.typed", {}, ["the wheel lacks longspan/py.typed"]),
        ("", {"Requires-Dist: matplotlib": "Requires-Dist: requests\nRequires-Dist: matplotlib"}, ["the wheel needs "]),
        ("", {"\nVersion: ": "\nVersion: 1"}, ["the wheel says longspan 1"]),
    ],
)
def test_a_wheel_that_lacks_a_file_or_says_another_thing_is_found(built, check, tmp_path, lost, added, said):
    path = tmp_path / built.wheel.name
    with zipfile.ZipFile(built.wheel) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.endswith("/METADATA"):
                for before, after in added.items():
                    assert before in text.decode()
                    text = text.decode().replace(before, after, 1).encode()
            if name != lost:
                new.writestr(name, text)
    found = list(check.wrong_wheel(path))
    assert len(found) == len(said)
    assert all(line.startswith(words) for line, words in zip(found, said, strict=True))


def test_a_stray_file_in_the_sdist_is_found(check, tmp_path):
    path = tmp_path / "longspan.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (*check.WANTED[1:], "src/longspan/__pycache__/api.pyc"):
            archive.addfile(tarfile.TarInfo(f"longspan-0/{name}"), io.BytesIO())
    found = list(check.wrong_sdist(path))
    assert found == ["the sdist lacks pyproject.toml", "the sdist has src/longspan/__pycache__/api.pyc"]


def test_the_check_ends_with_1_if_anything_is_wrong(built, check, tmp_path, capsys):
    assert check.main(["--files", "--built", str(built.wheel.parent)]) == 0
    assert capsys.readouterr().out.endswith("\nready\n")
    shutil.copy(built.wheel, tmp_path)
    assert check.main(["--files", "--built", str(tmp_path)]) == 1  # the sdist is not there
    assert capsys.readouterr().out.endswith("NOT ready\n")
    steps = check.Steps()
    assert steps.run("right", [sys.executable, "-c", "print('said')"], "said")
    assert steps.ok
    assert not steps.run("silent", [sys.executable, "-c", ""], "said")
    assert not steps.ok


def test_the_version_stands_in_one_place(check):
    """It stands where the build reads it; everything else reads it there."""
    assert check.version() == longspan.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", longspan.__version__)
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "docs", ".")
        for path in (ROOT / folder).glob("*.*" if folder == "." else "**/*.*")
        if path.suffix in (".py", ".toml") and longspan.__version__ in path.read_text()
    ]
    assert found == ["src/longspan/versions.py"]
    assert 'path = "src/longspan/versions.py"' in (ROOT / "pyproject.toml").read_text()


def test_the_changelog_begins_with_the_version(check, monkeypatch):
    assert list(check.wrong_words()) == []
    for other in ("9.9.9", "9.9.0.dev1"):
        monkeypatch.setattr(check, "version", lambda other=other: other)
        assert len(list(check.wrong_words())) == 1


def test_changelog_is_short_and_of_known_parts():
    said = (ROOT / "CHANGELOG.md").read_text()
    assert len(said.splitlines()) <= 150
    heads = re.findall(r"^## (.+)$", said, re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", head) for head in heads[1:])
    kinds = {"What it has", "Added", "Changed", "Removed", "Fixed", "Security", "Numerics"}
    assert set(re.findall(r"^### (.+)$", said, re.MULTILINE)) <= kinds


def test_the_project_names_no_home_and_the_words_are_those_of_the_field():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "urls" not in project  # there is none yet
    assert "context parallelism" in project["description"]
    python = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    tested = set(re.findall(r'python-version: "(.+)"', (ROOT / ".github/workflows/ci.yml").read_text()))
    assert set(python) == tested  # no version that .ci/run was not run with


def test_an_index_shows_readme_without_the_links_that_it_cannot_follow(built, check):
    """The build makes the long description: the words of relative links alone, and no picture."""
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        said = Parser().parsestr(wheel.read(name).decode())
    text, readme = said.get_payload(), (ROOT / "README.md").read_text()
    assert said["Description-Content-Type"] == "text/markdown"
    assert list(check.wrong_links(text)) == []
    assert list(check.wrong_links(readme)) != []
    assert text.startswith("# Longspan\n\n**Train ")
    assert "takes any length and masks, also on CPUs" in text
    code = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert code.findall(text) == code.findall(readme)


@pytest.mark.parametrize("text", ["[a](docs/start.md)", "![a](docs/a.svg)", '<img src="docs/a.svg">', "[a](#install)"])
def test_links_that_an_index_cannot_follow_are_found(check, text):
    assert len(list(check.wrong_links(text))) == 1
    assert list(check.wrong_links("[a](https://example.org/a#b)")) == []


def test_actions_are_pinned_and_nothing_is_published():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        for action in re.findall(r"uses: (\S+)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{path.name}: {action}"
        assert not re.search(r"id-token|pypi|password|secrets\.|TOKEN", text)


@pytest.mark.nightly
def test_the_first_page_runs_in_a_clean_environment(installed, tmp_path):
    code = next(code for kind, code in readme_blocks("docs/index.md") if not kind)
    printed = output_of([installed / "bin" / "python", "-c", code + "\nprint(out.shape, ls.__file__)"], cwd=tmp_path)
    assert printed.startswith(f"torch.Size([1, 8, 2048, 64]) {installed}")


def test_command_answers_in_a_clean_environment(installed, tmp_path):
    command = installed / "bin" / "longspan"
    assert "plan" in output_of([command, "--help"], cwd=tmp_path)
    assert longspan.__version__ in output_of([command, "--version"], cwd=tmp_path)
    said = output_of([command, "plan", "--seq", "1M", "--ranks", "64", "--docs", "longtail"], cwd=tmp_path)
    assert "1,048,576 tokens on 64 ranks" in said
