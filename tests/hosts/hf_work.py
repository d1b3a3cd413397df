"""Tiny models of seven families, batches of three kinds, and what ranks do with them; importable by name."""

import contextlib
import dataclasses
import logging

import torch
import torch.distributed as dist

from tests.hosts.hf_versions import checkpoint_layers

VOCAB, TOKENS, BATCH, WINDOW, CHUNK = 24, 52, 2, 9, 11
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "llama4")
CASES = ("plain", "padded", "packed")
DOCUMENTS = ([10, 23, 19], [31, 1, 20])
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.17,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]


def config(family, **changes):
    """A config in which every feature matters: short windows, a low soft cap, temperatures that move early."""
    import transformers as hf

    sizes = {**SIZES, **changes}
    if family == "llama":
        return hf.LlamaConfig(**sizes)
    if family == "mistral":
        return hf.MistralConfig(**sizes, sliding_window=WINDOW)
    if family == "qwen3":
        return hf.Qwen3Config(**sizes, use_sliding_window=True, sliding_window=WINDOW, layer_types=BOTH)
    if family == "gemma2":
        return hf.Gemma2Config(
            **sizes, sliding_window=WINDOW, layer_types=BOTH, query_pre_attn_scalar=8, attn_logit_softcapping=1.5
        )
    if family == "gemma3":
        return hf.Gemma3TextConfig(**sizes, sliding_window=WINDOW, layer_types=BOTH, query_pre_attn_scalar=3)
    if family == "gpt_oss":
        return hf.GptOssConfig(
            **sizes, sliding_window=WINDOW, layer_types=BOTH, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
    return hf.Llama4TextConfig(
        **sizes, intermediate_size_mlp=32, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=CHUNK,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], floor_scale=5, attn_scale=0.5,
    )  # fmt: skip


def model_of(family, attention="eager", **changes):
    from transformers import AutoModelForCausalLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config(family, **changes), attn_implementation=attention).float().train()


