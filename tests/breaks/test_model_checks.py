"""A model that was checked is what runs: code that changed, hooks and patched classes are checked again or refused, and
check files that are broken are made again. Hooks that only observe, and those of known tools, pass."""

import functools
import importlib
import json
import shutil
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.loss import loss_utils
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama

from longspan.huggingface import check as proof
from longspan.huggingface import first_use, released
from longspan.huggingface.check import Form, prove
from longspan.huggingface.structure import Rules
from tests.breaks import model_checks_work as work
from tests.hosts.hf_work import SIZES
from tests.lanes import NIGHTLY
from tests.pool import pool

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
TIMEOUT = 500.0
EXACT = 1e-5
"""Of float32, a dozen times what a model without hooks is off."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checks"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(function, *args):
    return pool(2).run(function, *args, timeout=TIMEOUT)


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_that_change_something_are_refused_by_name(folder, tries):
    """Put on before the model's first use or after it, in turn; at night both."""
    cases = [(name, (turn + use) % 2 == 0) for turn, name in enumerate(work.CHANGING) for use in range(1 + NIGHTLY)]
    for rank, found in enumerate(run(work.changing, folder, cases)):
        assert len(found) == len(cases)
        for (name, is_used), (said, alone, is_trusted, after) in found.items():
            assert isinstance(said, str), f"{name}, used before: {is_used}: off by {said} without a word"
            assert "must only observe over ranks" in said
            assert work.CHANGING[name][1] in said
            assert alone <= 1e-6, f"{name}: its check changed what one device computes"
            assert is_trusted
            assert after <= EXACT, f"{name} was removed"
        if rank == 0:
            tries("hooks that change something", len(found), 0, len(found))


def test_without_the_check_of_hooks_models_are_wrong(folder):
    """A mutant: no hook is taken for a user's."""
    names = ["forward hook", "pre-hook with kwargs", "in place, uncounted", "for all modules", "backward hook"]
    for found in run(work.changing, folder, [(name, False) for name in names], True):
        assert all(said > 1e-3 for said, *_ in found.values())


def test_hooks_that_observe_pass(folder, tries):
    for rank, found in enumerate(run(work.observing, folder)):
        assert len(found) == 2 * len(work.OBSERVING) + 1
        assert not {name: said for name, said in found.items() if isinstance(said, str) or not said <= EXACT}
        if rank == 0:
            tries("hooks that observe", len(found), len(found))


@pytest.mark.parametrize("name", work.TOOLS)
def test_hooks_of_known_tools_pass(name, folder, tries):
    for rank, found in enumerate(run(work.tools, folder, name)):
        assert all(not isinstance(said, str) and said <= EXACT for said in found), found
        if rank == 0:
            tries("tools that put hooks or forwards into models", 2, 2)


def test_hooks_of_compiled_models_are_refused(folder, tries):
    for rank, found in enumerate(run(work.compiled_changing, folder, (True, False) if NIGHTLY else (True,))):
        assert all("must only observe over ranks" in str(said) for said in found), found
        if rank == 0:
            tries("hooks that change something", len(found), 0, len(found))


def test_forwards_that_hide_behind_tools_are_refused(folder, tries):
    for rank, found in enumerate(run(work.forwards, folder)):
        assert all("model.layers.0.mlp (LlamaMLP), whose forward was replaced" in str(s) for s in found.values()), found
        if rank == 0:
            tries("forwards that were replaced", len(found), 0, len(found))


HOOKED = """
import torch
from transformers import LlamaForCausalLM
def double(module, args, output): return 2 * output
def shift(module, args, output): return output.roll(1, 1)
class Model(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers: layer.mlp.register_forward_hook({hook})
"""


