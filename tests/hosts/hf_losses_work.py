"""What ranks do in tests/hosts/test_hf_losses.py: the Trainer with smoothed labels, losses of a user's, and noise."""

import torch
import torch.distributed as dist

from tests.hosts.hf_training_work import arguments, collator, curve, launched, model_of, samples, trainer_class

STEPS = 5


def cross_entropy(logits, labels, count):
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return torch.nn.functional.cross_entropy(flat, labels.reshape(-1), reduction="sum") / count


def shifts(outputs, labels, num_items_in_batch=None):
    """As most people write it: labels are shifted here; hard tokens weigh more."""
    logits, later = outputs.logits[..., :-1, :], labels[..., 1:]
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, later.clamp(min=0)[..., None])[..., 0]
    return ((1 - chosen.exp()) * -chosen * (later != -100)).sum() / num_items_in_batch


def in_place(outputs, labels, num_items_in_batch=None):
    """Each token is to be told again."""
    return cross_entropy(outputs["logits"], labels, num_items_in_batch)


def worst_token(outputs, labels, num_items_in_batch=None):
    """Nothing that adds up: the largest loss of each row."""
    logits, later = outputs.logits[:, :-1], labels[:, 1:]
    flat = torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), later, reduction="none")
    return flat.max(dim=1).values.sum() / num_items_in_batch


def reads_more(outputs, labels, num_items_in_batch=None):
    """Hidden states are read, too, which fails where there are none."""
    size = outputs.hidden_states[-1].float().square().mean()
    return shifts(outputs, labels, num_items_in_batch) + 0.1 * size / num_items_in_batch


OWN = {"shifts": shifts, "in_place": in_place, "worst_token": worst_token, "reads_more": reads_more}


def train(folder, what, kind, cp_size=None):
    """(loss, norm) of each step, and what an evaluation says."""
    from transformers import PrinterCallback, Trainer

    world = dist.get_world_size()
    split = world > 1
    with launched():
        model = model_of("llama", "longspan" if split else "eager")
        model.config.output_hidden_states = what == "reads_more"
        changes = {"smoothing": {"label_smoothing_factor": 0.2}, "noise": {"neftune_noise_alpha": 5.0}}.get(what, {})
        rows = 4 // (world // (cp_size or world))
        args = arguments(folder, rows, max_steps=STEPS, gradient_checkpointing=False, **changes)
        own = OWN.get(what)
        trainer = trainer_class(Trainer, split)(
            model=model,
            args=args,
            train_dataset=samples(40),
            eval_dataset=samples(8, seed=2),
            data_collator=collator(kind),
            compute_loss_func=own,
            **({"cp_size": cp_size, "scheme": "exchange"} if split else {}),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        way = getattr(trainer.compute_loss_func, "alignment", None)
        hooks = len(model.get_input_embeddings()._forward_hooks)
        return {"curve": curve(trainer), "way": way, "hooks": hooks, "eval": trainer.evaluate()["eval_loss"]}


def gathers(folder):
    """How often logits of whole sequences were gathered, for two batches."""
    from unittest import mock

    from transformers import PrinterCallback, Trainer

    from longspan.huggingface import trainer as ours

    found = {}
    with launched():
        made = trainer_class(Trainer, True)(
            model=model_of("llama", "longspan"),
            args=arguments(folder, 4),
            eval_dataset=samples(8, seed=2),
            data_collator=collator("padded"),
            scheme="exchange",
        )
        made.remove_callback(PrinterCallback)
        for name in ("evaluate", "metrics", "predict"):
            with mock.patch.object(ours, "gather_outputs", side_effect=ours.gather_outputs) as gathered:
                made.compute_metrics = (lambda _: {}) if name == "metrics" else None
                made.predict(samples(8, seed=2)) if name == "predict" else made.evaluate()
                found[name] = gathered.call_count
    return found


def liger(folder, shifts_itself=False):
    """A training after kernels were put into the model as Liger does it: a loss from hidden states, other norms."""
    import types
    from unittest import mock

    from transformers import PrinterCallback, Trainer
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def fused(self, input_ids=None, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
        later = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        return CausalLMOutputWithPast(loss=cross_entropy(logits, later, num_items_in_batch))

    def old(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
        return CausalLMOutputWithPast(loss=cross_entropy(logits[:, :-1], labels[:, 1:], num_items_in_batch))

    def norm(self, x):
        return torch.rms_norm(x, x.shape[-1:], self.weight, 1e-6)

    def of_liger(f):
        scope = {**f.__globals__, "__name__": "liger_kernel.transformers"}
        return types.FunctionType(f.__code__, scope, f.__name__, f.__defaults__, f.__closure__)

    fused, old, norm = map(of_liger, (fused, old, norm))

    def apply(model, config):
        model.model.norm.forward = types.MethodType(norm, model.model.norm)
        model.forward = types.MethodType(old if shifts_itself else fused, model)

    split = dist.get_world_size() > 1
    with launched(), mock.patch("transformers.trainer.apply_liger_kernel", apply):
        trainer = trainer_class(Trainer, split)(
            model=model_of("llama", "longspan" if split else "eager"),
            args=arguments(folder, 4, max_steps=3, use_liger_kernel=True, gradient_checkpointing=False),
            train_dataset=samples(40),
            data_collator=collator("padded"),
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except ValueError as error:
            return {"said": str(error)}
        return {"curve": curve(trainer)}
