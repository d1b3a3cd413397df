"""A whole model's training step on one screen: where its bytes and its time go, whether it fits, and what it costs.

longspan plan --model qwen3-8b --seq 256k --ranks 8 --machine h100 --memory 80 --price 2.50
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longspan.cli.command import FAILED, FINE
from longspan.cli.output import Row, count, print_facts, print_json, print_table, print_text
from longspan.cli.workload import RANKS, Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import LongspanError, PlanError
from longspan.formatting import (
    bytes_in_one_unit,
    bytes_text,
    format_count,
    seconds_in_one_unit,
    seconds_text,
    three_digits,
)
from longspan.layouts import Layout
from longspan.planning.machine import GPU_MEMORY, Machine
from longspan.planning.plan import Plan
from longspan.sizing import (
    BUILT_IN,
    RESERVE,
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
from longspan.sizing.memory import step_without_attention
from longspan.sizing.parallel import split_model
from longspan.sizing.recommend import MAX_GPUS, numbers_of_gpus
from longspan.sizing.time import PlanOptions, attention_plans, attention_seconds, recipes, training_step, widest_mask

# -- Memory and time of a step, and where it fits ----------------------------------------------------------------------


@dataclass(frozen=True)
class ModelWorkload:
    """A model, and how it is trained."""

    name: str
    sizes: ModelSizes
    workload: Workload
    recipe: Recipe
    data_parallel: int
    notes: tuple[str, ...] = ()
    _steps: dict[int, PlannedStep] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch(self) -> int:
        return self.workload.tensors["batch"]

    def plan_on(self, ranks: int) -> PlannedStep:
        """Plan for a sequence over this many ranks; once for each number."""
        if ranks not in self._steps:
            workload = self.workload
            layout = replace(workload, mask=widest_mask(self.sizes, workload.mask), _layouts={}).layout(ranks)
            machine = workload.machine if workload.is_machine_named or self.sizes.tp > 1 else None
            options = PlanOptions(
                workload.scheme, machine, workload.keep, workload.fetch_bytes, self.batch, workload.tensors["dtype"],
            )  # fmt: skip
            plans = attention_plans(self.sizes, workload.mask, layout, options)
            self._steps[ranks] = PlannedStep(self, layout, plans)
        return self._steps[ranks]

    def least_bytes(self, ranks: int, allowed: list[Recipe]) -> int:
        """Return a lower bound of memory: tokens spread evenly, no attention, the recipe that needs least."""
        tokens = -(-self.workload.seq_len // ranks) * self.batch
        ranks *= self.data_parallel
        steps = (step_without_attention(self.sizes, tokens, ranks, recipe) for recipe in allowed)
        return min(step_memory(step).peak.size for step in steps)


@dataclass(frozen=True)
class PlannedStep:
    """A training step on some ranks, with the plans of its attention layers."""

    model: ModelWorkload
    layout: Layout
    plans: dict[Heads, Plan]

    def step(self, recipe: Recipe | None = None) -> TrainingStep:
        """Return the step with this recipe, or with that of the arguments."""
        model = self.model
        return training_step(
            model.sizes, self.layout, self.plans, model.batch, recipe or model.recipe, model.data_parallel
        )

    def memory(self, recipe: Recipe | None = None) -> StepMemory:
        return step_memory(self.step(recipe))

    @property
    def machine(self) -> Machine:
        if self.model.sizes.tp > 1:  # plans have the machine as ranks of cp see it
            return self.model.workload.machine
        return next((plan.machine for plan in self.plans.values()), self.model.workload.machine)

    @property
    def gpus(self) -> int:
        return self.layout.world_size * self.model.data_parallel * self.model.sizes.tp

    def why_no_time(self, recipe: Recipe | None = None) -> str | None:
        return why_no_time(self.step(recipe), self.machine)

    def time(self, recipe: Recipe | None = None) -> StepTime:
        return step_time(self.step(recipe), attention_seconds(self.plans), self.machine)

    def cost(self) -> StepCost:
        """Return the cost for the tokens of all sequences of a step, on all GPUs."""
        model = self.model
        tokens = model.workload.seq_len * model.batch * model.data_parallel
        flop = model_flop(model.sizes, tokens, attention_seconds(self.plans), self.gpus, model.recipe.lora)
        return StepCost(self.gpus, tokens, self.time().seconds, flop, self.machine.flops)


def steps_that_may_fit(model: ModelWorkload, room: int, allowed: list[Recipe], above: int = 0) -> Iterator[PlannedStep]:
    """Yield steps on more and more ranks, without those whose lower bound does not fit."""
    for ranks in numbers_of_gpus(model.workload.machine.node):
        if ranks <= above:
            continue
        try:
            if model.least_bytes(ranks, allowed) <= room:
                yield model.plan_on(ranks)
        except LongspanError:  # --layout, --scheme or --ep does not allow this many
            continue


def check_fit(step: PlannedStep, memory: int) -> dict[str, Any]:
    """Return whether it fits into so many GB, why not, what would make it fit, and the fewest GPUs on which it does."""
    room, model = (memory << 30) - RESERVE, step.model
    peak = step.memory().peak
    allowed = recipes(model.recipe, model.sizes.tp)
    smallest = next(
        (
            {"gpus": one.gpus, "ranks": one.layout.world_size, "with": recipe.words}
            for one in steps_that_may_fit(model, room, allowed)
            for recipe in allowed
            if one.memory(recipe).peak.size <= room
        ),
        None,
    )
    result: dict[str, Any] = {
        "memory": memory, "fits": peak.size <= room, "bytes_left": room - peak.size, "fits_with": None,
        "fits_with_ranks": None, "smallest": smallest,
    }  # fmt: skip
    reserve = f"and {bytes_text(RESERVE)} set aside for CUDA and NCCL"
    if result["fits"]:
        return {**result, "why": f"{bytes_text(peak.size)} at the peak, {reserve}"}
    most = max(peak.lines, key=lambda line: line.size)
    why = f"{bytes_text(peak.size)} at the peak ({peak.name}), {bytes_text(most.size)} of it {most.name}, {reserve}"
    advice: list[str] = []
    better = next((recipe for recipe in allowed if step.memory(recipe).peak.size <= room), None)
    if better is not None:
        result["fits_with"] = better.words
        advice.append(f"with {better.words}: yes")
    wider = steps_that_may_fit(model, room, [model.recipe], step.layout.world_size)
    more = next((one for one in wider if one.memory().peak.size <= room), None)
    if more is not None:
        result["fits_with_ranks"] = more.layout.world_size
        advice.append(f"with --ranks {more.layout.world_size}: yes")
    if not advice:
        least = min(step.memory(recipe).peak.size for recipe in allowed)
        advice.append(f"the thriftiest recipe below takes {bytes_text(least)}")
    return {**result, "why": why, "advice": "; ".join(advice)}


# -- The command -------------------------------------------------------------------------------------------------------


MAX_CONFIG = 1 << 20
QUANTIZED = "The file's quantization_config is left aside: parameters take what --state and --dtype say."
FROM_MODEL = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
"""Options that a model sets, with their defaults without a model."""
SWITCHES = {
    "gpus": None, "gpu": None, "kernel": None, "memory": None, "price": None, "data_parallel": 1, "lora": 0,
    "no_checkpointing": False, "offload": (), "mlp_chunks": 1, "logits": False, "state": "float32", "tp": 1, "ep": 1,
}  # fmt: skip
SEARCHED = ("data_parallel", "no_checkpointing", "offload", "mlp_chunks")
"""Options that --gpus searches."""
OFFLOAD_TARGETS = ("inputs", "optimizer")
"""What --offload moves to the host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a workload and of a whole model, which sets some of them."""
    model = parser.add_argument_group("a whole model, in training")
    which = model.add_mutually_exclusive_group()
    text = f"{', '.join(BUILT_IN)}, a name on the Hub that is in the local cache, or a folder; nothing is downloaded"
    which.add_argument("--model", metavar="NAME", help=text)
    which.add_argument("--config", metavar="FILE", help="a config.json of transformers, or a folder with one")
    model.add_argument("--gpus", type=count, metavar="N", help="recommend a configuration for so many GPUs")
    model.add_argument("--gpu", metavar="NAME", help=f"with --gpus: {', '.join(GPU_MEMORY)} (h100)")
    text = "with --gpus: FA2, FA3, FA4, cuDNN or flex (those that kernel='auto' may run)"
    model.add_argument("--kernel", metavar="NAME", help=text)
    model.add_argument("--lora", type=count, default=0, metavar="RANK", help="train adapters of all linear layers only")
    model.add_argument("--memory", type=count, metavar="GB", help="memory of a device, such as 80: does it fit?")
    model.add_argument("--price", type=price, metavar="P", help="of an hour of one GPU: what do a billion tokens cost?")
    text = "N sequences at once, each over its own --ranks; FSDP is over all of them (1)"
    model.add_argument("--data-parallel", type=count, default=1, metavar="N", help=text)
    text = "tensor parallel: N ranks share heads and inner sizes, each with rows of the sequence between blocks (1)"
    model.add_argument("--tp", type=count, default=1, metavar="N", help=text)
    text = "expert parallel: N ranks share the experts; they are ranks of dp, cp and tp as well (1)"
    model.add_argument("--ep", type=count, default=1, metavar="N", help=text)
    model.add_argument("--no-checkpointing", action="store_true", help="layers keep all that their backward needs")
    text = "on the host: inputs (of checkpointed layers, the default), optimizer (and shards), or inputs,optimizer"
    model.add_argument(
        "--offload", type=offload_targets, nargs="?", const=("inputs",), default=(), metavar="WHAT", help=text
    )
    model.add_argument("--mlp-chunks", type=count, default=1, metavar="N", help="MLPs run over N runs of tokens (1)")
    model.add_argument("--logits", action="store_true", help="the loss is computed from whole logits")
    text = "dtype of parameters, gradients and optimizer as they are kept (float32)"
    model.add_argument("--state", choices=("float32", "bfloat16"), default="float32", help=text)
    text = "compare all ranks with every dp x cp on a dataset (--docs), with micro-batches of TOKENS a rank"
    parser.add_argument("--batches", type=count, metavar="TOKENS", help=text)
    add_workload(parser)
    parser.set_defaults(ranks=None, **dict.fromkeys(FROM_MODEL))


def offload_targets(text: str) -> tuple[str, ...]:
    """Parse what is offloaded.

    >>> offload_targets("inputs,optimizer")
    ('inputs', 'optimizer')
    """
    words = tuple(text.split(","))
    if not set(words) <= set(OFFLOAD_TARGETS):
        raise argparse.ArgumentTypeError(f"it must be inputs, optimizer, or inputs,optimizer, but got {text!r:.40}.")
    return words


def price(text: str) -> float:
    """Parse the price of an hour of one GPU.

    >>> price("2.50")
    2.5
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"the price of an hour of one GPU must be above 0, but got {text!r:.40}.")
    return value


