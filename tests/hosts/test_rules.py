"""Rules that ship as data: those of before, found without a proof for exactly what was proved, in milliseconds."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import transformers as hf

from longspan.cli.command import main
from longspan.huggingface import first_use, rules
from longspan.huggingface.batches import read_batch
from longspan.huggingface.prove import table
from longspan.huggingface.prove.check import prove
from longspan.huggingface.prove.families import FORMS, VARIED, cases, class_of, config_of, variants
from longspan.huggingface.rules import PLAIN, Entry, Form, Rules, config_key, find_entry
from longspan.training import BatchError
from longspan.versions import TRANSFORMERS
from tests.hosts import hf_published
from tests.hosts.hf_work import SIZES, batch_of
from tests.lanes import NIGHTLY, share
from tests.pace import quiet_seconds
from tests.pool import pool

pytestmark = [pytest.mark.timeout(900 if not NIGHTLY else 7200), pytest.mark.filterwarnings("ignore")]
if hf.__version__ != TRANSFORMERS[-1]:
    pytest.skip("rules.json is of another version of transformers", allow_module_level=True)

BEFORE = json.loads((Path(__file__).parent / "rules_before.json").read_text())
"""What the proof found of every family and form before rules were data: a number in a list of rules, or "refused" where
the comparison refused it, or "failed" where nothing could be compared."""
CASES = {str(case): case for case in cases()}
VARIANTS = [*(f"causal:{family}" for family in VARIED), "masked:esm"]


def rules_before(name, form):
    found = BEFORE["cases"][name][form]
    return found if isinstance(found, str) else Rules.of_json({**Rules().as_json(), **BEFORE["rules"][found]})


def test_the_table_has_the_rules_of_before():
    """All families and forms."""
    assert BEFORE["cases"].keys() == CASES.keys()
    accepted, wrong = 0, {}
    for name, case in CASES.items():
        for form in FORMS:
            before = rules_before(name, form)
            if isinstance(before, Rules):
                accepted += 1
                entry = find_entry_unloaded(class_of(case), config_of(case), FORMS[form])
                if entry is None or entry.rules != before:
                    wrong[name, form] = entry
    assert not wrong
    assert accepted >= 1200


def find_entry_unloaded(kind, config, form):
    """The entry, without a look at files of modules that are imported with a model."""
    _, forms = rules.read_table()["models"].get(rules.full_name(kind), {}).get(config_key(config), (None, {}))
    number = forms.get(str(form))
    if number is None:
        return None
    return Entry(Rules.of_json({**Rules().as_json(), **rules.read_table()["rules"][number]}), ())


@pytest.mark.parametrize("name", share(BEFORE["cases"], 60, "rules_before"))
def test_the_proof_finds_the_rules_of_before(name):
    case = CASES[name]
    try:
        config = config_of(case)
    except Exception:
        assert set(BEFORE["cases"][name].values()) == {"failed"}
        return
    for form in FORMS:
        proof = prove(class_of(case), config, FORMS[form])
        before = rules_before(name, form)
        if isinstance(before, Rules):
            assert proof.ok, proof.reason
            assert proof.rules == before
            assert find_entry(class_of(case), config, FORMS[form]) == Entry(before, _kept(proof.classes))
        else:
            assert not proof.ok
            assert proof.was_compared == (before == "refused")


@pytest.mark.parametrize("name", share(VARIANTS, 5, "variants"))
def test_variants_of_configurations_have_their_own_entries(name):
    case = CASES[name]
    found = list(variants(case, config_of(case)))
    assert len({config_key(config) for config in found}) == len(found)
    for config in found[1:]:
        proof = prove(class_of(case), config)
        entry = find_entry(class_of(case), config, PLAIN)
        assert (entry is not None) is proof.ok, proof.reason
        assert entry is None or entry == Entry(proof.rules, _kept(proof.classes))


def _kept(classes):
    """Classes in the order of the table, without those of torch that need no proof."""
    made = table.Table()
    made.add(hf.LlamaForCausalLM, hf.LlamaConfig(), PLAIN, Entry(Rules(), tuple(classes)))
    (homes,) = made.as_dict()["modules"]
    return tuple(f"{home}.{name}" for home, names in homes.items() for name in names.split())


# -- what an entry is for ----------------------------------------------------------------------------------------------


def test_sizes_have_no_part_in_it_and_kinds_have():
    tiny, large = hf.LlamaConfig(**SIZES), hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 32, "hidden_size": 4096})
    assert config_key(tiny) == config_key(large)
    assert find_entry(hf.LlamaForCausalLM, tiny, PLAIN) is not None
    others = {
        "scaled logits": (hf.GraniteConfig(logits_scaling=8.0), hf.GraniteConfig(logits_scaling=1.0)),
        "experts in some layers": (
            hf.Qwen3MoeConfig(num_hidden_layers=4), hf.Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[1]),
        ),
        "windows": (hf.MistralConfig(sliding_window=None), hf.MistralConfig(sliding_window=9)),
        "kinds of layers": (
            hf.Gemma2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2),
            hf.Gemma2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
        ),
        "regression": (hf.LlamaConfig(num_labels=1), hf.LlamaConfig(num_labels=2)),
    }  # fmt: skip
    for name, (one, other) in others.items():
        assert config_key(one) != config_key(other), name


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-Next-80B-A3B", "Qwen2.5-VL-7B"])
def test_published_models_are_in_the_table(name):
    config = hf_published.config_of(name)
    assert find_entry_unloaded(hf_published.model_class(config), config, PLAIN) is not None


def esm(kind):
    others = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
    sizes = {name: value for name, value in SIZES.items() if name not in others}
    config = hf.EsmConfig(
        **{**sizes, "pad_token_id": 1, "vocab_size": 33}, mask_token_id=32, position_embedding_type=kind,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.EsmForMaskedLM(config)


def test_one_class_has_the_rules_of_each_configuration():
    """ESM with rotary embeddings counts positions from 0, with absolute ones from padding_idx + 1."""
    found = {kind: find_entry(hf.EsmForMaskedLM, esm(kind).config, PLAIN) for kind in ("rotary", "absolute")}
    assert {kind: entry.rules.positions for kind, entry in found.items()} == {
        kind: prove(hf.EsmForMaskedLM, esm(kind).config).rules.positions for kind in found
    }
    assert found["rotary"].rules != found["absolute"].rules


def test_both_are_right_over_ranks_in_one_process():
    for errors in pool(2).run(esm_errors, timeout=200.0):
        assert errors
        assert max(errors) <= 1e-5


def esm_errors():
    import torch.distributed as dist

    from longspan import huggingface

    torch.manual_seed(0)
    errors = []
    ids = torch.randint(4, 24, (2, 41))
    for kind in ("rotary", "absolute", "rotary"):
        model = esm(kind)
        model.set_attn_implementation("longspan")
        expected = model(input_ids=ids, labels=ids).loss
        inputs = huggingface.shard_inputs(model, {"input_ids": ids, "labels": ids}, dist.group.WORLD)
        loss = huggingface.full_loss(model(**inputs).loss, inputs)
        errors.append(abs(float(loss.detach()) / float(expected.detach()) - 1))
    return errors


def test_an_edited_modeling_file_is_proved(tmp_path, monkeypatch):
    from transformers.models.llama import modeling_llama

    model = llama()
    proved = []
    monkeypatch.setattr("longspan.huggingface.prove.check.prove", lambda *args: proved.append(args) or prove(*args))
    use(model)
    assert not proved
    text = Path(modeling_llama.__file__).read_text()
    (tmp_path / "modeling_llama.py").write_text(text + "# edited\n")
    monkeypatch.setattr(modeling_llama, "__file__", str(tmp_path / "modeling_llama.py"))
    use(llama())
    assert len(proved) == 1


class One:
    rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)


def llama(**changes):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, **changes}))


def use(model, kind="plain"):
    return first_use.get_rules(model, read_batch(batch_of(kind)), One(), False)


class Mine(hf.LlamaForCausalLM):
    """A class that no table knows."""


def test_what_has_no_entry_is_proved_once_and_told(caplog, monkeypatch):
    model, proved = Mine(hf.LlamaConfig(**SIZES)), []
    monkeypatch.setattr("longspan.huggingface.prove.check.prove", lambda *args: proved.append(args) or prove(*args))
    with caplog.at_level(logging.WARNING, "longspan"):
        assert use(model) == use(model) == use(llama())
    assert len(proved) == 1
    (told,) = (record.getMessage() for record in caplog.records if record.name == "longspan")
    assert "Mine is not in rules.json for batches that are plain" in told
    assert "longspan prove CONFIG --add" in told


def test_liger_without_an_entry_is_refused(monkeypatch):
    model = Mine(hf.LlamaConfig(**SIZES))
    monkeypatch.setattr(type(model.model.norm), "__module__", "liger_kernel.transformers.rms_norm")
    with pytest.raises(BatchError, match=r"cannot run Liger's kernels\. `longspan prove CONFIG --add`"):
        use(model)


# -- what it costs -----------------------------------------------------------------------------------------------------


COSTS = """
import json, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import transformers as hf
from longspan import huggingface
from tests.hosts.hf_work import SIZES, batch_of
def model():
    made = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    made.set_attn_implementation("longspan")
    return made
