import math

import pytest
import torch

from shardclip.step.scale import scale_


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [float, lambda c: torch.tensor(c, dtype=torch.float64)])
def test_a_coefficient_is_not_rounded_to_the_gradients_dtype(dtype, given):
    coef = 300 / 76800 / 300  # a subnormal float16
    tensor = torch.full((7,), 300.0, dtype=dtype)
    scale_([tensor], given(coef))
    torch.testing.assert_close(tensor, torch.full_like(tensor, 300 / 76800), rtol=1e-3, atol=0)


def test_a_coefficient_below_float32_is_applied_in_two_steps():
    tensor = torch.full((3,), 1e38)
    scale_([tensor], 1e-42)  # on its own a subnormal float32, off by 0.1 %
    torch.testing.assert_close(tensor, torch.full((3,), 1e-4), rtol=1e-6, atol=0)


def test_one_touches_nothing():
    tensor = torch.ones(3)
    before = tensor._version
    scale_([tensor], 1.0)
    assert tensor._version == before


def test_zero_and_nan_are_multiplied_as_torch_does():
    tensor = torch.tensor([1.0, math.inf])
    scale_([tensor], 0.0)
    assert tensor[0] == 0
    assert tensor[1].isnan()
    scale_([tensor], math.nan)
    assert tensor.isnan().all()


def test_empty_mixed_and_strided_tensors():
    wide = torch.ones(4, 4)
    tensors = [torch.empty(0), wide[:, ::2], torch.ones(2, dtype=torch.complex64)]
    scale_(tensors, 0.5)
    assert wide.sum() == 12
    assert tensors[2].tolist() == [0.5, 0.5]
