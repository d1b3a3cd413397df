"""A GPU's order of things without a GPU: operations are queued on streams and run late, in any order that streams and
events allow.

The engine works on tensors of the `meta` device, which have shapes, views and storages but no data, and
`QueuedOperations` sees each of its operations. What they stand for is memory of the simulated GPU: every storage has a
`Block`, and a queued operation reads and writes blocks when its turn comes, which may be long after the host has gone
on. Three things are as on a GPU:

- **Streams.** Each rank has a stream for computing and one for messages, as ProcessGroupNCCL has. Operations of one
  stream run in order; between streams only events keep order.
- **Memory.** A storage that the host drops is free at once, and may be handed out again on the same stream while
  operations that use it are still queued. What another stream uses is safe only if that was recorded. New memory holds
  NaN (all bits set).
- **The host** does not see data. What would make it wait for the GPU, or copy from pageable memory, raises.

    host     a = empty   send(a)   del a   b = empty
    compute  poison a                      poison b       b has a's memory: right only if the send is over, or recorded
    comm                 read a ..........................................
"""

import random
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xFF
ROUND = 512
"""PyTorch's allocator rounds sizes up to this."""
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
VIEWS = {"detach", "alias", "_unsafe_view", "lift_fresh", "_reshape_alias"}
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
COPIES = {"_to_copy", "copy_", "lift"}
PACES = (0.01, 1.0, 100.0)


class HostWaitError(RuntimeError):
    """The host would wait for the GPU."""


class HostCopyError(RuntimeError):
    """Data would be copied to the GPU from pageable memory, for which the host waits."""


class DeadlockError(RuntimeError):
    """Operations are left, and none can ever run."""


@dataclass(frozen=True)
class Event:
    """Reached when the stream has run so many operations."""

    stream: "Stream"
    count: int

    @property
    def is_done(self):
        return self.stream.done >= self.count


@dataclass(eq=False, repr=False)
class Stream:
    name: str
    queue: deque = field(default_factory=deque)
    put: int = 0
    done: int = 0
    pace: float = 1.0
    """How likely its next operation is to be next, relative to others; drawn anew every so often."""

    def event(self):
        """Reached when all that is queued by now has run."""
        return Event(self, self.put)

    def add(self, run, waits=()):
        """Queues an operation that also waits for events; returns the event that it has run."""
        self.queue.append((run, waits))
        self.put += 1
        return self.event()

    def wait(self, event):
        """Whatever is queued from now on runs after the event."""
        self.add(None, (event,))

    @property
    def head(self):
        """The operation that is next, if nothing stops it."""
        if not self.queue:
            return None
        run, waits = self.queue[0]
        for event in waits:
            if not event.is_done:
                return None
        return run or nothing

    def pop(self):
        self.queue.popleft()
        self.done += 1


def nothing():
    """An operation that only keeps order."""


@dataclass(eq=False, repr=False)
class Block:
    """Memory of the GPU, and who may still use it."""

    memory: torch.UntypedStorage
    stream: Stream
    recorded: list[Stream] = field(default_factory=list)
    is_shared: bool = False
    """Whether another stream has used it since it was handed out."""

    @property
    def size(self):
        return self.memory.nbytes()

    def poison(self):
        whole = torch.empty(0, dtype=torch.uint8).set_(self.memory)
        whole.fill_(POISON)


@dataclass(frozen=True, repr=False)
class Place:
    """A tensor of the GPU as an operation sees it: it does not keep the memory from being handed out again."""

    block: Block
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self):
        return torch.empty(0, dtype=self.dtype).set_(self.block.memory, self.offset, self.shape, self.strides)


