"""Models for `planted.py` whose fault is not a module of hidden states: positions, attention, arguments, losses."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

pytest.importorskip("transformers")
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

from tests.hosts.planted_layers import Beside


class Swapped(LlamaForCausalLM):
    """Llama with a few parts exchanged after it was made."""

    def __init__(self, config):
        super().__init__(config)
        self.swap(config)
        self.post_init()

    def swap(self, config):
        raise NotImplementedError


def swap_attention(model, kind, layers=None):
    for number, layer in enumerate(model.model.layers):
        if layers is None or number in layers:
            layer.self_attn = kind(model.config, number)


def named(model, *parts):
    """The class under a name of its own: proofs are remembered by name."""
    model.__name__ = model.__qualname__ = "".join(["Model", *(f"_{part.__name__}" for part in parts)])
    return model


# -- positions ---------------------------------------------------------------------------------------------------------


class LocalRotary(llama.LlamaRotaryEmbedding):
    """Counts the tokens that it sees."""

    def forward(self, x, position_ids):
        return super().forward(x, torch.arange(x.shape[1])[None])


class DynamicRotary(llama.LlamaRotaryEmbedding):
    """Slower rotations for longer sequences, by the largest position here."""

    def forward(self, x, position_ids):
        return super().forward(x, position_ids / (1.0 + position_ids.max() / 16))


_angles = {}


class CachedRotary(llama.LlamaRotaryEmbedding):
    """One table for all sequences of a length, from the first one that came."""

    def forward(self, x, position_ids):
        key = x.shape[1], x.dtype
        if key not in _angles:
            _angles[key] = tuple(table[:1].clone() for table in super().forward(x, position_ids))
        return _angles[key]


class TableRotary(llama.LlamaRotaryEmbedding):
    """Right: a table of all positions, made once, read at position_ids."""

    table = None

    def forward(self, x, position_ids):
        if self.table is None or self.table[0].shape[1] <= int(position_ids.max()):
            self.table = super().forward(x.float(), torch.arange(2 * int(position_ids.max()) + 2)[None])
        return tuple(table[0][position_ids].to(x.dtype) for table in self.table)


def rotating(kind):
    class Model(Swapped):
        def swap(self, config):
            self.model.rotary_emb = kind(config)

    return named(Model, kind)


class IdTable(nn.Module):
    """Embeddings with a second table, read at what is made of the ids."""

    def __init__(self, tokens, config, index):
        super().__init__()
        self.tokens, self.index = tokens, index
        self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, ids):
        return self.tokens(ids) + self.table(self.index(ids))


def embedding(index):
    class Model(Swapped):
        def swap(self, config):
            self.model.embed_tokens = IdTable(self.model.embed_tokens, config, index)

        def get_input_embeddings(self):
            return self.model.embed_tokens.tokens

    return named(Model, index)


def counted_ids(ids):
    """RoBERTa's positions: real tokens counted, from pad_token_id + 1 on."""
    real = (ids != 0).long()
    return real.cumsum(1) * real


def same_as_before(ids):
    return F.pad(ids[:, 1:] == ids[:, :-1], (1, 0)).long()


def ends_before(ids):
    """How many documents ended, by their last token."""
    return F.pad((ids == 2).long().cumsum(1), (1, -1))


def kinds_of_tokens(ids):
    return torch.full_like(ids, ids.unique().numel())


# -- attention ---------------------------------------------------------------------------------------------------------


