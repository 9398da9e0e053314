"""Put this machine's copy of the drafter package on the GPU host, once per content.

The code on the host is the code that was deployed, by hash: ``<workspace>/code/<sha256>/drafter``.
It travels as a tar stream over stdin, only when it is missing, and appears whole.
"""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from pathlib import Path

import drafter
from drafter import code
from drafter.errors import DrafterError, RecipeError
from drafter.layout import Workspace
from drafter.recipe import Recipe
from gpu_host.hooks import GpuHostHook

PACKAGE = Path(drafter.__file__).parent
UPLOAD_TIMEOUT_S = 300


def deploy(hook: GpuHostHook, recipe: Recipe) -> str:
    """Make sure that the package, recipe.json and the launcher are on the host: the code's hash.

    Raises RecipeError when what is there under this hash has been edited, DrafterError when it
    cannot be written.
    """
    sha256 = code.code_hash(PACKAGE)
    workspace = Workspace(Path(recipe.host.workspace))
    outcome = _install(hook, recipe, workspace, sha256, b"")
    if outcome == "missing":
        outcome = _install(hook, recipe, workspace, sha256, archive(PACKAGE))
    if outcome == "tampered":
        raise RecipeError(
            f"{workspace.code(sha256)} on the host is not the code it is named after: somebody"
            " edited it; remove that directory and run this again"
        )
    if outcome not in ("present", "installed"):
        raise DrafterError(f"the upload of code {sha256[:12]} arrived {outcome}: run this again")
    return sha256


def archive(package_dir: Path) -> bytes:
    """The package as a tar file that depends on names and bytes only."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in code.package_files(package_dir):
            content = path.read_bytes()
            info = tarfile.TarInfo(f"drafter/{path.relative_to(package_dir).as_posix()}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _install(
    hook: GpuHostHook, recipe: Recipe, workspace: Workspace, sha256: str, tar: bytes
) -> str:
    program = Path(code.__file__).read_text()
    arguments = [str(workspace.root), sha256, recipe.host.python, str(workspace.launcher)]
    line = shlex.join([recipe.host.python, "-c", program, *arguments])
    stdin = json.dumps(recipe.as_json()).encode() + b"\n" + tar
    exit_code, output, errors = hook.run_line(line, stdin, UPLOAD_TIMEOUT_S)
    if exit_code == 127:
        raise RecipeError(
            f"no {recipe.host.python} on the host: set host.python in the recipe to an interpreter"
            " that has include/requirements.txt installed"
        )
    if exit_code:
        raise DrafterError(f"deployment failed: {_last_line(errors) or f'exit {exit_code}'}")
    answer = json.loads(_last_line(output))
    if answer["outcome"] == "failed":
        raise DrafterError(
            f"cannot deploy to {recipe.host.workspace}: {answer['reason']}; make the workspace"
            " writable for the SSH user, with space left"
        )
    return str(answer["outcome"])


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
