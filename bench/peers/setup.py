"""Make the peers' virtual environments under build/peers, except those that are up to date.

    python -m bench.peers.setup                  all of them
    python -m bench.peers.setup torch torchrec   some, and their bases

torch comes from pip's default index: on Linux x86-64 a build with CUDA, 0.9 GB to download and 5 GB on disk.
TORCH_INDEX_URL=... in the environment names torch's CPU-only index instead (0.2 GB); `--share` takes torch
from the Python that runs this, if it has the very version.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from bench.peers.registry import PEERS, Peer

FOLDER = Path(__file__).parents[2] / "build" / "peers"
STAMP = "installed.json"
"""Written last: a folder without it is incomplete and is made anew."""


class SetupError(Exception):
    """A peer's environment could not be made; the text has the output of pip or Python."""


def python_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the interpreter of a peer's environment."""
    return folder / name / "bin" / "python"


def contents_of(name: str) -> list[str]:
    """Return the contents of a peer's environment: if they change, it is made anew."""
    peer = PEERS[name]
    under = contents_of(peer.base) if peer.base else []
    return [
        f"python {sys.version_info.major}.{sys.version_info.minor}",
        *under,
        *peer.requirements,
        *peer.bare,
    ]


def missing(name: str, folder: Path = FOLDER) -> bool:
    """Whether the environment is missing, incomplete, or has other contents."""
    stamp = folder / name / STAMP
    if not stamp.exists():
        return True
    made = json.loads(stamp.read_text())
    return made["asked"] != contents_of(name) or not all(Path(p).is_dir() for p in made["sees"])


def make(name: str, share: bool = False, folder: Path = FOLDER) -> bool:
    """Make a peer's environment and those under it; False if there was nothing to do.

    share: a torch of the pinned version in the running Python is used instead of installed again.

    Raises:
        SetupError: pip failed, or what it installed does not import.
    """
    peer = PEERS[name]
    if peer.base:
        make(peer.base, share, folder)
    if not missing(name, folder):
        return False
    home = folder / name
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)], f"making {home}")
    sees, requirements = _seen(peer, share, folder)
    packages = next(home.glob("lib/python*/site-packages"))
    if sees:
        (packages / "peer_base.pth").write_text("".join(f"{path}\n" for path in sees))
    pip = [str(python_of(name, folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX_URL")
    if index:
        pip += ["--extra-index-url", index]
    if requirements:
        _run([*pip, *requirements], f"pip for {name}")
    if peer.bare:
        _run([*pip, "--no-deps", *peer.bare], f"pip --no-deps for {name}")
    for module in peer.imports:
        _run([str(python_of(name, folder)), "-c", f"import {module}"], f"importing {module} for {name}")
    (home / STAMP).write_text(json.dumps({"asked": contents_of(name), "sees": [str(path) for path in sees]}))
    return True


def _seen(peer: Peer, share: bool, folder: Path) -> tuple[list[Path], Sequence[str]]:
    """Return further folders of packages on its path, and the requirements that remain to install."""
    if peer.base:
        base = json.loads((folder / peer.base / STAMP).read_text())
        own = next((folder / peer.base).glob("lib/python*/site-packages"))
        return [own, *map(Path, base["sees"])], peer.requirements
    if not share or not all(_here(requirement) for requirement in peer.requirements):
        return [], peer.requirements
    return [Path(sysconfig.get_path("purelib"))], ()


def _here(requirement: str) -> bool:
    """Whether the running Python has exactly this package; a local version (2.13.0+cpu) counts."""
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name).split("+")[0] == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _run(command: Sequence[str], what: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SetupError(
            f"{what} failed ({done.returncode}):\n{(done.stderr or done.stdout).strip()[-3000:]}"
        )


def main() -> int:
    """Make the named environments, or all; returns the exit status, 1 if one could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--share", action="store_true", help="take torch from the running Python")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    failed = 0
    for name in options.names or PEERS:
        try:
            print(
                f"{name}: {'made' if make(name, options.share) else 'up to date'} ({FOLDER / name})",
                flush=True,
            )
        except SetupError as error:
            failed = 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
