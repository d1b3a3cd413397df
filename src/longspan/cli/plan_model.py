"""A whole model's training step on one screen: where its bytes and its time go, whether it fits, and what it costs.

longspan plan --model qwen3-8b --seq 256k --ranks 8 --machine h100 --memory 80 --price 2.50
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.cli.command import FAILED, FINE
from longspan.cli.output import Column, Row, Screen, count, print_json, progress, screen_of
from longspan.cli.workload import Workload
from longspan.errors import LongspanError, PlanError
from longspan.formatting import bytes_alike, bytes_text, counted, seconds_alike, seconds_text, three
from longspan.layouts import Layout
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.sizing import (
    BUILT_IN,
    RESERVE,
    AttentionBytes,
    Heads,
    ModelSizes,
    Recipe,
    StepCost,
    StepMemory,
    StepTime,
    TrainingStep,
    built_in_config,
    model_flop,
    sizes_of,
    step_memory,
    step_time,
    why_no_time,
)
from longspan.sizing.time import PlanOptions, attention_plans, attention_seconds, recipes, training_step, widest

# What `longspan plan` answers of a whole model: bytes and seconds of its step, whether and where it fits.


MOST_RANKS, MOST_NODES = 1024, 16
"""Up to which powers of two, and how many whole nodes, it is tried on how many ranks a step fits."""


@dataclass(frozen=True)
class ModelQuestion:
    """A model, and how its step was asked for."""

    name: str
    sizes: ModelSizes
    workload: Workload
    recipe: Recipe
    data_parallel: int
    notes: tuple[str, ...] = ()
    _answers: dict[int, Answer] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(args: argparse.Namespace, name: str, sizes: ModelSizes, notes: tuple[str, ...]) -> ModelQuestion:
        workload = Workload.of(args)
        dtype = workload.tensors["dtype"]
        recipe = Recipe(not args.no_checkpointing, args.offload, args.mlp_chunks, args.logits, dtype, args.state)
        if args.keep and args.no_checkpointing:
            raise PlanError(
                "--keep and --no-checkpointing were given: every layer would keep remote K/V until its backward, which"
                " is not counted here. Leave one of them out."
            )
        return ModelQuestion(name, sizes, workload, recipe, args.data_parallel, notes)

    @property
    def batch(self) -> int:
        return self.workload.tensors["batch"]

    def on(self, ranks: int) -> Answer:
        """The answer for so many ranks to a sequence; made once."""
        if ranks not in self._answers:
            self._answers[ranks] = self._planned(ranks)
        return self._answers[ranks]

    def _planned(self, ranks: int) -> Answer:
        workload = self.workload
        layout = replace(workload, mask=widest(self.sizes, workload.mask), _layouts={}).layout(ranks)
        options = PlanOptions(
            workload.scheme, workload.machine if workload.machine_given else None, workload.keep, workload.fetch_bytes,
            self.batch, workload.tensors["dtype"],
        )  # fmt: skip
        return Answer(self, layout, attention_plans(self.sizes, workload.mask, layout, options))

    def least_bytes(self, ranks: int, allowed: list[Recipe]) -> int:
        """What it takes on so many ranks at least: spread evenly, attention aside, by the thriftiest recipe."""
        tokens = -(-self.workload.seq_len // ranks) * self.batch
        nothing = {heads: AttentionBytes(0, 0) for heads in self.sizes.attentions}
        steps = (TrainingStep(self.sizes, tokens, ranks * self.data_parallel, nothing, recipe) for recipe in allowed)
        return min(step_memory(step).peak.size for step in steps)


@dataclass(frozen=True)
class Answer:
    """What was asked, and how its attentions were planned."""

    asked: ModelQuestion
    layout: Layout
    plans: dict[Heads, Plan]

    def step(self, recipe: Recipe | None = None) -> TrainingStep:
        """The step with this recipe, or with the one that was asked for."""
        asked = self.asked
        return training_step(
            asked.sizes, self.layout, self.plans, asked.batch, recipe or asked.recipe, asked.data_parallel
        )

    def memory(self, recipe: Recipe | None = None) -> StepMemory:
        return step_memory(self.step(recipe))

    @property
    def machine(self) -> Machine:
        return next((plan.machine for plan in self.plans.values()), self.asked.workload.machine)

    @property
    def gpus(self) -> int:
        return self.layout.world_size * self.asked.data_parallel

    def why_no_time(self, recipe: Recipe | None = None) -> str | None:
        return why_no_time(self.step(recipe), self.machine)

    def time(self, recipe: Recipe | None = None) -> StepTime:
        return step_time(self.step(recipe), attention_seconds(self.plans), self.machine)

    def cost(self, recipe: Recipe | None = None) -> StepCost:
        """Tokens of all sequences of a step, on all GPUs."""
        asked = self.asked
        tokens = asked.workload.seq_len * asked.batch * asked.data_parallel
        flop = model_flop(asked.sizes, tokens, attention_seconds(self.plans), self.gpus)
        return StepCost(self.gpus, tokens, self.time(recipe).seconds, flop, self.machine.flops)


def numbers_of_ranks(machine: Machine) -> list[int]:
    """Powers of two, and whole nodes, from the smallest.

    >>> from longspan.planning.machine import H100
    >>> numbers_of_ranks(H100)[:8]
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    powers = {1 << power for power in range(MOST_RANKS.bit_length())}
    node = machine.node if machine.node <= MOST_RANKS else 1
    return sorted(powers | {node * number for number in range(1, MOST_NODES + 1) if node > 1})


