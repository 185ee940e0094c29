"""A GPT small enough for one CPU core, and its decoder with a KV cache.

Rows of a batch read what they are given (a prompt, then the tool's answers) at once, whatever
their lengths, and then write in lock step, one token each. A row stops when it ends its turn.
"""

# pyright: basic, reportMissingImports=false

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rollyard_trainer.engines import Sampling, Tokenizer
from rollyard_trainer.engines.lockstep import LockStepEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the model."""

    vocabulary: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 128


class Cache:
    """Keys and values of all tokens so far; ``position`` is each row's own length.

    The last place is never looked at: there goes what pads a row.
    """

    def __init__(self, shape: Shape, rows: int) -> None:
        size = (shape.layers, rows, shape.heads, shape.context + 1, shape.width // shape.heads)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.position = torch.zeros(rows, dtype=torch.long)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.position = self.position[rows]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values, each (B, heads, T, width / heads)."""
        rows, length, _ = x.shape
        parts = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        return query, key, value

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.before_mlp(x))).square())


class TinyGPT(nn.Module):
    """Decoder-only transformer: rotary positions, RMSNorm, squared ReLU, untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.width // shape.heads // 2
        angle = torch.outer(torch.arange(shape.context), 100.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for block in self.blocks:
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.down.weight)

    def _rotate(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotate (B, heads, T, D) by ``position``, (T,) or (B, 1, T)."""
        cos, sin = self.cos[position], self.sin[position]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of the token after each of ``ids`` (B, T)."""
        x, position = self.embed(ids), torch.arange(ids.shape[1])
        for block in self.blocks:
            query, key, value = block.split(x)
            query, key = self._rotate(query, position), self._rotate(key, position)
            x = block.finish(x, F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return self.head(self.norm(x))

    def read(self, ids: torch.Tensor, count: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits (B, V) after the first ``count`` (B,) of ``ids`` (B, T).

        A count of 0 is a row that has ended; its logits mean nothing. What is read is put into the
        cache, whose positions advance.
        """
        rows, column = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1])
        position = cache.position[:, None] + column  # (B, T)
        spare = cache.keys.shape[3] - 1
        place = torch.where(column < count[:, None], position, spare)
        used = int((cache.position + count).max())
        visible = (torch.arange(used) <= position[:, :, None])[:, None]  # (B, 1, T, used)
        x, turned = self.embed(ids), position.clamp(max=spare - 1)[:, None]
        for layer, block in enumerate(self.blocks):
            query, key, value = block.split(x)
            query, key = self._rotate(query, turned), self._rotate(key, turned)
            cache.keys[layer, rows, :, place] = key.transpose(1, 2)
            cache.values[layer, rows, :, place] = value.transpose(1, 2)
            scores = query @ cache.keys[layer, :, :, :used].transpose(-1, -2)
            scores = (scores / math.sqrt(query.shape[-1])).masked_fill(~visible, -torch.inf)
            x = block.finish(x, scores.softmax(-1) @ cache.values[layer, :, :, :used])
        cache.position += count
        last = x.gather(1, (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[-1]))
        return self.head(self.norm(last))[:, 0]


class TinyEngine(LockStepEngine):
    """Multi-turn rollouts of a :class:`TinyGPT`; see :class:`rollyard_trainer.engines.Engine`."""

    def __init__(self, model: TinyGPT, tokenizer: Tokenizer, seed: int) -> None:
        super().__init__(tokenizer, model.shape.context, seed)
        self.model = model

    def begin(self, rows: int) -> Cache:
        return Cache(self.model.shape, rows)

    def keep(self, cache: Cache, rows: torch.Tensor) -> None:
        cache.keep(rows)

    def write(
        self, given: list[list[int]], room: torch.Tensor, cache: Cache, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities of one turn, with -1 where a row wrote none."""
        count = torch.tensor([len(ids) for ids in given])
        ids = torch.zeros(len(given), int(count.max()), dtype=torch.long)
        for row, tokens_of in enumerate(given):
            ids[row, : len(tokens_of)] = torch.tensor(tokens_of)
        writing = torch.ones(len(given), dtype=torch.bool)
        tokens: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        while writing.any():
            logits = self.model.read(ids, count, cache).div(sampling.temperature).log_softmax(-1)
            token = torch.multinomial(logits.exp(), 1, generator=self.chance)[:, 0]
            tokens.append(torch.where(writing, token, -1))
            scores.append(logits.gather(1, token[:, None])[:, 0])
            room = room - writing.long()
            writing = writing & (token != self.tokenizer.end_id) & (room > 0)
            ids, count = token[:, None], writing.long()
        return torch.stack(tokens, 1), torch.stack(scores, 1)
