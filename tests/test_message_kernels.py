"""Kernels of programs without a GPU: what is written of them, which code is taken from disk, how they are started."""

import ctypes
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from gnnaccel.graph import files
from gnnaccel.lower import bounds
from gnnaccel.ops import messages as m
from gnnaccel.ops.messages import generated, nvrtc
from gnnaccel.ops.messages.source import is_too_wide, source_of
from gnnaccel.ops.messages.values import Form
from gnnaccel.program.derivatives import gradients
from gnnaccel.program.program import Leaf, Output, Program, Step, program_of

x, q, k = m.u("x"), m.u("q"), m.v("k")


def text_of(messages, shapes, vec=4):
    program, _ = program_of(tuple((message, "sum") for message in messages), shapes)
    form = Form(("f32",) * len(program.leaves), ("f32",) * len(program.outputs), "i64", vec)
    return source_of(program, form).text


def test_one_number_is_made_once():
    """A sum of all features is one of lanes together for whoever reads it: not again in the loops of each that is not
    as wide as the features that are summed."""
    leaves = ((("u", "q"), (64, 4)), (("v", "k"), (64, 4)), (("u", "x"), (64, 4)), (("u", "w"), (64, 1)))
    dot = m.sum(q * k, (-1, -2), True)
    text = text_of((dot * x, m.sigmoid(dot) * m.u("w")), leaves)
    assert "for (unsigned" not in text and text.count("__shfl_xor_sync(~0u, s") == 5


@pytest.mark.parametrize("width", [513, 1500, 2048])
def test_wide_sums_take_no_loops(width):
    """A sum in a loop of each lane takes the square of the width, one inside another the cube."""
    message = m.sum(x / (m.sum(q * k, -1, True) + 1.0), -1, True) * x
    text = text_of((message,), tuple((leaf, (width,)) for leaf in message.leaves), 4 if width % 4 == 0 else 1)
    assert "for (unsigned" not in text


def test_sums_inside_loops_are_made_before_them():
    narrow = m.sum(m.u("w") / (m.sum(q * k, (-1, -2), True) + 1.0), -2, True)
    leaves = ((("u", "w"), (64, 1)), (("u", "q"), (64, 4)), (("v", "k"), (64, 4)), (("u", "x"), (64, 4)))
    text = text_of((narrow * m.u("w"), x * 2.0), leaves)
    assert text.count("for (unsigned") == 2  # over the 64 of w


def test_negative_infinity_can_be_negated():
    leaf, minus = Leaf("u", (4,)), Step("fill", (), (-float("inf"),), (4,))
    steps = (Step("leaf", (), (0,), (4,)), minus, Step("neg", (1,), (), (4,)), Step("add", (0, 2), (), (4,)))
    text = source_of(Program((leaf,), steps, (Output(3, "sum"),)), Form(("f32",), ("f32",), "i32", 4)).text
    assert "--infinite" not in text


def test_rows_of_no_features_beside_others():
    text = text_of((x * 2.0, q * 2.0), ((("u", "x"), (0,)), (("u", "q"), (4,))))
    assert "% 0u" not in text and "/ 0u" not in text


def test_forms_do_not_depend_on_how_far_addresses_can_be_divided():
    program, _ = program_of(((x * 2.0, "sum"),), ((("u", "x"), (8,)),))
    before = generated._form.cache_info().currsize
    device = torch.device("cpu")
    seen = []

    def made(program, form, device):
        seen.append(form)
        source = source_of(program, form)
        return SimpleNamespace(source=source, walk=lambda *given: None, merge=None)

    indptr = torch.tensor([0, 1, 2])
    arrays = SimpleNamespace(
        device=device, indptr=indptr, order=None, indices=torch.tensor([0, 1]), edge_ids=None, num_rows=2, calls={}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated, "_made", made)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(generated.lib, "on_stream", lambda device, start, *args: start(*args, 0))
        for address in (1 << 12, 1 << 13, 1 << 20):
            patch.setattr(generated.lib, "pointer", lambda tensor, address=address: 0 if tensor is None else address)
            generated.walk(arrays, program, [torch.zeros(2, 8)], [torch.zeros(2, 8)], [])
    assert len(seen) == len(arrays.calls) == 1 and generated._form.cache_info().currsize == before + 1


class TestWhoWroteIt:
    """Machine code is run: it has to be this user's own."""

    @pytest.fixture
    def path(self, tmp_path, monkeypatch):
        monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path)
        monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
        monkeypatch.setattr(nvrtc, "compiled", lambda source, capability: b"code")
        assert nvrtc.code_of("source", (9, 0)) == b"code"
        monkeypatch.setattr(nvrtc, "compiled", lambda source, capability: b"other")
        return tmp_path / f"{nvrtc.key_of('source', (9, 0))}.cubin"

    def test_own(self, path):
        assert nvrtc.code_of("source", (9, 0)) == b"code"

    @pytest.mark.parametrize("mode", [0o664, 0o646])
    def test_writable_by_others(self, path, mode, caplog):
        path.chmod(mode)
        assert nvrtc.code_of("source", (9, 0)) == b"other" and "another user" in caplog.text
        assert path.stat().st_mode & 0o022 == 0  # written anew
        assert nvrtc.code_of("source", (9, 0)) == b"other"

    def test_of_another_user(self, path, monkeypatch, caplog):
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        if me == 0:  # root is trusted: let the file be of somebody else
            os.chown(path, 1234, -1)
        assert nvrtc.code_of("source", (9, 0)) == b"other" and "another user" in caplog.text

    def test_for_what_is_only_read_anybodys_will_do(self, path):
        path.chmod(0o666)
        assert files.content(path, 1 << 20)
        with pytest.raises(ValueError, match="another user"):
            files.content(path, 1 << 20, trusted=True)