def test_hooks_of_the_class_itself_are_part_of_its_check(place):
    """They are in the copy as well; the same hook once more is not."""
    from longspan.huggingface.user_hooks import CheckedHook

    for hook, is_right in (("double", True), ("shift", False)):
        kind = load(place, "hooked", HOOKED.format(hook=hook)).Model
        answer = first_use.load_or_run_check(kind, LlamaConfig(**SIZES), Form())
        assert answer["ok"] is is_right
        if is_right:
            model = kind(LlamaConfig(**SIZES))
            first_use.Known().accept(model, answer["classes"])
            mlp = model.model.layers[0].mlp
            assert not any(isinstance(h, CheckedHook) for h in mlp._forward_hooks.values())
            mlp.register_forward_hook(sys.modules["hooked"].double)
            first_use.Known().accept(model, answer["classes"])
            assert all(isinstance(h, CheckedHook) for h in mlp._forward_hooks.values())


# -- classes and functions that are replaced ---------------------------------------------------------------------------


def test_classes_that_are_patched_after_first_use_are_refused(folder, tries):
    wrong, right = work._patches()
    for rank, found in enumerate(run(work.patches, folder)):
        assert found.keys() == wrong.keys() | right.keys()
        for name in wrong:
            said, other, after = found[name]
            assert "was replaced after the model was checked" in str(said), f"{name}: {said}"
            assert f"{wrong[name][0].__name__}.{wrong[name][1]}" in said
            assert other == said, "with another form of batch"
            assert after <= EXACT, "after it was put back"
        assert all(found[name] <= EXACT for name in right)
        if rank == 0:
            tries("classes that are patched", 2 * len(wrong) + len(right), len(right), 2 * len(wrong))


def test_without_the_snapshot_of_classes_models_are_wrong(folder):
    """A mutant: replaced functions are not looked for."""
    for found in run(work.patches, folder, True):
        assert all(found[name][0] > 1e-3 for name in work._patches()[0])


def test_classes_that_are_patched_before_first_use_are_checked_so(folder, tries):
    for rank, (doubled, restored, shifted, after) in enumerate(run(work.patched_before, folder)):
        assert doubled <= EXACT
        assert "LlamaMLP.forward was replaced after the model was checked" in restored
        assert "The first that computes something else is" in shifted
        assert after <= EXACT
        if rank == 0:
            tries("classes that are patched", 4, 2, 2)


# -- what is kept on disk ----------------------------------------------------------------------------------------------


def load(folder, name, source):
    """The module with this source, imported from a file."""
    (folder / f"{name}.py").write_text(source)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def kept():
    folder = first_use.cache_folder()
    return sorted(folder.iterdir()) if folder.exists() else []


MODEL = """
import json, pathlib
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
import own_helpers
SHIFT = {constant}
def mix(x, by={default}): return x.roll(SHIFT + by + {body} + own_helpers.SHIFT, 1)
class MLP(LlamaMLP):
    shift = {attribute}
    @property
    def more(self): return {property} + json.loads((pathlib.Path(__file__).parent / "own_data.json").read_text())
    def forward(self, x): return mix(super().forward(x)).roll(self.shift + self.more, 1)
class Model(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers: layer.mlp = MLP(config)
"""
EDITS = ("constant", "default", "body", "attribute", "property", "import", "data")


def test_code_of_a_users_own_is_checked_in_every_process(place, tries):
    """The edit by which tokens meet is noticed, whatever was edited."""
    refused = 0
    for edit in (None, *EDITS, None):
        values = {name: int(name == edit) for name in EDITS}
        (place / "own_data.json").write_text(str(values["data"]))
        load(place, "own_helpers", f"SHIFT = {values['import']}\n")
        kind = load(place, "own_model", MODEL.format(**values)).Model
        answer = first_use.load_or_run_check(kind, LlamaConfig(**SIZES), Form())
        assert answer["ok"] is (edit is None), edit
        refused += not answer["ok"]
    assert not kept()
    tries("edits of a model's code", len(EDITS) + 2, 2, refused)


