from __future__ import annotations

import torch

from foremoe.moe.workspace import Workspace

LIKE = torch.empty(0)


def test_scratch_goes_from_call_to_call_at_the_size_of_the_largest_one() -> None:
    workspace = Workspace()
    workspace.open_step(8)
    first = workspace.take("a", 3, 4, LIKE)
    assert first.shape == (3, 4)
    assert workspace.take("a", 8, 4, LIKE).data_ptr() == first.data_ptr()
    assert workspace.take("b", 3, 4, LIKE).data_ptr() != first.data_ptr()
    assert workspace.take("a", 9, 4, LIKE).shape == (9, 4)
    assert workspace.take("a", 3, 4, LIKE.double()).dtype == torch.float64


def test_kept_rows_are_handed_out_again_only_when_nothing_refers_to_them() -> None:
    workspace = Workspace()
    workspace.open_step(8)
    first = workspace.keep(5, 4, LIKE)
    second = workspace.keep(8, 4, LIKE)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    part = first[1:2]
    del first
    assert workspace.keep(2, 4, LIKE).data_ptr() not in places, "a view of it is still in use"
    del part, second
    assert {workspace.keep(1, 4, LIKE).data_ptr() for _ in range(3)} & places


def test_rows_saved_for_backward_stay_until_the_graph_lets_go_of_them() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            kept = workspace.keep(*x.shape, x)
            kept.copy_(x)
            ctx.save_for_backward(kept)
            places.append(kept.data_ptr())
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return 2 * kept * grad

    places: list[int] = []
    workspace = Workspace()
    workspace.open_step(2)
    x = torch.tensor([[3.0], [4.0]], requires_grad=True)
    held = Square.apply(x).sum()
    with torch.no_grad():
        Square.apply(x + 1)
        Square.apply(x + 2)
    assert places[0] not in places[1:]
    assert places[1] == places[2]
    for _ in range(2):
        (gradient,) = torch.autograd.grad(held, x, retain_graph=True)
        assert gradient.tolist() == [[6.0], [8.0]]
    torch.autograd.grad(held, x)
    Square.apply(x)
    assert places[3] in places[:2]


def test_a_closed_step_keeps_nothing_and_leaves_what_is_in_use_alone() -> None:
    workspace = Workspace()
    workspace.open_step(2)
    kept = workspace.keep(2, 2, LIKE).fill_(7.0)
    workspace.close_step()
    workspace.open_step(2)
    workspace.keep(2, 2, LIKE).fill_(0.0)
    assert (kept == 7.0).all()
    workspace.close_step()
    assert workspace.keep(1, 2, LIKE).untyped_storage().nbytes() == 8, "outside of a step exactly what is needed"


def test_what_was_made_in_inference_mode_is_not_used_outside_of_it() -> None:
    workspace = Workspace()
    workspace.open_step(2)
    with torch.inference_mode():
        assert workspace.take("a", 2, 2, LIKE).is_inference()
        assert workspace.keep(2, 2, LIKE).is_inference()
    assert not workspace.take("a", 2, 2, LIKE).is_inference()
    assert not workspace.keep(2, 2, LIKE).is_inference()