def has_model(args: argparse.Namespace) -> bool:
    """Return whether the arguments name a model, and refuse options that contradict it, or need it.

    Fill in defaults.
    """
    if args.config is None and args.model is None:
        for name, default in SWITCHES.items():
            if getattr(args, name) != default:
                raise PlanError(f"--{name.replace('_', '-')} needs a whole model: add --model or --config.")
        for name, value in {**FROM_MODEL, "ranks": RANKS}.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
        return False
    for name in (*FROM_MODEL, "v_head_dim", "window"):
        if getattr(args, name) is not None:
            raise PlanError(f"--{name.replace('_', '-')} must not be set with a model, which sets it. Leave it out.")
        setattr(args, name, FROM_MODEL.get(name))
    if args.gpus is None:
        for name in ("gpu", "kernel"):
            if getattr(args, name) is not None:
                raise PlanError(f"--{name} needs --gpus, which searches. With --ranks, use --machine.")
        args.ranks = RANKS if args.ranks is None else args.ranks
        return True
    for name in SEARCHED:
        if getattr(args, name) != SWITCHES[name]:
            raise PlanError(
                f"--{name.replace('_', '-')} must not be set with --gpus, which searches it. Leave it out, or use"
                " --ranks for a single configuration."
            )
    if args.ranks is not None or args.layout != "balanced":
        name = "--ranks" if args.ranks is not None else "--layout"
        raise PlanError(f"{name} must not be set with --gpus, which searches meshes of balanced layouts. Leave it out.")
    return True