def test_kept_on_disk_are_those_used_last(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compiled", lambda source, capability: source.encode())
    monkeypatch.setattr(bounds, "KERNEL_FILES", 4)
    of = {name: tmp_path / f"{nvrtc.key_of(name, (9, 0))}.cubin" for name in "abcde"}
    for age, name in enumerate("dcba"):
        nvrtc.code_of(name, (9, 0))
        os.utime(of[name], (age, age))
    other = tmp_path / "of somebody else"
    other.touch()
    nvrtc.code_of("d", (9, 0))  # the oldest, used again
    nvrtc.code_of("e", (9, 0))
    assert {name for name, path in of.items() if path.exists()} == {"a", "d", "e"} and other.exists()


class Driver:
    """Of CUDA, with a context for each thread as the real one has it."""

    def __init__(self):
        self.of_thread, self.launches, self.next = threading.local(), 0, 0

    def cuDeviceGet(self, gpu, device):
        return 0

    def cuDevicePrimaryCtxRetain(self, context, gpu):
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context):
        self.of_thread.context = context.value
        return 0

    def _status(self):
        return 0 if getattr(self.of_thread, "context", None) == 77 else 201

    def cuModuleLoadData(self, module, code):
        return self._status()

    def cuModuleGetFunction(self, function, module, name):
        return 0

    def cuLaunchKernel(self, *given):
        self.launches += not self._status()
        return self.next or self._status()

    def cuGetErrorString(self, status, words):
        words._obj.value = b"of the test"
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: made)
    monkeypatch.setattr(nvrtc, "code_of", lambda source, capability: b"code")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return made


def test_a_thread_that_has_no_context(driver):
    """As autograd's, and those of DataParallel, may be: each loads and starts kernels."""
    words, failed = (ctypes.c_uint64 * 1)(), []
    kernel = nvrtc.Module("source", 0).kernel("walk")
    kernel((1, 1), 256, words, 0)

    def elsewhere():
        try:
            kernel((1, 1), 256, words, 0)
            nvrtc.Module("source", 0).kernel("walk")((1, 1), 256, words, 0)
        except nvrtc.Failed as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failed and driver.launches == 3


def test_a_kernel_that_does_not_start_says_why(driver):
    kernel = nvrtc.Module("source", 0).kernel("walk")
    for status in (1, 201):
        driver.next = status
        with pytest.raises(nvrtc.Failed, match="walk: of the test"):
            kernel((1, 1), 256, (ctypes.c_uint64 * 1)(), 0)


def test_gpus_that_nvrtc_does_not_know(monkeypatch):
    """PTX for one that is newer; messages are stored, with a word, on one that is older."""
    monkeypatch.setattr(nvrtc, "architectures", lambda: (75, 80, 90))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    assert [nvrtc.target(c) for c in ((9, 0), (7, 5), (8, 6), (12, 0))] == [
        "sm_90",
        "sm_75",
        "compute_80",
        "compute_90",
    ]
    monkeypatch.setattr(nvrtc, "obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((9, 0), (7, 0))[device])
    assert nvrtc.obstacle_of_gpus() == "NVRTC 13.0 compiles for sm_75 and later, not for sm_70"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert nvrtc.obstacle_of_gpus() is None
    monkeypatch.setattr(nvrtc, "obstacle", lambda: "NVRTC was not found")
    assert nvrtc.obstacle_of_gpus() == "NVRTC was not found"


def test_nvrtc_of_torchs_version_is_taken_first(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = {"*": ["/a/cuda_nvrtc/lib/libnvrtc.so.12", "/a/cu13/lib/libnvrtc.so.13"]}
    monkeypatch.setattr(nvrtc.glob, "glob", lambda pattern: found["*"] if "nvidia" in pattern else [])
    monkeypatch.setattr(
        nvrtc.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=["/a/nvidia"])
    )
    assert nvrtc._candidates()[0].endswith(".so.13")


def test_too_many_features_for_lanes_to_meet():
    """Where a gradient would sum over more features than lanes hold, messages are stored instead."""
    for width, message, wide in (
        (2048, m.u("x") * m.e("w:1"), False),
        (2049, m.u("x") * m.e("w:1"), True),
        (2049, m.sum(m.u("x"), -1, True), True),
        (4096, m.u("x") * m.v("k"), False),
    ):
        shapes = tuple((leaf, (1,) if leaf[1].endswith(":1") else (width,)) for leaf in message.leaves)
        program, _ = program_of(((message, "sum"),), shapes)
        assert is_too_wide(program) == wide
        if not wide:
            for half in gradients(program, (True,) * len(program.leaves), (True,)):
                if half is not None:
                    count = len(half.program.leaves), len(half.program.outputs)
                    form = Form(("f32",) * count[0], ("f32",) * count[1], "i32", 1)
                    assert "for (unsigned" not in source_of(half.program, form).text
