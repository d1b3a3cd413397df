"""What planted models compute over real ranks, beside one device; importable by name."""

import warnings

import torch
import torch.distributed as dist

from tests.hosts.hf_work import batch_of, gradients

ENDS = (9, 30, 40)
"""Places of end tokens, in both halves of a row."""
LAYOUTS = ("zigzag", "striped")
EVALUATED = "mean in evaluation"


def model_of(entry):
    """In float64, with no weight zero, as after some training; the same on every rank."""
    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = entry.kind._from_config(entry.settings(), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train(entry.name != EVALUATED)


def batch_for(form):
    """Tokens that are often the same as their neighbour; ends of documents among them."""
    batch = batch_of(form)
    batch["input_ids"][:, 1::2] = batch["input_ids"][:, 0::2]
    batch["input_ids"][:, list(ENDS)] = 2
    return batch


def one_device(entry, form):
    """(logits, gradients) of two calls: some models remember the first. "eager" makes NaN of padding in front."""
    model, batch = model_of(entry), batch_for(form)
    model.set_attn_implementation("longspan" if form == "padded" else "eager")
    model.config.use_cache = False
    return [_step(model, batch) for _ in LAYOUTS]


def _step(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output.logits.detach(), gradients(model)


def error_over_ranks(entry, form, trust):
    """The largest error of logits and gradients, of the largest entry, or the exception's words."""
    from longspan import huggingface

    model, batch = model_of(entry), batch_for(form)
    model.set_attn_implementation("longspan")
    found, places = [], []
    try:
        for layout in LAYOUTS:
            inputs = huggingface.shard_inputs(
                model, batch, dist.group.WORLD, layout=layout, logits=True, trust_model=trust
            )
            found.append(_step(model, inputs))
            places.append(torch.as_tensor(inputs["longspan"].layout.positions(dist.get_rank())))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    worst = 0.0
    for (mine, own), (truth, wanted), here in zip(found, one_device(entry, form), places, strict=True):
        for gradient in own.values():
            dist.all_reduce(gradient)
        largest = max(gradient.abs().max() for gradient in wanted.values())
        errors = [(own[name] - right).abs().max() / largest for name, right in wanted.items()]
        errors.append((mine - truth[:, here])[real[:, here]].abs().max() / truth.abs().max())
        worst = max(worst, float(torch.stack(errors).max()))
    return worst


def by_number(which, number, form, trust):
    """As `error_over_ranks`, of an entry of FAULTS or TWINS: classes made by functions do not travel."""
    from tests.hosts import planted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return error_over_ranks(getattr(planted, which)[number], form, trust)


def broken_proof():
    """What is said where the proof itself raises."""
    from unittest import mock

    from longspan import huggingface
    from tests.hosts import planted

    def broken(*_):
        raise RuntimeError("it broke")

    model = model_of(planted.TWINS[0])
    model.set_attn_implementation("longspan")
    with mock.patch("longspan.huggingface.prove.check.prove", broken):
        try:
            huggingface.shard_inputs(model, batch_for("plain"), dist.group.WORLD)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"