def read_model(args: argparse.Namespace) -> tuple[str, ModelSizes, tuple[str, ...]]:
    """Return the name and the sizes of the model, and notes about it."""
    if args.model is not None:
        path = find_config(args.model)
        if path is None:
            return args.model, sizes_of(built_in_config(args.model)), ()
        name, sizes, notes = read_config(path)
        return args.model if "/" in args.model and not Path(args.model).exists() else name, sizes, notes
    path = Path(args.config)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise PlanError(
            f"--config must be a config.json, or a directory with one, but got {args.config!r:.80}."
            f" There is no file {str(path)!r:.80}."
        )
    return read_config(path)


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it has downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def find_config(name: str) -> Path | None:
    """Return the config.json of a folder, of a file, or of a name on the Hub that is in the local cache; None for
    models that are built in."""
    path = Path(name)
    if name in BUILT_IN:
        return None
    if path.is_file() or (path / "config.json").is_file():
        return path if path.is_file() else path / "config.json"
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    is_on_hub = name.count("/") == 1 and ".." not in name and not name.startswith(("/", ".", "~"))
    if is_on_hub:
        main = cached / "refs" / "main"
        snapshots = [cached / "snapshots" / main.read_text().strip()] if main.is_file() else []
        snapshots += sorted(cached.glob("snapshots/*"))
        config = next((one / "config.json" for one in snapshots if (one / "config.json").is_file()), None)
        if config is not None:
            return config
    try:
        built_in_config(name)
    except PlanError as error:
        if not is_on_hub:
            raise
        raise PlanError(
            f"--model must be a folder with a config.json, a name on the Hub that is in {str(hub_cache())!r:.80}, or"
            f" one of {', '.join(BUILT_IN)}, but got {name!r:.60}. Run `hf download {name} config.json` where there is"
            " a network, or pass the file with --config."
        ) from error
    return None