def test_remote_code_and_classes_without_a_file_are_not_kept(place, tmp_path, tries):
    config = LlamaConfig(**SIZES)
    source = "from transformers import LlamaForCausalLM, LlamaConfig\nclass Model(LlamaForCausalLM):\n    pass\n"
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "modeling_remote.py").write_text(source)
    config.auto_map = {"AutoModelForCausalLM": "modeling_remote.Model"}
    config.save_pretrained(tmp_path / "remote")
    from transformers import AutoConfig

    given = AutoConfig.from_pretrained(tmp_path / "remote", trust_remote_code=True)
    remote = AutoModelForCausalLM.from_config(given, trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules.")
    prompt = {"__name__": "__main__"}
    exec(source, prompt)
    typed = prompt["Model"](LlamaConfig(**SIZES))
    filed = load(place, "filed", source).Model(LlamaConfig(**SIZES))

    class Settings(LlamaConfig):
        """A configuration of a user's, with released classes of models."""

    own = LlamaForCausalLM(Settings(**SIZES))
    models = (remote, typed, filed, own)
    assert [released.release_of(model, model.config) for model in models] == [None] * 4
    assert first_use.load_or_run_check(type(filed), filed.config, Form(), filed)["ok"]
    assert not kept()
    tries("models that are not released code", 4, 4)


def _mine(*args, **kwargs):
    return modeling_llama.LlamaMLP.forward(*args, **kwargs)


class _Callable:
    def __call__(self, *args):
        return args


REBOUND = {
    "function": (modeling_llama, "apply_rotary_pos_emb", _mine),
    "wrapped": (modeling_llama, "apply_rotary_pos_emb", functools.wraps(modeling_llama.apply_rotary_pos_emb)(_mine)),
    "behind torch": (modeling_llama, "apply_rotary_pos_emb", torch.no_grad()(_mine)),
    "partial": (modeling_llama, "apply_rotary_pos_emb", functools.partial(_mine, 3)),
    "object": (modeling_llama, "apply_rotary_pos_emb", _Callable()),
    "class": (modeling_llama, "LlamaMLP", type("LlamaMLP", (modeling_llama.LlamaMLP,), {})),
    "method": (modeling_llama.LlamaMLP, "forward", _mine),
    "property": (modeling_llama.LlamaMLP, "training", property(_mine)),
    "static method": (modeling_llama.LlamaMLP, "helper", staticmethod(_mine)),
    "method of torch": (torch.nn.Linear, "forward", _mine),
    "function of torch": (torch.nn.functional, "silu", _mine),
    "loss": (loss_utils, "fixed_cross_entropy", _mine),
}


def test_released_code_is_kept_unless_something_is_rebound(monkeypatch, tries):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    digest = released.release_of(model, model.config)
    assert digest is not None
    for name, (owner, attribute, value) in REBOUND.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value, raising=False)
            assert released.release_of(model, model.config) is None, name
    for mapping, key in ((loss_utils.LOSS_MAPPING, "ForCausalLM"), (modeling_llama.ROPE_INIT_FUNCTIONS, "own")):
        with monkeypatch.context() as patch:
            patch.setitem(mapping, key, _mine)
            assert released.release_of(model, model.config) is None, key
    others = {  # from released code, but not the model's own
        "another function": (modeling_llama, "rotate_half", modeling_gemma.apply_rotary_pos_emb),
        "another method": (modeling_llama.LlamaMLP, "forward", modeling_gemma.GemmaRMSNorm.forward),
        "constant": (modeling_llama.LlamaMLP, "shift", 3),
    }
    for name, (owner, attribute, value) in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value, raising=False)
            found = released.release_of(model, model.config)
            assert found is not None
            assert found != digest, name
    assert released.release_of(model, model.config) == digest
    tries("released code with something rebound", len(REBOUND) + 2 + len(others), len(REBOUND) + 2 + len(others))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Lfm2ForCausalLM", "MixtralForCausalLM"])
def test_a_check_that_was_kept_is_found_again_after_use(name, monkeypatch):
    """Also where functions of the modeling file are replaced by Longspan's own, for recurrences and routers."""
    kind = getattr(pytest.importorskip("transformers"), name)
    config = kind.config_class()
    answer = first_use.load_or_run_check(kind, config, Form())
    assert answer["ok"], answer["reason"]
    monkeypatch.setattr(proof, "prove", None)
    assert first_use.load_or_run_check(kind, config, Form()) == answer
    assert len(kept()) == 1


