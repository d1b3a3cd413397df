"""Models of transformers with hooks and patched classes, over real ranks; importable by name."""

import contextlib
import copy
import functools
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.hosts.hf_structure_work import llama, text
from tests.hosts.hf_versions import checkpoint_layers

GLOBAL = nn.modules.module


def batch(padded=False):
    ids = text()
    found = {"input_ids": ids, "labels": ids}
    if padded:
        found["attention_mask"] = (torch.arange(ids.shape[1]) < torch.tensor([[ids.shape[1]], [30]])).long()
    return found


def step(model, given=None, average=False, **options):
    """The loss over ranks and all gradients; wrappers that average gradients say so."""
    from longspan import huggingface

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, given or batch(), dist.group.WORLD, **options)
    loss = model(**inputs).loss
    loss = huggingface.full_loss(loss, inputs, gradients="average" if average else "sum")
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model, is_complete=average)}


def whole(model, given=None):
    """The same on one device, by a copy."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss = alone(**(given or batch()), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **_gradients(alone, is_complete=True)}


def _gradients(model, is_complete):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            if not is_complete:
                dist.all_reduce(grad)
            found[name.removeprefix("module.").replace("_orig_mod.", "")] = grad
    return found


def off(found, expected):
    """The largest difference, of each tensor's largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - x).abs().max() / x.abs().max().clamp(min=1e-4)) for n, x in expected.items())


def outcome(call, *args, **options):
    """What was said where it was refused; else what came out."""
    try:
        return call(*args, **options)
    except ValueError as error:
        return str(error)


def _begin(folder):
    os.environ["XDG_CACHE_HOME"] = folder
    logging.getLogger("transformers").setLevel(logging.ERROR)


# -- hooks that change something ---------------------------------------------------------------------------------------


def shift(x, by=1):
    """Every token is given what belongs to the token before it."""
    return nn.functional.pad(x, (0, 0, by, 0))[:, :-by].contiguous()


def shifting(module, args, output):
    return shift(output)


def shifting_by(by, module, args, output):
    return shift(output, by)


def write(module, args, output):
    output.copy_(shift(output).clone())


def write_data(module, args, output):
    output.data.copy_(shift(output.data).clone())


def shift_keywords(module, args, kwargs):
    return args, {**kwargs, "hidden_states": shift(kwargs["hidden_states"])}


def write_keywords(module, args, kwargs):
    kwargs["hidden_states"] = shift(kwargs["hidden_states"])


def shift_ids(module, args, kwargs):
    return args, {**kwargs, "input_ids": kwargs["input_ids"].roll(1, 1)}


def of_llama_mlp(module, args, output):
    return shift(output) if type(module).__name__ == "LlamaMLP" else None


def of_llama_mlp_before(module, args):
    return (shift(args[0]),) if type(module).__name__ == "LlamaMLP" else None


@functools.wraps(nn.functional.relu)
def disguised(module, args, output):
    return shift(output)


class Shifting:
    def __call__(self, module, args, output):
        return shift(output)

    def method(self, module, args, output):
        return shift(output)


def _neftune(model):
    from transformers.integrations.neftune import neftune_post_forward_hook

    model.train()
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    return model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)


def _double(module, args, kwargs, output):
    output.loss = output.loss * 2


def _mlp(model):
    return model.model.layers[0].mlp


def _attention(model):
    return model.model.layers[0].self_attn


