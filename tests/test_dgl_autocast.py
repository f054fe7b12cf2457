"""Every case of dgl_cases.CASES under autocast: DGL's dtypes, values and gradients, and its errors."""

import pytest
import torch
from dgl_cases import CASES
from dgl_compare import both

pytestmark = [pytest.mark.usefixtures("dgl_restored"), pytest.mark.filterwarnings("ignore::UserWarning")]

# DGL's own segments have no kernel of bfloat16 on the CPU; ours have.
OURS_ALONE = ("GlobalAttentionPooling", "GlobalAttentionPooling with its attention")


@pytest.mark.parametrize("name", CASES)
def test_autocast_of_dgl_functions(name):
    case = CASES[name]
    where = case.graphs[0]
    call, inputs, module = case.bind(where, torch.float32)

    def widened(*arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*arguments)

    grad = where not in case.no_backward
    want, got, _ = both(widened, inputs, module, grad=grad)
    if not isinstance(want, dict):
        assert isinstance(got, dict) if name in OURS_ALONE else got[0] == want[0]
        return
    assert isinstance(got, dict) and got.keys() == want.keys(), got
    exact, _, _ = both(call, inputs, module, grad=grad)
    for key, right in want.items():
        if not isinstance(right, torch.Tensor):
            continue
        assert got[key].dtype == right.dtype, key
        if right.is_floating_point() and right.numel():
            finite = right.isfinite()
            assert torch.equal(finite, got[key].isfinite()), key
            error = (got[key].float() - right.float())[finite].abs()
            # bfloat16 keeps 8 bits, and may be rounded at other places: by as much again as DGL's result is off.
            off = (exact[key].float() - right.float())[finite].abs()
            allowed = 3e-2 * right.float()[finite].abs().max().clamp(min=1e-6) + 2 * off.max() if error.numel() else 0
            assert not error.numel() or error.max() <= allowed, key
