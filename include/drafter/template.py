"""The target's own prompt format: conversations to token ids, and what its control tokens are.

Rendering is the tokenizer's ``apply_chat_template``, once; nothing is ever decoded and encoded
again. What people wrote stays text: ``<think>`` or ``<|im_end|>`` in a message must not become
control ids. Tokenizers cannot be asked for that alone (``split_special_tokens`` leaves tokens such
as Kimi's tool markers alone, whose ``special`` flag is false). So a private-use character is set
inside every such string before rendering, and the rendered text is cut at those characters and
encoded piece by piece: no piece holds a whole one. Prompts without such strings go through the
tokenizer in one piece. The thinking that an earlier answer begins with is no text where the
template itself looks for it (Qwen's and DeepSeek's take it out of history).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafter.errors import DataError, RecipeError
from drafter.files import read_json
from drafter.rows import Family
from drafter.sections import Target
from drafter.sources.prompt import Message, Prompt, mapped

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""As Kimi, Qwen and DeepSeek spell them; their ids are the tokenizer's."""

_PROBE, _ARGUMENT = "probe", "value"
_STUMBLED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template runs into besides Jinja's own errors: it calls Python on what it is given."""

_THOUGHT = re.compile(rf"(\s*{THINK_OPEN})(.*?)({THINK_CLOSE})(.*)", re.DOTALL)
PROBE_CALL = (_PROBE, {"x": _ARGUMENT})
"""Name and arguments of what :func:`called` renders."""


def load_tokenizer(target: Path) -> Any:
    """The target's tokenizer, with code of its own (Kimi has some). RecipeError if unusable."""
    from transformers import AutoTokenizer

    if not target.is_dir():
        raise RecipeError(f"no target at {target}: correct target.path, a path on the GPU host")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target, trust_remote_code=True, local_files_only=True
        )
    # A damaged tokenizer.json surfaces as whatever its reader stumbled over.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"no tokenizer loads from {target} ({reason}): correct target.path"
        ) from None
    if not tokenizer.chat_template:
        raise RecipeError(
            f"the tokenizer in {target} has no chat template: add its chat_template.jinja"
        )
    return tokenizer


def render(tokenizer: Any, prompt: Prompt, thinking: bool) -> list[int]:
    """Ids of ``prompt`` up to where the target speaks. DataError when the template refuses it."""
    strings = list(_strings(prompt.content))
    text = "\n".join(strings)
    if not _control_pattern(tokenizer).search(text) and not _may_meet(tokenizer, strings):
        ids: list[int] = _apply(tokenizer, prompt, thinking, tokenize=True)
        return ids
    cut = _unused_character(text)
    marked = Prompt(
        [_marked(tokenizer, message, cut) for message in prompt.messages],
        _cut_open(tokenizer, prompt.tools, cut),
    )
    rendered = _apply(tokenizer, marked, thinking, tokenize=False)
    # A template that writes tools as JSON may have escaped it.
    pieces = re.split(f"{cut}|\\\\u{ord(cut):04x}", rendered)
    return [i for piece in pieces for i in encode(tokenizer, piece)]