def count(call):
    found = [0, 0]
    def profile(frame, event, _):
        if event == "call":
            found[0] += 1
            found[1] += "/longspan/" in frame.f_code.co_filename
    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return found, result
first, batch = model(), batch_of("plain")
shard = lambda: huggingface.shard_inputs(first, batch, dist.group.WORLD)
calls = {"first": count(shard)[0], "later": count(shard)[0]}
part = shard()
for _ in range(2):
    first(**part).loss.backward()
calls["forward"] = count(lambda: first(**part))[0]
print(json.dumps(calls))
"""


def test_the_first_use_of_a_model_with_an_entry_is_cheap_and_writes_no_file(tmp_path):
    """Python calls, of all code in the first use and of Longspan's own afterwards; transformers makes 350 in a forward
    pass."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", COSTS], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    calls = json.loads(done.stdout)
    assert calls["first"][0] <= 3000
    assert calls["later"][1] <= 85
    assert calls["forward"][1] <= 500
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_first_use_takes_milliseconds():
    import torch.distributed as dist

    models, batch = [llama() for _ in range(6)], read_batch(batch_of("plain"))
    assert not dist.is_initialized()

    def first():
        began = time.process_time()
        rules.read_table.cache_clear()
        first_use.get_rules(models.pop(), batch, One(), False)
        return time.process_time() - began

    assert quiet_seconds(first) <= 0.05


