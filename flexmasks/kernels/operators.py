"""Operators of torch without gradients, by their schemas.

torch.library.custom_op would import torch's compilers when an operator runs for the first time, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "flexmasks"
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator for all devices; `fake` returns tensors with the shapes and dtypes of its results."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(torch.ops.flexmasks, name).default
