"""The tiny target's tokenizer: byte-level BPE over the demo's language, Kimi-K2.5's special tokens.

Byte-level, so that any text encodes and comes back unchanged; trained on the language, so that each
word is one token. Words may hold dots and colons inside ("functions.trace:0"), which keeps the
boilerplate of a tool call short.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"

SPECIAL = (
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> [UNK] [PAD]"
).split()
"""Dropped when decoding with ``skip_special_tokens``."""

MARKUP = (
    "<think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
).split()
"""Kept in decoded text, where parsers look for them (special = false, as Kimi has it)."""

HEADERS = ("user", "assistant", "system", "tool", "tool_declare", "## Return of")
"""What the chat template writes around contents."""

PIECES = r" ?[\p{L}_]+(?:[.:][\p{L}\p{N}_]+)*| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], multiple: int = 64) -> Tokenizer:
    """Learn the merges; reserved tokens fill the vocabulary to the next multiple."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2048, min_frequency=20, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_special_tokens([_added(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([_added(token, special=False) for token in MARKUP])
    num_reserved = -tokenizer.get_vocab_size() % multiple
    reserved = (f"<|reserved_token_{i}|>" for i in range(num_reserved))
    tokenizer.add_special_tokens([_added(token, special=True) for token in reserved])
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write the three tokenizer files, in the form every transformers since 4.40 reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def tools_text(tools: list[dict[str, Any]]) -> str:
    """Declarations as the chat template renders them."""
    return json.dumps(tools, separators=(",", ":"))
