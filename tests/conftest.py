"""Settings of the whole suite."""

import os

# Workers of pytest-xdist share the cores: threads of one that spin at a barrier would hold up the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
