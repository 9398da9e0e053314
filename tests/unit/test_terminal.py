"""Terminal output as text for a model: what goes, what is replaced and what stays."""

from __future__ import annotations

import pytest

from drafter.sources.terminal import plain, redacted

ESC, BEL = "\x1b", "\x07"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (f"{ESC}[1;31mFAILED{ESC}[0m test_a", "FAILED test_a"),
        (f"{ESC}[2K{ESC}[1G 99 %{ESC}[?25h", " 99 %"),
        (f"{ESC}]0;vim{BEL}$ ls", "$ ls"),
        (f"see {ESC}]8;;http://a/b{ESC}\\here{ESC}]8;;{ESC}\\.", "see here."),
        (f"{ESC}(B{ESC}[m{ESC}=ok", "ok"),
        (f"{ESC}]0;never ended\nnext line", "0;never ended\nnext line"),
        (f"cut off {ESC}[", "cut off "),
        (f"cut off {ESC}", "cut off "),
        (f"{ESC}é", "é"),
        (r"print('\x1b[31m' + '\033[0m')", r"print('\x1b[31m' + '\033[0m')"),
        ("plain [31m text", "plain [31m text"),
        ("bar 1 %\rbar 2 %\r", "bar 1 %\rbar 2 %\r"),
    ],
)
def test_escape_sequences_go_and_code_that_spells_them_stays(shown: str, text: str) -> None:
    assert plain(shown) == text


SECRETS = [
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "AIza" + "b-9_" * 8 + "xyz",
    "ghp_" + "a1B2" * 9,
    "ghs_" + "a1B2" * 9,
    "github_pat_" + "a1B2c" * 12,
    "glpat-" + "x9_Y-" * 4,
    "hf_" + "aBcDeFgHiJ" * 3 + "klmn",
    "npm_" + "a1B2" * 9,
    "pypi-" + "AgEIcHlwaS5vcmc" * 5,
    "sk-proj-" + "a1B2c3_-" * 6,
    "sk-ant-api03-" + "a1B2c3_-" * 8,
    "xoxb-1234567890-abcdefghij",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\nAAAA==\n-----END OPENSSH PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC\n\nMII\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret[:12])
def test_a_secret_that_shows_by_its_form_is_replaced_wherever_it_stands(secret: str) -> None:
    assert redacted(secret) == "[redacted]"
    assert redacted(f"token: '{secret}', next") == "token: '[redacted]', next"


@pytest.mark.parametrize(
    ("dump", "text"),
    [
        ("HOME=/root\nDB_PASSWORD=hunter22x\nX=1", "HOME=/root\nDB_PASSWORD=[redacted]\nX=1"),
        ("export API_KEY=0123456789abcdef", "export API_KEY=[redacted]"),
        ('declare -x NPM_TOKEN="0123456789"', 'declare -x NPM_TOKEN="[redacted]"'),
        ("AWS_SECRET_ACCESS_KEY=u8Zt/1kQ+v=", "AWS_SECRET_ACCESS_KEY=[redacted]"),
        ("{'A': 'b', 'SMTP_PASSWORD': 'letmein99'}", "{'A': 'b', 'SMTP_PASSWORD': '[redacted]'}"),
        ('{"CLIENT_SECRET":"q1w2e3r4t5"}', '{"CLIENT_SECRET":"[redacted]"}'),
    ],
)
def test_what_an_environment_assigns_to_the_name_of_a_secret_is_replaced(
    dump: str, text: str
) -> None:
    assert redacted(dump) == text


@pytest.mark.parametrize(
    "text",
    [
        "MAX_TOKENS=4096000000",
        "TOKEN_LIMIT=4096000000",
        "KEYBOARD=de-latin1-nodeadkeys",
        "PASSWORD=short",
        "API_KEY=$(cat /run/secrets/key)",
        "API_KEY=os.environ['API_KEY']",
        "SECRET_KEY = secrets.token_hex(32)",
        "    api_key=settings.api_key_value,",
        "echo TOKEN=abcdefghijkl",
        "postgres://user:password123@localhost/test",
        "task-0123456789012345678901234567890123456789abc",
        "class='sk-toggleable__content sk-hidden'",
        "ghp_short and AKIA in prose, hf_hub_download(repo)",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
        "-----BEGIN RSA PRIVATE KEY-----\nwithout an end",
        "aGVsbG8gd29ybGQ=" * 500,
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_what_was_redacted_stays_as_it_is() -> None:
    for secret in SECRETS:
        once = redacted(f"NPM_TOKEN=0123456789\n{secret}")
        assert redacted(once) == once
