"""Tiny targets of each template family, made in milliseconds: tokenizer, template and configs.

The templates are written for these tests, after the public description of each family. Names of
control tokens are the families' own; their ids are whatever the vocabulary gives them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from demo.tokenizer import CHAT_TEMPLATE, MARKUP, SPECIAL

QWEN_TEMPLATE = r"""
{%- if tools -%}
{{- '<|im_start|>system\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- elif message.role == 'assistant' and '</think>' in message.content -%}
{{- message.content.split('</think>')[-1].lstrip('\n') -}}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}
"""

DEEPSEEK_TEMPLATE = """
{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content }}{%- endif -%}
{%- if message.role == 'user' -%}<｜User｜>{{ message.content }}{%- endif -%}
{%- if message.role == 'tool' -%}
<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- endif -%}
{%- if message.role == 'assistant' -%}
<｜Assistant｜></think>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if loop.first -%}<｜tool▁calls▁begin｜>{%- endif -%}
<｜tool▁call▁begin｜>{{ call.function.name }}
<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>
{%- if loop.last -%}<｜tool▁calls▁end｜>{%- endif -%}
{%- endfor -%}
<｜end▁of▁sentence｜>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}
{%- endif -%}
""".replace("\n", "")

PLAIN_TEMPLATE = """
{%- for message in messages -%}
[{{ message.role | upper }}] {{ message.content | trim }} [/{{ message.role | upper }}]
{%- endfor -%}
""".replace("\n", "")


@dataclass(frozen=True)
class TinyTarget:
    """What tells one family from another."""

    template: str
    eos: str
    special: tuple[str, ...]
    """Added tokens with special = true."""
    markup: tuple[str, ...] = ()
    """Added tokens with special = false."""
    generation_eos: tuple[str, ...] = ()
    bos: str | None = None
    config: dict[str, int] = field(default_factory=dict)

    def save(self, target: Path) -> Path:
        """Write tokenizer, template and configs, without weights."""
        target.mkdir(parents=True, exist_ok=True)
        tokenizer = byte_tokenizer()
        for special, tokens in ((True, self.special), (False, self.markup)):
            added = [AddedToken(token, special=special, normalized=False) for token in tokens]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        tokenizer.save(str(target / "tokenizer.json"))
        names = {"eos_token": self.eos, **({"bos_token": self.bos} if self.bos else {})}
        write(
            target / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names},
        )
        write(target / "config.json", {"vocab_size": tokenizer.get_vocab_size(), **self.config})
        if self.generation_eos:
            eos = [tokenizer.token_to_id(token) for token in self.generation_eos]
            write(target / "generation_config.json", {"eos_token_id": eos})
        (target / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        return target


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges, so that borders between pieces can matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "i"), ("Ġ", "a"), ("<", "|"), ("|", ">"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


KIMI = TinyTarget(
    CHAT_TEMPLATE.read_text(encoding="utf-8"),
    "[EOS]",
    tuple(SPECIAL),
    tuple(MARKUP),
    ("<|im_end|>",),
)
PERMUTED_KIMI = TinyTarget(
    KIMI.template, "[EOS]", tuple(reversed(SPECIAL)), tuple(reversed(MARKUP)), ("<|im_end|>",)
)
QWEN = TinyTarget(
    QWEN_TEMPLATE,
    "<|im_end|>",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ("<|im_end|>", "<|endoftext|>"),
)
DEEPSEEK = TinyTarget(
    DEEPSEEK_TEMPLATE,
    "<｜end▁of▁sentence｜>",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    (
        *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *(
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
    ),
    bos="<｜begin▁of▁sentence｜>",
)
PLAIN = TinyTarget(PLAIN_TEMPLATE, "</s>", ("<s>", "</s>"), ("<think>", "</think>"))
"""Has thinking tokens in its vocabulary, as some instruct models do, and never thinks."""

FAMILIES = {
    "kimi": KIMI,
    "permuted kimi": PERMUTED_KIMI,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "plain": PLAIN,
}