def answers(asked: ModelQuestion, room: int, allowed: list[Recipe], above: int = 0) -> Iterator[Answer]:
    """Answers for more and more ranks, where it may fit."""
    for ranks in numbers_of_ranks(asked.workload.machine):
        if ranks <= above or asked.least_bytes(ranks, allowed) > room:
            continue
        try:
            yield asked.on(ranks)
        except LongspanError:  # a layout or a scheme that was named does not go with so many
            continue


def verdict(answer: Answer, memory: int) -> dict[str, Any]:
    """Whether it fits into so many GB, why not, what would make it, and the smallest number of GPUs that can."""
    room = (memory << 30) - RESERVE
    peak = answer.memory().peak
    found: dict[str, Any] = {
        "memory": memory, "fits": peak.size <= room, "bytes_left": room - peak.size, "fits_with": None,
        "fits_with_ranks": None, "smallest": smallest(answer, room),
    }  # fmt: skip
    aside = f"and {bytes_text(RESERVE)} set aside for CUDA and NCCL"
    if found["fits"]:
        return {**found, "why": f"{bytes_text(peak.size)} at the peak, {aside}"}
    most = max(peak.lines, key=lambda line: line.size)
    why = f"{bytes_text(peak.size)} at the peak ({peak.name}), {bytes_text(most.size)} of it {most.name}, {aside}"
    asked, ranks = answer.asked, answer.layout.world_size
    better = next((one for one in recipes(asked.recipe) if answer.memory(one).peak.size <= room), None)
    wider = answers(asked, room, [asked.recipe], ranks)
    more = next((one for one in wider if one.memory().peak.size <= room), None)
    found["fits_with"] = None if better is None else better.words
    found["fits_with_ranks"] = None if more is None else more.layout.world_size
    return {**found, "why": why, "advice": _advice(answer, found)}


def _advice(answer: Answer, found: dict[str, Any]) -> str:
    """What would make it fit."""
    with_, ranks = found["fits_with"], found["fits_with_ranks"]
    yes = [] if with_ is None else [f"with {with_}: yes"]
    yes += [] if ranks is None else [f"with --ranks {ranks}: yes"]
    if yes:
        return "; ".join(yes)
    least = min(answer.memory(one).peak.size for one in recipes(answer.asked.recipe))
    return f"the thriftiest recipe below takes {bytes_text(least)}"


def smallest(answer: Answer, room: int) -> dict[str, Any] | None:
    """The smallest number of GPUs on which it fits, with the first recipe that makes it; None where none was found."""
    allowed = recipes(answer.asked.recipe)
    for one in answers(answer.asked, room, allowed):
        for recipe in allowed:
            if one.memory(recipe).peak.size <= room:
                ranks = one.layout.world_size
                return {"gpus": one.gpus, "ranks": ranks, "with": recipe.words}
    return None


# -- The command -------------------------------------------------------------------------------------------------------


