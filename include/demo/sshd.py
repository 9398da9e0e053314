"""A private sshd on loopback: the demo's "GPU container", reached like any other host.

Own port, own host key (checked by the client), own user key; nothing of the machine's ssh set-up is
read or changed. sshd wants absolute paths: with relative ones it listens and resets every
connection.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from pathlib import Path

from drafter.errors import RecipeError

SBIN = "/usr/sbin:/usr/local/sbin"
"""Where sshd lives, though an ordinary user's PATH does not have it."""

CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey "{keys}/host"
AuthorizedKeysFile "{keys}/user.pub"
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM {pam}
StrictModes no
MaxStartups 100
MaxSessions 100
LogLevel ERROR
"""


def find_sshd() -> str:
    """Absolute path of sshd. Raises RecipeError when openssh-server is not installed."""
    found = shutil.which("sshd", path=f"{os.environ['PATH']}:{SBIN}")
    if found is None:
        raise RecipeError("sshd is missing: install the package openssh-server")
    return found


def make_keys(directory: Path) -> None:
    """A host key and a user key, once."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("host", "user"):
        if not (directory / name).exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", directory / name],
                check=True,
            )


def command(directory: Path, port: int) -> list[str]:
    """The command line of the private sshd, in the foreground, logging to stderr."""
    keys = directory.resolve()
    if set('"%') & set(str(keys)):
        raise RecipeError(f"sshd cannot use {keys}: choose a folder without % and double quotes")
    config = keys / "sshd_config"
    config.write_text(CONFIG.format(port=port, keys=keys, pam="yes" if _is_locked() else "no"))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation directory of Debian's sshd
    return [find_sshd(), "-D", "-e", "-f", str(config)]


def _is_locked() -> bool:
    """Root without a password ("!" in shadow, as on Ubuntu) may log in by key only through PAM."""
    if os.geteuid() != 0:
        return False
    entries = Path("/etc/shadow").read_text().splitlines()
    return any(entry.startswith("root:!") for entry in entries)


def connection(directory: Path, port: int) -> str:
    """The Airflow connection to it, as the JSON of an AIRFLOW_CONN_ variable."""
    keys = directory.resolve()
    kind, key, *_ = (keys / "host.pub").read_text().split()
    return json.dumps(
        {
            "conn_type": "ssh",
            "host": "127.0.0.1",
            "port": port,
            "login": pwd.getpwuid(os.geteuid()).pw_name,
            "extra": {"key_file": str(keys / "user"), "host_key": f"{kind} {key}"},
        }
    )
