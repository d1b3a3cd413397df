"""What ranks do in tests/hosts/test_hf_training.py: short trainings of tiny models, told as numbers per step.

One process runs plain transformers with eager attention and knows nothing of Longspan: that is what ranks must equal.
"""

import contextlib
import os
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.hosts.hf_versions import checkpoint_layers

STEPS, VOCAB = 20, 64
LEARNING_RATE = 1e-3
EPSILON = 1e-6
"""Adam's, above rounding: gradients that are zero but for it would otherwise move parameters by their sign."""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LAYERS = ["sliding_attention", "full_attention"]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def launched():
    """This process as torchrun would have started it; accelerate keeps its state in globals, which end here, too."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    world, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if world > 1:
        values = (str(rank), str(rank), str(world), str(world), "127.0.0.1", "29500")
        os.environ.update(zip(RANK_VARIABLES, values, strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of other packages; none has to do with what is computed.
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")  # accelerate, for its FSDP2
            yield
    finally:
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()


def config_of(family, **changes):
    import transformers as hf

    window = {"sliding_window": 7, "layer_types": LAYERS}
    match family:
        case "llama":
            return hf.LlamaConfig(**SIZES, **changes)
        case "gemma2":
            return hf.Gemma2Config(**SIZES, **window, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)
        case "gemma3":
            return hf.Gemma3TextConfig(**SIZES, **window, query_pre_attn_scalar=8)
        case "gpt_oss":
            return hf.GptOssConfig(**SIZES, **window, num_local_experts=2, num_experts_per_tok=1, **changes)
        case "qwen3":
            return hf.Qwen3Config(**SIZES, **window, use_sliding_window=True)
        case "gpt2":
            return hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2)
    raise ValueError(family)


def model_of(family, attention, **changes):
    from transformers import AutoModelForCausalLM

    if attention == "longspan":
        import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, **changes), attn_implementation=attention)


def samples(number, seed=1):
    """Documents of 9 to 40 tokens that count up from somewhere, with a twist: something to learn, nothing to guess."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        length, start, step = (
            int(torch.randint(*span, (1,), generator=draw)) for span in ((9, 41), (0, VOCAB), (1, 4))
        )
        ids = ((torch.arange(length) * step + start) % VOCAB).tolist()
        found.append({"input_ids": ids, "labels": ids})
    return found


def pad(features):
    """Rows of one length, padded at the end."""
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    for feature in features:
        feature["attention_mask"] = [1] * len(feature["input_ids"])
    return {
        name: torch.tensor([feature[name] + [fill] * (longest - len(feature[name])) for feature in features])
        for name, fill in rows.items()
    }


def collator(kind):
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening() if kind == "packed" else pad


def accuracy(prediction):
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    kept = labels != -100
    return {"accuracy": float((guesses == labels)[kept].mean()), "num": int(kept.sum())}


def arguments(folder, batch, **changes):
    from transformers import TrainingArguments

    settings = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "include_num_input_tokens_seen": "all",
        "seed": 3,
    }
    return TrainingArguments(**{**settings, **changes})


def curve(trainer, names=("loss", "grad_norm")):
    return [tuple(float(entry[name]) for name in names) for entry in trainer.state.log_history if "loss" in entry]


def first_step(trainer):
    """How many steps had been made when the training began; older versions of transformers do not keep it."""
    return next(callback.first for callback in trainer.callback_handler.callbacks if hasattr(callback, "first"))


def begin_noted():
    """A callback that keeps the step at which a training begins."""
    from transformers import TrainerCallback

    class BeginNoted(TrainerCallback):
        first = None

        def on_train_begin(self, args, state, control, **_):
            self.first = state.global_step

    return BeginNoted()


def trainer_class(base, split):
    if not split:
        return base
    from longspan.huggingface.trainer import ContextParallelTrainer

    return type("MyTrainer", (ContextParallelTrainer, base), {})


