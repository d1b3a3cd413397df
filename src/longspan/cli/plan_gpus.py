"""A recommended configuration for a number of GPUs: the best that fit, why nothing does, and the lines to paste.

longspan plan --model qwen3-8b --seq 256k --gpus 8 --gpu h100
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from longspan.cli import plan_model
from longspan.cli.command import FAILED, FINE
from longspan.cli.output import Row, print_facts, print_json, print_table, print_text
from longspan.cli.workload import Workload
from longspan.errors import PlanError
from longspan.formatting import bytes_text, format_count, seconds_text
from longspan.planning.kernel_memory import about_kernel
from longspan.planning.machine import GPU_MEMORY, Machine, machines_of_gpu
from longspan.planning.planners import can_limit
from longspan.sizing import RESERVE, Recipe
from longspan.sizing.recommend import Configuration, Recommendation, Request, divisors, recommend


def run(args: argparse.Namespace) -> int:
    name, sizes, notes = plan_model.read_model(args)
    workload = Workload.of(args)
    machines, memory = _machines(args, workload)
    recipe = Recipe(logits=args.logits, dtype=args.dtype, state=args.state, lora=args.lora)
    request = Request(
        sizes, workload.seq_len, args.gpus, machines, memory, recipe,
        None if workload.docs == "causal" else workload.mask, args.batch,
        None if workload.scheme == "auto" else workload.scheme, args.keep, args.fetch_bytes, args.tp, args.ep,
    )  # fmt: skip
    result = recommend(request)
    if args.json:
        print_json("plan", figures(result, name, workload, args.price))
    else:
        show(result, name, workload, notes, args.price)
    return FINE if result.best else FAILED


def _machines(args: argparse.Namespace, workload: Workload) -> tuple[tuple[Machine, ...], int]:
    """Return the machines of --gpu and --kernel, or that of --machine, and the memory of a GPU."""
    if args.machine is None:
        gpu = "h100" if args.gpu is None else args.gpu.lower()
        machines = machines_of_gpu(gpu, args.kernel)
        return machines, args.memory or GPU_MEMORY[gpu]
    for option in ("gpu", "kernel"):
        if getattr(args, option) is not None:
            raise PlanError(f"--{option} must not be set with --machine, which has both. Leave one of them out.")
    memory = args.memory or GPU_MEMORY.get(workload.machine.name.partition("-")[0])
    if memory is None:
        raise PlanError(f"--memory is needed: the memory of {workload.machine.name!r:.60} is not known. Add it in GB.")
    return (workload.machine,), memory


# -- The screen --------------------------------------------------------------------------------------------------------


def show(result: Recommendation, name: str, workload: Workload, notes: tuple[str, ...], price: float | None) -> None:
    request = result.request
    print_text(f"{name} in training, {workload.seq_len:,} tokens on {format_count(request.gpus, 'GPU')}")
    print_facts(_facts(result, workload, price))
    print_text()
    configurations = [*result.best] or [one for one in (result.least,) if one is not None]
    heads = (
        " x ".join(_axes(request)),
        "memory",
        "host",
        "step",
        "tokens/s",
        "kernel",
        "scheme",
        "ckpt",
        "offload",
        "MLP",
    )
    print_table(heads, [_row(one, one in result.best[:1]) for one in configurations], left=(0, 5, 6, 7, 8, 9))
    if result.best:
        print_text("To run the first:")
        print("", *config_lines(result.best[0], name, request), "", sep="\n")
    unknown = (
        ""
        if all(one.memory_known for one in configurations)
        else " What cuDNN allocates is not known, and not counted."
    )
    is_bound = any(one.time.at_least for one in configurations)
    bound = " What Adam takes on the host is not known: those times are lower bounds." if is_bound else ""
    for note in (
        "Computed, not measured: nothing here has run on a GPU. Times are simulated; memory and host are of one GPU,"
        " and whether the host has as much is not checked. FSDP2 shards over all GPUs. Tensor and expert parallel are"
        f" as --tp and --ep state them, not searched; pipeline parallel and FP8 are not modelled.{bound}{unknown}",
        *notes,
    ):
        print_text(note)


def _facts(result: Recommendation, workload: Workload, price: float | None) -> Iterator[tuple[str, str]]:
    request, sizes = result.request, result.request.sizes
    yield "model", f"{sizes.model_type}, {sizes.params / 1e9:,.2f}e9 parameters, {len(sizes.layers)} layers"
    yield "tokens", workload.about_docs()
    kernels = ", ".join(machine.kernel for machine in request.machines)
    gpu = request.machines[0].name.partition("-")[0]
    reserve = f"{bytes_text(RESERVE)} of it set aside for CUDA and NCCL"
    yield "GPU", f"{gpu}, {request.memory} GB, {reserve}; kernels {kernels}"
    if result.best:
        first = result.best[0]
        yield "best", f"{_mesh_text(first)}, {first.recipe.words}: {_time_text(first)}"
        if price is not None:
            cost = first.cost.per_billion(price)
            yield "cost", f"{cost:,.0f} for a billion tokens, at {price:g} for an hour of each GPU"
        if (own := result.without_install) is not None:
            needs = about_kernel(first.machine.kernel)
            yield "kernel", f"{needs}; without it, {own.machine.kernel}: {_time_text(own)} ({_mesh_text(own)})"
        return
    if result.least is None:
        yield "fits", f"no, because {request.scheme} takes none of the meshes; leave --scheme out"
        return
    peak = result.least.memory.peak
    most = max(peak.lines, key=lambda line: line.size)
    yield (
        "fits",
        f"in {request.memory} GB: no, because the smallest need of all configurations is {bytes_text(peak.size)}"
        f" ({peak.name}, {bytes_text(most.size)} of it {most.name}), {bytes_text(peak.size - request.room)} too much",
    )
    options = [change.option for change in result.changes]
    yield "needs", " or ".join(options) if options else "nothing that was tried makes it fit"


def _mesh_text(one: Configuration) -> str:
    return " x ".join(f"{name} {number}" for name, number in _axes(one).items())


def _axes(one: Configuration | Request) -> dict[str, int]:
    """Return the names of the axes with their sizes, without tp and ep of 1."""
    mesh = (one.data_parallel, one.ranks) if isinstance(one, Configuration) else (1, 1)
    return dict(zip(("dp", "cp"), mesh, strict=True)) | {n: s for n, s in (("tp", one.tp), ("ep", one.ep)) if s > 1}


def _time_text(one: Configuration) -> str:
    bound = "at least " if one.time.at_least else ""
    return f"{bound}{seconds_text(one.time.seconds)} a step of {one.cost.tokens:,} tokens, MFU {one.cost.mfu:.1%}"


def _row(one: Configuration, chosen: bool) -> Row:
    host = bytes_text(one.memory.host) if one.memory.host else ""
    bound = "> " if one.time.at_least else ""
    recipe = one.recipe
    offloads = (recipe.offload, "inputs"), (recipe.offload_optimizer, "state")
    cells = (
        " x ".join(map(str, _axes(one).values())), bytes_text(one.memory.peak.size), host,
        f"{bound}{seconds_text(one.time.seconds)}", f"{one.cost.tokens_per_second:,.0f}", one.machine.kernel,
        _scheme_text(one), "yes" if recipe.checkpointing else "no",
        "+".join(word for on, word in offloads if on) or "no",
        f"{recipe.mlp_chunks} chunks" if recipe.mlp_chunks > 1 else "whole",
    )  # fmt: skip
    return Row(cells, chosen)


def _scheme_text(one: Configuration) -> str:
    limit = f", K/V of {bytes_text(one.fetch_bytes)}" if one.fetch_bytes is not None else ""
    return f"{one.scheme}{limit}" if one.schemes else "none"


# -- Lines to paste ----------------------------------------------------------------------------------------------------


def config_lines(one: Configuration, name: str, request: Request) -> list[str]:
    """Return the launch command, and the lines of a program with a Trainer and of one with its own loop.

    A Trainer's model is sharded when it is loaded: adapters and MLPs in chunks, which come before that, are in the
    lines of a loop only. So are limits of remote K/V, and tensor and expert parallelism, which a Trainer does not take.
    """
    recipe = one.recipe
    has_trainer = not recipe.lora and recipe.mlp_chunks == 1 and one.fetch_bytes is None and one.tp == one.ep == 1
    lines = [f"# {launch_command(request.gpus, one.machine.node)}"]
    if has_trainer:
        lines += ["", "# with transformers' Trainer, or one of TRL", *_trainer_lines(one, name, request)]
    return [*lines, "", "# in your own loop", *_loop_lines(one, request)]


def launch_command(gpus: int, node: int) -> str:
    """Return the command that starts all ranks, as many on each node.

    >>> launch_command(8, 8)
    'torchrun --nproc-per-node 8 train.py'
    >>> launch_command(12, 8)
    'torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py'
    """
    local = max(number for number in divisors(gpus) if number <= node)
    nodes = f"--nnodes {gpus // local} " if gpus > local else ""
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes else ""
    return f"torchrun {nodes}--nproc-per-node {local} {meeting}train.py"


def _trainer_lines(one: Configuration, name: str, request: Request) -> Iterator[str]:
    recipe, quoted = one.recipe, json.dumps(name) if "/" in name else "path"
    offload = ", fsdp_cpu_offload=True" if recipe.offload_optimizer else ""
    yield "class LongTrainer(ContextParallelTrainer, Trainer): ..."
    yield "model = AutoModelForCausalLM.from_pretrained("
    yield f'    {quoted}, attn_implementation="longspan", dtype="{recipe.state}",'
    yield f"    distributed_config=DistributedConfig(fsdp_size={request.gpus}, fsdp_mixed_precision=True{offload}),"
    yield ")"
    yield from _checkpointing_lines(recipe)
    yield f"args = TrainingArguments(output_dir=out, per_device_train_batch_size={request.batch})"
    scheme = f', scheme="{one.scheme}"' if one.ranks > 1 else ""
    yield f"trainer = LongTrainer(model=model, args=args, train_dataset=data, cp_size={one.ranks}{scheme})"


def _checkpointing_lines(recipe: Recipe) -> list[str]:
    offload = "offload=True" if recipe.offload else ""
    return [f"model.activation_checkpointing_enable({offload})"] if recipe.checkpointing else []


def _loop_lines(one: Configuration, request: Request) -> Iterator[str]:
    recipe = one.recipe
    if recipe.lora:
        yield f'model = get_peft_model(model, LoraConfig(r={recipe.lora}, target_modules="all-linear"))'
    yield from _checkpointing_lines(recipe)
    layers = "model.base_model.model.model.layers" if recipe.lora else "model.model.layers"
    if recipe.mlp_chunks > 1:
        yield f"tile(model, chunks={recipe.mlp_chunks})  # longspan.training"
    tp = f", tp={one.tp}" if one.tp > 1 else ""
    yield f"mesh = make_mesh(dp={one.data_parallel}, cp={one.ranks}{tp})"
    if one.tp > 1:
        yield "parallelize_module(model, mesh.tp, your_plan)  # with SequenceParallel norms"
    if one.ep > 1:
        shape = f"({request.gpus // one.ep}, {one.ep})"
        yield f'experts = init_device_mesh("cuda", {shape}, mesh_dim_names=("efsdp", "ep"))  # the same ranks'
        yield "# your model sends tokens over experts['ep'] and shards its experts over experts['efsdp']"
    yield f"policy = MixedPrecisionPolicy(param_dtype=torch.{recipe.dtype}, reduce_dtype=torch.{recipe.state})"
    yield f"for part in (*{layers}, model):"
    offload = ", offload_policy=CPUOffloadPolicy()" if recipe.offload_optimizer else ""
    yield f"    fully_shard(part, mesh=mesh.dp_cp, mp_policy=policy{offload})"
    yield f"layout = ls.layouts.balanced(mask, world_size={one.ranks})"
    if one.tp > 1:
        yield "# heads of one rank of mesh.tp; Longspan itself uses mesh.cp only"
    for number, (heads, scheme) in enumerate(zip(request.part.attentions, one.schemes, strict=True)):
        sizes = f"q_heads={heads.q_heads}, kv_heads={heads.kv_heads}, head_dim={heads.head_dim}"
        if heads.v_head_dim != heads.head_dim:
            sizes += f", v_head_dim={heads.v_head_dim}"
        mask = "mask" if heads.window is None else f"mask & ls.masks.sliding_window({heads.window})"
        name = "plan" if len(one.schemes) == 1 else f"plan_{number}"
        batch = f", batch={request.batch}" if request.batch > 1 else ""
        batch += f", fetch_bytes={one.fetch_bytes}" if one.fetch_bytes is not None and can_limit(scheme) else ""
        yield f'{name} = ls.plan({mask}, layout, scheme="{scheme}", dtype="{recipe.dtype}",'
        yield f"{' ' * len(name)}           {sizes}{batch})"


# -- JSON --------------------------------------------------------------------------------------------------------------


def figures(result: Recommendation, name: str, workload: Workload, price: float | None) -> dict[str, Any]:
    """Return the figures for JSON."""
    request = result.request
    own, least = result.without_install, result.least
    return {
        "model": plan_model.model_json(name, request.sizes),
        "seq_len": request.seq_len,
        "docs": workload.docs,
        "gpus": request.gpus,
        "machines": [machine.name for machine in request.machines],
        "memory": request.memory,
        "best": [_figures_of(one, price) for one in result.best],
        "without_install": None if own is None else _figures_of(own, price),
        "least": None if least is None else _figures_of(least, price),
        "ways": [{"option": change.option, **_figures_of(change.configuration, price)} for change in result.changes],
        "lines": config_lines(result.best[0], name, request) if result.best else [],
    }


def _figures_of(one: Configuration, price: float | None) -> dict[str, Any]:
    mesh = {"data_parallel": one.data_parallel, "context_parallel": one.ranks}
    mesh |= {"tensor_parallel": one.tp, "expert_parallel": one.ep}
    return {
        **mesh, **asdict(one.recipe), "with": one.recipe.words, "machine": one.machine.name,
        "kernel": one.machine.kernel, "schemes": list(one.schemes), "fetch_bytes": one.fetch_bytes,
        "peak_bytes": one.memory.peak.size, "peak_moment": one.memory.peak.name, "memory_known": one.memory_known,
        "host_bytes": one.memory.host, "at_least": one.time.at_least, **plan_model.cost_json(one.cost, price),
    }  # fmt: skip
