"""Attacks on `longspan prove`: bad configurations."""

import json
from importlib.util import find_spec

import pytest

from longspan.cli import command

# -- prove -------------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
BAD = {
    "text for a size": LLAMA | {"hidden_size": "x"},
    "no heads": LLAMA | {"num_attention_heads": 0},
    "heads that do not divide": LLAMA | {"num_attention_heads": 7},
    "negative width": LLAMA | {"hidden_size": -4},
    "a list": [1, 2],
    "a number": 3,
    "null": None,
    "no type": {"hidden_size": 64},
    "an unknown type": {"model_type": "nosuch"},
    "a type that is no text": {"model_type": 3},
    "layers as a list": LLAMA | {"num_hidden_layers": [2]},
    "an unknown rope": LLAMA | {"rope_scaling": {"rope_type": "nosuch"}},
    "an unknown activation": LLAMA | {"hidden_act": "nosuch"},
    "no words": LLAMA | {"vocab_size": 0},
}
TEXTS = {"cut off": '{"model_type": "llama"', "binary": "\x00\xff", "empty": ""}

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@needs_transformers
def test_bad_configurations_are_refused_in_words(tmp_path, capsys, tries):
    """2 and one line, or 1 and a table that says why no batch can be used; never a traceback."""
    texts = {name: json.dumps(value) for name, value in BAD.items()} | TEXTS
    for name, text in texts.items():
        file = tmp_path / "config.json"
        file.write_bytes(text.encode("latin-1"))
        for words in (["prove", str(file), "--forms", "plain"], ["prove", str(tmp_path), "--forms", "plain", "--json"]):
            code = command.main(words)
            out, errors = capsys.readouterr()
            assert code in (1, 2), (name, out, errors)
            if code == 2:
                assert out == "", name
                assert "longspan prove: " in errors, (name, errors)
                assert str(tmp_path) in errors, (name, errors)
            else:
                assert "could be built" in out, (name, out)
    tries("bad configurations", 2 * len(texts), 0, 2 * len(texts))
