"""Rollouts of a causal language model of Hugging Face's transformers, in this process.

Token in, token out: what a rollout trains on are the very tokens that were sampled. For a model
that fits beside its optimizer; larger ones are served (:mod:`rollyard_trainer.engines.openai`) and
trained by TRL or verl (:mod:`rollyard_trainer.adapters`).

The cache keeps one column per token for all rows. Rows that wait, or are given less than others,
have columns that nobody attends to; positions count a row's own tokens only.
"""

# pyright: basic, reportMissingImports=false

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rollyard_trainer.engines import Sampling
from rollyard_trainer.engines.lockstep import LockStepEngine
from rollyard_trainer.template import END, START

_CONTROL = re.compile(f"({re.escape(START)}|{re.escape(END)})")


class HFTokenizer:
    """A fast tokenizer of transformers, told to see control tokens in the template's markup only.

    Args:
        tokenizer: It must have ``<|im_start|>`` and ``<|im_end|>``, as Qwen's and ChatML's do.

    Raises:
        ValueError: it has not, or it is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("a fast tokenizer is needed (tokenizer.json)")
        self.source = tokenizer
        self._plain = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        # Special tokens are read letter by letter: a program may print <|endoftext|>.
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()
        self._control: dict[str, int] = {}
        for text in (START, END):
            token = tokenizer.backend_tokenizer.token_to_id(text)
            if token is None:
                raise ValueError(f"the tokenizer has no {text}: add it, and train it")
            self._control[text] = token
        self.end_id = self._control[END]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _CONTROL.split(text):
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids += self._plain.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._plain.decode(list(ids), skip_special_tokens=False)


class CausalLM(nn.Module):
    """A model of transformers as the loop wants one: ids (B, T) to logits (B, T, V)."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Padding is on the right, where a causal model does not see it.
        return self.inner(input_ids=ids, use_cache=False).logits.float()


@dataclass(slots=True)
class Cache:
    """Keys and values of all columns, and which of them are a row's own, (B, columns)."""

    past: DynamicCache
    mask: torch.Tensor = field(repr=False)


class HFEngine(LockStepEngine):
    """Multi-turn rollouts; see :class:`rollyard_trainer.engines.Engine`.

    Args:
        model: Decoder-only, with positions that can be given (all of today's).
        tokenizer: Its own.
        context: Most tokens of prompt and response; default what its configuration says.
        rows: Rollouts at once; their keys and values must fit beside the model and its optimizer.
    """

    def __init__(
        self, model: CausalLM, tokenizer: HFTokenizer, seed: int, context: int | None = None,
        rows: int = 64,
    ) -> None:  # fmt: skip
        room = context or int(model.inner.config.max_position_embeddings)
        super().__init__(tokenizer, room, seed, model.inner.device, rows)
        self.model = model

    def begin(self, rows: int) -> Cache:
        inner = self.model.inner
        empty = torch.zeros(rows, 0, dtype=torch.long, device=inner.device)
        return Cache(DynamicCache(config=inner.config), empty)

    def keep(self, cache: Cache, rows: torch.Tensor) -> None:
        rows = rows.to(cache.mask.device)
        cache.past.batch_select_indices(rows)
        cache.mask = cache.mask[rows]

    def write(
        self, given: list[list[int]], room: torch.Tensor, cache: Cache, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities of one turn, with -1 where a row wrote none."""
        device, width = cache.mask.device, max(map(len, given))
        end = self.tokenizer.end_id
        ids = torch.full((len(given), width), end)
        seen = torch.zeros(len(given), width, dtype=torch.long)
        for row, tokens in enumerate(given):  # on the left, so that all sample next
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            seen[row, width - len(tokens) :] = 1
        ids, seen, room = ids.to(device), seen.to(device), room.to(device)
        writing = torch.ones(len(given), dtype=torch.bool, device=device)
        wrote: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        was_training = self.model.training
        self.model.eval()
        while writing.any():
            logits = self._next(ids, seen, cache).div(sampling.temperature).log_softmax(-1)
            token = self.choose(logits)
            wrote.append(torch.where(writing, token, -1))
            scores.append(logits.gather(1, token[:, None])[:, 0])
            room = room - writing.long()
            writing = writing & (token != end) & (room > 0)
            ids, seen = token[:, None], writing.long()[:, None]
        self.model.train(was_training)
        return torch.stack(wrote, 1).cpu(), torch.stack(scores, 1).cpu()

    def choose(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row, (B,), from log-probabilities (B, V)."""
        return torch.multinomial(logprobs.exp(), 1, generator=self.chance)[:, 0]

    def _next(self, ids: torch.Tensor, seen: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits (B, V) after the last column of ``ids``, which joins the cache."""
        cache.mask = torch.cat((cache.mask, seen), 1)
        position = (cache.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model.inner(
            input_ids=ids, attention_mask=cache.mask, position_ids=position,
            cache=cache.past, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return out.logits[:, -1].float()


def load(
    name: str, seed: int, device: str | None = None, context: int | None = None
) -> tuple[CausalLM, HFEngine]:
    """A model and its engine, by a directory or a hub name, on the GPU if there is one.

    Raises:
        OSError: there is no such model; the message says where it was looked for.
        ValueError: its tokenizer lacks the template's control tokens.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = HFTokenizer(AutoTokenizer.from_pretrained(name))
    # In bfloat16, which has 8 bits, a learning rate of 1e-6 would change no weight.
    model = CausalLM(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device))
    return model, HFEngine(model, tokenizer, seed, context)