class Memory:
    """One rank's memory, handed out as PyTorch's caching allocator does it."""

    def __init__(self, draw):
        self.draw, self.reserved = draw, 0
        self.others: list[Memory] = []
        """Tensors of these are known here, too; they hand out memory of their own."""
        self.used: dict[int, tuple[StorageWeakRef, Block]] = {}
        self.free: list[Block] = []
        self.leaving: list[tuple[list[Event], Block]] = []
        self.records = True
        """Whether `record_stream` does anything."""

    def allocate(self, tensor, stream, *, anew=False):
        """A block for the tensor's storage, which nobody has seen yet: a free one of this stream, or new."""
        self.collect()
        storage = tensor.untyped_storage()
        size = -(-max(storage.nbytes(), 1) // ROUND) * ROUND
        fits = [block for block in self.free if block.stream is stream and size <= block.size <= 4 * size]
        if fits and not anew:  # of all that could be handed out, the most dangerous one is
            block = next((block for block in fits if block.is_shared), None) or self.draw.choice(fits)
            self.free.remove(block)
            block.is_shared = False
        else:
            block = Block(torch.UntypedStorage(size), stream)
            block.poison()
            self.reserved += size
        self.used[storage._cdata] = StorageWeakRef(storage), block
        return block

    def collect(self):
        """Takes back what the host has dropped."""
        for key in [key for key in self.used if torch.UntypedStorage._expired(key)]:
            _, block = self.used.pop(key)
            events = [stream.event() for stream in block.recorded] if self.records else []
            block.recorded = []
            self.leaving.append((events, block))
        waiting, self.leaving = self.leaving, []
        for events, block in waiting:
            if all(event.is_done for event in events):
                self.free.append(block)
            else:
                self.leaving.append((events, block))

    def place(self, tensor):
        key = tensor.untyped_storage()._cdata
        _, block = next(memory for memory in (self, *self.others) if key in memory.used).used[key]
        return Place(block, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def record(self, tensor, stream):
        """The memory is not handed out again before the stream has passed, once it is dropped."""
        block = self.place(tensor).block
        block.recorded.append(stream)
        block.is_shared = True


class Gpu:
    """One rank's streams and memory."""

    def __init__(self, rank, draw):
        self.rank = rank
        self.compute, self.comm, self.side = (Stream(f"{name} of rank {rank}") for name in ("compute", "comm", "side"))
        self.own = (self.compute, self.comm, self.side)
        self.streams = [*self.own]
        self.current = self.compute
        self.memory = Memory(draw)

    def launch(self, function, tensors, results):
        """Queues one operation: results become what the function makes of the tensors (None may be among them)."""
        given = [t if t is None or not t.is_meta else self.memory.place(t) for t in tensors]
        into = [self.memory.place(t) for t in results]

        def run():
            made = function(*(t.tensor() if isinstance(t, Place) else t for t in given))
            for place, tensor in zip(into, made, strict=True):
                place.tensor().copy_(tensor)

        self.current.add(run)

    def upload(self, tensor):
        """A tensor of the GPU with this data, put there while nothing runs."""
        with torch.utils._python_dispatch._disable_current_modes():
            made = torch.empty_like(tensor, device="meta")
            block = self.memory.allocate(made, self.compute, anew=True)
            self.memory.place(made).tensor().copy_(tensor)
        assert block is not None
        return made

    def read(self, tensor):
        """What is in a tensor of the GPU, when all has run."""
        return self.memory.place(tensor).tensor().clone()


class Simulation:
    """All ranks' GPUs. `ahead` is how far hosts run ahead of them: 1.0 for all the way, 0.0 for hardly at all."""

    def __init__(self, world, seed, ahead=1.0):
        self.draw = random.Random(seed)
        self.gpus = [Gpu(rank, random.Random(f"{seed} {rank}")) for rank in range(world)]
        self.ahead, self.warm = ahead, False
        self.gpu = self.gpus[0]
        self.left = 0
        self.num_run = 0

    @contextmanager
    def host(self, rank):
        """Inside, operations are those of this rank's host."""
        before, self.gpu = self.gpu, self.gpus[rank]
        try:
            with QueuedOperations(self), torch.no_grad():
                yield self.gpu
        finally:
            self.gpu = before

    @contextmanager
    def on(self, stream):
        """Inside, this rank's operations go to another stream."""
        gpu = self.gpu
        before, gpu.current = gpu.current, stream
        try:
            yield
        finally:
            gpu.current = before

    # -- running -------------------------------------------------------------------------------------------------------

    def step(self):
        """Runs one operation, or a few of one stream; whether there was any that could run."""
        streams = [stream for gpu in self.gpus for stream in gpu.streams if stream.queue]
        if self.left <= 0:
            self.left = self.draw.choice((1, 10, 50, 250))
            for stream in streams:
                stream.pace = self.draw.choice(PACES)
        while streams:
            stream = self.draw.choices(streams, [stream.pace for stream in streams])[0]
            num = self.draw.choice((1, 2, 20))
            if self.run_some(stream, num):
                return True
            streams.remove(stream)
        return False

    def run_some(self, stream, num):
        """Runs up to so many of the stream's operations; whether any could run."""
        for done in range(num):
            head = stream.head
            actions = head.actions(self) if isinstance(head, Batch) else [head] if head is not None else []
            if not actions:
                return done > 0
            self.draw.choice(actions)()
            self.num_run += 1
            self.left -= 1
            if not isinstance(head, Batch) or head.is_over:
                stream.pop()
        return True

    def drain(self):
        """Runs all that is queued."""
        while self.step():
            pass
        left = [stream for gpu in self.gpus for stream in gpu.streams if stream.queue]
        if left:
            raise DeadlockError(f"{sum(len(s.queue) for s in left)} operations wait for ever: {[s.name for s in left]}")

    def advance(self):
        """Lets GPUs work while the host goes on, as far as it is not ahead of them."""
        while self.draw.random() > self.ahead and self.step():
            pass


class Batch:
    """A group of sends and receives of one rank: one operation of its stream for messages. A message passes when both
    ends have come to it; NCCL knows no tags, so the n-th send to a rank meets that rank's n-th receive."""

    def __init__(self, gpu, sends, receives):
        self.gpu, self.sends, self.receives = gpu, sends, receives
        self.has_begun = False

    @property
    def is_over(self):
        return self.has_begun and not self.sends and not self.receives

    def actions(self, simulation):
        """What can happen now: it begins, or a message to this rank passes."""
        if not self.has_begun or self.is_over:
            return [self.begin]
        found = []
        for at, (peer, place) in enumerate(self.receives):
            if any(src == peer for src, _ in self.receives[:at]):
                continue  # an earlier message of the same rank comes first
            for stream in simulation.gpus[peer].streams:
                other = stream.head
                sent = other.next_to(self.gpu.rank) if isinstance(other, Batch) else None
                if sent is not None:
                    found.append(lambda e=(peer, place), s=stream, m=sent: self.take(e, s, m))
        return found

    def next_to(self, rank):
        """The next message to a rank, if messages pass by now."""
        return next((entry for entry in self.sends if entry[0] == rank), None) if self.has_begun else None

    def begin(self):
        """From now on buffers may be written to, in any order."""
        self.has_begun = True
        for _, place in self.receives:
            place.tensor().fill_(POISON)

    def take(self, entry, stream, sent):
        """Receives the next message of another rank's stream."""
        target, source, other = entry[1].tensor(), sent[1].tensor(), stream.head
        if target.numel() != source.numel():
            raise DeadlockError(f"{source.numel()} bytes are sent, and {target.numel()} expected")
        target.copy_(source)
        self.receives.remove(entry)
        other.sends.remove(sent)
        if other is not self and other.is_over:
            stream.pop()


# -- what the host does ------------------------------------------------------------------------------------------------


class QueuedOperations(TorchDispatchMode):
    """Queues operations on tensors of the GPU; those of the host run at once."""

    def __init__(self, simulation):
        super().__init__()
        self.simulation = simulation

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and looking for it takes longer than most operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.is_view or name in VIEWS:
            return func(*args, **kwargs)
        tensors = leaves(args, leaves(kwargs.values(), []))
        if not any(t.is_meta for t in tensors) and _device(kwargs) != "meta":
            return func(*args, **kwargs)
        check(func, args, kwargs, tensors, warm=self.simulation.warm)
        gpu = self.simulation.gpu
        if name in COPIES and any(not t.is_meta for t in tensors):
            return self.copied(func(*args, **kwargs), tensors)
        if name in ALLOCATIONS:
            found = func(*args, **kwargs)
            gpu.current.add(gpu.memory.allocate(found, gpu.current).poison)
        elif func._schema.is_mutable:
            found = kwargs["out"] if "out" in kwargs else args[0]
            self.queue(gpu, func, args, kwargs, [])
        else:
            found = results_of(func, args, kwargs)
            self.queue(gpu, func, args, kwargs, leaves((found,), []))
        self.simulation.advance()
        return found

    def copied(self, found, tensors):
        """A copy from the host, which waits for it: it is there at once."""
        memory = self.simulation.gpu.memory
        if found.untyped_storage()._cdata not in memory.used:
            memory.allocate(found, self.simulation.gpu.current, anew=True)
        memory.place(found).tensor().copy_(next(t for t in tensors if not t.is_meta))
        return found

    def queue(self, gpu, func, args, kwargs, results):
        """Queues an operation, which writes into its arguments or gives new results."""
        args, kwargs = mapped(lambda t: gpu.memory.place(t) if t.is_meta else t.clone(), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        for tensor in results:
            gpu.memory.allocate(tensor, gpu.current)
        into = [gpu.memory.place(tensor) for tensor in results]

        def run():
            real_args, real_kwargs = mapped(
                lambda place: place.tensor() if type(place) is Place else place, (args, kwargs)
            )
            made = func(*real_args, **real_kwargs)
            assert "out" not in kwargs or made.shape == kwargs["out"].shape, f"{func} resized its output"
            for place, tensor in zip(into, leaves((made,), []) if into else (), strict=True):
                place.tensor().copy_(tensor)

        gpu.current.add(run)


class NoHostWaits(TorchDispatchMode):
    """Inside, what makes the host wait for tensors of the `meta` device, or copies to them from the host, raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = leaves(args, leaves(kwargs.values(), []))
        if any(t.is_meta for t in tensors) or _device(kwargs) == "meta":
            check(func, args, kwargs, tensors, warm=True)
        return func(*args, **kwargs)


_forms = {}


def results_of(func, args, kwargs):
    """The results of an operation, without data. Working out their shapes takes long, so it is done once."""
    form = lambda t: (t.shape, t.stride(), t.dtype, t.is_meta)  # noqa: E731
    key = repr((func, mapped(form, (args, kwargs))))
    if key not in _forms:
        _forms[key] = mapped(form, func(*args, **kwargs))
        return func(*args, **kwargs)
    found = _forms[key]
    if isinstance(found[0], torch.Size):
        return torch.empty_strided(found[0], found[1], dtype=found[2], device="meta")
    return tuple(torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype, _ in found)


def check(func, args, kwargs, tensors, *, warm):
    """Refuses what makes the host wait for the GPU, and in a warm call what is copied from the host."""
    name = func.overloadpacket.__name__
    by_flags = name in ("index", "index_put_", "index_put", "_index_put_impl_") and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
    )
    if name in WAITS or by_flags or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        raise HostWaitError(f"the host would wait for the GPU in {func}")
    if name in ("set_", "resize_", "record_stream"):
        raise NotImplementedError(f"{func} is not modelled")
    if name not in COPIES:
        return
    to_host = _device(kwargs) == "cpu" or (name == "copy_" and not args[0].is_meta)
    if to_host:
        raise HostWaitError(f"the host would wait for the GPU in {func}: its data is copied to the host")
    if warm and any(not t.is_meta for t in tensors):
        raise HostCopyError(f"data is copied from the host in a warm call, by {func}")


def _device(kwargs):
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def leaves(tree, found):
    """All tensors in lists and tuples, after those found before."""
    for value in tree:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            leaves(value, found)
    return found


def mapped(change, tree):
    """The same tree with other tensors, or places."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(change, value) for value in tree])
    if kind is dict:
        return {key: mapped(change, value) for key, value in tree.items()}
    return change(tree) if kind is Place or isinstance(tree, torch.Tensor) else tree
