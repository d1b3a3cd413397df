"""CUDA graphs on simulated GPUs: what a host queues while it captures is not run, and runs as often as the graph is
launched, at the addresses it had.

As in CUDA, memory that is allocated while capturing belongs to the graph alone, nothing may be copied from the host or
waited for, and every stream that has joined must be waited for by the one that captures.
"""

import random
from contextlib import contextmanager

from tests.simulation.streams import Batch, Event, Memory, Simulation, Stream
from tests.simulation.streams_cases import Case, queue
from tests.simulation.streams_group import SimulatedNccl, run, simulated


class UnjoinedError(RuntimeError):
    """A stream was left that nobody waits for."""


class Graph:
    """What one rank captured."""

    def __init__(self, gpu, streams):
        self.gpu, self.streams = gpu, streams
        first, *others = streams
        waited = {}
        for _, waits in first.queue:
            for event in waits:
                waited[event.stream] = max(waited.get(event.stream, 0), event.count)
        for stream in others:
            if waited.get(stream, 0) < stream.put:
                raise UnjoinedError(
                    f"{stream.name}: {stream.put - waited.get(stream, 0)} operations are not waited for"
                )

    def launch(self):
        """Queues all of it on the current stream."""
        new = {stream: Stream(f"graph's {stream.name}") for stream in self.streams}
        begin = self.gpu.current.event()
        for stream, copy in new.items():
            copy.wait(begin)  # counts are one more than they were
            for action, waits in stream.queue:
                if isinstance(action, Batch):
                    action = Batch(self.gpu, list(action.sends), list(action.receives))
                copy.add(action, tuple(Event(new[event.stream], event.count + 1) for event in waits))
        self.gpu.streams = [stream for stream in self.gpu.streams if stream.queue or stream in self.gpu.own]
        self.gpu.streams += new.values()
        for copy in new.values():
            self.gpu.current.wait(copy.event())


@contextmanager
def capturing(simulation, rank):
    """Inside, this rank's host captures; gives a list that will hold the graph."""
    gpu, found = simulation.gpus[rank], []
    before = gpu.compute, gpu.comm, gpu.side, gpu.current, gpu.memory, simulation.warm
    gpu.compute, gpu.comm, gpu.side = streams = [Stream(stream.name) for stream in before[:3]]
    outer, private = gpu.memory, Memory(random.Random(rank))
    private.others = [outer, *outer.others]
    gpu.current, gpu.memory, simulation.warm = gpu.compute, private, True
    try:
        with simulation.host(rank):
            yield found
        found.append(Graph(gpu, streams))
    finally:
        gpu.compute, gpu.comm, gpu.side, gpu.current, gpu.memory, simulation.warm = before
        outer.others.append(private)  # where results are


def replayed(case: Case, others: list[Case], seed, ahead, nccl=SimulatedNccl):
    """What every rank gets for each of the other cases' inputs from one graph of this case's pass: an eager pass, a
    capture, then a launch for each, all queued before anything must have run, and an eager pass at the end."""
    simulation = Simulation(len(case.plans), seed, ahead)
    case.operators.simulation = simulation
    upload = lambda cases, rank: [[simulation.gpus[rank].upload(t) for t in c.shards[rank][0]] for c in cases]  # noqa: E731
    ranks = range(len(case.plans))
    inputs, news = [upload([case], rank)[0] for rank in ranks], [upload(others, rank) for rank in ranks]
    with simulated(nccl(simulation)):
        queue(case, simulation, [[layer] for layer in inputs])
        graphs, results = [], []
        for rank in ranks:
            with capturing(simulation, rank) as found:
                results.append(run_pass(case, simulation, rank, inputs[rank]))
            graphs += found
        kept = [[] for _ in ranks]
        for number in range(len(others)):
            for rank in simulation.draw.sample(ranks, len(ranks)):
                with simulation.host(rank):
                    for static, new in zip(inputs[rank], news[rank][number], strict=True):
                        static.copy_(new)
                    graphs[rank].launch()
                    kept[rank].append([t.clone() for t in results[rank]])
        simulation.warm = True
        last = queue(case, simulation, [[layer] for layer in inputs])
        simulation.drain()
    gpus = simulation.gpus
    made = [[[gpu.read(t) for t in found] for found in kept[gpu.rank]] for gpu in gpus]
    return made, [[gpu.read(t) for t in found] for gpu, found in zip(gpus, last, strict=True)]


def run_pass(case, simulation, rank, layer):
    """Forward and backward of one layer."""
    host, answer = case.host(rank, [layer]), None
    while True:
        try:
            direction, make = host.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = run(simulation, rank, make(), case.plans[rank], direction)


def other_inputs(case, seed):
    """The same plan with other data."""
    return Case(case.plans, 1, seed)
