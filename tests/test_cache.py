"""gnnaccel.graph.cache: found by identity, forgotten on change, on death and on demand, and never else."""

import gc
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gnnaccel.graph.cache import TensorCache, derived, invalidate


@pytest.fixture
def cache():
    return TensorCache(most=4)


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
    assert not cache._records and not cache._groups


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


def test_any_number_of_living_tensors(cache):
    weights = [torch.arange(2) for _ in range(300)]
    for i, weight in enumerate(weights):
        cache.put((weight,), "x", i)
        cache.put((weights[0], weight), "y", i)
    assert [cache.get((weight,), "x") for weight in weights] == list(range(300))
    assert [cache.get((weights[0], weight), "y") for weight in weights] == list(range(300))


@pytest.mark.parametrize("count", [1, 2])
def test_the_values_of_one_set_of_tensors_are_bounded(cache, count):
    """The one that was put last stays longest."""
    owners = tuple(torch.arange(2) for _ in range(count))
    for key in (0, 1, 2, 3, 0, 4, 5):
        cache.put(owners, key, str(key))
    assert len(cache) == 4
    assert [cache.get(owners, key) for key in range(6)] == ["0", None, None, "3", "4", "5"]


def test_dead_tensors_leave_nothing():
    """20,000 that die: a chain each, and a value of it together with one that lives. Without the garbage collector."""
    cache, alive = TensorCache(), torch.arange(2)
    cache.put((alive,), "x", 1)
    gc.disable()
    try:
        for _ in range(20_000):
            edges = torch.arange(2)
            looped = edges + 1
            cache.put((looped,), "origin", (cache.owner(edges), cache.owner(looped)))
            cache.put((looped, alive), "y", torch.arange(2))
            cache.put((edges,), "looped", looped)
            del looped
            assert len(cache._records) == 3
        del edges
        assert len(cache) == len(cache._records) == 1
        assert not cache._groups and not cache._records[id(alive)].groups
    finally:
        gc.enable()
    assert cache.get((alive,), "x") == 1


def test_a_changed_origin_takes_the_chain_with_it(cache):
    edges = torch.arange(4)
    looped = edges + 1
    cache.put((edges,), "looped", looped)
    cache.put((looped,), "graph", 1)
    del looped
    edges.add_(1)
    assert cache.get((edges,), "looped") is None
    assert len(cache) == 0
    cache.put((edges,), "other", 2)
    edges.add_(1)
    cache.put((edges,), "graph", 3)  # the first to see the change
    assert cache.get((edges,), "other") is None and cache.get((edges,), "graph") == 3


def test_an_id_that_another_tensor_has_now(cache):
    """Whose owner died without the cache being told yet."""
    old, other, new = torch.arange(4), torch.arange(3), torch.arange(4)
    cache.put((old,), "x", 1)
    cache.put((old, other), "x", 2)
    record = cache._records.pop(id(old))
    record.id = id(new)
    cache._records[id(new)] = record
    assert cache.get((new,), "x") is None
    cache.put((new,), "x", 3)
    cache._bury(record.ref)  # told now
    assert cache.get((new,), "x") == 3 and len(cache) == 1


def test_threads(cache):
    """Writers, readers and deaths at once: each reads its own tensor's value or none, and all is forgotten."""
    shared, stop, wrong = [torch.arange(4)], threading.Event(), []

    def work(number):
        common = shared[0]
        try:
            while not stop.is_set():
                own = torch.tensor([number])
                cache.put((own,), "x", number)
                cache.put((own, common), "x", number)
                cache.put((common,), number, number)
                found = cache.get((own,), "x"), cache.get((own, common), "x"), cache.get((common,), number)
                if found[0] != number or not {*found} <= {number, None}:
                    wrong.append(found)
                if number == 0:
                    common.add_(1)
                elif number == 1:
                    cache.invalidate(common)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    shared.clear()
    assert len(cache._records) == len(cache._groups) == 0


def test_inference_tensors_are_not_kept(cache):
    with torch.inference_mode():
        a = torch.arange(4)
    cache.put((a,), "x", 1)
    assert cache.get((a,), "x") is None
    assert len(cache) == 0
    other = torch.arange(2)
    assert cache.owner(a).ref() is a  # other values may remember it
    cache.put((other, a), "x", 1)
    assert cache.get((a,), "x") is cache.get((other, a), "x") is None


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
