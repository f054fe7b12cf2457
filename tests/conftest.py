"""What all tests share: which cases run, a fixed seed, the thread count restored, and the devices to run on."""

import gc
import os

import pytest
import torch
from pairwise import thinned
from reached import Counted

from gnnaccel import _library
from gnnaccel.lower import bounds

# torch asks for it where cuBLAS is to be deterministic, and looks at it once, at the first product of matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser):
    """`--all`, which `make test-all` gives."""
    parser.addoption("--all", action="store_true", help="all cases, not some that hold every pair (pairwise.py)")


def pytest_configure(config):
    """The marks of these tests."""
    config.addinivalue_line("markers", "only(where): of its cases, those that this function of parameters takes")
    config.addinivalue_line("markers", "reached(kinds): nine tenths of its calls must be accelerated (reached.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Some cases of each test over three or more lists of parameters, of those that are asked for."""
    items[:], left_out = thinned(items, config.getoption("--all"))
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """What is there by now stays: a collection of garbage, which many tests ask for, does not go through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test with the mark `reached` is counted."""
    mark = item.get_closest_marker("reached")
    if mark is None:
        return (yield)
    with Counted(item.name, **mark.kwargs) as counted, counted.case():
        return (yield)


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    """Graphs of tests are as small as those that are left to PyG."""
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {})
    monkeypatch.setattr(bounds, "FEW_AT_FIRST", {})


@pytest.fixture(autouse=True)
def _fixed_start():
    """The same random numbers in each test; nothing a test sets globally reaches the next one."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def _cuda_missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    return None if _library.has_cuda_kernels() else "this build has no CUDA half"


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    """Every device the kernels run on; CUDA is skipped, visibly, where there is none."""
    if request.param == "cuda" and (reason := _cuda_missing()):
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture
def dgl_restored():
    """Empty counters, one thread (graphs this small only wait for each other's), and after the test DGL alone again."""
    from gnnaccel import dgl_backend, report

    torch.set_num_threads(1)
    report.reset()
    yield
    dgl_backend.disable()


@pytest.fixture
def poisoned():
    """Outputs and workspaces hold NaN when a kernel gets them: torch fills fresh memory under this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
