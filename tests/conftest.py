from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from flexmasks.spec import definitions

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
    monkeypatch.setattr(definitions, "_NAMES", {kind: dict(known) for kind, known in definitions._NAMES.items()})


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """More threads gain nothing for functions as short as random ones, and wait for each other where cores are few."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