def read_config(path: Path) -> tuple[str, ModelSizes, tuple[str, ...]]:
    """Return the name and the sizes of the model of a config.json, and notes about it."""
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise PlanError(f"{path} must be a config.json of at most {MAX_CONFIG:,} bytes, but is larger.")
    try:
        config = json.loads(data.decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON. It must be a config.json as transformers writes it.") from error
    try:
        sizes = sizes_of(config)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    name = path.resolve().parent.name if path.name == "config.json" else path.name
    return name, sizes, (QUANTIZED,) if config.get("quantization_config") else ()


def plan_step(args: argparse.Namespace) -> tuple[PlannedStep, dict[str, Any] | None]:
    """Plan the step that the arguments describe; return also whether it fits, if they state the memory."""
    name, sizes, notes = read_model(args)
    workload = Workload.of(args)
    recipe = Recipe(
        not args.no_checkpointing, "inputs" in args.offload, args.mlp_chunks, args.logits, args.dtype, args.state,
        args.lora, "optimizer" in args.offload,
    )  # fmt: skip
    if args.keep and args.no_checkpointing:
        raise PlanError(
            "--keep must not be combined with --no-checkpointing: every layer would keep remote K/V until its"
            " backward, which is not counted here. Leave one of them out."
        )
    part = split_model(sizes, args.tp, args.ep)
    step = ModelWorkload(name, part, workload, recipe, args.data_parallel, notes).plan_on(args.ranks)
    step.step()  # refuses what does not divide
    if args.price is not None and (why := step.why_no_time()) is not None:
        raise PlanError(f"--price needs the time of a step, which is not known: {why}. Use another --machine.")
    return step, None if args.memory is None else check_fit(step, args.memory)


def run(args: argparse.Namespace) -> int:
    step, fit = plan_step(args)
    if args.json:
        print_json("plan", figures(step, fit, args.price))
    else:
        show(step, fit, args.price)
    return FAILED if fit and not fit["fits"] else FINE


def figures(step: PlannedStep, fit: dict[str, Any] | None, price: float | None) -> dict[str, Any]:
    """Return the figures for JSON; bytes are those of the rank that holds most."""
    memory, model, sizes = step.memory(), step.model, step.model.sizes
    of_model = (*FROM_MODEL, "v_head_dim", "window")
    return {
        "workload": {name: value for name, value in model.workload.as_json().items() if name not in of_model},
        "model": model_json(model.name, sizes.whole or sizes) | {"blocks": sizes.num_blocks},
        "ranks": step.layout.world_size,
        "data_parallel": model.data_parallel,
        "tensor_parallel": sizes.tp,
        "expert_parallel": sizes.ep,
        "gpus": step.gpus,
        "layout": step.layout.name,
        "tokens_per_rank": step.step().tokens,
        "attentions": [
            {"count": number, **asdict(heads), "scheme": step.plans[heads].scheme.name}
            for heads, number in sizes.attentions.items()
        ],
        "with": model.recipe.words,
        "peak_bytes": memory.peak.size,
        "peak_moment": memory.peak.name,
        "host_bytes": memory.host,
        "moments": [
            {"name": one.name, "bytes": one.size, "lines": [_line(line, "bytes", line.size) for line in one.lines]}
            for one in memory.moments
        ],
        "time": _time_json(step, price),
        "recipes": [
            {
                "with": recipe.words,
                "peak_bytes": step.memory(recipe).peak.size,
                "host_bytes": step.memory(recipe).host,
                "seconds": None if step.why_no_time(recipe) else step.time(recipe).seconds,
            }
            for recipe in recipes(model.recipe, sizes.tp)
        ],
        "fits": fit,
        "notes": list(model.notes),
    }


def model_json(name: str, sizes: ModelSizes) -> dict[str, Any]:
    about = {"name": name, "model_type": sizes.model_type, "layers": len(sizes.layers)}
    return about | {"parameters": sizes.params, "active_parameters": sizes.active_params}


def cost_json(cost: StepCost, price: float | None) -> dict[str, Any]:
    return {
        "seconds": cost.seconds, "tokens": cost.tokens, "tokens_per_second": cost.tokens_per_second,
        "tokens_per_second_per_gpu": cost.tokens_per_second_per_gpu, "mfu": cost.mfu, "price": price,
        "price_per_billion_tokens": None if price is None else cost.per_billion(price),
    }  # fmt: skip


def _time_json(step: PlannedStep, price: float | None) -> dict[str, Any]:
    if (why := step.why_no_time()) is not None:
        return {"seconds": None, "why_not": why}
    time = step.time()
    return {
        **cost_json(step.cost(), price), "simulated": True, "machine": step.machine.name,
        "kernel": step.machine.kernel, "at_least": time.at_least,
        "lines": [_line(line, "seconds", line.seconds) for line in time.lines],
    }  # fmt: skip


def _line(line: Any, name: str, value: float) -> dict[str, Any]:
    return {"name": line.name, name: value, "why": line.why}


def show(step: PlannedStep, fit: dict[str, Any] | None, price: float | None) -> None:
    memory, model, ranks = step.memory(), step.model, step.layout.world_size
    several = f", {model.data_parallel:,} sequences at once" if model.data_parallel > 1 else ""
    several += "".join(f", {n} {s}" for n, s in (("tp", model.sizes.tp), ("ep", model.sizes.ep)) if s > 1)
    several += f": {step.gpus:,} GPUs" if step.gpus > ranks else ""
    print_text(f"{model.name} in training, {model.workload.seq_len:,} tokens on {ranks:,} ranks{several}")
    print_facts(facts(step, memory, fit, price))
    print_text()
    lines = memory.peak.lines
    cells = zip(lines, bytes_column([line.size for line in lines]), strict=True)
    rows = [Row((line.name, size, line.why)) for line, size in cells]
    print_table((memory.peak.name, "bytes", "what"), rows, left=(0, 2))
    sizes = bytes_column([moment.size for moment in memory.moments])
    rows = [Row((m.name, size), m is memory.peak) for m, size in zip(memory.moments, sizes, strict=True)]
    print_table(("moment", "bytes"), rows)
    if step.why_no_time() is None:
        time = step.time()
        cells = zip(time.lines, seconds_column([line.seconds for line in time.lines]), strict=True)
        rows = [Row((line.name, text, f"{line.seconds / time.seconds:.1%}", line.why)) for line, text in cells]
        print_table(("step", "time", "share", "what"), rows, left=(0, 3))
    memories = [(recipe, step.memory(recipe)) for recipe in recipes(model.recipe, model.sizes.tp)]
    peaks, hosts = bytes_column([m.peak.size for _, m in memories]), bytes_column([m.host for _, m in memories])
    rows = []
    for (recipe, m), peak, host in zip(memories, peaks, hosts, strict=True):
        seconds = "" if step.why_no_time(recipe) else seconds_text(step.time(recipe).seconds)
        row = (recipe.words, peak, host if m.host else "", seconds, m.peak.name)
        rows.append(Row(row, recipe == model.recipe))
    print_table(("with", "peak", "host", "step", "at"), rows, left=(0, 4))
    for note in (
        "Computed, not measured: nothing here has run on a GPU. Layers keep what transformers' own modules keep, FSDP2"
        " shards over all ranks; memory lost between tensors is not counted. Times are simulated; pipeline"
        " parallel and FP8 are not known here.",
        *model.notes,
    ):
        print_text(note)


def facts(
    step: PlannedStep, memory: StepMemory, fit: dict[str, Any] | None, price: float | None
) -> Iterator[tuple[str, str]]:
    model, machine = step.model, step.machine
    sizes = model.sizes.whole or model.sizes
    active = f", {sizes.active_params / 1e9:,.2f}e9 of them for a token" if sizes.active_params < sizes.params else ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sizes.num_blocks.items())
    layers = f"{len(sizes.layers)} layers: {kinds}"
    yield "model", f"{sizes.model_type}, {sizes.params / 1e9:,.2f}e9 parameters{active}; {layers}"
    yield "tokens", f"{model.workload.about_docs()}, {step.step().tokens:,} tokens on a rank"
    yield "attention", "; ".join(about_attentions(step)) or "none"
    yield "with", f"{model.recipe.words}{'' if model.recipe.logits else '; loss without logits'}"
    yield "peak", f"{bytes_text(memory.peak.size)} on a rank: {memory.peak.name}"
    if memory.host:
        yield "host", f"{bytes_text(memory.host)} of pinned memory for each rank"
    if (why := step.why_no_time()) is not None:
        yield "step", f"how long it takes is not known: {why}"
    else:
        cost = step.cost()
        rates = f"{cost.tokens_per_second:,.0f} tokens/s, {cost.tokens_per_second_per_gpu:,.0f} for each GPU"
        on = f"simulated on {machine.name} ({machine.kernel or 'kernel not named'})"
        bound = "at least " if step.time().at_least else ""
        yield "step", f"{bound}{seconds_text(cost.seconds)}, {on}: {rates}; MFU {cost.mfu:.1%}"
        if price is not None:
            yield "cost", f"{cost.per_billion(price):,.0f} for a billion tokens, at {price:g} for an hour of each GPU"
    if fit is not None:
        text = f"in {fit['memory']} GB: {'yes, ' if fit['fits'] else 'no, because '}{fit['why']}"
        yield "fits", text + (f"; {fit['advice']}" if "advice" in fit else "")
        least = fit["smallest"]
        if least is None:
            yield "smallest", f"it fits on none that was tried, up to {MAX_GPUS:,} ranks"
        else:
            yield "smallest", f"{format_count(least['gpus'], 'GPU')} (--ranks {least['ranks']:,}), with {least['with']}"


