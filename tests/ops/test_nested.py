"""Nested tensors in: their rows, and what messages say of containers that are no tensors of rows."""

from __future__ import annotations

import re

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jagged.ops import from_nested, jagged_softmax


def test_rows_of_samples() -> None:
    samples = [torch.randn(length, 3, requires_grad=True) for length in (2, 0, 4)]
    values, offsets = from_nested(torch.nested.as_nested_tensor(samples, layout=torch.jagged))
    assert torch.equal(values, torch.cat(samples))
    assert offsets.tolist() == [0, 2, 2, 6]
    values.square().sum().backward()
    for sample in samples:
        assert sample.grad is not None
        assert torch.equal(sample.grad, 2 * sample)


def test_holes_are_left_out() -> None:
    rows = torch.arange(10.0)[:, None].requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 4, 6, 10]), torch.tensor([2, 0, 3]))
    for total in (None, 5):
        values, offsets = from_nested(nested, total)
        assert values.flatten().tolist() == [0, 1, 6, 7, 8]
        assert offsets.tolist() == [0, 2, 2, 5]
    values.sum().backward()
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 0]


def test_containers_are_named_with_the_line_that_converts_them() -> None:
    offsets = torch.tensor([0, 2, 5])
    jagged = JaggedTensor(torch.randn(5, 3), offsets=offsets)
    keyed = KeyedJaggedTensor(["a"], torch.arange(5), offsets=offsets)
    cases = (
        (jagged, TypeError, "values: expected a tensor [S, T], got a JaggedTensor; pass its .values()"),
        (
            keyed,
            TypeError,
            "values: expected a tensor [S, T], got a KeyedJaggedTensor; take one key, x[key], and pass its .values()",
        ),
        (
            torch.nested.nested_tensor([torch.randn(2, 3)], layout=torch.jagged),
            TypeError,
            "values: expected a tensor [S, T], got a nested tensor; pass the values and offsets of jagged.ops.from_nested(x)",
        ),
        (
            torch.randn(2, 4, 3),
            ValueError,
            "values: expected shape [S, T], got [2, 4, 3]; a padded batch becomes rows by dense_to_jagged(x, offsets)",
        ),
        ([1.0], TypeError, "values: expected a tensor [S, T], got list"),
    )
    for given, error, message in cases:
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            jagged_softmax(given, offsets)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("offsets: expected a tensor [B + 1], got a JaggedTensor; pass its .offsets()")):
        jagged_softmax(torch.randn(5, 3), jagged)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("nested: expected a nested tensor [B, j, *F], got a tensor [5, 3]")):
        from_nested(torch.randn(5, 3))
    turned = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged).transpose(1, 2)
    expected = "nested: expected dimension 1 to be the ragged one, got 2; pass nested.transpose(...)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        from_nested(turned)
