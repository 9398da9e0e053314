"""The embedded default: a tiny trained target, its prompts, and the language both speak."""
