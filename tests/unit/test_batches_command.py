"""`longspan batches`: one group beside static splits, from files of lengths."""

import json

import numpy as np
import pytest

from longspan.cli.workload import drawn_lengths

ROWS = ("one group", "8 x 2", "4 x 4", "2 x 8", "1 x 16")


def answer(longspan, *words):
    code, out, err = longspan("batches", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_table_has_one_group_and_every_split_with_room(longspan):
    code, out, err = longspan("batches", "--docs", "short", "--ranks", "16", "--tokens-per-rank", "8k", "--plain")
    assert (code, err) == (0, "")
    rows = [line.strip("* ").split("  ")[0] for line in out.splitlines()]
    assert all(name in rows for name in ROWS)
    assert "Simulated, not measured" in out
    found = answer(longspan, "--docs", "short", "--ranks", "16", "--tokens-per-rank", "8k")
    splits = {split["name"]: split for split in found["splits"]}
    one = splits["one group"]
    assert one["pairs"] <= 1.03
    assert one["tokens"] <= 1.02
    assert one["seconds"] <= min(split["seconds"] for split in splits.values()) * 1.02
    assert splits["4 x 4"]["pairs"] >= 1.0
    assert sum(found["lengths"]) <= 16 * 8192


def test_files_of_lengths_give_the_same(longspan, tmp_path):
    lengths = drawn_lengths("short", 1 << 18, 3)
    np.save(tmp_path / "lengths.npy", lengths)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths.tolist())))
    options = ("--ranks", "4", "--tokens-per-rank", "8k", "--step", "2", "--seed", "5")
    binary, text = (answer(longspan, "--lengths", str(tmp_path / f"lengths.{end}"), *options) for end in ("npy", "txt"))
    assert binary == text
    assert binary["num_documents"] == len(lengths)
    assert [lengths[number] for number in binary["documents"]] == binary["lengths"]


def test_a_picture_is_written(longspan, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    code, out, _ = longspan(
        "batches", "--docs", "short", "--ranks", "4", "--tokens-per-rank", "16k", "--plot", str(path)
    )
    assert code == 0
    assert out.split()[-2:] == ["wrote", str(path)]
    assert path.read_text().lstrip().startswith(("<?xml", "<svg"))


def test_what_cannot_be_done_is_refused(longspan, tmp_path):
    np.save(tmp_path / "floats.npy", np.array([1.5, 2.0]))
    (tmp_path / "broken.npy").write_bytes(b"no array")
    np.save(tmp_path / "objects.npy", np.array([1, "x", None], dtype=object))
    np.save(tmp_path / "long.npy", np.array([100, 70_000]))
    refused = {
        (): "one of --lengths FILE and --docs KIND",
        ("--docs", "short", "--lengths", "x.npy"): "one of --lengths FILE and --docs KIND",
        ("--lengths", "nowhere.npy"): "There is no file 'nowhere.npy'",
        ("--lengths", str(tmp_path / "floats.npy")): "whole numbers, 1 or more, but got float64",
        ("--lengths", str(tmp_path / "broken.npy")): "numpy's format",
        ("--lengths", str(tmp_path / "objects.npy")): "numpy's format",
        ("--lengths", str(tmp_path / "long.npy"), "--ranks", "2", "--tokens-per-rank", "1k"): "too_long='cut'",
        ("--docs", "short", "--ranks", "2", "--step", "10000"): "--step must be 0 to",
    }
    for words, said in refused.items():
        code, out, err = longspan("batches", *words)
        assert (code, out) == (2, ""), words
        assert said in err, (words, err)
    long = answer(
        longspan,
        "--lengths",
        str(tmp_path / "long.npy"),
        "--ranks",
        "2",
        "--tokens-per-rank",
        "1k",
        "--too-long",
        "cut",
    )
    assert max(long["lengths"]) <= 2048