def family(target: Path, tokenizer: Any = None) -> Family:
    """The control tokens of a model, read from its tokenizer, template and configs."""
    tokenizer = tokenizer or load_tokenizer(target)
    controls = control_tokens(tokenizer)
    config = read_json(target / "config.json")
    generation = target / "generation_config.json"
    user = {"role": "user", "content": "?"}
    said = _history(tokenizer, [user, {"role": "assistant", "content": _PROBE}])
    call = called(tokenizer)
    in_text = _control_pattern(tokenizer).findall
    after_answer = in_text(said.rpartition(_PROBE)[2])[:1]
    thinks = THINK_CLOSE in controls and THINK_CLOSE in _template(tokenizer)
    markup = {token for token in in_text(call) if token not in (THINK_OPEN, THINK_CLOSE)}
    markup -= set(in_text(said))
    before_name = set(in_text(call.partition(_PROBE)[0]))
    after_call = {controls[token] for token in markup & set(in_text(call.rpartition(_ARGUMENT)[2]))}
    eos = [
        *_as_list(config.get("eos_token_id")),
        *_as_list(config.get("text_config", {}).get("eos_token_id")),
        *_as_list(read_json(generation).get("eos_token_id") if generation.exists() else None),
        *_as_list(tokenizer.eos_token_id),
    ]
    begin = frozenset(controls[token] for token in markup & before_name)
    tool_ids = frozenset(controls[token] for token in markup)
    stop = frozenset([*eos, *(controls[token] for token in after_answer)])
    text = _template(tokenizer)
    # Some vocabularies hold words as added tokens (Gemma's have HTML tags): those are text.
    ordinary = {
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if not token.special and str(token) not in text
    }
    return Family(
        think_open=controls.get(THINK_OPEN) if thinks else None,
        think_close=controls[THINK_CLOSE] if thinks else None,
        prefilled=thinks and _ends_in_thinking(tokenizer, user),
        tool_begin=begin,
        tool_ids=tool_ids,
        stop_ids=stop,
        vocab_size=config.get("vocab_size") or config["text_config"]["vocab_size"],
        blank_ids=_blank_ids(tokenizer),
        # An id that also begins calls, or whose place another stop id may take, says nothing.
        tool_end=frozenset() if after_call & stop else frozenset(after_call - begin),
        other_controls=frozenset({*controls.values()} - ordinary - tool_ids - stop),
    )


def require_thinking(target: Target, family: Family) -> None:
    """Raises RecipeError when the recipe wants thinking of a target that cannot end it."""
    if target.thinking and family.think_close is None:
        raise RecipeError(
            f"{target.path} has no token that ends thinking: set target.thinking = false"
        )


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """Every string that the tokenizer turns into one id of its own, whatever its ``special`` flag.

    Added words and added white space (some tokenizers have runs of line ends) are ordinary text.
    """
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    # Kimi's tokenizer keeps its reserved names here and nowhere else.
    own = getattr(tokenizer, "special_tokens", None)
    tokens = {**added, **(own if isinstance(own, dict) else {})}
    return {
        token: i
        for token, i in tokens.items()
        if len(token) > 1 and not token.isalnum() and not token.isspace()
    }


@functools.lru_cache(maxsize=4)
def _control_pattern(tokenizer: Any) -> re.Pattern[str]:
    longest_first = sorted(control_tokens(tokenizer), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)


def _marked(tokenizer: Any, message: Message, cut: str) -> Message:
    """``message`` cut open, but for markup of thinking that the template reads itself."""
    marked: Message = _cut_open(tokenizer, message, cut)
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return marked
    thought = _THOUGHT.fullmatch(content)
    if thought and _reads_thinking(tokenizer):
        opened, inside, closed, answer = thought.groups()
        inside, answer = _cut_open(tokenizer, [inside, answer], cut)
        marked["content"] = opened + inside + closed + answer
    return marked


def _cut_open(tokenizer: Any, value: Any, cut: str) -> Any:
    """``value`` with ``cut`` behind the first character of every control string in it, and behind
    an end that is the begin of one."""
    pattern = _control_pattern(tokenizer)
    begins = _halves(tokenizer)[0]

    def opened(text: str) -> str:
        pieces, begin = [], 0
        # One may begin inside another.
        while found := pattern.search(text, begin):
            end = found.start() + 1
            pieces += [text[begin:end], cut]
            begin = end
        left = text[begin:]
        # Templates trim, and may set the next text right behind.
        end = len(left.rstrip())
        if _ends_in(left[:end], begins):
            left = left[:end] + cut + left[end:]
        return "".join([*pieces, left])

    return mapped(value, opened)


