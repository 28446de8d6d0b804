"""The tiers of the plugin, and why one cannot run here."""

from __future__ import annotations

from int8moe.native import LibraryUnavailable
from int8moe_x86_vnni import experts, probe

KERNELS = {
    "avx2": experts.Avx2Experts,
    "avx_vnni": experts.AvxVnniExperts,
    "avx512_vnni": experts.Avx512VnniExperts,
    "amx_int8": experts.AmxInt8Experts,
}


def why_not(tier: str) -> str | None:
    try:
        return probe.refusal(tier, probe.read_cpu(ask_for_amx=True))
    except LibraryUnavailable as error:
        return str(error)
