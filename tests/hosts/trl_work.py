"""What ranks do in tests/hosts/test_trl.py: short trainings with TRL's trainers, told as numbers per step.

One process runs plain TRL with eager attention and knows nothing of Longspan: that is what ranks must equal.
"""

import contextlib
import itertools
from pathlib import Path

import torch
import torch.distributed as dist

from tests.hosts.hf_training_work import EPSILON, LEARNING_RATE, VOCAB, launched, trainer_class

STEPS = 20
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # distributions that are worth learning from
}


def saved_model(folder, name, cp_size=None, layers=2, seed=0):
    """A tiny Qwen3 with windows from a folder: TRL loads references from the same place."""
    import transformers as hf

    attention = "longspan" if is_split(cp_size) else "eager"
    if attention == "longspan":
        import longspan.huggingface  # noqa: F401  (registers the attention)

    path = Path(folder) / name
    if not (path / "config.json").exists() and dist.get_rank() == 0:
        kinds = [("sliding_attention", "full_attention")[n % 2] for n in range(layers)]
        sizes = {**SIZES, "num_hidden_layers": layers, "layer_types": kinds}
        config = hf.Qwen3Config(**sizes, sliding_window=7, use_sliding_window=True, eos_token_id=1, pad_token_id=0)
        torch.manual_seed(seed)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    dist.barrier()
    return hf.AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32)


def tokenizer():
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1", padding_side="left")


def texts(number, seed, low=4, high=14):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (number,), generator=draw).tolist()
    return [" ".join(f"w{n}" for n in torch.randint(2, VOCAB, (size,), generator=draw).tolist()) for size in lengths]


def settings(folder, **changes):
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return {**given, **changes}