# -- the table as a file -----------------------------------------------------------------------------------------------


def test_a_table_that_is_written_is_read(tmp_path, monkeypatch):
    made = table.Table()
    entry = Entry(Rules(head="lm_head", cuts=(("x", 2, 1),)), ("transformers.models.llama.modeling_llama.LlamaMLP",))
    made.add(hf.LlamaForCausalLM, hf.LlamaConfig(), Form(padding="left"), entry)
    monkeypatch.setattr(rules, "PATH", tmp_path / "rules.json")
    made.write(rules.PATH)
    try:
        assert find_entry(hf.LlamaForCausalLM, hf.LlamaConfig(num_hidden_layers=3), Form(padding="left")) == entry
        assert find_entry(hf.LlamaForCausalLM, hf.LlamaConfig(), PLAIN) is None
        again = table.Table().read(rules.read_table())
        assert table.differences(again.as_dict(), made.as_dict()) == []
        again.add(hf.LlamaForCausalLM, hf.LlamaConfig(), PLAIN, entry)
        (line,) = table.differences(again.as_dict(), made.as_dict())
        assert line.startswith("LlamaForCausalLM")
    finally:
        rules.read_table.cache_clear()


def test_the_command_adds_an_entry(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rules, "PATH", tmp_path / "rules.json")
    rules.read_table.cache_clear()
    try:
        assert main(["prove", "llama", "--forms", "plain", "--add"]) == 0
        assert find_entry(hf.LlamaForCausalLM, hf.LlamaConfig(num_hidden_layers=3), PLAIN) is not None
        assert find_entry(hf.LlamaForCausalLM, hf.LlamaConfig(), Form(labels=False)) is None
    finally:
        rules.read_table.cache_clear()
    capsys.readouterr()
    assert main(["prove"]) == 2
    assert main(["prove", "llama", "--all"]) == 2
    assert capsys.readouterr().err.count("and not both") == 2


def test_a_proof_of_all_families_makes_the_table(monkeypatch, capsys):
    """Of one family here: all of its entries are those that ship, and no other."""
    monkeypatch.setattr(table, "cases", lambda: [CASES["masked:esm"]])
    assert main(["prove", "--all"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("LlamaForCausalLM") for line in lines)
    assert not any(line.startswith("EsmForMaskedLM") for line in lines)
