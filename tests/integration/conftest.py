"""The integration, switched on for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def enabled() -> Iterator[None]:
    """The integration is on during the test."""
    pytest.importorskip("transformers")
    from int8moe.integrations.transformers import enable

    with enable():
        yield
