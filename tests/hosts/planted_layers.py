"""Modules for `planted.py`: most let tokens meet, or count them, in ways that are right only if the sequence is whole;
the last ones look as if they did and do not. All take and give (batch, tokens, features)."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class Beside(nn.Module):
    """A layer's feed-forward part that gets what a planted module makes of its input, too."""

    def __init__(self, inner, mixer):
        super().__init__()
        self.inner, self.mixer = inner, mixer

    def forward(self, x):
        return self.inner(x + self.mixer(x))


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.hidden_size
        self.build(config)

    def build(self, config):
        pass


# -- tokens meet -------------------------------------------------------------------------------------------------------


class TokenConv(Mixer):
    dilation = 1

    def build(self, config):
        self.conv = nn.Conv1d(self.width, self.width, 3, groups=self.width, dilation=self.dilation)

    def forward(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (2 * self.dilation, 0))).transpose(1, 2)


class FarConv(TokenConv):
    """Sees the 6th and the 12th token before this one, no neighbour."""

    dilation = 6


class HiddenConv(TokenConv):
    """Switched off by its first weight, as new branches often are."""

    def build(self, config):
        super().build(config)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.gate * super().forward(x)


class TokenCumsum(Mixer):
    def forward(self, x):
        return 0.1 * x.cumsum(1)


class RunningMean(Mixer):
    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


class TokenMean(Mixer):
    def forward(self, x):
        return x.mean(1, keepdim=True)


class TokenStatistics(Mixer):
    """Features are centred and scaled over tokens, in float32."""

    def forward(self, x):
        wide = x.float()
        return ((wide - wide.mean(1, keepdim=True)) * (wide.var(1, keepdim=True) + 1e-3).rsqrt()).to(x.dtype)


