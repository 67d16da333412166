"""The git tree hashes of the packages that ran, computed from their files: they name the code, committed or not.

Reading the files instead of asking git gives the same hashes on a machine that has only a copy of the sources, and
does not claim a commit's hash for sources that were changed after it. Format: "Git Internals - Git Objects", Pro Git.
"""

import hashlib
import os
from pathlib import Path

PACKAGES = ("simulator", "planner", "executor", "analysis")

# What running, building and editing leave beside the sources, and nobody commits.
_IGNORED_FOLDERS = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".venv", "build", "dist", "runs"}
)
_IGNORED_SUFFIXES = (".pyc", ".so", ".o", ".tmp", ".swp", "~", ".egg-info", ".DS_Store")


def source_tree(root: Path | None = None) -> dict[str, str]:
    """Package -> git tree hash of its folder under `root` (default: where this package lies).

    Equal to `git rev-parse HEAD:PACKAGE` in a clean checkout. A package without files has the hash of the empty tree.
    """
    root = root or Path(__file__).resolve().parent.parent
    return {package: _tree(root / package).hex() for package in PACKAGES}


def package_hash(folder: Path) -> str:
    """The git tree hash of one folder of sources, committed or not."""
    return _tree(folder).hex()


def _tree(folder: Path) -> bytes:
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(_IGNORED_SUFFIXES) or (path.name in _IGNORED_FOLDERS and path.is_dir()):
            continue
        name = os.fsencode(path.name)
        if path.is_symlink():
            entries.append((name, b"120000 " + name + b"\0" + _object(b"blob", os.fsencode(path.readlink()))))
        elif path.is_dir():
            digest = _tree(path)
            if digest != _EMPTY_TREE:  # git knows no empty folders
                # git sorts a folder as if its name ended in a slash
                entries.append((name + b"/", b"40000 " + name + b"\0" + digest))
        elif path.is_file():
            mode = b"100755 " if path.stat().st_mode & 0o100 else b"100644 "
            entries.append((name, mode + name + b"\0" + _object(b"blob", path.read_bytes())))
    return _object(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()


_EMPTY_TREE = _object(b"tree", b"")
