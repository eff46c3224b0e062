"""Models in plain PyTorch, at the sizes of their publications: what `dpro-search capture` is compared with PyTorch on.

dpro-search capture experiments/capture/models.py:gpt2 --python ENV/bin/python --batch 1 --sequence 1024 --out captured
"""

import os

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

LAYERS = int(os.environ.get("LAYERS", "0"))  # of all transformers; 0: as published
VOCAB_GPT2, VOCAB_LLAMA, VOCAB_BERT = 50257, 32000, 30522


class GptAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden):
        parts = self.c_attn(hidden).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).flatten(2))


class GptMlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return self.c_proj(F.gelu(self.c_fc(hidden), approximate="tanh"))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(width),
            GptAttention(width, heads),
            nn.LayerNorm(width),
            GptMlp(width),
        )

    def forward(self, hidden):
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class Gpt(nn.Module):
    """GPT-2 (Radford et al. 2019); the head uses the embedding's matrix."""

    def __init__(self, layers=12, width=768, heads=12, vocab=VOCAB_GPT2, positions=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):  # or, in a later stage of a pipeline, what the stage before it has made of them
        hidden = tokens
        if self.wte is not None:
            hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            hidden = block(hidden)
        return hidden if self.lm_head is None else self.lm_head(self.ln_f(hidden))


class LlamaAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden, cosines, sines):
        batch, sequence = hidden.shape[:2]
        q, k, v = (
            p(hidden).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cosines, sines), _rotated(k, cosines, sines)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, sequence, -1))


def _rotated(heads, cosines, sines):
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)


class LlamaMlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden):
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Experts(nn.Module):
    """Each token visits `top_k` experts; every expert gets as many tokens, as a captured step needs (capacity factor 1)."""

    def __init__(self, width, inner, count, top_k):
        super().__init__()
        self.count, self.top_k = count, top_k
        self.router, self.experts = nn.Linear(width, count, bias=False), GroupedExperts(width, inner, count)

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort()
        sent = tokens[order // self.top_k].view(self.count, -1, tokens.shape[-1])
        back = self.experts(sent).flatten(0, 1) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, back.to(tokens.dtype)).view(hidden.shape)


class GroupedExperts(nn.Module):
    """Tokens by expert, experts x tokens of each x width -> the same."""

    def __init__(self, width, inner, count):
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))

    def forward(self, tokens):
        gate, up = (tokens @ self.up).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, feed_forward):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(width), LlamaAttention(width, heads, kv_heads)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(width), feed_forward

    def forward(self, hidden, cosines, sines):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(nn.Module):
    """Touvron et al. 2023; with `experts` Mixtral (Jiang et al. 2024)."""

    def __init__(self, layers, width, heads, kv_heads, inner, vocab=VOCAB_LLAMA, experts=0, top_k=2):
        super().__init__()
        self.head_dim = width // heads
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, Experts(width, inner, experts, top_k) if experts else LlamaMlp(width, inner))
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        hidden = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(1)
        angles = places / 10000 ** (torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        for layer in self.layers:
            hidden = layer(hidden, cosines, sines)
        return hidden if self.lm_head is None else self.lm_head(self.norm(hidden))


class BertBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out_proj, self.attention_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc1, self.fc2, self.output_norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        q, k, v = (p(hidden).unflatten(2, (-1, 64)).transpose(1, 2) for p in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = self.attention_norm(hidden + self.dropout(self.out_proj(attended)))
        return self.output_norm(hidden + self.dropout(self.fc2(F.gelu(self.fc1(hidden)))))


class Bert(nn.Module):
    """Devlin et al. 2018 with the masked language model's head, without the prediction of the next sentence."""

    def __init__(self, layers=12, width=768, heads=12, vocab=VOCAB_BERT, positions=512):
        super().__init__()
        self.tokens, self.positions, self.types = nn.Embedding(vocab, width), nn.Embedding(positions, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertBlock(width, heads) for _ in range(layers))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight = self.tokens.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places) + self.types(torch.zeros_like(tokens))
        hidden = self.dropout(self.norm(hidden))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.decoder(self.transform_norm(F.gelu(self.transform(hidden))))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, hidden):
        left = hidden if self.downsample is None else self.downsample(hidden)
        hidden = self.relu(self.bn1(self.conv1(hidden)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        return self.relu(self.bn3(self.conv3(hidden)) + left)


class ResNet(nn.Module):
    """He et al. 2015, with the stride in the 3 x 3 convolution (as torchvision has it)."""

    def __init__(self, classes=1000):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width, stride if not number else 1))
                channels = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images):
        hidden = self.pool(self.stem(images))
        for block in self.blocks:
            hidden = block(hidden)
        return self.fc(hidden.mean((2, 3)))


def gpt2():
    return Gpt(LAYERS or 12)


def llama():
    """TinyLlama (1.1 B parameters)."""
    return Llama(LAYERS or 22, 2048, 32, 4, 5632)


def bert():
    return Bert(LAYERS or 12)


def resnet50():
    return ResNet()


def moe():
    """Mixtral of 8 experts at the width of a small Llama."""
    return Llama(LAYERS or 4, 1024, 16, 4, 3584, experts=8)


def images(batch):
    """Inputs of `resnet50`."""
    return torch.randn(batch, 3, 224, 224)


def with_data_dependence():
    """What cannot be captured."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, tokens):
            hidden = self.embed(tokens)
            if hidden.sum() > 0:
                hidden = hidden * 2
            return self.head(hidden)

    return Model()
