"""Functions that people write go to kernels as they are."""

from __future__ import annotations

import pytest
import torch
from functions_of_others import BATCH, HEADS, LENGTH, LIBRARIES

from flexmasks.backends.exact import NEGATIVE, OF_FLASH_ALONE, OVERFLOW, SIGN, WHOLE, outside_table

_AS_BITS = {
    # What is read from a tensor may be negative, or large, for all that the look knows.
    ("attention-gym", "documents"): NEGATIVE,
    ("attention-gym", "paged"): OVERFLOW,
    ("torch", "jagged"): NEGATIVE,
    ("torchtitan", "starts of documents"): NEGATIVE,
    ("torchtitan", "causal inside documents"): NEGATIVE,
    ("diffusers", "noised and clean frames"): "kernels are not known to compute `eq` of float32 as Python does",
    ("attention-gym", "flamingo"): WHOLE,
}
_NOT_ON_FLASH = {
    ("attention-gym", "transfusion"): "FLASH takes no constant index",
    ("torch", "every third before"): SIGN,
    ("torch", "windows of heads"): "FLASH makes booleans of torch.where between two numbers",
}


# Transformers moves what it reads from tensors, which lie on the CPU here, to the device of q.
@pytest.mark.parametrize(
    ("library", "device"), [(x, "cpu") for x in LIBRARIES] + [(x, "cuda") for x in LIBRARIES if x != "transformers"]
)
def test_functions_of_other_libraries(library: str, device: str) -> None:
    """The look at functions for a GPU needs none."""
    for name, function in LIBRARIES[library]().items():
        reasons = outside_table(function, torch.device(device), (BATCH, HEADS, LENGTH, LENGTH))
        of_inductor = [reason for reason in reasons if reason not in OF_FLASH_ALONE]
        of_flash = [reason for reason in reasons if reason in OF_FLASH_ALONE]
        case = library, name
        assert of_inductor[:1] == ([_AS_BITS[case]] if case in _AS_BITS else []), case
        if not of_inductor:  # else FLASH reads bits, too
            assert of_flash == ([_NOT_ON_FLASH[case]] if case in _NOT_ON_FLASH else []), case
