"""The bytes that a rank of FSDP2 holds in a training step, measured operator by operator; importable by name."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import longspan.huggingface  # noqa: F401  (registers the attention)
from tests.hosts.hf_versions import checkpoint_layers


class Live(TorchDispatchMode):
    """The most bytes of storages that were alive in each phase, as large as they were: FSDP empties and fills them."""

    def __init__(self):
        super().__init__()
        self.alive, self.most, self.phase = {}, {}, ""

    def note(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                self.alive.setdefault(storage._cdata, StorageWeakRef(storage))

    def size(self):
        total = 0
        for key, weak in list(self.alive.items()):
            storage = None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.alive[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.note(tree_leaves(found))
        self.most[self.phase] = max(self.most.get(self.phase, 0), self.size())
        return found


def phases(config, tokens, checkpointing):
    """The most bytes in forward, backward and optimizer of a model's layers and embedding, on this rank."""
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="longspan"
    )
    model = made.model.train()
    if checkpointing:
        checkpoint_layers(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids, dout = torch.randint(3, 90, (1, tokens)), torch.randn(1, tokens, config["hidden_size"]).bfloat16()

    def step(live):
        live.phase = "forward"
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        live.phase = "backward"
        out.backward(dout)
        live.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()

    step(Live())  # makes the optimizer's moments
    live = Live()
    live.note([*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())])
    with live:
        step(live)
    return live.most
