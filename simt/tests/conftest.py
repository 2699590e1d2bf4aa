import tempfile

import pytest
from bench import Bench

from simt import toolchain


@pytest.fixture(scope="session")
def bench():
    builds = toolchain.ROOT / ".cache/simt"
    builds.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=builds) as folder:
        yield Bench(folder)
