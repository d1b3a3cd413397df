"""Models of transformers inside of other tools, over real ranks; importable by name."""

import copy
import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.hosts.hf_structure_work import llama, text
from tests.hosts.hf_versions import checkpoint_layers


def batch():
    ids = text()
    return {"input_ids": ids, "labels": ids}


def step(model, average=False, **options):
    """The loss over ranks and all gradients; wrappers that average gradients say so."""
    from longspan import huggingface

    model.zero_grad()
    inputs = huggingface.shard_inputs(model, batch(), dist.group.WORLD, **options)
    loss = model(**inputs).loss
    loss = huggingface.full_loss(loss, inputs, gradients="average" if average else "sum")
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model, is_complete=average)}


def whole(model):
    """The same on one device, by a copy."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss = alone(**(batch()), use_cache=False).loss
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


def _mlp(model):
    return model.model.layers[0].mlp


class Seen(list):
    def __call__(self, module, args, output):
        self.append((output[0] if isinstance(output, tuple) else output).detach().norm())


def _every_module(model):
    seen = Seen()
    return [module.register_forward_hook(seen) for name, module in model.named_modules() if "." in name]


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


def tools(name):
    """How far a model is off in two steps, with hooks that look in all of its modules."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prepare, average = TOOLS[name]
    model = llama()
    if name == "compiled":  # the compiler takes seconds for each hook
        _mlp(model).register_forward_hook(Seen())
    else:
        _every_module(model)
    expected = whole(_peft(copy.deepcopy(model)) if name == "PEFT" else model)
    model = prepare(model)
    return [off(step(model, average=average), expected) for _ in range(2)]
