"""A whole model's training step on one screen: where its bytes and its time go, whether it fits, and what it costs.

longspan plan --model qwen3-8b --seq 256k --ranks 8 --machine h100 --memory 80 --price 2.50
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.cli.command import FAILED, FINE
from longspan.cli.model_answer import MOST_RANKS, Answer, ModelQuestion, verdict
from longspan.cli.progress import progress
from longspan.cli.quantities import count
from longspan.cli.screen import Column, Row, Screen, print_json, screen_of
from longspan.errors import PlanError
from longspan.number_words import bytes_alike, bytes_text, counted, seconds_alike, seconds_text, three
from longspan.sizing import BUILT_IN, Heads, ModelSizes, StepMemory, built_in_config, sizes_of
from longspan.sizing.fit import recipes

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
