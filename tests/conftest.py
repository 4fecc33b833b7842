"""What every test stands on: few threads, no network, and the real data where it is there."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

# A shell lets what it starts in the background ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: two workers with a thread each are faster than two that fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.zoo import Zoo  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

# The machine is shared, so a slow moment is no failure; the examples are the same on every run.
settings.register_profile("regard", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("regard")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real data, or skip."""
    folder = Path(os.environ.get("REGARD_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set REGARD_DATA")
    return folder


@pytest.fixture(scope="session")
def bfloat16() -> None:
    """Skip where the processor cannot compute in bfloat16, whatever it announces."""
    from regard.native.processor import unsupported_reason

    if why := unsupported_reason("bfloat16"):
        pytest.skip(f"this processor cannot compute in bfloat16: {why}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Iterator[Path]:
    """A cache of this session's own, with the user's kernels, which take a while to compile."""
    from regard.files import cache_folder
    from regard.native import library

    library()
    folder = tmp_path_factory.mktemp("cache")
    for path in cache_folder().glob("native-*"):
        shutil.copy(path, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def zoo(tmp_path_factory, cache) -> Zoo:
    """Small data and trained models, which all workers share."""
    home = tmp_path_factory.getbasetemp()
    home = (home.parent if "PYTEST_XDIST_WORKER" in os.environ else home) / "zoo"
    home.mkdir(exist_ok=True)
    return Zoo(home)
