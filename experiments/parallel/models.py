"""Two small transformers in plain PyTorch, which any exported plan splits: a GPT and a Llama."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class GptAttention(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GptFeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class GptLayer(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(width), GptAttention(width, head)
        self.second_norm, self.feed_forward = nn.LayerNorm(width), GptFeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Gpt(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, vocab = config["n_embd"], config["vocab_size"]
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(config["n_positions"], width)
        self.layers = nn.ModuleList([GptLayer(width, width // config["n_head"]) for _ in range(config["n_layer"])])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


class LlamaAttention(nn.Module):
    def __init__(self, width, head, kv_width):
        super().__init__()
        self.head = head
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, kv_width, bias=False), nn.Linear(width, kv_width, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q_proj, self.k_proj, self.v_proj))
        cosines, sines = _angles(q.shape[2], self.head, q.device, q.dtype)
        q, k = (part * cosines + _turned(part) * sines for part in (q, k))
        shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True, **shared).transpose(1, 2).flatten(2))


_KNOWN = {}


def _angles(length, head, device, dtype):
    key = length, head, device, dtype
    if key not in _KNOWN:
        turns = 10000.0 ** (-torch.arange(0, head, 2, device=device) / head)
        angles = torch.outer(torch.arange(length, device=device), turns).repeat(1, 2)
        _KNOWN[key] = angles.cos().to(dtype), angles.sin().to(dtype)
    return _KNOWN[key]


def _turned(part):
    first, second = part.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class LlamaFeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = width // heads
        self.first_norm, self.second_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = LlamaAttention(width, head, head * config["num_key_value_heads"])
        self.feed_forward = LlamaFeedForward(width, config["intermediate_size"])

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, vocab = config["hidden_size"], config["vocab_size"]
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(config["num_hidden_layers"])])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocab, bias=False)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def build(config):
    """The model of a ``config.json``."""
    return {"gpt2": Gpt, "llama": Llama}[config["model_type"]](config)
