"""Are the four import names ours? Other distributions ship packages called `executor` or `planner` too.

Nothing is imported: a shadowing package must not run. Only the standard library is used, since this check comes first.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

DISTRIBUTION = "conveyor-train"
PACKAGES = ("simulator", "planner", "executor", "analysis")


def shadowed_packages() -> list[str]:
    """One sentence for each import name that is not this installation's, naming the path and the distribution."""
    root = Path(__file__).resolve().parents[1]
    sentences = []
    for name in PACKAGES:
        folder = _folder(name)
        if folder is None:
            sentences.append(f"the package '{name}' is missing from {root}: install Conveyor again")
        elif folder != root / name:
            owners = _owners(name, folder.parent) or _claimants(name) or ["no installed distribution"]
            sentences.append(
                f"the import name '{name}' leads to {folder} (of {' and '.join(owners)}), not to {root / name}: "
                "remove it from the import path, or give Conveyor an environment of its own"
            )
        elif owners := _owners(name, root):
            sentences.append(
                f"{' and '.join(owners)} also installed files into {folder}: uninstall it and install Conveyor again, "
                "or give Conveyor an environment of its own"
            )
    return sentences


def _folder(name: str) -> Path | None:
    """Where `import name` would look, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def _owners(name: str, site: Path) -> list[str]:
    """Distributions other than Conveyor that installed the package `name` into `site`."""
    owners = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        # The raw text: parsing every file of every distribution takes seconds.
        record = distribution.read_text("RECORD") or ""
        if f"\n{name}/__init__.py," in f"\n{record}" and distribution.name != DISTRIBUTION:
            owners.append(f"{distribution.name} {distribution.version}")
    return owners


def _claimants(name: str) -> list[str]:
    """Distributions other than Conveyor that declare the import name: editable installs record no files."""
    names = importlib.metadata.packages_distributions().get(name, [])
    return [f"{other} {importlib.metadata.version(other)}" for other in sorted(set(names) - {DISTRIBUTION})]