MAX_CONFIG = 1 << 20
QUANTIZED = "The file's quantization_config is left aside: parameters take what --state and --dtype say."
FROM_MODEL = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
"""What a model says itself, and what is taken where there is no model."""
SWITCHES = {
    "memory": None,
    "price": None,
    "data_parallel": 1,
    "no_checkpointing": False,
    "offload": False,
    "mlp_chunks": 1,
    "logits": False,
    "state": "float32",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a whole model; call it after those of the workload."""
    parser.set_defaults(**dict.fromkeys(FROM_MODEL))
    model = parser.add_argument_group("a whole model, in training")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--config", metavar="FILE", help="a config.json of transformers; nothing is downloaded")
    which.add_argument("--model", metavar="NAME", help=f"a model by name: {', '.join(BUILT_IN)}")
    model.add_argument("--memory", type=count, metavar="GB", help="memory of a device, such as 80: does it fit?")
    model.add_argument("--price", type=price, metavar="P", help="of an hour of one GPU: what do a billion tokens cost?")
    model.add_argument(
        "--data-parallel", type=count, default=1, metavar="N",
        help="N sequences at once, each over its own --ranks; FSDP is over all of them (1)",
    )  # fmt: skip
    model.add_argument("--no-checkpointing", action="store_true", help="layers keep all that their backward needs")
    model.add_argument("--offload", action="store_true", help="inputs of checkpointed layers wait on the host")
    model.add_argument("--mlp-chunks", type=count, default=1, metavar="N", help="MLPs run over N runs of tokens (1)")
    model.add_argument("--logits", action="store_true", help="the loss is computed from whole logits")
    model.add_argument(
        "--state", choices=("float32", "bfloat16"), default="float32",
        help="dtype of parameters, gradients and optimizer as they are kept (float32)",
    )  # fmt: skip


def price(text: str) -> float:
    """Money for an hour of one GPU.

    >>> price("2.50")
    2.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"the price of an hour of one GPU is above 0, but {text!r:.40} was given.")
    return value


def asked(args: argparse.Namespace) -> bool:
    """Whether a whole model was asked about. What speaks for the model, or against it, is refused."""
    if args.config is None and args.model is None:
        for name, default in SWITCHES.items():
            if getattr(args, name) != default:
                raise PlanError(f"--{name.replace('_', '-')} is about a whole model. Say which: --model or --config.")
        for name, value in FROM_MODEL.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
        return False
    for name in (*FROM_MODEL, "v_head_dim", "window"):
        if getattr(args, name) is not None:
            raise PlanError(
                f"--{name.replace('_', '-')} was given beside a model, which says that itself. Leave it out."
            )
        setattr(args, name, FROM_MODEL.get(name))
    return True


