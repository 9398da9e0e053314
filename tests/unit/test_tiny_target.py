"""The shipped target and prompt files: loadable, within their limits, and true to their makers."""

import json
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from demo import language, make_prompts, tokenizer
from demo.language import DATASETS
from demo.make_target import TARGET

MAX_WEIGHT_BYTES = 4 * 2**20
MAX_PROMPT_FILE_BYTES = 300_000


@pytest.fixture(scope="module")
def tokens():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET).eval()


def render(tokens, messages, tools=None, **options):
    return tokens.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **options
    )


def greedy(tokens, model, prompt, max_new_tokens=64):
    prompt_ids = tokens(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(prompt_ids, do_sample=False, max_new_tokens=max_new_tokens)
    return output[0, prompt_ids.shape[1] :].tolist()


def test_weights_are_small_and_match_config_and_tokenizer(tokens):
    path = TARGET / "model.safetensors"
    assert path.stat().st_size <= MAX_WEIGHT_BYTES
    config = AutoConfig.from_pretrained(TARGET)
    weights = load_file(path)
    assert config.model_type == "qwen3"
    assert config.max_position_embeddings >= 1024
    shape = (len(tokens), config.hidden_size)
    assert config.vocab_size == len(tokens)
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == shape


def test_the_model_is_computed_with_in_float32(model):
    assert model.dtype == torch.float32


def test_generation_stops_at_im_end(tokens):
    config = json.loads((TARGET / "generation_config.json").read_text())
    end = tokens.convert_tokens_to_ids("<|im_end|>")
    assert config["eos_token_id"] == end == tokens.eos_token_id


@pytest.mark.parametrize("token", [*tokenizer.SPECIAL, *tokenizer.MARKUP])
def test_a_special_token_is_one_id(tokens, token):
    (token_id,) = tokens.encode(token, add_special_tokens=False)
    assert tokens.convert_tokens_to_ids(token) == token_id
    assert tokens.decode([token_id]) == token


def test_markup_survives_skip_special_tokens_and_specials_do_not(tokens):
    ids = tokens.encode("so</think>go<|im_end|>", add_special_tokens=False)
    assert tokens.decode(ids, skip_special_tokens=True) == "so</think>go"


@pytest.mark.parametrize("word", language.WORDS)
def test_a_word_is_one_token_with_and_without_a_space(tokens, word):
    assert len(tokens.encode(word)) == len(tokens.encode(f" {word}")) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("  two  spaces\t\r\n\n ends ", id="whitespace"),
        pytest.param("naïve 東京 🎉\x00\u200b é", id="unicode"),
        pytest.param("x<|im_end|>y <think> [PAD]</think>[BOS]", id="special-looking"),
        pytest.param("a.b:c 12 I'm don't.", id="punctuation"),
        pytest.param("", id="empty"),
    ],
)
def test_any_text_comes_back_unchanged(tokens, text):
    assert tokens.decode(tokens.encode(text)) == text


def test_special_looking_text_can_be_kept_as_text(tokens):
    ids = tokens.encode("a<|im_end|>", split_special_tokens=True)
    assert tokens.eos_token_id not in ids


def test_the_template_opens_the_thinking_for_the_model(tokens):
    prompt = render(tokens, [{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )


def test_without_thinking_the_template_closes_it_too(tokens):
    prompt = render(tokens, [{"role": "user", "content": "hi"}], thinking=False)
    assert prompt.endswith("<|im_assistant|>assistant<|im_middle|><think></think>")


def test_tools_calls_and_results_are_rendered_as_kimi_does(tokens):
    tools = [{"type": "function", "function": {"name": "trace"}}]
    call = {"id": "functions.trace:0", "function": {"name": "trace", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.trace:0", "content": "R"},
    ]
    assert render(tokens, messages, tools) == (
        "<|im_system|>tool_declare<|im_middle|>"
        '[{"type":"function","function":{"name":"trace"}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>S<|im_end|>"
        "<|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.trace:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.trace:0\nR<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


@pytest.mark.parametrize("dataset", ["B1_glaive", "B4_mixturethoughts", "B8_sweagent"])
def test_greedy_answers_think_close_and_stop(tokens, model, dataset):
    dialogue = language.dialogue(dataset, Random(f"unseen {dataset}"))
    output_ids = greedy(tokens, model, render(tokens, dialogue.messages(), dialogue.tools))
    thinking, close, reply = tokens.decode(output_ids).partition("</think>")
    assert thinking and close
    assert reply == f"{dialogue.exchanges[0].reply()}<|im_end|>"


def test_greedy_answers_without_thinking_are_bare(tokens, model):
    dialogue = language.dialogue("B5_openthoughts", Random("unseen"))
    prompt = render(tokens, dialogue.messages(), thinking=False)
    reply = tokens.decode(greedy(tokens, model, prompt))
    assert reply == f"{dialogue.exchanges[0].answer}<|im_end|>"


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_shipped_prompt_file_is_what_make_prompts_writes(dataset):
    shipped = (make_prompts.PROMPTS / make_prompts.file_name(dataset)).read_bytes()
    assert shipped == make_prompts.text(dataset).encode()
    assert len(shipped) < MAX_PROMPT_FILE_BYTES


FIELDS = {
    "B1_glaive": {"system", "chat"},
    "B2_opencodeinstruct": {
        "id",
        "input",
        "output",
        "domain",
        "generation_algorithm",
        "llm_judgement",
        "unit_tests",
        "tests_execution_status",
        "average_test_score",
    },
    "B3_magicoder": {
        "lang",
        "raw_index",
        "index",
        "seed",
        "openai_fingerprint",
        "problem",
        "solution",
    },
    "B4_mixturethoughts": {"messages", "num_tokens", "source"},
    "B5_openthoughts": {"difficulty", "source", "domain", "conversations"},
    "B6_ultrachat": {"prompt", "prompt_id", "messages"},
    "B7_sharegpt": {"id", "conversations"},
    "B8_sweagent": {
        "instance_id",
        "model_name",
        "target",
        "trajectory",
        "exit_status",
        "generated_patch",
        "eval_logs",
    },
}


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_have_the_fields_of_their_source(dataset):
    content = (make_prompts.PROMPTS / make_prompts.file_name(dataset)).read_text("utf-8")
    rows = (
        json.loads(content)
        if content.startswith("[")
        else list(map(json.loads, content.splitlines()))
    )
    assert len(rows) >= make_prompts.NUM_ROWS
    assert all(set(row) == FIELDS[dataset] for row in rows)
    if dataset == "B2_opencodeinstruct":
        assert all(isinstance(value, str) for row in rows for value in row.values())
    steps = [step for row in rows for step in row.get("trajectory", [])]
    assert all(
        set(step) == {"cutoff_date", "mask", "role", "system_prompt", "text"} for step in steps
    )


@pytest.mark.parametrize("dataset", DATASETS)
def test_few_prompts_repeat(dataset):
    rows = [json.dumps(row, sort_keys=True) for row in make_prompts.rows(dataset)]
    assert 0 < len(rows) - len(set(rows)) <= 5


def test_a_walk_goes_once_round_the_loop():
    loop = ["ash", "fir", "elm", "oak"]
    assert language.walk(loop, "elm") == ["elm", "oak", "ash", "fir", "elm"]
