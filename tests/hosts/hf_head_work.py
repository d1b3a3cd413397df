"""Losses and log-probabilities of transformers' models without logits, over ranks; importable by name."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.hosts.hf_structure_work import error, llama, made, text
from tests.hosts.hf_work import SIZES, gradients

CAPPED = {"final_logit_softcapping": 2.0}


def _models():
    import transformers as hf

    return {
        "llama": partial(llama, training=True),
        "capped": lambda: made("Gemma2ForCausalLM", hf.Gemma2Config(**SIZES, **CAPPED), True),
        "divided": lambda: made("GraniteForCausalLM", hf.GraniteConfig(**SIZES, logits_scaling=8.0), True),
        "multiplied": lambda: made("CohereForCausalLM", hf.CohereConfig(**SIZES, logit_scale=0.25), True),
    }


def _batch(seed=5):
    ids = text(seed)
    labels = ids.clone()
    labels[0, :17] = -100
    return {"input_ids": ids, "labels": labels}


class LargestLogits:
    """The most numbers that any head has given."""

    def __init__(self, model):
        self.most = 0
        self.handle = model.get_output_embeddings().register_forward_hook(self.look)

    def look(self, module, args, output):
        self.most = max(self.most, output.numel())

    look.__module__ = "torch"  # for a stranger's hook logits would be computed


def losses():
    """For every model: (errors of loss and gradients, numbers of logits) with and without."""
    from longspan import huggingface

    found = {}
    for name, make in _models().items():
        model, batch = make().double(), _batch()
        one = model(**batch, use_cache=False).loss
        one.backward()
        right = gradients(model)
        for logits in (False, True):
            model.zero_grad()
            seen = LargestLogits(model)
            inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, logits=logits)
            output = model(**inputs)
            seen.handle.remove()
            loss = huggingface.full_loss(output.loss, inputs)
            loss.backward()
            mine = gradients(model)
            for gradient in mine.values():
                dist.all_reduce(gradient)
            off = max(error(loss, one), *(error(mine[n], right[n]) for n in right))
            found[f"{name} {'with' if logits else 'without'}"] = off, seen.most
    return found


def log_probabilities():
    """Errors of log-probabilities, entropies and gradients of both, and numbers of logits."""
    from longspan import huggingface
    from longspan.training import gather_tokens

    found = {}
    for name, make in _models().items():
        model, ids = make().double(), text()
        logits = model(input_ids=ids, use_cache=False).logits / 0.7
        every = torch.log_softmax(logits, -1)[:, :-1]
        right = every.gather(-1, ids[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)
        weights = [torch.randn(right[0].shape, generator=torch.Generator().manual_seed(n)).double() for n in (1, 2)]
        sum((a * b).sum() for a, b in zip(right, weights, strict=True)).backward()
        wanted = gradients(model)
        model.zero_grad()
        seen = LargestLogits(model)
        part = huggingface.shard_for_logprobs(model, {"input_ids": ids}, dist.group.WORLD, temperature=0.7)
        scores = model(**part).logits
        seen.handle.remove()
        whole = [
            gather_tokens(x, part["longspan"].layout, dist.group.WORLD, 1, gradients="sum")[:, :-1] for x in scores
        ]
        sum((a * b).sum() for a, b in zip(whole, weights, strict=True)).backward()
        mine = gradients(model)
        for gradient in mine.values():
            dist.all_reduce(gradient)
        off = max(
            *(error(a, b) for a, b in zip(whole, right, strict=True)), *(error(mine[n], wanted[n]) for n in wanted)
        )
        found[name] = off, seen.most
    return found


def _curve(wrap, steps=3):
    """Losses of some steps, with the model wrapped."""
    from longspan import huggingface

    model = llama(training=True)
    trained = wrap(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        batch = _batch(step)
        if wrap is _alone:
            loss = trained(**batch, use_cache=False).loss
        else:
            inputs = huggingface.shard_inputs(trained, batch, dist.group.WORLD)
            loss = huggingface.full_loss(trained(**inputs).loss, inputs, gradients="average")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def _alone(model):
    return model


def _head_apart(model):
    """The head is sharded by itself: its weight is there while it runs, and not a moment longer."""
    fully_shard(model.lm_head)
    return fully_shard(model)


def _head_inside(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model, reshard_after_forward=True)


def wrapped():
    """Errors of loss curves under wrappers."""
    expected = _curve(_alone)
    ways = {"DDP": DistributedDataParallel, "FSDP2, the head apart": _head_apart, "FSDP2": _head_inside}
    return {name: error(_curve(wrap), expected) for name, wrap in ways.items()}


def scores_under_fsdp():
    """The error of log-probabilities' gradients where the head's weight is sharded by itself."""
    from longspan import huggingface

    norms = []
    for wrap in (_alone, _head_apart):
        model = wrap(llama(training=True))
        part = huggingface.shard_for_logprobs(model, {"input_ids": text()}, dist.group.WORLD, layout="zigzag")
        scores = model(**part).logits
        (scores.logprobs * 1.5 + scores.entropies).sum().backward()
        squares = torch.stack([_square(p.grad) for p in model.parameters()])
        if wrap is _alone:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            squares = torch.stack([_square(p.grad / 2) for p in model.parameters()])  # FSDP averages
        norms.append(squares)
    return error(norms[1], norms[0]) / norms[0].max().item()


def _square(grad):
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grad.double().square().sum()


def left_to_the_model():
    """Where logits are computed after all: numbers of logits and errors of losses; and what is said."""
    from longspan import huggingface

    found, batch = {}, _batch()
    model = llama(training=True)
    right = model(**batch, use_cache=False).loss.item()

    def ran(name, change=lambda inputs: inputs, factor=1.0, model=model):
        inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD)
        output = model(**change(inputs))
        shape = tuple(output.logits.shape) if isinstance(output.logits, torch.Tensor) else repr(output.logits)
        off = None
        if output.loss is not None:
            off = abs(huggingface.full_loss(output.loss, inputs).item() * factor - right)
        found[name] = shape, off

    ran("plain")
    ran("labels taken out", lambda inputs: {n: v for n, v in inputs.items() if "labels" not in n})
    ran("counted otherwise", lambda inputs: {**inputs, "num_items_in_batch": 3 * inputs["num_items_in_batch"]}, 3.0)
    hooked, other = llama(training=True), llama(training=True)  # changed before their first use
    hooked.lm_head.register_forward_hook(lambda module, args, output: output)
    ran("a hook", model=hooked)
    other.lm_head = nn.Sequential(other.lm_head)
    ran("another head", model=other)
    own, model.loss_function = model.loss_function, _another_loss
    ran("another loss", factor=0.5)
    model.loss_function = own
    ran("the same again")
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD)
    found["a tuple"] = _of_tuple(model(**inputs, return_dict=False), inputs, right)
    handle = model.lm_head.register_forward_hook(_stop)
    _stop.__module__ = "torch"  # a stranger's hook would have logits computed
    inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD)
    try:
        model(**inputs)
    except InterruptedError:
        handle.remove()
    logits = model(**{name: value for name, value in inputs.items() if "labels" not in name}).logits
    found["after an error"] = tuple(logits.shape), None
    compiled = torch.compile(model, backend="eager")
    inputs = huggingface.shard_inputs(compiled, batch, dist.group.WORLD)
    output = compiled(**inputs)
    found["compiled"] = repr(output.logits), abs(huggingface.full_loss(output.loss, inputs).item() - right)
    output = model(**huggingface.shard_inputs(model, batch, dist.group.WORLD))
    for name, use in {
        "argmax": lambda logits: logits.argmax(-1), "rows": lambda logits: logits[:, 0], "softmax": functional.softmax
    }.items():  # fmt: skip
        try:
            use(output.logits)
        except ValueError as said:
            found[name] = str(said)
    found["hasattr"] = hasattr(output.logits, "shape")
    return found


def _of_tuple(output, inputs, right):
    from longspan import huggingface

    return repr(output[1]), abs(huggingface.full_loss(output[0], inputs).item() - right)


def _stop(module, args, output):
    raise InterruptedError


def _another_loss(logits, labels, vocab_size, **kwargs):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def refused():
    """Messages."""
    from longspan import huggingface

    found, ids = {}, text()
    calls = {
        "temperature": (llama(), {"input_ids": ids}, {"temperature": 0.0}),
        "nothing to predict": (llama(), {"inputs_embeds": torch.zeros(2, 41, 32)}, {}),
        "classes": (llama("LlamaForSequenceClassification"), {"input_ids": ids}, {}),
    }
    for name, (model, batch, options) in calls.items():
        try:
            huggingface.shard_for_logprobs(model, batch, dist.group.WORLD, **options)
        except ValueError as said:
            found[name] = str(said)
    return found