@functools.lru_cache(maxsize=4)
def _halves(tokenizer: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Every begin and every end of a control string, none of them whole."""
    cuts = [(token, n) for token in control_tokens(tokenizer) for n in range(1, len(token))]
    return frozenset(t[:n] for t, n in cuts), frozenset(t[n:] for t, n in cuts)


def _ends_in(text: str, begins: frozenset[str]) -> bool:
    return any(text[-n:] in begins for n in range(1, min(len(text), _longest(begins)) + 1))


def _may_meet(tokenizer: Any, strings: list[str]) -> bool:
    """Could a template that sets two of ``strings`` side by side make a control string of them?"""
    begins, ends = _halves(tokenizer)
    if not any(_ends_in(text.rstrip(), begins) for text in strings):
        return False
    heads = (text.lstrip()[: _longest(ends)] for text in strings)
    return any(head[:n] in ends for head in heads for n in range(1, len(head) + 1))


@functools.lru_cache(maxsize=8)
def _longest(halves: frozenset[str]) -> int:
    return max(map(len, halves), default=0)


def _unused_character(text: str) -> str:
    """A private-use character of which ``text`` holds neither itself nor its JSON escape."""
    lower = text.lower()
    for code in range(0xE000, 0xF900):
        if chr(code) not in text and f"\\u{code:04x}" not in lower:
            return chr(code)
    raise DataError("the prompt holds control strings and every private-use character: remove it")


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """DataError for whatever the template meets in ``what``."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, *_STUMBLED) as error:
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise DataError(f"the target's template refuses {what}: {reason}") from None


def _apply(tokenizer: Any, prompt: Prompt, thinking: bool, tokenize: bool) -> Any:
    with _refusals("the prompt"):
        return tokenizer.apply_chat_template(
            prompt.messages,
            tools=prompt.tools,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=False,
            # Kimi and DeepSeek read the first, Qwen the second; others are ignored.
            thinking=thinking,
            enable_thinking=thinking,
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """As ``apply_chat_template`` encodes what it has rendered."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of ``ids`` to be looked at, control tokens included; never to be encoded again."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _template(tokenizer: Any) -> str:
    text: str = tokenizer.get_chat_template()
    return text


def _history(tokenizer: Any, messages: list[Message]) -> str:
    with _refusals("a conversation"):
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )
    return text


def called(tokenizer: Any, num_calls: int = 1) -> str:
    """Rendered calls of PROBE_CALL in one message; empty when the template knows none."""
    spellings: tuple[str | dict[str, Any], ...] = (f'{{"x": "{_ARGUMENT}"}}', {"x": _ARGUMENT})
    for arguments in spellings:
        function = {"name": _PROBE, "arguments": arguments}
        calls = [
            {"id": f"functions.{_PROBE}:{i}", "type": "function", "function": function}
            for i in range(num_calls)
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = _history(tokenizer, [{"role": "user", "content": "?"}, said])
        except DataError:
            continue
        return text if _PROBE in text else ""
    return ""


@functools.lru_cache(maxsize=4)
def _reads_thinking(tokenizer: Any) -> bool:
    """Does the template look for thinking at the head of an earlier answer?"""
    user, answer = {"role": "user", "content": "?"}, f"{THINK_OPEN}{_PROBE}{THINK_CLOSE}{_ARGUMENT}"
    try:
        said = _history(tokenizer, [user, {"role": "assistant", "content": answer}, user])
    except DataError:
        return False
    return answer not in said


def _ends_in_thinking(tokenizer: Any, user: Message) -> bool:
    text: str = _apply(tokenizer, Prompt([user]), thinking=True, tokenize=False)
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)


def _blank_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decode to white space only."""
    # Only tokens without a visible ASCII character can: decoding each of 160,000 would take long.
    visible = re.compile(r"[!-~]")
    maybe = [
        i
        for token, i in tokenizer.get_vocab().items()
        if not visible.search(token) or token.startswith("<0x")
    ]
    return frozenset(i for i in maybe if tokenizer.decode([i]).isspace())


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
