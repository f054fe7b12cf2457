"""gnnaccel.graph.cache: found by identity, forgotten on change, on death, on demand and beyond its bound."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gnnaccel.graph.cache import TensorCache, derived, invalidate


@pytest.fixture
def cache():
    return TensorCache(maxsize=4)


def test_finds_by_identity_and_key(cache):
    a, b = torch.arange(4), torch.arange(4)
    cache.put((a,), "x", 1)
    cache.put((a, b), "x", 2)
    assert cache.get((a,), "x") == 1
    assert cache.get((a, b), "x") == 2
    assert cache.get((a,), "y") is None
    assert cache.get((b,), "x") is None
    assert cache.get((b, a), "x") is None


CHANGES = {
    "in place": lambda t: t.add_(1),
    "item": lambda t: t.__setitem__(0, 7),
    "through a view": lambda t: t[1:].zero_(),
    "through detach": lambda t: t.detach().zero_(),
    "resized": lambda t: t.resize_(2),
    "other storage": lambda t: setattr(t, "data", torch.zeros(4, dtype=torch.long)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_notices_a_change(cache, change):
    a, b = torch.arange(4), torch.arange(4)
    cache.put((b, a), "x", 1)
    change(a)
    assert cache.get((b, a), "x") is None
    assert len(cache) == 0


def test_drops_with_any_owner(cache):
    a, b = torch.arange(4), torch.arange(4)
    cache.put((a, b), "x", 1)
    cache.put((a,), "x", 2)
    del b
    gc.collect()
    assert len(cache) == 1
    assert cache.get((a,), "x") == 2
    del a
    gc.collect()
    assert len(cache) == 0
    assert not cache._owners


def test_drops_chains(cache):
    a = torch.arange(4)
    b = a + 1
    cache.put((b,), "y", 2)
    cache.put((a,), "x", b)
    del b
    gc.collect()
    assert len(cache) == 2  # b lives in a's entry
    del a
    gc.collect()
    assert len(cache) == 0


def test_least_recently_used_goes_first(cache):
    tensors = [torch.arange(2) for _ in range(6)]
    for i, t in enumerate(tensors[:4]):
        cache.put((t,), "x", i)
    assert cache.get((tensors[0],), "x") == 0
    for i, t in enumerate(tensors[4:]):
        cache.put((t,), "x", i)
    assert len(cache) == 4
    assert cache.get((tensors[0],), "x") == 0
    assert cache.get((tensors[1],), "x") is None


def test_inference_tensors_are_not_kept(cache):
    with torch.inference_mode():
        a = torch.arange(4)
    cache.put((a,), "x", 1)
    assert cache.get((a,), "x") is None
    assert len(cache) == 0


def test_what_fake_tensors_gave_is_not_kept(cache):
    a = torch.arange(4)
    with FakeTensorMode():
        cache.put((a,), "x", 1)
    assert cache.get((a,), "x") is None


def test_invalidate(cache):
    a, b = torch.arange(4), torch.arange(4)
    for owners in ((a,), (a, b), (b,)):
        cache.put(owners, "x", 1)
    cache.invalidate(a)
    assert len(cache) == 1
    cache.invalidate()
    assert len(cache) == 0


def test_public_invalidate():
    a = torch.arange(4)
    derived.put((a,), "x", 1)
    a.numpy()[0] = 9  # no version counter sees this
    assert derived.get((a,), "x") == 1
    invalidate(a)
    assert derived.get((a,), "x") is None
    with pytest.raises(TypeError, match="invalidate: expected"):
        invalidate([1, 2])


def test_nothing_is_written_on_the_tensor():
    a = torch.arange(4)
    before = dict(vars(a))
    derived.put((a,), "x", 1)
    assert vars(a) == before


def test_tensors_swap_whatever_was_derived_from_them():
    """Also where a value of another tensor's remembers one."""
    a, b, other = torch.arange(4), torch.arange(4) + 4, torch.arange(3)
    for tensor in (a, b):
        derived.put((tensor,), "x", tensor[0].item())
        derived.put((other, tensor), "x", 1)
    derived.put((other,), "origin", (derived.owner(a), derived.owner(b)))
    torch.utils.swap_tensors(a, b)
    assert a[0] == 4 and b[0] == 0
    assert derived.get((a,), "x") is derived.get((b,), "x") is derived.get((other, a), "x") is None
    assert [held.ref() for held in derived.get((other,), "origin")] == [None, None]
    derived.put((a,), "x", 2)
    assert derived.get((a,), "x") == 2
    torch.utils.swap_tensors(a, b)


def test_load_state_dict_that_swaps():
    module = torch.nn.Module()
    module.register_buffer("edges", torch.arange(4))
    derived.put((module.edges,), "x", 1)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict({"edges": torch.arange(4) + 1})
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert module.edges[0] == 1 and derived.get((module.edges,), "x") is None
