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
    words = ["--files", "--built", str(built.wheel.parent), "--tag"]
    assert check.main([*words, f"v{longspan.__version__}"]) == 0
    assert capsys.readouterr().out.endswith("\nready\n")
    assert check.main([*words, "v9.9.9"]) == 1
    said = capsys.readouterr().out
    assert "the tag is v9.9.9, but the version is" in said
    assert said.endswith("NOT ready\n")
    shutil.copy(built.wheel, tmp_path)
    assert check.main(["--files", "--built", str(tmp_path)]) == 1  # the sdist is not there
    steps = check.Steps()
    assert steps.run("right", [sys.executable, "-c", "print('said')"], "said")
    assert steps.ok
    assert not steps.run("silent", [sys.executable, "-c", ""], "said")
    assert not steps.ok


def test_version_agrees_in_all_places(check):
    """It stands where the build reads it, and in the citation, which is plain data; everything else reads it."""
    assert check.version() == longspan.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", longspan.__version__)
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "docs", ".")
        for path in (ROOT / folder).glob("*.*" if folder == "." else "**/*.*")
        if path.suffix in (".py", ".toml", ".cff") and longspan.__version__ in path.read_text()
    ]
    assert sorted(found) == ["CITATION.cff", "src/longspan/versions.py"]
    assert 'path = "src/longspan/versions.py"' in (ROOT / "pyproject.toml").read_text()
    minor = longspan.__version__.rpartition(".")[0]
    assert f"| {minor} | yes |" in (ROOT / "SECURITY.md").read_text()


def test_changelog_citation_and_tag_say_the_version(check, monkeypatch):
    assert list(check.wrong_words(None)) == []
    assert list(check.wrong_words(f"v{longspan.__version__}")) == []
    assert ["the tag is" in line for line in check.wrong_words(longspan.__version__)] == [True]
    monkeypatch.setattr(check, "version", lambda: "9.9.9")
    assert len(list(check.wrong_words("v0.2.0"))) == 3


def test_changelog_can_be_released():
    """What is unreleased stands first, then versions from the newest on, with the day; each part is of a known kind."""
    said = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.+)$", said, re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", head) for head in heads[1:])
    kinds = {"Migration from 0.1", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Numerics"}
    assert set(re.findall(r"^### (.+)$", said, re.MULTILINE)) <= kinds


def test_citation_is_whole():
    cited = (ROOT / "CITATION.cff").read_text()
    for key in ("cff-version", "message", "title", "authors", "license", "version", "date-released"):
        assert re.search(rf"^{key}:", cited, re.MULTILINE), key
    released = re.search(r"^## [\d.]+ - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert f"date-released: {released}\n" in cited
    assert "Apache-2.0" in cited


def test_addresses_are_absolute_and_words_are_those_of_the_field():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["urls"]) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith("https://") for url in project["urls"].values())
    assert "context parallelism" in project["description"]
    python = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    tested = set(re.findall(r'python-version: "(.+)"', (ROOT / ".github/workflows/ci.yml").read_text()))
    assert set(python) == tested  # no version that CI does not run


def test_readme_renders_on_an_index(check):
    assert list(check.wrong_links((ROOT / "README.md").read_text())) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](docs/start.md)", "no absolute address"),
        ("![a](docs/images/mask.svg)", "no absolute address"),
        ('<img src="docs/images/mask.svg">', "no absolute address"),
        ("[a](#install)", "no absolute address"),
        ("[a](http://github.com/longspan)", "no absolute address"),
        ("[a](https://github.com/longspan/longspan/blob/main/docs/gone.md)", "not in the repository"),
        (
            "![a](https://raw.githubusercontent.com/longspan/longspan/main/docs/images/gone.png)",
            "not in the repository",
        ),
        ("![a](https://github.com/longspan/longspan/actions/workflows/gone.yml/badge.svg)", "a workflow"),
        ("[a](https://github.com/longspan/longspan/blob/main/docs/start.md#install)", None),
        ("[![a](https://github.com/longspan/longspan/actions/workflows/ci.yml/badge.svg)](https://example.org)", None),
    ],
)
def test_links_that_an_index_cannot_follow_are_found(check, text, said):
    found = list(check.wrong_links(text))
    assert (said is None) == (found == [])
    assert said is None or said in found[0]


def test_releases_are_published_from_tags_alone_and_actions_are_pinned():
    folder = ROOT / ".github" / "workflows"
    for path in folder.glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{path.name}: {action}"
    release = (folder / "release.yml").read_text()
    assert 'tags: ["v*"]' in release
    assert "branches" not in release
    assert release.count("id-token: write") == 1
    assert release.index("id-token: write") > release.index("  publish:\n")
    assert "environment:\n      name: pypi" in release
    assert '--tag "$GITHUB_REF_NAME"' in release
    assert not re.search(r"password|secrets\.|TOKEN", release)


@pytest.mark.nightly  # likewise
def test_readme_example_runs_in_a_clean_environment(installed, tmp_path):
    code = next(code for kind, code in readme_blocks("README.md") if not kind)
    printed = output_of([installed / "bin" / "python", "-c", code + "\nprint(ls.__file__)"], cwd=tmp_path)
    assert "10920 of 16384 entries" in printed
    assert printed.splitlines()[-1].startswith(str(installed))


def test_command_answers_in_a_clean_environment(installed, tmp_path):
    command = installed / "bin" / "longspan"
    assert "plan" in output_of([command, "--help"], cwd=tmp_path)
    assert longspan.__version__ in output_of([command, "--version"], cwd=tmp_path)
    said = output_of([command, "plan", "--seq", "1M", "--ranks", "64", "--docs", "longtail"], cwd=tmp_path)
    assert "1,048,576 tokens on 64 ranks" in said
