"""What must stay the same under stored ids, and how it is told: target, tokenizer, sampling.

Pydantic and the standard library only.
"""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from drafter.errors import RecipeError
from drafter.files import file_record
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

CONFIG_FILES = ("config.json", "generation_config.json")
"""What says which ids there are and which of them end an answer."""

TOKENIZER_SOFTWARE = ("transformers", "tokenizers", "tiktoken", "sentencepiece", "jinja2")


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
    total = hashlib.sha256()
    for name, sha256 in tokenizer_files(target).items():
        total.update(f"{name}\0{sha256}\n".encode())
    return total.hexdigest()


def tokenizer_files(target: Path) -> dict[str, str]:
    """name -> sha256 of each file that decides a tokenizer. RecipeError if there is none."""
    files = sorted({file for pattern in TOKENIZER_FILES for file in target.glob(pattern)})
    if not files:
        raise RecipeError(f"no tokenizer in {target}: correct target.path, a path on the GPU host")
    return {file.name: file_record(file)["sha256"] for file in files}


def config_files(target: Path) -> dict[str, str]:
    """name -> sha256 of each file that says which ids stop an answer."""
    files = [target / name for name in CONFIG_FILES]
    return {file.name: file_record(file)["sha256"] for file in files if file.exists()}


def tokenizer_software() -> dict[str, str]:
    """package -> version of what runs a tokenizer: while these and its files are the same, so is
    what it does. Nothing is imported to find out."""
    versions = {}
    for package in TOKENIZER_SOFTWARE:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