def train(folder, family, kind, cp_size=None, rows=4, resume=None, save=False, evaluate=False, wrap="ddp"):
    """A training with the Trainer. `rows`: samples in all batches of one micro-step, over all ranks.

    Llama's are shuffled and never the same; for the others a few batches come again, whose plans are known.
    """
    from transformers import PrinterCallback, Trainer

    world = dist.get_world_size()
    split = world > 1
    cp, shuffled = world if cp_size is None else cp_size, family == "llama"
    with launched():
        model = model_of(family, "longspan" if split else "eager")
        if wrap == "fsdp2" and split:
            model = sharded(model, folder)
        changes = {"save_strategy": "steps", "save_steps": STEPS // 2} if save else {}
        if not shuffled:
            changes["train_sampling_strategy"] = "sequential"
        args = arguments(folder, rows // (world // cp), **changes)
        options = {"cp_size": cp_size, "scheme": "auto" if shuffled else "exchange"} if split else {}
        trainer = trainer_class(Trainer, split)(
            model=model,
            args=args,
            train_dataset=samples(64 if shuffled else 16),
            eval_dataset=samples(10, seed=2),
            data_collator=collator(kind),
            compute_metrics=accuracy if evaluate else None,
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(begin_noted())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        found = {
            "curve": curve(trainer),
            "first": first_step(trainer),
            "tokens": trainer.state.num_input_tokens_seen,
            "flos": trainer.state.total_flos,
            "batch": trainer.get_total_train_batch_size(args),
        }
        if evaluate:
            found |= evaluated(trainer)
        return found


def evaluated(trainer):
    """What evaluate() and predict() say, with and without labels; the last batch is not full, rows differ in length."""
    trainer.data_collator = pad
    metrics = trainer.evaluate()
    output = trainer.predict(samples(7, seed=4))
    trainer.data_collator = lambda features: {k: v for k, v in pad(features).items() if k != "labels"}
    bare = trainer.predict(samples(3, seed=5))
    trainer.data_collator, trainer.args.per_device_eval_batch_size = pad, 1
    rows = samples(3, seed=6)
    rows[1] = {**rows[1], "labels": [-100] * len(rows[1]["labels"])}
    names = ("eval_loss", "eval_accuracy", "eval_num")
    return {
        "metrics": [metrics[name] for name in names],
        "predict": [output.metrics[name.replace("eval", "test")] for name in names],
        "logits": np.asarray(output.predictions),
        "labels": np.asarray(output.label_ids),
        "bare": np.asarray(bare.predictions),
        "one without labels": [trainer.evaluate(rows)["eval_loss"]],
    }


def sharded(model, folder):
    """The same weights, sharded over all ranks by transformers itself (FSDP2); accelerate refuses to do so on CPUs."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    path = Path(folder) / "start"
    if dist.get_rank() == 0:
        model.save_pretrained(path)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        path,
        attn_implementation="longspan",
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    )


def accelerate_loop(family="gemma3"):
    """A loop of one's own over accelerate's data loader, model and optimizer; padded batches."""
    from accelerate import Accelerator

    world = dist.get_world_size()
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        ranks = None
        if world > 1:
            from longspan import huggingface
            from longspan.huggingface.accelerate import split_sequences

            ranks = split_sequences(accelerator)
        model = model_of(family, "eager" if ranks is None else "longspan")
        checkpoint_layers(model)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
        loader = torch.utils.data.DataLoader(samples(8 * STEPS), batch_size=4, collate_fn=pad)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found, batches = [], iter(loader)
        for _ in range(STEPS):
            pair = [next(batches), next(batches)]
            total, num_labels = 0.0, sum((batch["labels"][:, 1:] != -100).sum() for batch in pair)
            for batch in pair:
                if ranks is not None:
                    batch = huggingface.shard_inputs(
                        accelerator.unwrap_model(model), batch, ranks.cp, scheme="exchange"
                    )
                with accelerator.accumulate(model):
                    loss = model(**{**batch, "num_items_in_batch": num_labels, "use_cache": False}).loss
                    accelerator.backward(loss * 2 * accelerator.num_processes)  # what accelerate and DDP divide by
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                total += float(accelerator.reduce(loss.detach(), "sum"))
            found.append((total, float(norm)))
        return {"curve": found}


def sft(folder):
    """TRL's trainer, which packs documents best-fit; stock TRL refuses that with context parallelism."""
    import datasets
    import tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    split = dist.get_world_size() > 1
    datasets.disable_progress_bars()
    with launched():
        model = model_of("qwen3", "longspan" if split else "eager")
        words = {f"w{number}": number for number in range(VOCAB)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
            pad_token="w0",
            eos_token="w1",
        )
        args = SFTConfig(
            **{
                **arguments(folder, 1).to_dict(),
                "bf16": False,
                "max_length": 64,
                "packing": True,
                "packing_strategy": "bfd",
                "shuffle_dataset": False,
            }
        )
        trainer = trainer_class(SFTTrainer, split)(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list([{"input_ids": sample["input_ids"]} for sample in samples(160)]),
            eval_dataset=datasets.Dataset.from_list(
                [{"input_ids": sample["input_ids"]} for sample in samples(12, seed=2)]
            ),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.train()
        names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
        metrics = trainer.evaluate()
        return {
            "curve": curve(trainer, names),
            "documents": int((batch["position_ids"] == 0).sum()),
            "metrics": [metrics[name] for name in ("eval_loss", "eval_mean_token_accuracy")],
        }


@contextlib.contextmanager
def gloo_as_accelerator():
    """Accelerate, made to take CPUs for accelerators: the only way to run its ParallelismConfig here."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def to_cpu(state):
        state.device = torch.device("cpu")

    answer = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", return_value=answer),
        mock.patch.object(PartialState, "set_device", to_cpu),
    ):
        yield


def train_planned(folder, family, kind, dp_shard):
    """The Trainer with accelerate's own FSDP2 and mesh, from a ParallelismConfig."""
    from accelerate import ParallelismConfig
    from transformers import PrinterCallback, Trainer

    with launched(), gloo_as_accelerator():
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        try:
            config = ParallelismConfig(cp_size=2, dp_shard_size=dp_shard)
            trainer = trainer_class(Trainer, True)(
                model=model_of(family, "longspan"),
                args=arguments(
                    folder,
                    4 // dp_shard,
                    train_sampling_strategy="sequential",
                    use_cpu=False,
                    parallelism_config=config,
                    fsdp=True,
                    fsdp_config={"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
                ),
                train_dataset=samples(16),
                data_collator=collator(kind),
                scheme="exchange",
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            return {"curve": curve(trainer), "names": trainer.accelerator.torch_device_mesh.mesh_dim_names}
        finally:
            for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
                del os.environ[name]


def dropped(folder, resume=None):
    """A few steps with attention dropout; what is resumed evaluates in between, too."""
    from transformers import PrinterCallback, Trainer

    with launched():
        model = model_of("llama", "longspan", attention_dropout=0.3)
        evaluation = {} if resume is None else {"eval_strategy": "steps", "eval_steps": 1}
        args = arguments(folder, 4, max_steps=3, save_strategy="steps", save_steps=1, **evaluation)
        trainer = trainer_class(Trainer, True)(
            model=model,
            args=args,
            train_dataset=samples(64),
            eval_dataset=samples(8, seed=2),
            data_collator=collator("packed"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(begin_noted())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {"curve": curve(trainer), "first": first_step(trainer)}


def refusals(folder):
    """What is said to each request that cannot be honoured."""
    with launched():
        return {name: _said(request, folder) for name, request in _requests().items()}


def _said(request, folder):
    from longspan.errors import LongspanError

    try:
        request(folder)
    except LongspanError as error:
        return str(error)
    return "nothing"


def _requests():
    import transformers as hf
    from torch.utils.data import DataLoader, IterableDataset

    from longspan.huggingface.trainer import ContextParallelTrainer

    class Mine(ContextParallelTrainer, hf.Trainer):
        pass

    class OwnLoss(Mine):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    class OtherBatches(Mine):
        def get_train_dataloader(self):
            return DataLoader(samples(8, seed=dist.get_rank()), batch_size=2, collate_fn=pad)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([{"input_ids": [n] * 20, "labels": [n] * 20} for n in range(32)])

    def make(kind=Mine, model=None, options=None, data=None, **changes):
        def request(folder):
            made = model() if model is not None else model_of("llama", "longspan")
            settings = arguments(folder, 2, max_steps=1, **changes)
            data_or_default = samples(8) if data is None else data
            given = {"train_dataset": data_or_default, "data_collator": pad, **(options or {})}
            kind(model=made, args=settings, **given).train()

        return request

    unlabelled = {"data_collator": lambda features: {**pad(features), "labels": None}}
    return {
        "eager": make(model=lambda: model_of("llama", "eager")),
        "cp_size": make(options={"cp_size": 3}),
        "batches": make(OtherBatches),
        "stream": make(data=Stream()),
        "own loss": make(OwnLoss),
        "tokens": make(average_tokens_across_devices=False),
        "objects": make(eval_use_gather_object=True),
        "collator": make(options={"data_collator": hf.DataCollatorWithFlattening(return_position_ids=False)}),
        "no labels": make(options=unlabelled),
    }