def test_files_must_be_as_they_were_installed(tmp_path, monkeypatch):
    """Not kept: an edited file of the same length, an editable install, one without RECORD."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    read, check = released._record, released._is_as_installed.__wrapped__
    folder, lines = read("transformers")
    copied = tmp_path / "transformers" / "models" / "llama" / "modeling_llama.py"
    copied.parent.mkdir(parents=True)
    shutil.copy(modeling_llama.__file__, copied)
    monkeypatch.setattr(released, "_record", lambda _: (str(tmp_path), lines))
    assert check("transformers", str(copied), 0, copied.stat().st_size)
    copied.write_text(copied.read_text().replace("rotate_half", "rotate_full"))
    assert not check("transformers", str(copied), 0, copied.stat().st_size)

    for record, is_kept in (
        ((folder, lines), True),
        ((folder, frozenset(line for line in lines if "modeling_llama" not in line)), False),
        ((folder, frozenset()), False),
        (("", frozenset()), False),
    ):
        monkeypatch.setattr(released, "_record", {"transformers": record, "torch": read("torch")}.get)
        released._is_as_installed.cache_clear()
        assert (released.release_of(model, model.config) is not None) is is_kept
    released._is_as_installed.cache_clear()


# -- broken files ------------------------------------------------------------------------------------------------------


def _without(text, key):
    found = json.loads(text)
    del found["answer"][key]
    return json.dumps(found)


def _with(text, **changes):
    found = json.loads(text)
    found["answer"] |= changes
    return json.dumps(found)


BROKEN = {
    "only ok": lambda _: '{"ok": true}',
    "empty": lambda _: "",
    "half": lambda text: text[: len(text) // 2],
    "a list": lambda _: "[]",
    "a number": lambda _: "3",
    "null": lambda _: "null",
    "a text": lambda _: '"exact"',
    "not JSON": lambda _: "{",
    "not text": lambda _: b"\xff\xfe\x00",
    "too deep": lambda _: "[" * 100_000,
    "no answer": lambda text: json.dumps({"digest": json.loads(text)["digest"]}),
    "no digest": lambda text: json.dumps({"answer": json.loads(text)["answer"]}),
    "the answer alone": lambda text: json.dumps(json.loads(text)["answer"]),
    **{f"no {key}": functools.partial(_without, key=key) for key in ("ok", "error", "rules", "classes", "reason")},
    "wrong types": lambda text: _with(text, classes="LlamaMLP", rules=[]),
    "other rules": lambda text: _with(text, rules=Rules(positions="none").as_json()),
    "the other answer": lambda text: _with(text, ok=False, reason="no"),
}


def test_broken_check_files_are_made_again(monkeypatch, tries):
    proofs = []
    right = prove(LlamaForCausalLM, LlamaConfig(**SIZES), Form())
    monkeypatch.setattr(proof, "prove", lambda *args: proofs.append(args) or right)
    ask = functools.partial(first_use.load_or_run_check, LlamaForCausalLM, LlamaConfig(**SIZES), Form())
    answer = ask()
    (place,) = kept()
    assert place == first_use.check_path(LlamaForCausalLM, LlamaConfig(**SIZES), Form())
    text = place.read_text()
    assert ask() == answer
    assert len(proofs) == 1
    for name, change in BROKEN.items():
        broken = change(text)
        place.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        proofs.clear()
        assert ask() == answer, name
        assert len(proofs) == 1, name
        assert place.read_text() == text, name
        assert ask() == answer
        assert len(proofs) == 1
    place.unlink()
    place.mkdir()
    assert ask() == answer
    assert place.read_text() == text, "an empty folder is replaced"
    place.unlink()
    (place / "inside").mkdir(parents=True)
    assert ask() == ask() == answer
    assert kept() == [place], "one with something in it is left, and no draft beside it"
    tries("broken check files", len(BROKEN) + 2, len(BROKEN) + 2)
