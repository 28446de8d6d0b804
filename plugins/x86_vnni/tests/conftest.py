from __future__ import annotations

import pytest

from int8moe_x86_vnni import experts, library, probe

KERNELS = {
    "avx2": experts.Avx2Experts,
    "avx_vnni": experts.AvxVnniExperts,
    "avx512_vnni": experts.Avx512VnniExperts,
    "amx_int8": experts.AmxInt8Experts,
}


def why_not(tier: str) -> str | None:
    try:
        return probe.refusal(tier, probe.read_cpu(ask_for_amx=True))
    except library.LibraryUnavailable as error:
        return str(error)


@pytest.fixture(params=list(KERNELS))
def tier(request: pytest.FixtureRequest) -> str:
    """A tier that can run here; the others are skipped with the reason."""
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
def kernel(tier: str) -> experts.X86Experts:
    return KERNELS[tier]()


@pytest.fixture
def native() -> object:
    try:
        return library.load_library()
    except library.LibraryUnavailable as error:
        pytest.skip(str(error))