def model_of(args: argparse.Namespace) -> tuple[str, ModelSizes, tuple[str, ...]]:
    """The name and the sizes of the model that was asked about, and what to say beside."""
    if args.model is not None:
        return args.model, sizes_of(built_in_config(args.model)), ()
    path = Path(args.config)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise PlanError(f"--config {args.config!r:.80} is no file. Give a config.json, or a folder that has one.")
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise PlanError(f"{path} is larger than {MAX_CONFIG:,} bytes. A config.json is expected.")
    try:
        config = json.loads(data.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as wrong:
        raise PlanError(f"{path} is not JSON. Give a config.json as transformers writes it.") from wrong
    try:
        sizes = sizes_of(config)
    except PlanError as wrong:
        raise PlanError(f"{path}: {wrong}") from wrong
    name = path.resolve().parent.name if path.name == "config.json" else path.name
    return name, sizes, (QUANTIZED,) if config.get("quantization_config") else ()


def run(args: argparse.Namespace) -> int:
    with progress(args, "planning every kind of layer"):
        answer = ModelQuestion.of(args, *model_of(args)).on(args.ranks)
        if args.price is not None and (why := answer.why_no_time()) is not None:
            raise PlanError(
                f"--price was given, but how long a step takes is not known: {why}. Name another --machine."
            )
        fits = None if args.memory is None else verdict(answer, args.memory)
    if args.json:
        print_json("plan", figures(answer, fits, args.price))
    else:
        show(answer, fits, args.price, screen_of(args))
    return FAILED if fits and not fits["fits"] else FINE


def figures(answer: Answer, fits: dict[str, Any] | None, price: float | None) -> dict[str, Any]:
    """What the command says, for JSON; bytes of the rank that holds most."""
    memory, asked = answer.memory(), answer.asked
    asked_for = asked.workload.as_json()
    for name in (*FROM_MODEL, "v_head_dim", "window"):
        asked_for.pop(name, None)
    return {
        "workload": asked_for,
        "model": {
            "name": asked.name,
            "model_type": asked.sizes.model_type,
            "parameters": asked.sizes.params,
            "active_parameters": asked.sizes.active_params,
            "layers": len(asked.sizes.layers),
            "blocks": asked.sizes.num_blocks,
        },
        "ranks": answer.layout.world_size,
        "data_parallel": asked.data_parallel,
        "gpus": answer.gpus,
        "layout": answer.layout.name,
        "tokens_per_rank": answer.step().tokens,
        "attentions": [
            {"count": number, **_heads_json(heads), "scheme": answer.plans[heads].scheme.name}
            for heads, number in asked.sizes.attentions.items()
        ],
        "with": asked.recipe.words,
        "peak_bytes": memory.peak.size,
        "peak_moment": memory.peak.name,
        "host_bytes": memory.host,
        "moments": [
            {
                "name": moment.name,
                "bytes": moment.size,
                "lines": [{"name": line.name, "bytes": line.size, "why": line.why} for line in moment.lines],
            }
            for moment in memory.moments
        ],
        "time": time_figures(answer, price),
        "recipes": [
            {
                "with": one.words,
                "peak_bytes": answer.memory(one).peak.size,
                "host_bytes": answer.memory(one).host,
                "seconds": None if answer.why_no_time(one) else answer.time(one).seconds,
            }
            for one in recipes(asked.recipe)
        ],
        "fits": fits,
        "notes": list(asked.notes),
    }


def time_figures(answer: Answer, price: float | None) -> dict[str, Any]:
    """The step's time, and what it means; or why it is not known."""
    if (why := answer.why_no_time()) is not None:
        return {"seconds": None, "why_not": why}
    time, cost = answer.time(), answer.cost()
    return {
        "seconds": time.seconds,
        "simulated": True,
        "machine": answer.machine.name,
        "kernel": answer.machine.kernel,
        "lines": [{"name": line.name, "seconds": line.seconds, "why": line.why} for line in time.lines],
        "tokens": cost.tokens,
        "tokens_per_second": cost.tokens_per_second,
        "tokens_per_second_per_gpu": cost.tokens_per_second_per_gpu,
        "mfu": cost.mfu,
        "price": price,
        "price_per_billion_tokens": None if price is None else cost.per_billion(price),
    }


def _heads_json(heads: Heads) -> dict[str, Any]:
    return {
        "q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim,
        "v_head_dim": heads.v_head_dim, "window": heads.window,
    }  # fmt: skip


def show(answer: Answer, fits: dict[str, Any] | None, price: float | None, screen: Screen) -> None:
    """The step as a person reads it."""
    memory, asked, ranks = answer.memory(), answer.asked, answer.layout.world_size
    several = f", {asked.data_parallel:,} sequences at once: {answer.gpus:,} GPUs" if asked.data_parallel > 1 else ""
    screen.title(f"{asked.name} in training, {asked.workload.seq_len:,} tokens on {ranks:,} ranks{several}")
    facts = [
        ("model", about_model(asked.sizes)),
        ("tokens", f"{asked.workload.about_docs()}, {answer.step().tokens:,} tokens on a rank"),
        ("attention", about_attentions(answer)),
        ("with", f"{asked.recipe.words}{'' if asked.recipe.logits else '; loss without logits'}"),
        ("peak", f"{bytes_text(memory.peak.size)} on a rank: {memory.peak.name}"),
    ]
    if memory.host:
        facts.append(("host", f"{bytes_text(memory.host)} of pinned memory for each rank"))
    screen.facts([*facts, *about_time(answer, price), *about_fit(fits)])
    screen.text()
    lines = memory.peak.lines
    columns = (Column(memory.peak.name, False), Column("bytes"), Column("what", False))
    cells = zip(lines, column([line.size for line in lines]), strict=True)
    screen.table(columns, [Row((line.name, size, line.why)) for line, size in cells])
    screen.text()
    _tables(answer, memory, screen)
    screen.notes((
        "Computed, not measured: nothing here has run on a GPU. Layers keep what transformers' own modules keep, FSDP2"
        " shards over all ranks; memory lost between tensors is not counted. Times are simulated; tensor and expert"
        " parallel, LoRA and FP8 are not known here.",
        *asked.notes,
    ))  # fmt: skip


def about_time(answer: Answer, price: float | None) -> list[tuple[str, str]]:
    """How long a step takes and what that means, in a line or two."""
    if (why := answer.why_no_time()) is not None:
        return [("step", f"how long it takes is not known: {why}")]
    cost, machine = answer.cost(), answer.machine
    rates = f"{cost.tokens_per_second:,.0f} tokens/s, {cost.tokens_per_second_per_gpu:,.0f} for each GPU"
    on = f"simulated on {machine.name} ({machine.kernel or 'kernel not named'})"
    lines = [("step", f"{seconds_text(cost.seconds)}, {on}: {rates}; MFU {cost.mfu:.1%}")]
    if price is not None:
        text = f"{cost.per_billion(price):,.0f} for a billion tokens, at {price:g} for an hour of each GPU"
        lines.append(("cost", text))
    return lines


def about_fit(fits: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Whether it fits, and the smallest number of GPUs on which it would."""
    if fits is None:
        return []
    text = f"in {fits['memory']} GB: {'yes, ' if fits['fits'] else 'no, because '}{fits['why']}"
    least = fits["smallest"]
    small = f"it fits on none that was tried, up to {MOST_RANKS:,} ranks"
    if least is not None:
        small = f"{counted(least['gpus'], 'GPU')} (--ranks {least['ranks']:,}), with {least['with']}"
    return [("fits", text + (f"; {fits['advice']}" if "advice" in fits else "")), ("smallest", small)]


def _tables(answer: Answer, memory: StepMemory, screen: Screen) -> None:
    """All moments, where the time goes, and all recipes."""
    sizes = column([moment.size for moment in memory.moments])
    rows = [Row((m.name, size), m is memory.peak) for m, size in zip(memory.moments, sizes, strict=True)]
    screen.table((Column("moment", False), Column("bytes")), rows)
    screen.text()
    if answer.why_no_time() is None:
        time = answer.time()
        cells = zip(time.lines, seconds_column([line.seconds for line in time.lines]), strict=True)
        screen.table(
            (Column("step", False), Column("time"), Column("share"), Column("what", False)),
            [Row((line.name, text, f"{line.seconds / time.seconds:.1%}", line.why)) for line, text in cells],
        )
        screen.text()
    found = [(one, answer.memory(one)) for one in recipes(answer.asked.recipe)]
    peaks, hosts = column([m.peak.size for _, m in found]), column([m.host for _, m in found])
    times = ["" if answer.why_no_time(one) else seconds_text(answer.time(one).seconds) for one, _ in found]
    screen.table(
        (Column("with", False), Column("peak"), Column("host"), Column("step"), Column("at", False)),
        [
            Row((one.words, peak, host if m.host else "", time, m.peak.name), one == answer.asked.recipe)
            for (one, m), peak, host, time in zip(found, peaks, hosts, times, strict=True)
        ],
    )
    screen.text()


def column(values: Sequence[int]) -> list[str]:
    """Bytes for one column, in GiB wherever one is that large: devices are sold by it."""
    if max(values) < 1 << 30:
        return bytes_alike(values)
    return [f"{three(value / (1 << 30))} GiB" for value in values]


def seconds_column(values: Sequence[float]) -> list[str]:
    """Times for one column, in seconds wherever one is that long.

    >>> seconds_column([34.146, 0.784]), seconds_column([0.5, 0.0123])
    (['34.1 s', '0.78 s'], ['500 ms', '12.3 ms'])
    """
    return seconds_alike(values) if max(values) < 1 else [f"{three(value)} s" for value in values]


def about_model(sizes: ModelSizes) -> str:
    """Parameters and layers, in a line."""
    active = f", {sizes.active_params / 1e9:,.2f}e9 of them for a token" if sizes.active_params < sizes.params else ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sizes.num_blocks.items())
    return f"{sizes.model_type}, {sizes.params / 1e9:,.2f}e9 parameters{active}; {len(sizes.layers)} layers: {kinds}"


def about_attentions(answer: Answer) -> str:
    """Each size of attention and its scheme, in a line."""
    words: list[str] = []
    for heads, number in answer.asked.sizes.attentions.items():
        dims = f"{heads.head_dim}" if heads.head_dim == heads.v_head_dim else f"{heads.head_dim}/{heads.v_head_dim}"
        seen = "" if heads.window is None else f", window of {heads.window:,} before each token"
        chosen = next(reason for reason in answer.plans[heads].reasons if reason.chosen)
        inside = "an unknown size" if chosen.workspace_bytes is None else bytes_text(chosen.workspace_bytes)
        taken = f"{bytes_text(chosen.peak_bytes)} of remote K/V, messages and sums while one runs"
        words.append(
            f"{number} x {heads.q_heads} query and {heads.kv_heads} key/value heads of {dims}{seen}, by"
            f" {chosen.scheme}, with {taken}, and {inside} inside kernels"
        )
    return "; ".join(words) if words else "none"