CHANGING = {  # how it is put on, and what the refusal names
    "forward hook": (lambda m: _mlp(m).register_forward_hook(shifting), "shifting on model.layers.0.mlp (LlamaMLP)"),
    "lambda": (lambda m: _mlp(m).register_forward_hook(lambda _, __, x: shift(x)), "<lambda>"),
    "partial": (lambda m: _mlp(m).register_forward_hook(functools.partial(shifting_by, 2)), "shifting_by"),
    "object": (lambda m: _mlp(m).register_forward_hook(Shifting()), "Shifting"),
    "method": (lambda m: _mlp(m).register_forward_hook(Shifting().method), "Shifting.method"),
    "disguised": (lambda m: _mlp(m).register_forward_hook(disguised), "LlamaMLP"),
    "behind a wrapper of torch": (
        lambda m: _mlp(m).register_forward_hook(torch.compiler.disable(shifting)),
        "LlamaMLP",
    ),
    "with kwargs, always called": (
        lambda m: _attention(m).register_forward_hook(
            lambda _, __, ___, out: (shift(out[0]), *out[1:]), with_kwargs=True, always_call=True
        ),
        "self_attn",
    ),
    "on a norm": (lambda m: m.model.norm.register_forward_hook(shifting), "model.norm"),
    "on the head": (lambda m: m.lm_head.register_forward_hook(shifting), "lm_head"),
    "on the model": (lambda m: m.register_forward_hook(_double, with_kwargs=True), "the model (LlamaForCausalLM)"),
    "on the model, before all others": (
        lambda m: m.register_forward_pre_hook(shift_ids, with_kwargs=True, prepend=True),
        "the model (LlamaForCausalLM)",
    ),
    "in place": (lambda m: _mlp(m).register_forward_hook(write), "changed its arguments in place"),
    "in place, uncounted": (lambda m: _mlp(m).register_forward_hook(write_data), "changed its arguments in place"),
    "pre-hook": (lambda m: _mlp(m).register_forward_pre_hook(lambda _, args: shift(args[0])), "forward pre-hook"),
    "pre-hook with kwargs": (
        lambda m: _attention(m).register_forward_pre_hook(shift_keywords, with_kwargs=True),
        "work.shift_keywords",
    ),
    "keywords in place": (
        lambda m: _attention(m).register_forward_pre_hook(write_keywords, with_kwargs=True),
        "changed its arguments in place",
    ),
    "for all modules": (lambda _: GLOBAL.register_module_forward_hook(of_llama_mlp), "on all modules"),
    "before all modules": (lambda _: GLOBAL.register_module_forward_pre_hook(of_llama_mlp_before), "on all modules"),
    "backward hook": (
        lambda m: _mlp(m).register_full_backward_hook(lambda _, grads, __: (shift(grads[0]),)),
        "the backward hook",
    ),
    "backward pre-hook": (
        lambda m: _mlp(m).register_full_backward_pre_hook(lambda _, grads: (shift(grads[0]),)),
        "the backward pre-hook",
    ),
    "NEFTune's own": (_neftune, "neftune_post_forward_hook on model.embed_tokens (Embedding)"),
}  # fmt: skip


def changing(folder, cases, mutant=False):
    """By name and by whether the model was used before: what is said, how far one device is off what it was, whether
    trust_model=True lets it through, and how far the model is off after the hook was removed."""
    _begin(folder)
    found = {}
    with _without_checks() if mutant else contextlib.nullcontext():
        for name, is_used in cases:
            model = llama()
            if is_used:
                step(model)
            handle = CHANGING[name][0](model)
            try:
                alone = whole(model) if name != "NEFTune's own" else None  # which is random
                said = outcome(step, model)
                said = said if isinstance(said, str) else off(said, alone)
                same = 0.0 if alone is None else off(whole(model), alone)
                trusted = outcome(step, model, trust_model=True)
                same = 0.0 if alone is None else max(same, off(whole(model), alone))
            finally:
                handle.remove()
            model.eval()
            after = off(step(model), whole(model))
            found[name, is_used] = said, same, isinstance(trusted, dict), after
    return found


@contextlib.contextmanager
def _without_checks():
    from longspan.huggingface import user_hooks

    kept, user_hooks._is_user = user_hooks._is_user, lambda hook: False
    try:
        yield
    finally:
        user_hooks._is_user = kept


# -- hooks that look ---------------------------------------------------------------------------------------------------


class Seen(list):
    def __call__(self, module, args, output):
        self.append((output[0] if isinstance(output, tuple) else output).detach().norm())


def _every_module(model):
    seen = Seen()
    return [module.register_forward_hook(seen) for name, module in model.named_modules() if "." in name]


