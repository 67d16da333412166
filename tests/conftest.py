"""Settings of the whole suite."""

import gc
import os
from collections.abc import Iterator

import pytest
from cuda_fixtures import deterministic, no_waits  # noqa: F401  fixtures
from front_door import complaint, given  # noqa: F401  fixtures

# Workers of pytest-xdist share the cores: threads of one that spin at a barrier would hold up the others. torch reads
# this when it is imported, so nothing above may import it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenized data go to a folder of the session, not to the user's cache."""
    folder = tmp_path_factory.mktemp("token-cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("executor.data.corpus.default_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def _device_to_itself(request: pytest.FixtureRequest) -> None:
    """A test on CUDA finds the device without what earlier tests of the process left for Python's collector."""
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
