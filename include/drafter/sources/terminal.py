"""What a terminal showed, as text for a model: without its escape sequences and without secrets.

Trajectories of agents are full of terminal output. Three things in it deserve a decision:

* Escape sequences (colours, cursor moves, titles, links) speak to a terminal, not to a reader, and
  cost several tokens each: they go. Code that spells one out (``\\x1b[31m``) holds no such
  character and stays.
* Secrets stand in dumps of an environment. Prompts are copied to workspaces and shown to people,
  and a model repeats what it reads, so a secret's value becomes ``[redacted]``: what a vendor's
  prefix or a PEM frame gives away, and what is assigned to a name in capitals that ends in SECRET,
  TOKEN, PASSWORD or such a KEY. A password inside of a URL stays: too many tests of web code are
  made of those.
* Base64 and output of any length stay. An engine would be shown them too, nothing is learned from
  a prompt's own tokens, and prepare's cap on them bounds what they cost.
"""

from __future__ import annotations

import re

REDACTED = "[redacted]"

_ESCAPE_SEQUENCE = re.compile(
    "\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # control sequence
    "|[\\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\\\)"  # title, link, ..., ended by BEL or ESC \
    r"|[ -/]*[0-~]"
    ")?"
)

_TOKEN = re.compile(
    r"\b(?:"
    r"A[KS]IA[0-9A-Z]{16}\b"  # Amazon
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|gh[pousr]_[0-9A-Za-z]{36,}"
    r"|github_pat_[0-9A-Za-z_]{50,}"
    r"|glpat-[0-9A-Za-z_-]{20,}"
    r"|hf_[0-9A-Za-z]{30,}"
    r"|npm_[0-9A-Za-z]{36}"
    r"|pypi-[0-9A-Za-z_-]{60,}"
    r"|sk-[0-9A-Za-z_-]{40,}"  # OpenAI, Anthropic and those who imitate them
    r"|xox[abprs]-[0-9A-Za-z-]{20,}"  # Slack
    r")"
)
_TOKEN_MARKS = (
    "AKIA ASIA AIza ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- hf_ npm_ pypi- sk- xox".split()
)

_PRIVATE_KEY = re.compile(
    r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----(?:[^-]|-(?!----))*-----END \1-----"
)

_SECRET_KEY = r"(?:ACCESS|ACCOUNT|API|AUTH|PRIVATE|SECRET)_?KEY"
_SECRET_NAME = rf"(?:[A-Z0-9]+_)*(?:SECRET|TOKEN|PASSWORD|PASSWD|{_SECRET_KEY})"
_ASSIGNMENT = re.compile(r"""(?:SECRET|TOKEN|PASSWORD|PASSWD|KEY)["']?[=:]""")
_ASSIGNED = re.compile(
    rf"""^((?:export |declare -x )?{_SECRET_NAME}=(["']?))[^\s"'`$(){{}}<>]{{8,}}(?=\2$)"""
    # An environment printed as a mapping.
    rf"""|((["']){_SECRET_NAME}\4: ?(["']))[^\s"'`$(){{}}<>]{{8,}}(?=\5)""",
    re.MULTILINE,
)


def plain(text: str) -> str:
    """``text`` without escape sequences."""
    return _ESCAPE_SEQUENCE.sub("", text) if "\x1b" in text else text


def redacted(text: str) -> str:
    """``text`` whose secrets are replaced by ``[redacted]``."""
    # Most text holds none of the marks, and looking for them is many times faster.
    if any(mark in text for mark in _TOKEN_MARKS):
        text = _TOKEN.sub(REDACTED, text)
    if "PRIVATE KEY-----" in text:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    if _ASSIGNMENT.search(text):
        text = _ASSIGNED.sub(lambda match: f"{match[1] or match[3]}{REDACTED}", text)
    return text
