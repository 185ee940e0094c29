"""A tokenizer of transformers made on the spot: one token per byte, and Qwen's control tokens."""

# pyright: basic, reportMissingImports=false

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollyard_trainer import template


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """``<e>`` ends a text and fills up."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(text) for text in (template.START, template.END, "<e>")])
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<e>", pad_token="<e>")