def logged(trainer):
    """The numbers of every step that do not depend on time."""
    left_out = ("step_time", "train_", "epoch", "learning_rate")
    return [
        {name: value for name, value in entry.items() if not name.startswith(left_out)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@contextlib.contextmanager
def quiet():
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    with launched():
        yield


def is_split(cp_size):
    """Whether ranks hold parts of sequences; else the trainer is TRL's own."""
    return dist.get_world_size() > 1 and cp_size != 1


def rows_each(total, cp_size):
    """Samples of one batch on one rank, of so many on all."""
    return total // (dist.get_world_size() // (cp_size or dist.get_world_size()))


def run(base, cp_size=None, **given):
    from transformers import PrinterCallback

    split = is_split(cp_size)
    trainer = trainer_class(base, split)(
        processing_class=tokenizer(), **given, **({"cp_size": cp_size, "scheme": "exchange"} if split else {})
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    metrics = trainer.evaluate()
    return {
        "curve": logged(trainer),
        "evaluated": {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second"))},
    }


def reward(completion_ids, **_):
    """How much a completion counts up, and a little for its length."""
    return [0.02 * (sum((b - a) % 7 for a, b in itertools.pairwise(ids)) + len(ids)) for ids in completion_ids]


def policy(folder, cp_size, trainer, config, mixin=None, **changes):
    """A trainer that generates: 8 completions a step, in groups of 4, each step of generation used twice."""
    import datasets

    with quiet():
        rows = rows_each(4, cp_size)
        given = {
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": rows,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            **changes,
        }
        data = datasets.Dataset.from_list([{"prompt": text} for text in texts(40, 1)])
        return run(
            trainer if mixin is None else type("Mine", (mixin, trainer), {}),
            cp_size,
            model=saved_model(folder, "policy", cp_size),
            args=config(**settings(folder, **given)),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            **(
                {"teacher_model": saved_model(folder, "teacher", cp_size, 3, 7)}
                if "Distillation" in trainer.__name__
                else {"reward_funcs": reward}
            ),
        )


def grpo(folder, cp_size=None, **changes):
    from trl import GRPOConfig, GRPOTrainer

    given = {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "epsilon": 0.01, **changes}
    return policy(folder, cp_size, GRPOTrainer, GRPOConfig, **given)


def rloo(folder, cp_size=None):
    from trl import RLOOConfig, RLOOTrainer

    given = {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "epsilon": 0.01}
    given |= {"optim": "sgd", "learning_rate": 5e-3}  # Adam takes steps along gradients that are rounding alone
    return policy(folder, cp_size, RLOOTrainer, RLOOConfig, **given)


def distillation(folder, cp_size=None):
    from trl import DistillationConfig, DistillationTrainer

    return policy(folder, cp_size, DistillationTrainer, DistillationConfig, beta=0.5)


def dpo(folder, cp_size=None, **changes):
    import datasets
    from trl import DPOConfig, DPOTrainer

    with quiet():
        rows = rows_each(4, cp_size)
        given = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "max_length": 48, **changes}
        rows_of_text = zip(texts(48, 1), texts(48, 2), texts(48, 3, 3, 20), strict=True)
        data = datasets.Dataset.from_list(
            [{"prompt": a, "chosen": f" {b}", "rejected": f" {c}"} for a, b, c in rows_of_text]
        )
        return run(
            DPOTrainer,
            cp_size,
            model=saved_model(folder, "policy", cp_size),
            args=DPOConfig(**settings(folder, **given)),
            train_dataset=data,
            eval_dataset=data.select(range(6)),
        )


def sft(folder, cp_size=None, **changes):
    import datasets
    from trl import SFTConfig, SFTTrainer

    with quiet():
        rows = rows_each(2, cp_size)
        given = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "max_length": 48}
        given |= {"packing": True, "gradient_accumulation_steps": 2, **changes}
        data = datasets.Dataset.from_list([{"text": text} for text in texts(200, 1, 5, 30)])
        return run(
            SFTTrainer,
            cp_size,
            model=saved_model(folder, "policy", cp_size),
            args=SFTConfig(**settings(folder, **given)),
            train_dataset=data,
            eval_dataset=data.select(range(9)),
        )


def grpo_groups(folder, cp_size):
    """Five steps in which two processes share every group; and the completions that the trainer would print."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    found = {}

    class Noting(GRPOTrainer):
        def log(self, *args, **kwargs):
            found["completions"] = [list(self._logs[name]) for name in ("prompt", "completion", "advantages")]
            super().log(*args, **kwargs)

    with quiet():
        given = {
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "num_generations": 4,
            "max_completion_length": 5,
            "max_steps": 5,
            "beta": 0.1,
        }
        data = datasets.Dataset.from_list([{"prompt": text} for text in texts(40, 1)])
        curves = run(
            Noting,
            cp_size,
            model=saved_model(folder, "policy", cp_size),
            args=GRPOConfig(**settings(folder, **given)),
            train_dataset=data,
            eval_dataset=data.select(range(3)),
            reward_funcs=reward,
        )
        return {**curves, **found}


def sft_smooth(folder, cp_size=None):
    """Padded rows and smoothed labels, which TRL smooths itself."""
    return sft(folder, cp_size, packing=False, label_smoothing_factor=0.2, max_steps=4)


def experts(folder, name, cp_size=None):
    """Four steps of a model with experts, whose router has a loss of its own, that TRL computes."""
    import datasets
    import transformers as hf
    import trl

    with quiet():
        if is_split(cp_size):
            import longspan.huggingface  # noqa: F401  (registers the attention)

        sizes = {**SIZES, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        config = hf.Qwen3MoeConfig(**sizes, eos_token_id=1, pad_token_id=0)
        torch.manual_seed(0)
        attention = "longspan" if is_split(cp_size) else "eager"
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        given = {"max_steps": 4, "router_aux_loss_coef": 0.5, "per_device_train_batch_size": 4}
        given["per_device_eval_batch_size"] = 4
        rows = [{"text": text} for text in texts(40, 1, 5, 30)]
        more = {}
        if name == "GRPO":
            given |= {"num_generations": 4, "max_completion_length": 6}
            rows, more = [{"prompt": row["text"]} for row in rows], {"reward_funcs": reward}
        data = datasets.Dataset.from_list(rows)
        return run(
            getattr(trl, f"{name}Trainer"),
            cp_size,
            model=model,
            args=getattr(trl, f"{name}Config")(**settings(folder, **given)),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            **more,
        )


def with_mixin_alone(folder):
    """Two steps of GRPO on one process, with the mixin and without."""
    from longspan.huggingface.trainer import ContextParallelTrainer

    return [grpo(folder, 1, max_steps=2, mixin=mixin) for mixin in (None, ContextParallelTrainer)]


def refused(folder):
    """What is said to requests that cannot be honoured; and how many completions are generated where one can."""
    import datasets
    import trl

    from longspan.errors import LongspanError

    def make(name, **changes):
        data = [{"prompt": text} for text in texts(8, 1)]
        if name == "KTO":
            data = [{**row, "completion": " w3 w4", "label": n % 2 == 0} for n, row in enumerate(data)]
        more = {"reward_funcs": reward} if name == "GRPO" else {}
        try:
            made = trainer_class(getattr(trl, f"{name}Trainer"), True)(
                model=saved_model(folder, "policy"),
                args=getattr(trl, f"{name}Config")(**settings(folder, **changes)),
                train_dataset=datasets.Dataset.from_list(data),
                processing_class=tokenizer(),
                **more,
            )
        except LongspanError as error:
            return str(error)
        return made.args.generation_batch_size, made.accelerator.num_processes, made.accelerator.process_index

    with quiet():
        return {
            "kto": make("KTO", per_device_train_batch_size=2),
            "groups": make("GRPO", per_device_train_batch_size=3, num_generations=2, gradient_accumulation_steps=1),
            "fits": make("GRPO", per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=3),
        }