class OwnAttention(llama.LlamaAttention):
    """Calls PyTorch's function itself."""

    def forward(self, hidden_states, position_embeddings=None, **_):
        q, k, v = _projected(self, hidden_states, position_embeddings)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def _projected(attention, x, angles):
    q, k, v = (
        project(x).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return *llama.apply_rotary_pos_emb(q, k, *angles), v


class DeafAttention(llama.LlamaAttention):
    """Hands no other arguments on: masks say enough."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **_):
        return super().forward(hidden_states, position_embeddings, attention_mask)


class MasklessAttention(llama.LlamaAttention):
    """Padding and documents do not reach it."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, None, **kwargs)


class CutOffAttention(llama.LlamaAttention):
    """Hands neither masks nor keywords on."""

    def forward(self, hidden_states, position_embeddings=None, **_):
        return super().forward(hidden_states, position_embeddings)


class BiasedAttention(llama.LlamaAttention):
    """Adds a falling line to the scores of its own, by place."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        places = torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)
        line = 0.3 * (places[None, :] - places[:, None])[None, None]
        if isinstance(attention_mask, torch.Tensor):
            attention_mask = line + attention_mask
        else:
            kwargs["position_bias"] = line
        return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)


class PlacedAttention(llama.LlamaAttention):
    """Llama 4's temperatures, by place instead of by position."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        grown = 1 + torch.log1p(torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype))[:, None]
        angles = tuple(table * grown for table in position_embeddings)  # both sides of the scores, as a scale
        return super().forward(hidden_states, angles, attention_mask, **kwargs)


class WarmAttention(llama.LlamaAttention):
    """Right: temperatures by position_ids."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None, **kwargs):
        grown = 1 + torch.log1p(position_ids.to(hidden_states.dtype))[..., None]
        angles = tuple(table * grown for table in position_embeddings)
        return super().forward(hidden_states, angles, attention_mask, position_ids=position_ids, **kwargs)


class ConvAttention(llama.LlamaAttention):
    """Zaya's kind: values are mixed with those of the token before."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states + F.pad(hidden_states, (0, 0, 1, 0))[:, :-1], *args, **kwargs)


class NormedAttention(llama.LlamaAttention):
    """Keys are normalised over tokens instead of over features."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.k_proj = nn.Sequential(self.k_proj, _OverTokens())


class _OverTokens(nn.Module):
    def forward(self, x):
        return x * (x.square().mean(-2, keepdim=True) + 1e-3).rsqrt()


def attending(kind, layers=None):
    class Model(Swapped):
        def swap(self, config):
            swap_attention(self, kind, layers)

    return named(Model, kind)


# -- arguments of the model --------------------------------------------------------------------------------------------


class LengthsFromMask(LlamaForCausalLM):
    """Padded batches only: embeddings are scaled by the number of real tokens."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        if attention_mask is not None:
            embedded = embedded * attention_mask.sum(1)[:, None, None] / 32
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, **kwargs)


class PositionsFromMask(LlamaForCausalLM):
    """OPT's positions, which start with the first real token: Longspan finds them out and hands them over."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if attention_mask is not None:
            position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class DocumentTable(LlamaForCausalLM):
    """Packed batches only: an embedding for the first document of a row, the second, ..."""

    def __init__(self, config):
        super().__init__(config)
        self.documents = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        embedded = embedded + self.documents(F.pad(places.diff(dim=1) < 0, (1, 0)).long().cumsum(1))
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **kwargs)


class PositionTable(LlamaForCausalLM):
    """Right: a learned table, read at position_ids."""

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        embedded = self.model.embed_tokens(input_ids) + self.table(places)
        return super().forward(inputs_embeds=embedded, position_ids=position_ids, **kwargs)


# -- logits and losses -------------------------------------------------------------------------------------------------


class ScaledHead(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head, self.largest = head, 1.0

    def forward(self, x):
        return self.head(x) / self.largest


class ScaledLogits(Swapped):
    """Logits shrink with the largest position of the call."""

    def swap(self, config):
        self.lm_head = ScaledHead(self.lm_head)

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        self.lm_head.largest = 1.0 + float(places.max()) / 16
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class MeanLoss(LlamaForCausalLM):
    """The loss is a mean over the labels of the call: Longspan computes it itself."""

    def forward(self, input_ids=None, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if shift_labels is not None:
            out.loss = self.loss_of(out.logits, shift_labels)
        return out

    def loss_of(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class RowLoss(MeanLoss):
    """The mean over rows of their means."""

    def loss_of(self, logits, labels):
        return torch.stack([F.cross_entropy(row, wanted) for row, wanted in zip(logits, labels, strict=True)]).mean()


class NormalisedLoss(MeanLoss):
    """With a term that keeps the logits' norms small, a mean over tokens."""

    def loss_of(self, logits, labels):
        return super().loss_of(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


class ShiftedLoss(LlamaForCausalLM):
    """Labels are shifted inside of the call, and no others are looked at: Longspan computes the loss itself."""

    def forward(self, input_ids=None, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if labels is not None:
            ahead = F.pad(labels[:, 1:], (0, 1), value=-100)
            count = (ahead != -100).sum() if num_items_in_batch is None else num_items_in_batch
            out.loss = F.cross_entropy(out.logits.flatten(0, 1), ahead.flatten(), reduction="sum") / count
        return out


class Router(nn.Module):
    """Two experts; remembers how evenly tokens went to them: a product of means over tokens."""

    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 2)
        self.experts = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
        self.balance = 0.0

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        mine = F.one_hot(weights.argmax(-1), 2)
        self.balance = (weights.mean((0, 1)) * mine.to(x.dtype).mean((0, 1))).sum()
        return sum(expert(x) * (weights * mine)[..., e, None] for e, expert in enumerate(self.experts))


class RouterLoss(Swapped):
    """Adds every router's balance to the loss."""

    def swap(self, config):
        for layer in self.model.layers:
            layer.mlp = Beside(layer.mlp, Router(config))

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + sum(layer.mlp.mixer.balance for layer in self.model.layers)
        return out
