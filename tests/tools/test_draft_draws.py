"""The chances of agreement are those that drawing many times finds."""

import pytest
import torch

from tools.draft_draws import chances


def test_chances_are_what_drawing_finds():
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 12, dtype=torch.float64).mul(1.5).softmax(-1)
    found, draws = chances(p, q), 40_000
    uniform = torch.rand(3, draws, dtype=torch.float64)
    inverse = [torch.searchsorted(each.cumsum(-1), uniform) for each in (p, q)]
    noise = -torch.rand(3, draws, 12, dtype=torch.float64).log().neg().log()
    gumbel = [(each.log()[:, None] + noise).argmax(-1) for each in (p, q)]
    for way, (own, other) in {"inverse": inverse, "gumbel": gumbel}.items():
        drawn = (own == other).double().mean(-1)
        torch.testing.assert_close(drawn, found[way], rtol=0, atol=0.012)
    assert (found["independent"] < found["gumbel"]).all() and (found["gumbel"] <= found["most"]).all()
    assert (found["inverse"] <= found["most"]).all()
    assert found["likeliest"].tolist() == pytest.approx([p[i, q[i].argmax()].item() for i in range(3)])


def test_equal_predictions_always_agree_where_the_number_is_shared():
    p = torch.randn(2, 30, dtype=torch.float64).softmax(-1)
    found = chances(p, p)
    for way in ("inverse", "gumbel", "most"):
        torch.testing.assert_close(found[way], torch.ones(2, dtype=torch.float64))
