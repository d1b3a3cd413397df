"""The `longspan` command beside its answers: names of commands, schemes and files, pipes, completion, help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import longspan as ls
from longspan import layouts, masks
from longspan.cli import command
from longspan.errors import PlanError
from longspan.planning import Problem, Sizes, scheme

SRC = Path(ls.__file__).parents[1]


def shell(line, **environment):
    """Run a line of bash in which `longspan` is the command in a process of its own."""
    start = f'longspan() {{ "{sys.executable}" -m longspan "$@"; }}\n'
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment}
    return subprocess.run(["bash", "-c", start + line], env=variables, capture_output=True, text=True, timeout=120)


# -- names of schemes --------------------------------------------------------------------------------------------------


def planned(name):
    mask = masks.documents([40, 24]) & masks.causal()
    return ls.plan(mask, layouts.zigzag(64, 4), q_heads=8, kv_heads=2, head_dim=16, dtype="float32", scheme=name)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ulysses", "all_to_all"),
        (" ulysses", "all_to_all"),
        ("usp(2)", "hybrid(2,ring)"),
        ("usp( 4 )", "hybrid(4,ring)"),
    ],
)
def test_an_alias_is_the_scheme_itself(alias, name):
    """Ranks that use either name agree: name, fingerprint and steps are equal."""
    one, other = planned(alias), planned(name)
    assert one.scheme.name == name
    assert one.fingerprint == other.fingerprint
    problem = Problem.make(masks.causal(), layouts.zigzag(64, 4), Sizes(8, 2, 16, 16, 4))
    assert scheme(alias, problem).schedule() == scheme(name, problem).schedule()


@pytest.mark.parametrize("name", ["usp", "usp()", "usp(2,exchange)", "usp(-1)", "usp(2", "usp(9999999)"])
def test_usp_needs_the_size_of_a_group(name):
    with pytest.raises(PlanError, match=r"scheme must be usp\(HEADS\), as in usp\(8\)") as error:
        planned(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("usp(3)", "Use a divisor of 4"),
        ("Ulysses", "all_to_all (alias ulysses)"),
        ("uspx", "usp(8) is hybrid(8, ring)"),
        ("ulysses(2)", "scheme must be one of"),
    ],
)
def test_names_like_aliases_are_refused(name, message):
    with pytest.raises(PlanError) as error:
        planned(name)
    assert message in str(error.value)


def test_commands_accept_aliases(longspan):
    code, out, _ = longspan("plan", "--seq", "4k", "--ranks", "4", "--scheme", "usp(2)")
    assert code == 0
    assert "4,096 tokens on 4 ranks: hybrid(2,ring)" in out
    words = ("--seq", "4k", "--ranks", "4", "--layouts", "balanced", "--schemes", "ulysses,all_to_all,usp(2)")
    code, out, _ = longspan("compare", *words)
    assert code == 0
    assert out.count("  all_to_all") + out.count("* all_to_all") == 1  # one row for both names
    assert "hybrid(2,ring)" in out
    for words in (("plan", "--scheme", "usp"), ("compare", "--schemes", "ring,usp")):
        code, out, err = longspan(*words, "--seq", "4k")
        assert (code, out) == (2, "")
        assert "scheme must be usp(HEADS)" in err
        assert err.count("\n") == 1


# -- names of commands and files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pla",), "longspan: there is no command pla. Did you mean plan?"),
        (("verfy", "--ranks", "2"), "longspan: there is no command verfy. Did you mean verify?"),
        (("--json", "comapre"), "longspan: there is no command comapre. Did you mean compare?"),
        (("xyzzy",), "longspan: there is no command xyzzy. See longspan --help."),
        (("--bogus",), "longspan: there is no option --bogus. See longspan --help."),
        (("--verzion",), "longspan: there is no option --verzion. Did you mean --version?"),
        (("plan", "--seq", "8k", "--shceme", "ring"), "longspan: plan has no --shceme ring. Did you mean --scheme?"),
    ],
)
def test_names_that_do_not_exist_are_one_line(longspan, words, message):
    assert longspan(*words) == (2, "", message + "\n")


def test_names_that_exist_are_not_corrected(longspan):
    for words in (("--version",), ("plan", "--help"), ("plan", "--seq", "4k")):
        code, out, err = longspan(*words)
        assert (code, err) == (0, "")
        assert out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("plan", "--seq", "8k", "--machine", "mine.json"), "a file that `longspan calibrate` wrote"),
        (("plan", "--docs", "lengths.txt"), "a file of lengths"),
        (("plan", "--seq", "8k", "--config", "model.json"), "--config must be a config.json"),
        (("plan", "--seq", "8k", "--config", "folder"), "--config must be a config.json, or a directory with one"),
    ],
)
def test_a_missing_file_is_named_with_what_was_expected(longspan, tmp_path, monkeypatch, words, expected):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    code, out, err = longspan(*words)
    assert (code, out) == (2, "")
    assert expected in err
    name = "folder/config.json" if words[-1] == "folder" else words[-1]
    assert f"There is no file '{name}'" in err
    assert err.count("\n") == 1


def test_prove_names_a_missing_file(longspan):
    pytest.importorskip("transformers")
    code, out, err = longspan("prove", "./nothing.json")
    assert (code, out) == (2, "")
    assert "a directory with a config.json" in err
    assert "There is no file './nothing.json'" in err


# -- pipes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("longspan plan --seq 4k --ranks 4", 0),
        ("longspan --help", 0),
        ("longspan plan --seq 4k --json", 0),
        ("longspan plan --model qwen3-8b --seq 64k --ranks 2 --memory 8", 1),  # it does not fit
        ("longspan plan --seq 4k --scheme magic 2>&1", 2),
    ],
)
def test_a_reader_that_ends_early_changes_no_status(line, status):
    """The same status with a reader of one line, with one that reads nothing, and with one that reads all."""
    for reader, lines in (("head -1", 1), ("true", 0), ("cat >/dev/null", 0)):
        done = shell(f'{line} | {reader}; exit "${{PIPESTATUS[0]}}"')
        assert done.returncode == status, (reader, done.stderr)
        assert done.stdout.count("\n") == lines
        assert done.stderr == ""


# -- help and completion -----------------------------------------------------------------------------------------------


def test_help_starts_with_what_people_do(longspan):
    code, out, _ = longspan("--help")
    assert code == 0
    assert out.index("longspan plan --model") < out.index("-m longspan verify") < out.index("options:")
    for line in command.DESCRIPTION.splitlines():  # each line can be typed
        words = line.partition("longspan ")[2].split() if line.startswith("  ") else []
        if words:
            known = command.make_parser(words).parse_args(words)
            assert known.command in command.COMMANDS
    for name, (_, text) in command.COMMANDS.items():
        assert f"\n    {name:10}  {text}\n" in out  # one line each


def completions(line, file):
    """Complete a line as the shell does: argcomplete writes the words to file 8."""
    words = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " "}
    done = shell(f'longspan 8>"{file}" >/dev/null', **words)
    return set(file.read_text().split()), done


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("longspan com", {"compare"}),
        ("longspan plan --sch", {"--scheme"}),
        ("longspan plan --layout z", {"zigzag"}),
        ("longspan xyzzy --sch", set()),
    ],
)
def test_the_shell_completes_commands_and_options(tmp_path, line, words):
    pytest.importorskip("argcomplete", reason="completion needs argcomplete")
    found, done = completions(line, tmp_path / "words")
    assert found == words
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_argcomplete_and_without_a_shell_nothing_changes(longspan, monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert longspan("--version")[0] == 0
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert longspan("--version") == (0, f"longspan {ls.__version__}\n", "")
