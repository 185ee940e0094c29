"""A tokenizer of one token for each character, with a chat template: for tests of rollouts."""

import json
from typing import Any

EOS = "\x03"


class Letters:
    """The little of transformers' tokenizers that rollout functions use."""

    eos_token = EOS
    eos_token_id = ord(EOS)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, ids))
        return text.replace(EOS, "") if skip_special_tokens else text

    def apply_chat_template(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False,
        tokenize: bool = True, return_dict: bool = False, chat_template: Any = None,
    ) -> Any:  # fmt: skip
        if messages and isinstance(messages[0], list):  # a batch
            assert return_dict
            texts = [self._rendered(one, tools, add_generation_prompt) for one in messages]
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}
        text = self._rendered(messages, tools, add_generation_prompt)
        return [ord(letter) for letter in text] if tokenize else text

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, opened: bool) -> str:
        parts = [f"tools {[one['function']['name'] for one in tools]}\n"] if tools else []
        for one in messages:
            calls = "".join(
                f"<tool_call>{json.dumps(call['function'])}</tool_call>"
                for call in one.get("tool_calls", ())
            )
            parts.append(f"<{one['role']}>{one['content']}{calls}{EOS}\n")
        return "".join(parts) + ("<assistant>" if opened else "")


def call(code: str, name: str = "python") -> str:
    """What a model writes to call the tool."""
    written = json.dumps({"name": name, "arguments": {"code": code}})
    return f"I compute. <tool_call>\n{written}\n</tool_call>"
