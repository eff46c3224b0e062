"""Small models that tests capture, and functions that `dpro-search capture` can be given."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS, EXPERTS, TOP_K = 64, 8, 4, 128, 256, 3, 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * HIDDEN // HEADS, bias=False) for _ in range(2))

    def forward(self, x):
        parts = (each(x).unflatten(2, (-1, HIDDEN // HEADS)).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(HIDDEN), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):  # or what the stage before has made of them
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


def llama():
    return Llama()


def four_layers():
    return Llama(4)


class Experts(nn.Module):
    """As many tokens for each expert; experts x tokens of each x width go through `grouped`."""

    def __init__(self):
        super().__init__()
        self.router, self.grouped = nn.Linear(HIDDEN, EXPERTS, bias=False), GroupedExperts()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K, dim=-1)
        order = chosen.flatten().argsort()
        back = self.grouped(tokens[order // TOP_K].view(EXPERTS, -1, HIDDEN)).flatten(0, 1) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, back).view(x.shape)


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * FFN))
        self.down = nn.Parameter(torch.empty(EXPERTS, FFN, HIDDEN))

    def forward(self, tokens):
        gate, up = (tokens @ self.up).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down


def mixture():
    model = Llama()
    for layer in model.layers:
        layer.feed_forward = Experts()
    return model


class WholeOnly(Llama):
    """A forward pass that skips nothing."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def whole_only():
    return WholeOnly()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if x.sum() > 0:  # depends on data
            x = x * 2
        return self.output(x)


def branching():
    return Branching()


def plan(model):
    """Only the feed-forward networks are split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = {f"layers.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    return columns | {"layers.*.feed_forward.w2": RowwiseParallel()}


def no_model():
    return torch.zeros(1)