OBSERVING = {
    "norms of every output": _every_module,
    "its output again": lambda m: [_mlp(m).register_forward_hook(lambda _, __, out: out)],
    "a tuple again": lambda m: [_attention(m).register_forward_hook(lambda _, __, out: (out[0], out[1]))],
    "arguments": lambda m: [_mlp(m).register_forward_pre_hook(lambda _, args: args)],
    "one argument": lambda m: [_mlp(m).register_forward_pre_hook(lambda _, args: args[0])],
    "arguments and keywords": lambda m: [
        _attention(m).register_forward_pre_hook(lambda _, args, kwargs: (args, dict(kwargs)), with_kwargs=True)
    ],
    "requires_grad_": lambda m: [m.model.embed_tokens.register_forward_hook(lambda _, __, x: x.requires_grad_(True))],
    "the head's logits": lambda m: [m.lm_head.register_forward_hook(Seen())],
    "the model": lambda m: [m.register_forward_hook(lambda _, __, out: out)],
    "for all modules": lambda _: [GLOBAL.register_module_forward_hook(lambda *_: None)],
    "before all modules": lambda _: [GLOBAL.register_module_forward_pre_hook(lambda *_: None)],
    "gradients": lambda m: [_mlp(m).register_full_backward_hook(lambda _, grads, __: grads)],
    "gradients before": lambda m: [_mlp(m).register_full_backward_pre_hook(lambda *_: None)],
    "transformers' inputs that need gradients": lambda m: m.enable_input_require_grads() or [],
    "parameters": lambda m: [m.lm_head.weight.register_hook(lambda grad: None)],
}  # fmt: skip


def observing(folder):
    """By name and by whether the model was used before: how far it is off one device."""
    _begin(folder)
    found = {}
    for name, put_on in OBSERVING.items():
        for is_used in (False, True):
            model = llama()
            if is_used:
                step(model)
            handles = put_on(model)
            try:
                found[name, is_used] = outcome(lambda: off(step(model), whole(model)) or off(step(model), whole(model)))  # noqa: B023
            finally:
                for handle in handles:
                    handle.remove()
    with torch.inference_mode():  # contents are compared in every call there
        model = llama()
        _every_module(model)
        found["inference", False] = outcome(_loss_is_off, model)
    return found


def _loss_is_off(model):
    from longspan import huggingface

    inputs = huggingface.shard_inputs(model, batch(), dist.group.WORLD)
    found = huggingface.full_loss(model(**inputs).loss, inputs)
    return abs(float(found) - float(model(**batch(), use_cache=False).loss))


# -- tools -------------------------------------------------------------------------------------------------------------