def about_attentions(step: PlannedStep) -> Iterator[str]:
    """Describe each size of attention and its scheme."""
    for heads, number in step.model.sizes.attentions.items():
        dims = f"{heads.head_dim}" if heads.head_dim == heads.v_head_dim else f"{heads.head_dim}/{heads.v_head_dim}"
        window = "" if heads.window is None else f", window of {heads.window:,} before each token"
        chosen = step.plans[heads].chosen
        inside = "an unknown size" if chosen.workspace_bytes is None else bytes_text(chosen.workspace_bytes)
        yield (
            f"{number} x {heads.q_heads} query and {heads.kv_heads} key/value heads of {dims}{window}, by"
            f" {chosen.scheme}, with {bytes_text(chosen.peak_bytes)} of remote K/V, messages and sums while one runs,"
            f" and {inside} inside kernels"
        )


def bytes_column(values: Sequence[int]) -> list[str]:
    """Format bytes for one column, in GiB if one is that large, as memory of devices is sold."""
    if max(values) < 1 << 30:
        return bytes_in_one_unit(values)
    return [f"{three_digits(value / (1 << 30))} GiB" for value in values]


def seconds_column(values: Sequence[float]) -> list[str]:
    """Format times for one column, in seconds if one is that long.

    >>> seconds_column([34.146, 0.784]), seconds_column([0.5, 0.0123])
    (['34.1 s', '0.78 s'], ['500 ms', '12.3 ms'])
    """
    return seconds_in_one_unit(values) if max(values) < 1 else [f"{three_digits(value)} s" for value in values]
