"""Short trainings with `ContextParallelTrainer` on one process and on several; importable by name."""

import os
import random
import tempfile
import warnings

import torch

from tests.hosts.hf_training_work import arguments, launched, pad, trainer_class

VOCAB, SAMPLES = 64, 53
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "initializer_range": 0.2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "initializer_range": 0.2},
    "llama": {"tie_word_embeddings": True},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {
        "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 8,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2, "initializer_range": 0.2,
    },
}  # fmt: skip


def model_of(family, attention="longspan"):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if "bert" in family else AutoModelForCausalLM
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    return kind.from_config(config, attn_implementation=attention, dtype=torch.float32)


LENGTHS = (3, 5, 17, 40, 61)


def samples(number=SAMPLES, lengths=LENGTHS):
    """Texts of very different lengths; labels begin somewhere inside, and some texts have none."""
    draw, found = random.Random(0), []
    for place in range(number):
        ids = [draw.randint(3, VOCAB - 1) for _ in range(draw.choice(lengths))]
        first = len(ids) if place % 11 == 0 else draw.randint(0, len(ids) - 1)
        found.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return found


def train(family, packed, lengths=LENGTHS, **changes):
    """Losses and norms by step, losses of evaluations, and logits of a prediction without labels."""
    from transformers import DataCollatorWithFlattening, PrinterCallback, Trainer

    with launched(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("default")
        settings = {
            "max_steps": 4, "gradient_accumulation_steps": 3, "gradient_checkpointing": False, "learning_rate": 1e-2,
            "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 2, "adam_epsilon": 1e-4,
        }  # fmt: skip
        trainer = trainer_class(Trainer, True)(
            model=model_of(family),
            args=arguments(folder, 2, **{**settings, **changes}),
            train_dataset=samples(lengths=lengths),
            eval_dataset=samples(7, lengths),
            data_collator=DataCollatorWithFlattening() if packed else pad,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        history = trainer.state.log_history
        found = [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]
        found += [(entry["eval_loss"], 0.0) for entry in history if "eval_loss" in entry]
        bare = []
        if packed:
            trainer.data_collator = _without_labels
            bare = trainer.predict(samples(2, lengths)).predictions.tolist()
        return found, bare


def _without_labels(features):
    from transformers import DataCollatorWithFlattening

    batch = DataCollatorWithFlattening()(features)
    return {name: value for name, value in batch.items() if name != "labels"}


def separated(family, attention):
    """A packed batch through the mixin's `Separator`: logits of its documents, those of each alone, and warnings."""
    from longspan.huggingface.trainer import Separator

    model = model_of(family, attention).eval()
    lengths = (25, 1, 14)
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": ids, "position_ids": places, "labels": ids}
    separator = Separator()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        given = [separator.apply(model, batch, {}) for _ in range(2)][1]
        found = model(**given, use_cache=False) if "use_cache" not in given else model(**given)
        alone = torch.cat([model(document, use_cache=False).logits for document in ids.split(lengths, 1)], 1)
    said = [str(warning.message) for warning in caught if "kept apart" in str(warning.message)]
    far = float((found.logits - alone).abs().max())
    loss = torch.nn.functional.cross_entropy(found.logits[0, :-1], ids[0, 1:])
    return {"far": far, "loss": float((found.loss - loss).abs()), "said": said, "is_same": given is batch}


def wrapped(how):
    """What a model became in a training of one step, or why it was refused."""
    from transformers import Trainer

    variables = {"ACCELERATE_USE_FSDP": "true"} if how == "variable" else {}
    changes = {"fsdp": True, "fsdp_config": {"version": 2}} if how == "arguments" else {}
    with launched(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            trainer = trainer_class(Trainer, True)(
                model=model_of("llama"),
                args=arguments(folder, 2, max_steps=1, gradient_accumulation_steps=1, **changes),
                train_dataset=samples(4),
                data_collator=pad,
            )
            trainer.train()
        except ValueError as error:
            return str(error)
        finally:
            for name in os.environ.keys() - before.keys() | variables.keys():
                if name.startswith(("ACCELERATE_", "FSDP_")):
                    del os.environ[name]
        return type(trainer.model_wrapped).__name__