class SequenceNorm(Mixer):
    """Normalises tokens and features at once."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[1:])


class TokenBatchNorm(Mixer):
    def build(self, config):
        self.norm = nn.BatchNorm1d(self.width)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class TokenMax(Mixer):
    def forward(self, x):
        return x.amax(1, keepdim=True)


class TokenSoftmax(Mixer):
    def build(self, config):
        self.score = nn.Linear(self.width, 1)

    def forward(self, x):
        return self.score(x).softmax(1) * x


class FirstToken(Mixer):
    def forward(self, x):
        return x[:, :1]


class LastToken(Mixer):
    def forward(self, x):
        return x[:, -1:]


class TokenShift(Mixer):
    """RWKV's: half of the features are those of the token before."""

    def forward(self, x):
        before = torch.roll(x, 1, 1) * (torch.arange(x.shape[1]) > 0)[:, None]
        return torch.cat([before[..., : self.width // 2], x[..., self.width // 2 :]], -1)


class PreviousGate(Mixer):
    def build(self, config):
        self.gate = nn.Linear(self.width, self.width)

    def forward(self, x):
        return x * self.gate(F.pad(x, (0, 0, 1, 0))[:, :-1]).sigmoid()


class TokenFourier(Mixer):
    """FNet's."""

    def forward(self, x):
        return torch.fft.fft(x.float(), dim=1).real.to(x.dtype) / x.shape[1]


class TokenSort(Mixer):
    def forward(self, x):
        return x.sort(1).values


class TopTokens(Mixer):
    """Mixture of depths: the best third of the tokens goes through."""

    def build(self, config):
        self.score, self.work = nn.Linear(self.width, 1), nn.Linear(self.width, self.width)

    def forward(self, x):
        score = self.score(x)
        places = score.topk(max(1, x.shape[1] // 3), dim=1).indices
        chosen = torch.zeros_like(score).scatter(1, places, 1.0)
        return chosen * score.sigmoid() * self.work(x)


class Recurrence(Mixer):
    """A state with a gate, token by token."""

    def build(self, config):
        self.gate = nn.Linear(self.width, self.width)

    def forward(self, x):
        state, states, gates = torch.zeros_like(x[:, 0]), [], self.gate(x).sigmoid()
        for token in range(x.shape[1]):
            state = gates[:, token] * state + (1 - gates[:, token]) * x[:, token]
            states.append(state)
        return torch.stack(states, 1)


class Gru(Mixer):
    def build(self, config):
        self.cell = nn.GRU(self.width, self.width, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


# -- tokens are counted ------------------------------------------------------------------------------------------------


class ByLength(Mixer):
    def forward(self, x):
        return x * math.log(x.shape[1])


class DepthByCount(Mixer):
    """How much of a layer is used is drawn from the number of tokens."""

    def forward(self, x):
        return x * float(torch.rand((), generator=torch.Generator().manual_seed(x.shape[1])))


class Capacity(Mixer):
    """Two experts, each of which takes half of the tokens and no more; the others pass."""

    def build(self, config):
        self.router = nn.Linear(self.width, 2)
        self.experts = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(2))

    def forward(self, x):
        weights, most = self.router(x).softmax(-1), math.ceil(x.shape[1] / 2)
        mine = F.one_hot(weights.argmax(-1), 2)
        fits = mine * (mine.cumsum(1) <= most)
        return sum(expert(x) * (weights * fits)[..., e, None] for e, expert in enumerate(self.experts))


class LocalTable(Mixer):
    """A learned vector for the first token, the second, ..."""

    def build(self, config):
        self.table = nn.Embedding(config.max_position_embeddings, self.width)

    def forward(self, x):
        return self.table(torch.arange(x.shape[1])).expand_as(x)


class Countdown(Mixer):
    """How far it is to the end."""

    def forward(self, x):
        return x / (1 + torch.arange(x.shape[1], dtype=x.dtype).flip(0))[:, None]


# -- backward, and between calls ---------------------------------------------------------------------------------------


class _ScaledBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1e-3 + gradient.norm(dim=(1, 2), keepdim=True))


class GradientNorm(Mixer):
    """Forward it does nothing; gradients are divided by their norm over tokens."""

    def forward(self, x):
        return _ScaledBack.apply(x)


class Memory(Mixer):
    """Adds the last token of the call before."""

    last = None

    def forward(self, x):
        before, self.last = self.last, x[:1, -1:].detach().clone()
        return x if before is None else x + before


class EvaluationMean(Mixer):
    """In evaluation only."""

    def forward(self, x):
        return x if self.training else x.mean(1, keepdim=True)


_calls = []


class Counter(Mixer):
    """Every call of the process is a little different."""

    def forward(self, x):
        _calls.append(len(_calls))
        return x * math.cos(len(_calls))


# -- what looks like it ------------------------------------------------------------------------------------------------


class PointConv(Mixer):
    def build(self, config):
        self.conv = nn.Conv1d(self.width, self.width, 1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class FeatureCumsum(Mixer):
    def forward(self, x):
        return 0.1 * x.cumsum(2)


class FeatureStatistics(Mixer):
    def build(self, config):
        self.norm = nn.GroupNorm(4, self.width)

    def forward(self, x):
        wide = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-2) + x.amax(-1, keepdim=True)
        return self.norm(wide.reshape(-1, self.width)).reshape(x.shape)


class FeatureShift(Mixer):
    def forward(self, x):
        return torch.roll(x, 1, 2) + torch.fft.fft(x.float(), dim=2).real.to(x.dtype) / self.width


class FeatureSort(Mixer):
    def forward(self, x):
        return x.sort(2).values * x.softmax(2)


class TokenGate(Mixer):
    def build(self, config):
        self.gate = nn.Linear(self.width, 1)

    def forward(self, x):
        return x * self.gate(x).sigmoid()


class FeatureRecurrence(Mixer):
    """A recurrent cell along the features of each token."""

    def build(self, config):
        self.cell = nn.GRU(1, 1, batch_first=True)

    def forward(self, x):
        return self.cell(x.reshape(-1, self.width, 1))[0].reshape(x.shape)


class InPieces(Mixer):
    """Token by token, in pieces of 7: how many there are does not matter."""

    def build(self, config):
        self.work = nn.Linear(self.width, self.width)

    def forward(self, x):
        return torch.cat([self.work(piece) for piece in x.split(7, 1)], 1)


class FrozenBatchNorm(TokenBatchNorm):
    """Never looks at the batch: its statistics are buffers."""

    def train(self, mode=True):
        return super().train(False)


class TopExperts(Mixer):
    """Each token chooses two of four experts; no capacity."""

    def build(self, config):
        self.router = nn.Linear(self.width, 4)
        self.experts = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(4))

    def forward(self, x):
        best = self.router(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter(-1, best.indices, best.values)
        return sum(expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts))
