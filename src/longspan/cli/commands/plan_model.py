"""A whole model's training step on one screen: where its bytes go, what saves them, and whether it fits.

longspan plan --model qwen3-8b --seq 256k --ranks 8 --machine h100 --memory 80
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longspan.cli.command import FAILED, FINE
from longspan.cli.quantities import count
from longspan.cli.screen import Column, Row, Screen, print_json, screen_of
from longspan.cli.workload import Workload
from longspan.errors import LongspanError, PlanError
from longspan.layouts import Layout
from longspan.number_words import bytes_alike, bytes_text, three
from longspan.schedules.plan import Plan
from longspan.sizing import (
    BUILT_IN,
    RESERVE,
    Heads,
    ModelSizes,
    Recipe,
    StepMemory,
    built_in_config,
    sizes_of,
    step_memory,
)
from longspan.sizing.fit import PlanOptions, attention_plans, recipes, training_step, widest

MAX_CONFIG = 1 << 20
MOST_RANKS = 1024
"""Up to which it is tried on how many a step fits."""
QUANTIZED = "The file's quantization_config is left aside: parameters take what --state and --dtype say."
FROM_MODEL = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
"""What a model says itself, and what is taken where there is no model."""
SWITCHES = {
    "memory": None,
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
    model.add_argument("--no-checkpointing", action="store_true", help="layers keep all that their backward needs")
    model.add_argument("--offload", action="store_true", help="inputs of checkpointed layers wait on the host")
    model.add_argument("--mlp-chunks", type=count, default=1, metavar="N", help="MLPs run over N runs of tokens (1)")
    model.add_argument("--logits", action="store_true", help="the loss is computed from whole logits")
    model.add_argument(
        "--state", choices=("float32", "bfloat16"), default="float32",
        help="dtype of parameters, gradients and optimizer as they are kept (float32)",
    )  # fmt: skip


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


@dataclass(frozen=True)
class Answer:
    """A model, its step, and how the step was planned."""

    name: str
    sizes: ModelSizes
    workload: Workload
    layout: Layout
    plans: dict[Heads, Plan]
    recipe: Recipe
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(args: argparse.Namespace, ranks: int | None = None) -> Answer:
        """For as many ranks as were asked for, or for others."""
        name, sizes, notes = model_of(args)
        workload = Workload.of(args)
        layout = replace(workload, mask=widest(sizes, workload.mask), _layouts={}).layout(ranks or args.ranks)
        batch, dtype = workload.tensors["batch"], workload.tensors["dtype"]
        options = PlanOptions(
            workload.scheme, workload.machine if workload.machine_given else None, workload.keep, workload.fetch_bytes,
            batch, dtype,
        )  # fmt: skip
        recipe = Recipe(not args.no_checkpointing, args.offload, args.mlp_chunks, args.logits, dtype, args.state)
        if args.keep and args.no_checkpointing:
            raise PlanError(
                "--keep and --no-checkpointing were given: every layer would keep remote K/V until its backward, which"
                " is not counted here. Leave one of them out."
            )
        plans = attention_plans(sizes, workload.mask, layout, options)
        return Answer(name, sizes, workload, layout, plans, recipe, notes)

    @property
    def tokens(self) -> int:
        return training_step(self.sizes, self.layout, self.plans, self.workload.tensors["batch"], self.recipe).tokens

    def memory(self, recipe: Recipe | None = None) -> StepMemory:
        """What the step takes, with this recipe or the one that was asked for."""
        batch = self.workload.tensors["batch"]
        return step_memory(training_step(self.sizes, self.layout, self.plans, batch, recipe or self.recipe))


def run(args: argparse.Namespace) -> int:
    answer = Answer.of(args)
    fits = None if args.memory is None else verdict(answer, args)
    if args.json:
        print_json("plan", figures(answer, fits))
    else:
        show(answer, fits, screen_of(args))
    return FAILED if fits and not fits["fits"] else FINE


def verdict(answer: Answer, args: argparse.Namespace) -> dict[str, Any]:
    """Whether it fits, why not, and what would make it."""
    room = (args.memory << 30) - RESERVE
    peak = answer.memory().peak
    found: dict[str, Any] = {"memory": args.memory, "fits": peak.size <= room, "bytes_left": room - peak.size}
    aside = f"and {bytes_text(RESERVE)} set aside for CUDA and NCCL"
    if found["fits"]:
        return {**found, "why": f"{bytes_text(peak.size)} at the peak, {aside}"}
    most = max(peak.lines, key=lambda line: line.size)
    why = f"{bytes_text(peak.size)} at the peak ({peak.name}), {bytes_text(most.size)} of it {most.name}, {aside}"
    better = next((one for one in recipes(answer.recipe) if answer.memory(one).peak.size <= room), None)
    ranks = fitting_ranks(args, room)
    advice = [] if better is None else [f"with {better.words}, and no whole logits"]
    advice += [] if ranks is None else [f"with --ranks {ranks}"]
    least = min(answer.memory(one).peak.size for one in recipes(answer.recipe))
    text = f"it fits {' or '.join(advice)}" if advice else f"the thriftiest recipe below takes {bytes_text(least)}"
    with_recipe = None if better is None else better.words
    return {**found, "why": why, "fits_with": with_recipe, "fits_with_ranks": ranks, "advice": text}


def fitting_ranks(args: argparse.Namespace, room: int) -> int | None:
    """How many ranks the same step fits on, doubling them; None where that is not tried any further."""
    ranks = 2 * args.ranks
    while ranks <= MOST_RANKS:
        try:
            if Answer.of(args, ranks).memory().peak.size <= room:
                return ranks
        except LongspanError:  # a layout or a scheme that was named does not go with so many
            return None
        ranks *= 2
    return None


def figures(answer: Answer, fits: dict[str, Any] | None) -> dict[str, Any]:
    """What the command says, for JSON; bytes of the rank that holds most."""
    memory = answer.memory()
    asked_for = answer.workload.as_json()
    for name in (*FROM_MODEL, "v_head_dim", "window"):
        asked_for.pop(name, None)
    return {
        "workload": asked_for,
        "model": {
            "name": answer.name,
            "model_type": answer.sizes.model_type,
            "parameters": answer.sizes.params,
            "active_parameters": answer.sizes.active_params,
            "layers": len(answer.sizes.layers),
            "blocks": answer.sizes.num_blocks,
        },
        "ranks": answer.layout.world_size,
        "layout": answer.layout.name,
        "tokens_per_rank": answer.tokens,
        "attentions": [
            {"count": number, **_heads_json(heads), "scheme": answer.plans[heads].scheme.name}
            for heads, number in answer.sizes.attentions.items()
        ],
        "with": answer.recipe.words,
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
        "recipes": [
            {"with": one.words, "peak_bytes": answer.memory(one).peak.size, "host_bytes": answer.memory(one).host}
            for one in recipes(answer.recipe)
        ],
        "fits": fits,
        "notes": list(answer.notes),
    }


def _heads_json(heads: Heads) -> dict[str, Any]:
    return {
        "q_heads": heads.q_heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim,
        "v_head_dim": heads.v_head_dim, "window": heads.window,
    }  # fmt: skip


def show(answer: Answer, fits: dict[str, Any] | None, screen: Screen) -> None:
    """The step as a person reads it."""
    memory, ranks = answer.memory(), answer.layout.world_size
    screen.title(f"{answer.name} in training, {answer.workload.seq_len:,} tokens on {ranks:,} ranks")
    facts = [
        ("model", about_model(answer.sizes)),
        ("tokens", f"{answer.workload.about_docs()}, {answer.tokens:,} tokens on a rank"),
        ("attention", about_attentions(answer)),
        ("with", f"{answer.recipe.words}{'' if answer.recipe.logits else '; loss without logits'}"),
        ("peak", f"{bytes_text(memory.peak.size)} on a rank: {memory.peak.name}"),
    ]
    if memory.host:
        facts.append(("host", f"{bytes_text(memory.host)} of pinned memory for each rank"))
    if fits is not None:
        text = f"in {fits['memory']} GB: {'yes' if fits['fits'] else 'no'}, {fits['why']}"
        facts.append(("fits", text + (f"; {fits['advice']}" if "advice" in fits else "")))
    screen.facts(facts)
    screen.text()
    lines = memory.peak.lines
    columns = (Column(memory.peak.name, False), Column("bytes"), Column("what", False))
    cells = zip(lines, column([line.size for line in lines]), strict=True)
    screen.table(columns, [Row((line.name, size, line.why)) for line, size in cells])
    screen.text()
    _tables(answer, memory, screen)
    screen.notes((
        "Computed, not measured: nothing here has run on a GPU. Layers keep what transformers' own modules keep, FSDP2"
        " shards over all ranks; memory lost between tensors is not counted.",
        *answer.notes,
    ))  # fmt: skip


def _tables(answer: Answer, memory: StepMemory, screen: Screen) -> None:
    """All moments, and all recipes."""
    sizes = column([moment.size for moment in memory.moments])
    rows = [Row((m.name, size), m is memory.peak) for m, size in zip(memory.moments, sizes, strict=True)]
    screen.table((Column("moment", False), Column("bytes")), rows)
    screen.text()
    found = [(one, answer.memory(one)) for one in recipes(answer.recipe)]
    peaks, hosts = column([m.peak.size for _, m in found]), column([m.host for _, m in found])
    screen.table(
        (Column("with", False), Column("peak"), Column("on the host"), Column("at", False)),
        [
            Row((one.words, peak, host if m.host else "", m.peak.name), one == answer.recipe)
            for (one, m), peak, host in zip(found, peaks, hosts, strict=True)
        ],
    )
    screen.text()


def column(values: Sequence[int]) -> list[str]:
    """Bytes for one column, in GiB wherever one is that large: devices are sold by it."""
    if max(values) < 1 << 30:
        return bytes_alike(values)
    return [f"{three(value / (1 << 30))} GiB" for value in values]


def about_model(sizes: ModelSizes) -> str:
    """Parameters and layers, in a line."""
    active = f", {sizes.active_params / 1e9:,.2f}e9 of them for a token" if sizes.active_params < sizes.params else ""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sizes.num_blocks.items())
    return f"{sizes.model_type}, {sizes.params / 1e9:,.2f}e9 parameters{active}; {len(sizes.layers)} layers: {kinds}"


def about_attentions(answer: Answer) -> str:
    """Each size of attention and its scheme, in a line."""
    words: list[str] = []
    for heads, number in answer.sizes.attentions.items():
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
