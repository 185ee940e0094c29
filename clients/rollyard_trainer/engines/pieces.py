"""A tokenizer of given pieces of text, for models of a laptop's size.

The template's fixed parts are one token each, so that a prompt of 2 KB costs little more than its
question.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rollyard_trainer import template
from rollyard_trainer.parse import TOOL_NAME

UNKNOWN = "\ufffd"
CALL = f'</reason>\n<tool_call>\n{{"name": "{TOOL_NAME}", "arguments": {{"code": "'
CALL_END = '", "input": ""}}\n</tool_call>'
ANSWER, ANSWER_END = "</reason>\n<answer>\\boxed{", "}</answer>"
_LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


class Pieces:
    """Longest match over pieces; the template's two control tokens come first.

    Text that no piece covers becomes one unknown token per stretch. The end of a turn cannot come
    from a program's output: the template quotes it.
    """

    end_id = 1

    def __init__(self, pieces: Iterable[str]) -> None:
        chosen = set(pieces) - {UNKNOWN, template.END, ""}
        self.pieces = [UNKNOWN, template.END]
        self.pieces += sorted(chosen, key=lambda piece: (-len(piece), piece))
        self._ids = {piece: index for index, piece in enumerate(self.pieces)}
        self._encoded = lru_cache(1 << 14)(self._encode)  # prompts come once for each rollout

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            found = next((p for p in self.pieces[1:] if text.startswith(p, at)), None)
            if found is not None:
                ids.append(self._ids[found])
            elif not ids or ids[-1] != 0:
                ids.append(0)
            at += len(found) if found else 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[index] for index in ids)


def pieces_of(texts: Iterable[str], *, words: int = 200, at_least: int = 8) -> Pieces:
    """Pieces for a task: the template's parts, printable ASCII, and the most frequent words
    and two-digit numbers.

    Args:
        texts: Questions and demonstrations.
        words: At most so many.
        at_least: Times that one must occur.
    """
    seen = Counter(word for text in texts for word in re.findall(r" ?[A-Za-z_]{2,}|\d{2}", text))
    frequent = [word for word, count in seen.most_common(words) if count >= at_least]
    fixed = [*template.prompt("\0").split("\0"), *template.tool_turn(["\0"]).split("\0")]
    calls = [CALL, CALL_END, ANSWER, ANSWER_END]
    return Pieces([*fixed, *calls, *_LETTERS, *frequent])