def batch_of(case, seed=0):
    """One batch: labels are uneven, rows are padded or packed differently."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=made)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=made) < 0.3] = -100
    batch = {"input_ids": ids, "labels": labels}
    if case == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -7:] = 0
        batch["attention_mask"][1, :5] = 0
        labels[batch["attention_mask"] == 0] = -100
        labels[1, 5] = -100  # its prediction is made at padding, where eager attends to anything
    if case == "packed":
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
        labels[batch["position_ids"] == 0] = -100
    return batch


def gradients(model):
    """Every parameter's; zero for experts that got no token."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def truth(model, batch, apart=False):
    """(loss, gradients) on one device by transformers' own attention; `apart`: every document on its own."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    parts = [batch]
    if apart:
        parts = [
            {name: batch[name][row : row + 1, stop - length : stop] for name in ("input_ids", "labels", "position_ids")}
            for row, lengths in enumerate(DOCUMENTS)
            for length, stop in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True)
        ]
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
    losses = [model(**part, use_cache=False, num_items_in_batch=count).loss for part in parts]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), gradients(model)


def difference(found, expected):
    """The largest difference of losses, of gradients, and how large gradients are."""
    assert found[1].keys() == expected[1].keys()
    worst = max((found[1][name] - expected[1][name]).abs().max().item() for name in expected[1])
    return abs(found[0] - expected[0]), worst, max(g.abs().max().item() for g in expected[1].values())


def over_ranks(model, batch, mistake=None, **options):
    """(loss, gradients summed over ranks) of a batch that is sharded over all ranks."""
    from longspan import huggingface

    model.set_attn_implementation("longspan")
    model.zero_grad()
    # Before anything is wrong: it proves the model at its first use, and would refuse the mistake.
    inputs = huggingface.shard_inputs(model, batch, options.pop("group", dist.group.WORLD), **options)
    with mistake or contextlib.nullcontext():
        if hasattr(mistake, "spoil"):
            mistake.spoil(inputs)
        out = model(**inputs)
        loss = huggingface.full_loss(out.loss, inputs)
        loss.backward()
    group = inputs["longspan"].group
    summed = gradients(model)
    for gradient in summed.values():
        dist.all_reduce(gradient, group=group)
    return loss.item(), summed


LAYOUTS = ("balanced", "zigzag", "striped", "contiguous")


def compare(family, checkpointing=False):
    """For every case: differences from one device."""
    found = {}
    model = model_of(family)
    for number, case in enumerate(CASES):
        batch = batch_of(case)
        expected = truth(model, batch, apart=family == "gpt_oss" and case == "packed")
        if checkpointing:
            checkpoint_layers(model)
        layouts = ("balanced",) if checkpointing else ("balanced", LAYOUTS[1 + number % 3])
        for layout in layouts:
            found[f"{family} {case} {layout}"] = difference(over_ranks(model, batch, layout=layout), expected)
        model.gradient_checkpointing_disable()
    return found


def compare_tiled(family):
    """The same with MLPs and norms in tiles, and layers checkpointed."""
    from longspan.training import tile

    model, batch = model_of(family), batch_of("packed")
    expected = truth(model, batch, apart=family == "gpt_oss")
    tile(model, 3)
    checkpoint_layers(model)
    return {f"{family} tiled": difference(over_ranks(model, batch), expected)}


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Mistake:
    """Something people get wrong, injected: `spoil` changes inputs, entering replaces a function until exit."""

    def __init__(self, spoil=None, module=None, name=None, wrong=None):
        self.spoil = spoil or (lambda inputs: None)
        self.place = module, name, wrong

    def __enter__(self):
        module, name, wrong = self.place
        if module is not None:
            self.right = getattr(module, name)
            setattr(module, name, wrong(self.right))
        return self

    def __exit__(self, *_):
        module, name, _ = self.place
        if module is not None:
            setattr(module, name, self.right)


def _set_whole(name):
    return lambda inputs: setattr(inputs["longspan"].whole, name, None)


def _without_window(inputs):
    whole = inputs["longspan"].whole
    kind = ("and", ("causal",), ("window", WINDOW))
    whole._masks[kind] = whole.mask(("causal",))


def _without_chunks(inputs):
    whole = inputs["longspan"].whole
    whole._masks["and", ("causal",), ("chunk", CHUNK)] = whole.mask(("causal",))


def _forget(inputs):
    inputs["longspan"].whole._masks.clear()


def _local_positions(inputs):
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand(BATCH, -1)


def _late_shift(inputs):
    own = inputs["longspan"].layout.shard(batch_of("plain")["labels"], dist.get_rank(), 1)
    inputs["shift_labels"] = torch.nn.functional.pad(own, (0, 1), value=-100)[:, 1:].contiguous()


def _rank_means(inputs):
    inputs["num_items_in_batch"] = (inputs["shift_labels"] != -100).sum() * dist.get_world_size()


def _both(*steps):
    def spoil(inputs):
        for step in steps:
            step(inputs)

    return spoil


def _asked_without(name):
    def wrong(right):
        def run(q, k, v, what, asked, *rest):
            return right(q, k, v, what, dataclasses.replace(asked, **{name: None}), *rest)

        return run

    return wrong


def mistakes():
    from longspan.huggingface import sequence as hf_sequence

    return {
        "none": ("mistral", "plain", Mistake()),
        "window dropped": ("mistral", "plain", Mistake(_without_window)),
        "chunks dropped": ("llama4", "plain", Mistake(_without_chunks)),
        "documents dropped": ("llama", "packed", Mistake(_both(_set_whole("documents"), _forget))),
        "padding dropped": ("llama", "padded", Mistake(_both(_set_whole("padding"), _forget))),
        "positions local": ("qwen3", "plain", Mistake(_local_positions)),
        "labels shifted late": ("llama", "plain", Mistake(_late_shift)),
        "mean of ranks' means": ("llama", "plain", Mistake(_rank_means)),
        "soft cap dropped": ("gemma2", "plain", Mistake(None, hf_sequence, "run", _asked_without("softcap"))),
        "sinks dropped": ("gpt_oss", "plain", Mistake(None, hf_sequence, "run", _asked_without("sinks"))),
        "scale dropped": ("gemma3", "plain", Mistake(None, hf_sequence, "run", _asked_without("scale"))),
        "temperature local": (
            "llama4", "plain", Mistake(None, hf_sequence, "with_temperature", lambda right: lambda module, q, *_: q),
        ),
    }  # fmt: skip


MISTAKES = (
    "none", "window dropped", "chunks dropped", "documents dropped", "padding dropped", "positions local",
    "labels shifted late", "mean of ranks' means", "soft cap dropped", "sinks dropped", "scale dropped",
    "temperature local",
)  # fmt: skip


def make_mistakes():
    """For every mistake: how far off it is."""
    found = {}
    for name, (family, case, mistake) in mistakes().items():
        model = model_of(family)
        batch = batch_of(case)
        expected = truth(model, batch)
        found[name] = difference(over_ranks(model, batch, mistake, layout="zigzag"), expected)
    return found


# -- other ways in -----------------------------------------------------------------------------------------------------


def dropout():
    """Dropout over ranks drops what a group of one drops, with the same seed, and something else with another."""
    model = model_of("llama", attention_dropout=0.3)
    batch = batch_of("packed")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    one = over_ranks(model, batch, dropout_seed=5, group=alone)
    same, other = over_ranks(model, batch, dropout_seed=5), over_ranks(model, batch, dropout_seed=6)
    return difference(same, one), difference(other, one)


def other_inputs():
    """Differences when the same batch is said in other words."""
    from longspan import huggingface

    model, found = model_of("qwen3"), {}
    batch = batch_of("packed")
    expected = truth(model, batch)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    words = {
        "shift_labels": {**batch, "labels": None, "shift_labels": shifted},
        "given count": {**batch, "num_items_in_batch": (shifted != -100).sum()},
    }
    for name, said in words.items():
        found[name] = difference(over_ranks(model, said), expected)
    numbers = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in DOCUMENTS])
    said = {"input_ids": batch["input_ids"], "labels": batch["labels"], "seq_idx": numbers}
    found["seq_idx of two rows"] = difference(over_ranks(model, said, positions="document"), expected)
    row = {name: value[:1] for name, value in batch.items()}
    expected = truth(model, row)
    edges = torch.tensor([0, *DOCUMENTS[0]]).cumsum(0).to(torch.int32)
    bare = {name: row[name] for name in ("input_ids", "labels")}
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 23, "max_length_k": 23}
    found["cu_seq_lens"] = difference(over_ranks(model, {**row, **lengths}), expected)
    found["seq_idx"] = difference(over_ranks(model, {**bare, "seq_idx": numbers[:1]}, positions="document"), expected)
    embeds = model.get_input_embeddings()(row["input_ids"]).detach()
    model.set_attn_implementation("longspan")
    inputs = huggingface.shard_inputs(
        model, {"inputs_embeds": embeds, **{k: row[k] for k in ("labels", "position_ids")}}, dist.group.WORLD
    )
    loss = huggingface.full_loss(model(**inputs).loss, inputs)
    found["inputs_embeds"] = abs(loss.item() - expected[0]), 0.0, 1.0
    return found


def refusals():
    """Messages of calls that must be refused over ranks."""
    import longspan as ls
    from longspan import huggingface

    model, batch, group = model_of("llama", "longspan"), batch_of("plain"), dist.group.WORLD
    packed = batch_of("packed")
    ones = torch.ones_like(batch["input_ids"])
    edges = torch.tensor([0, 30, TOKENS])

    def shard(changes=None, base=batch, on=model, **options):
        return lambda: huggingface.shard_inputs(on, {**base, **(changes or {})}, group, **options)

    def call(changes, **options):
        inputs = huggingface.shard_inputs(model, batch, group, **options)
        return lambda: model(**{**inputs, **changes(inputs)})

    from transformers import Qwen3NextConfig

    linear = Qwen3NextConfig(**SIZES)
    linear._attn_implementation = "longspan"
    dropping = model_of("llama", "longspan", attention_dropout=0.1)
    bare = huggingface.shard_inputs(model, batch, group)
    tries = {
        "other attention": shard(on=config("llama")),
        "no model": shard(on=3),
        "linear layers": shard(on=linear),
        "cache": shard({"use_cache": True}),
        "weights": shard({"output_attentions": True}),
        "last logits": shard({"logits_to_keep": 1}),
        "no tokens": shard({"input_ids": None}),
        "layout of another size": shard(layout=ls.layouts.zigzag(TOKENS, dist.get_world_size() + 1)),
        "layout of another length": shard(layout=ls.layouts.zigzag(TOKENS + 1, dist.get_world_size())),
        "unknown layout": shard(layout="diagonal"),
        "empty rank": shard(layout=ls.layouts.Layout.from_spans(TOKENS, [[(0, TOKENS)], []])),
        "dense mask": shard({"attention_mask": torch.ones(BATCH, 1, TOKENS, TOKENS)}),
        "packed and padded": shard({"attention_mask": ones}, packed),
        "borders disagree": shard({"cu_seq_lens_q": edges}, {k: v[:1] for k, v in packed.items()}),
        "documents without positions": shard({"cu_seq_lens_q": edges}, {k: v[:1] for k, v in batch.items()}),
        "positions twice": shard(base=packed, positions="document"),
        "short cu_seq_lens": shard({"cu_seq_lens_q": edges[:2]}, {k: v[:1] for k, v in batch.items()}),
        "list of cu_seq_lens": shard({"cu_seq_lens_q": [0, 30, TOKENS]}),
        "empty cu_seq_lens": shard({"cu_seq_lens_q": edges[:0]}),
        "falling cu_seq_lens": shard({"cu_seq_lens_q": torch.tensor([0, 30, 20, TOKENS])}),
        "cu_seq_lens of two rows": shard({"cu_seq_lens_q": edges}, positions="document"),
        "seq_idx of another length": shard({"seq_idx": ones[:, 1:]}),
        "list of position_ids": shard({"position_ids": [list(range(TOKENS))] * BATCH}),
        "loss_mask": shard({"loss_mask": ones}),
        "unnamed tensor": shard({"ticks": ones}),
        "cache_position": shard({"cache_position": torch.arange(TOKENS)}),
        "mask beside longspan": call(lambda inputs: {"attention_mask": (inputs["input_ids"] > 3).long()}),
        "config alone": shard(on=model.config),
        "cache beside longspan": lambda: _with_cache(model, batch, group),
        "labels shifted late": call(lambda inputs: {"shift_labels": None}),
        "shards of another layout": call(lambda inputs: {"longspan": _other(inputs, ls)}),
        "dropout without seed": lambda: dropping(**huggingface.shard_inputs(dropping, batch, group)),
        "dropout without layer": lambda: _nameless(dropping)(
            **huggingface.shard_inputs(dropping, batch, group, dropout_seed=1)
        ),
        "loss of nothing": lambda: huggingface.full_loss(torch.zeros(()), bare),
        "loss of other inputs": lambda: huggingface.full_loss(torch.zeros(()), batch),
        "mesh of two axes": lambda: huggingface.shard_inputs(model, batch, _mesh()),
    }
    return {name: _message(function) for name, function in tries.items()}


def _nameless(model):
    for layer in model.model.layers:
        del layer.self_attn.layer_idx
    return model


def _other(inputs, ls):
    from longspan.huggingface.sequence import ShardedSequence

    own = inputs["longspan"]
    spans = [[(0, 3)], [(3, TOKENS)]]
    other = ShardedSequence(own.whole, ls.layouts.Layout.from_spans(TOKENS, spans), own.group, "auto", None)
    other.arguments = own.arguments
    return other


def _mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))


def _with_cache(model, batch, group):
    from transformers import DynamicCache

    from longspan import huggingface

    inputs = huggingface.shard_inputs(model, batch, group)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=batch["input_ids"][:, :4], past_key_values=cache, use_cache=True)
        model(**{**inputs, "past_key_values": cache, "use_cache": True})


def _message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
