from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from flexmasks import registry

settings.register_profile("flexmasks", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("flexmasks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none is here"))


@pytest.fixture(autouse=True)
def _registry_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_REGISTRY", {kind: dict(known) for kind, known in registry._REGISTRY.items()})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
