from __future__ import annotations

from int8moe_triton_gpu import probe


def pytest_report_header() -> str:
    facts = probe.read_facts()
    how = (
        "interpreted (TRITON_INTERPRET=1)" if facts.interpreted else "compiled; TRITON_INTERPRET=1 runs the other half"
    )
    return f"int8moe-triton-gpu: triton {probe.triton_version() or 'is not installed'}, kernels are {how}"
