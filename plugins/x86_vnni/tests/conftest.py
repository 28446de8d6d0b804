from __future__ import annotations

import pytest
from native_tiers import KERNELS, why_not

from int8moe.native import LibraryUnavailable
from int8moe.testing import skip_kernel
from int8moe_x86_vnni import experts
from int8moe_x86_vnni.library import LIBRARY


@pytest.fixture(params=list(KERNELS))
def tier(request: pytest.FixtureRequest) -> str:
    """A tier that can run here; the others are skipped with the reason."""
    reason = why_not(request.param)
    if reason is not None:
        skip_kernel(request.node, f"x86_vnni.{request.param}", reason)
    return request.param


@pytest.fixture
def kernel(tier: str) -> experts.X86Experts:
    return KERNELS[tier]()


@pytest.fixture
def native() -> object:
    try:
        return LIBRARY.load()
    except LibraryUnavailable as error:
        pytest.skip(str(error))