def _peft(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def _fsdp(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _checkpointed(model):
    checkpoint_layers(model.train(), {"use_reentrant": False})
    return model


def _own_checkpoint(model):
    """The forward of a module, called through PyTorch's own function."""
    from torch.distributed._composable import checkpoint as composable

    composable(model.model.layers[0])
    return model


def _aligned(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(_mlp(model), AlignDevicesHook(execution_device="cpu"))
    return model


def _compiled_forward(model):
    _mlp(model).forward = torch.compile(_mlp(model).forward, backend="eager")
    return model


TOOLS = {
    "FSDP2": (_fsdp, True),
    "DDP": (DistributedDataParallel, True),
    "PEFT": (_peft, False),
    "compiled": (lambda m: torch.compile(m, backend="eager"), False),
    "checkpointed": (_checkpointed, False),
    "composable checkpoint": (_own_checkpoint, False),
    "accelerate": (_aligned, False),
    "compiled forward": (_compiled_forward, False),
    "hidden states": (lambda m: setattr(m.config, "output_hidden_states", True) or m, False),
}


def tools(folder, name):
    """How far a model is off in two steps, with hooks that look in all of its modules, put on before and after."""
    _begin(folder)
    prepare, average = TOOLS[name]
    model = llama()
    if name == "compiled":  # the compiler takes seconds for each hook
        _mlp(model).register_forward_hook(Seen())
    else:
        _every_module(model)
    expected = whole(_peft(copy.deepcopy(model)) if name == "PEFT" else model)
    model = prepare(model)
    first = outcome(step, model, average=average)
    inner = next(m for m in model.modules() if type(m).__name__.endswith("LlamaForCausalLM"))
    inner.model.layers[1].register_forward_hook(Seen())
    again = outcome(step, model, average=average)
    return [said if isinstance(said, str) else off(said, expected) for said in (first, again)]


def compiled_changing(folder, uses):
    """What is said of a compiled model with a hook that changes something: used on one device before, or not."""
    _begin(folder)
    found = []
    for is_used in uses:
        torch.compiler.reset()
        model = llama()
        _mlp(model).register_forward_hook(shifting)
        made = torch.compile(model, backend="eager")
        if is_used:
            made(**batch(), use_cache=False)
        found.append(outcome(step, made))
    return found


def forwards(folder):
    """What is said of forwards that were replaced by means that known tools use as well."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Mixing(ModelHook):
        def post_forward(self, module, output):
            return shift(output)

    _begin(folder)
    changes = {
        "compiled": lambda mlp: setattr(mlp, "forward", torch.compile(lambda x: shift(x), backend="eager")),
        "a function of torch": lambda mlp: setattr(mlp, "forward", functools.partial(nn.functional.pad, pad=(1, -1))),
        "a hook of accelerate's": lambda mlp: add_hook_to_module(mlp, Mixing()),
        "checkpoint of another": lambda mlp: setattr(mlp, "forward", functools.partial(checkpoint, shift)),
    }
    found = {}
    for name, change in changes.items():
        for is_used in (False, True):
            model = llama()
            if is_used:
                step(model)
            change(_mlp(model))
            found[name, is_used] = outcome(step, model)
    return found


# -- classes and modules that are patched ------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(owner, name, value):
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _patches():
    from transformers.models.llama import modeling_llama as place

    mlp, norm, rotate = place.LlamaMLP.forward, place.LlamaRMSNorm.forward, place.rotate_half
    wrong = {
        "forward": (place.LlamaMLP, "forward", lambda self, x: shift(mlp(self, x))),
        "forward of a norm": (place.LlamaRMSNorm, "forward", lambda self, x: shift(norm(self, x))),
        "wrapped": (place.LlamaMLP, "forward", functools.wraps(mlp)(lambda self, x: shift(mlp(self, x)))),
        "__call__": (place.LlamaMLP, "__call__", lambda self, x: shift(self.forward(x))),
        "forward of torch's": (nn.Linear, "forward", lambda self, x: shift(nn.functional.linear(x, self.weight, None))),
        "helper": (place, "rotate_half", lambda x: rotate(x).roll(1, -2)),
    }
    right = {
        "disabled for the compiler": (place.LlamaMLP, "forward", torch.compiler.disable(mlp)),
        "constant": (place.LlamaMLP, "note", 3),
    }
    return wrong, right


def patches(folder, mutant=False):
    """By name: what is said of a model whose class was patched after its first use; in another form of batch; after the
    patch was taken back. How far it is off after harmless patches."""
    from longspan.huggingface.structure import Snapshot

    _begin(folder)
    wrong, right = _patches()
    found = {}
    with patched(Snapshot, "find_replaced", lambda self: None) if mutant else contextlib.nullcontext():
        for name, patch in wrong.items():
            model = llama()
            step(model)
            with patched(*patch):
                said = outcome(step, model)
                said = said if isinstance(said, str) else off(said, whole(model))
                other = "" if mutant else outcome(step, model, batch(padded=True))
            found[name] = said, other, off(step(model), whole(model))
    for name, patch in right.items():
        model = llama()
        step(model)
        with patched(*patch):
            found[name] = off(step(model), whole(model))
    return found


def patched_before(folder):
    """A class that was patched before the first use: checked with the patch, which takes every token by itself or does
    not; then without it."""
    from transformers.models.llama import modeling_llama as place

    _begin(folder)
    step(llama())  # its check is kept
    forward, found = place.LlamaMLP.forward, []
    for change in (lambda x: 2 * x, shift):
        model = llama()
        with patched(place.LlamaMLP, "forward", lambda self, x, change=change: change(forward(self, x))):
            said = outcome(step, model)
            found.append(said if isinstance(said, str) else off(said, whole(model)))
        found.append(outcome(step, model) if isinstance(found[-1], float) else off(step(llama()), whole(llama())))
    return found
