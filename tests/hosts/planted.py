"""Models with one fault each that shows over ranks alone, and twins that look faulty and are not.

Every fault is right on one device by definition: what it computes there is what it is. A rank that sees a part of the
sequence computes something else. `tests/hosts/test_proof_faults.py` wants the proof to refuse all of them and none of
the twins; `tests/hosts/test_planted.py` shows over real ranks that faults are wrong and twins are right.
"""

from dataclasses import dataclass, field

import pytest

pytest.importorskip("transformers")
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.hosts import planted_layers as layers
from tests.hosts import planted_models as models
from tests.hosts.hf_work import BOTH, SIZES, WINDOW

EVERYWHERE = ("plain", "padded", "packed")


@dataclass(frozen=True)
class Planted:
    """A model class, how to make one, kinds of batches, and what the refusal speaks of."""

    name: str
    kind: type
    config: type = LlamaConfig
    changes: dict = field(default_factory=dict)
    forms: tuple[str, ...] = EVERYWHERE
    """Kinds of batches in which a fault is one, or a twin is right."""
    word: str = ""

    def settings(self):
        sizes = {**SIZES, **self.changes}
        if self.config is GPT2Config:
            names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            unused = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
            sizes = {names.get(name, name): value for name, value in sizes.items() if name not in unused}
            sizes |= {"n_positions": 128, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        if self.config is BertConfig:
            sizes = {name: value for name, value in sizes.items() if name not in ("num_key_value_heads", "head_dim")}
            sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return self.config(**sizes)


def beside(mixer, base=LlamaForCausalLM, chosen=None):
    """The model with a module beside the feed-forward part of the chosen layers."""

    class Model(base):
        def __init__(self, config):
            super().__init__(config)
            for number, layer in enumerate(_layers(self)):
                if chosen is None or chosen(number, config):
                    part = "mlp" if hasattr(layer, "mlp") else "intermediate"
                    setattr(layer, part, layers.Beside(getattr(layer, part), mixer(config)))
            self.post_init()

    return models.named(Model, base, mixer, *([chosen] if chosen else []))


def _layers(model):
    inner = getattr(model.base_model, "encoder", model.base_model)
    return next(getattr(inner, name) for name in ("layers", "layer", "h") if hasattr(inner, name))


def _full(number, config):
    return config.layer_types[number] == "full_attention"


def _third(number, _):
    return number % 3 == 2


def _last(number, config):
    return number == config.num_hidden_layers - 1


def _wide(_, config):
    return config.hidden_size >= 128


GEMMA = {"layer_types": BOTH, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5}
QWEN = {"layer_types": BOTH, "sliding_window": WINDOW, "use_sliding_window": True}
FAULTS = (
    Planted("convolution", beside(layers.TokenConv), word="mixer"),
    Planted("far convolution", beside(layers.FarConv), word="mixer"),
    Planted("convolution behind a closed gate", beside(layers.HiddenConv), word="mixer"),
    Planted("cumsum", beside(layers.TokenCumsum), word="mixer"),
    Planted("running mean", beside(layers.RunningMean), word="mixer"),
    Planted("mean", beside(layers.TokenMean), word="layers.0.mlp"),
    Planted("statistics in float32", beside(layers.TokenStatistics), word="mixer"),
    Planted("norm of the sequence", beside(layers.SequenceNorm), word="mixer"),
    Planted("batch norm", beside(layers.TokenBatchNorm), word="mixer"),
    Planted("max", beside(layers.TokenMax), word="layers.0.mlp"),
    Planted("softmax over tokens", beside(layers.TokenSoftmax), word="mixer"),
    Planted("first token added", beside(layers.FirstToken), word="layers.0.mlp"),
    Planted("last token added", beside(layers.LastToken), word="layers.0.mlp"),
    Planted("token shift", beside(layers.TokenShift), word="mixer"),
    Planted("gate of the token before", beside(layers.PreviousGate), word="mixer"),
    Planted("Fourier transform", beside(layers.TokenFourier), word="mixer"),
    Planted("sort", beside(layers.TokenSort), word="mixer"),
    Planted("top tokens", beside(layers.TopTokens), word="mixer"),
    Planted("recurrence", beside(layers.Recurrence), word="mixer"),
    Planted("GRU", beside(layers.Gru), word="mixer"),
    Planted("scale by length", beside(layers.ByLength), word="mixer"),
    Planted("depth by token count", beside(layers.DepthByCount), word="mixer"),
    Planted("capacity of experts", beside(layers.Capacity), word="mixer"),
    Planted("learned table by place", beside(layers.LocalTable), word="mixer"),
    Planted("countdown", beside(layers.Countdown), word="mixer"),
    Planted("gradients normalised over tokens", beside(layers.GradientNorm), word="gradient"),
    Planted("memory of the last call", beside(layers.Memory), word="mixer"),
    Planted("global counter", beside(layers.Counter)),
    Planted("local positions", models.rotating(models.LocalRotary), word="rotary_emb"),
    Planted("dynamic rotary", models.rotating(models.DynamicRotary), word="rotary_emb"),
    Planted("rotary cached by length", models.rotating(models.CachedRotary), word="rotary_emb"),
    Planted("positions from ids", models.embedding(models.counted_ids), word="embed_tokens"),
    Planted("token type from neighbours", models.embedding(models.same_as_before), word="embed_tokens"),
    Planted("number of different tokens", models.embedding(models.kinds_of_tokens), word="embed_tokens"),
    Planted("own call of SDPA", models.attending(models.OwnAttention, (1,)), word="self_attn"),
    Planted("masks and keywords dropped", models.attending(models.CutOffAttention, (1,)), word="mask"),
    Planted("masks dropped", models.attending(models.MasklessAttention, (1,)), word="mask"),
    Planted("bias made locally", models.attending(models.BiasedAttention), word="position_bias"),
    Planted("temperature by place", models.attending(models.PlacedAttention), word="self_attn"),
    Planted("convolution inside of attention", models.attending(models.ConvAttention), word="self_attn"),
    Planted("keys normalised over tokens", models.attending(models.NormedAttention), word="k_proj"),
    Planted("lengths from the mask", models.LengthsFromMask, forms=("padded",)),
    Planted("documents counted", models.DocumentTable, forms=("packed",)),
    Planted("logits by the largest position", models.ScaledLogits, word="lm_head"),
    Planted("loss by rows", models.RowLoss, word="loss"),
    Planted("norm of logits in the loss", models.NormalisedLoss, word="loss"),
    Planted("router loss", models.RouterLoss, word="loss"),
    Planted(
        "convolution in full layers",
        beside(layers.TokenConv, Gemma2ForCausalLM, _full),
        Gemma2Config,
        GEMMA,
        word="layers.1",
    ),
    Planted(
        "recurrence in full layers", beside(layers.Gru, Qwen3ForCausalLM, _full), Qwen3Config, QWEN, word="layers.1"
    ),
    Planted(
        "mean in every third layer",
        beside(layers.TokenMean, chosen=_third),
        changes={"num_hidden_layers": 6},
        word="mlp",
    ),
    Planted(
        "mean in the last layer",
        beside(layers.TokenMean, chosen=_last),
        changes={"num_hidden_layers": 6},
        word="mlp",
    ),
    Planted(
        "convolution in wide models",
        beside(layers.TokenConv, chosen=_wide),
        changes={"hidden_size": 128},
        word="mlp (Beside), which its tiny copy has not",
    ),
    Planted("mean in evaluation", beside(layers.EvaluationMean), word="mlp"),
    Planted("documents by end tokens", models.embedding(models.ends_before), word="embed_tokens"),
    Planted("GPT-2 with a mean", beside(layers.TokenMean, GPT2LMHeadModel), GPT2Config, word="h.0.mlp"),
    Planted(
        "BERT with a token shift",
        beside(layers.TokenShift, BertForMaskedLM),
        BertConfig,
        word="mixer",
        forms=("plain", "padded"),
    ),
)

TWINS = (
    Planted("convolution of width one", beside(layers.PointConv)),
    Planted("cumsum over features", beside(layers.FeatureCumsum)),
    Planted("statistics of features", beside(layers.FeatureStatistics)),
    Planted("features shifted, and their Fourier transform", beside(layers.FeatureShift)),
    Planted("sort and softmax of features", beside(layers.FeatureSort)),
    Planted("recurrence over features", beside(layers.FeatureRecurrence)),
    Planted("gate of a token", beside(layers.TokenGate)),
    Planted("tokens in pieces", beside(layers.InPieces)),
    Planted("batch norm with fixed statistics", beside(layers.FrozenBatchNorm)),
    Planted("top experts", beside(layers.TopExperts)),
    Planted("rotary from a table", models.rotating(models.TableRotary)),
    Planted("temperature by position", models.attending(models.WarmAttention)),
    Planted("learned table by position", models.PositionTable),
    Planted("gate in full layers", beside(layers.TokenGate, Gemma2ForCausalLM, _full), Gemma2Config, GEMMA),
    Planted("GPT-2 with a gate", beside(layers.TokenGate, GPT2LMHeadModel), GPT2Config),
    Planted("BERT with a gate", beside(layers.TokenGate, BertForMaskedLM), BertConfig, forms=("plain", "padded")),
    Planted("keywords dropped, masks not", models.attending(models.DeafAttention, (1,))),
    Planted("positions from the mask", models.PositionsFromMask),
    Planted("loss of local labels", models.MeanLoss),
    Planted("loss with a local shift", models.ShiftedLoss),
)
