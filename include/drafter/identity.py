"""What must stay the same under stored ids, and how it is told: target, tokenizer, sampling.

Pydantic and the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.layout import file_record
from drafter.recipe import Recipe

TOKENIZER_FILES = (
    "*token*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.py",
)
"""What decides a tokenizer's behaviour, as found in public checkpoints: slow, fast and tiktoken,
templates, and the code beside them (Kimi-K2.5 declares tools in Python)."""


def target_identity(recipe: Recipe) -> dict[str, Any]:
    """What must stay the same under stored ids: revision, tokenizer and template, thinking."""
    return {
        "revision": recipe.target.revision,
        "tokenizer": tokenizer_sha256(Path(recipe.target.path)),
        "thinking": recipe.target.thinking,
    }


def generation_identity(recipe: Recipe) -> dict[str, Any]:
    """What must stay the same over all responses of a dataset."""
    sampling = recipe.generate.model_dump(include={"temperature", "top_p", "max_new_tokens"})
    return {**target_identity(recipe), **sampling}


def tokenizer_sha256(target: Path) -> str:
    """One hash over names and bytes of the files that decide a tokenizer. RecipeError if none."""
    files = sorted({file for pattern in TOKENIZER_FILES for file in target.glob(pattern)})
    if not files:
        raise RecipeError(f"no tokenizer in {target}: correct target.path, a path on the GPU host")
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file_record(file)['sha256']}\n".encode())
    return total.hexdigest()
