"""The document of ``int8moe bench`` as text for people."""

from __future__ import annotations

from typing import Any

from .output import write, write_table

_READERS = {"read_memory": "the kernel's own read_memory"}

COLUMNS = (
    "M", "kernel", "median ms", "best ms", "middle half", "GB/s", "TOPS", "roofline ms", "bound by", "of roofline",
    "others",
)  # fmt: skip


def write_document(document: dict[str, Any]) -> None:
    """Print what was measured where, the points, the comparisons, and how quiet the machine was."""
    _write_header(document)
    write("")
    write_table(COLUMNS, _rows(document), right=[name for name in COLUMNS if name not in ("kernel", "bound by")])
    if document["points"] and document["points"][0]["comparisons"]:
        write("")
        _write_comparisons(document)
    write("")
    for row in document["overhead"]:
        write(f"overhead: {_overhead(row)}")
    write(f"disturbance: {disturbance_text(document['disturbance'])}")
    for note in document["notes"]:
        write(f"note: {note}")


def _write_header(document: dict[str, Any]) -> None:
    shape, machine = document["shape"], document["machine"]
    bias = ", bias" if shape["has_bias"] else ""
    write(
        f"shape:    {shape['name']} ({shape['num_experts']} experts, top-{shape['top_k']}, hidden "
        f"{shape['hidden_size']}, intermediate {shape['intermediate_size']}, {shape['activation']}{bias}), "
        f"{document['dtype']}, routing {document['routing']}"
    )
    threads = f"{document['threads']} thread{'s' if document['threads'] != 1 else ''}"
    write(f"machine:  {machine['cpu']}, {machine['machine']} {machine['system']}, {threads}")
    pages = "" if machine["huge_pages"] is None else f", {machine['huge_pages']:.0%} on huge pages"
    for kernel in {row["kernel"]: row for row in document["kernels"]}.values():
        packing = "" if kernel["layout"] == "canonical" else f" (pack alone {_gb_per_s(kernel)})"
        write(
            f"kernel:   {kernel['kernel']} ({kernel['distribution']} {kernel['version']}), layout {kernel['layout']}, "
            f"{kernel['layers']} layer{'s' if kernel['layers'] != 1 else ''} of "
            f"{_size(kernel['weight_bytes'] // kernel['layers'])}, load+pack "
            f"{kernel['load_pack_gb_per_s']:.3g} GB/s{packing}"
        )
        reader = _READERS.get(kernel["reader"], kernel["reader"])
        peak = "not measured" if kernel["peak_tops"] is None else f"{kernel['peak_tops']:.3g} TOPS"
        write(f"roofline: read {kernel['read_gb_per_s']:.3g} GB/s (by {reader}{pages}), peak {peak}")


def _gb_per_s(kernel: dict[str, Any]) -> str:
    return f"{kernel['weight_bytes'] / max(kernel['pack_seconds'], 1e-9) / 1e9:.3g} GB/s"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for point in document["points"]:
        for index, side in enumerate(point["kernels"]):
            first, third = side["quartile_seconds"]
            limit = side["roofline_seconds"]
            rows.append(
                [
                    str(point["tokens"]) if index == 0 else "",
                    side["label"],
                    _ms(side["median_seconds"]),
                    _ms(side["best_seconds"]),
                    f"{_ms(first)}..{_ms(third)}",
                    f"{side['gb_per_s']:.1f}",
                    f"{side['tops']:.3f}",
                    _ms(limit) if limit is not None else f">={_ms(side['memory_seconds'])}",
                    side["bound"] or "unknown",
                    fraction_text(side),
                    _percent(point["disturbance"]["others"]) if index == 0 else "",
                ]
            )
    return rows


def fraction_text(side: dict[str, Any]) -> str:
    """``0.74``, or ``>=0.24`` where only the memory's limit is known; ``void (2.31)`` where the limits were not met."""
    known = side["fraction"] is not None
    text = f"{side['fraction']:.2f}" if known else f">={side['memory_fraction']:.2f}"
    return f"void ({text})" if side["fraction_void"] else text


def _write_comparisons(document: dict[str, Any]) -> None:
    rows = [
        (
            str(point["tokens"]) if index == 0 else "",
            f"{row['label']} / {row['to']}",
            f"{row['ratio']:.3f}",
            f"{row['quartiles'][0]:.3f}..{row['quartiles'][1]:.3f}",
            verdict(row),
        )
        for point in document["points"]
        for index, row in enumerate(point["comparisons"])
    ]
    write_table(("M", "time of", "ratio", "middle half", "verdict"), rows, right=("M", "ratio", "middle half"))


def verdict(comparison: dict[str, Any]) -> str:
    """One comparison in words."""
    if comparison["void"]:
        return "void: A/A differs by more than 5 %"
    if comparison["noise_check"]:
        return "A/A agrees"
    first, third = comparison["quartiles"]
    return "faster" if third < 1 else "slower" if first > 1 else "no clear difference"


def _overhead(row: dict[str, Any]) -> str:
    if row["reason"]:
        return f"not measured: {row['reason']}"
    return (
        f"{row['kernel']}: {row['call_seconds'] * 1e6:.1f} us a call on a tiny layer (best "
        f"{row['best_call_seconds'] * 1e6:.1f}), of which {row['hook_seconds'] * 1e6:.1f} us are the kernel's hook"
    )


def disturbance_text(found: dict[str, Any]) -> str:
    """How quiet the machine was."""
    state = {None: "unknown", False: "quiet", True: "disturbed"}[found["disturbed"]]
    parts = [
        f"other processes took {_percent(found['others'])} of {found['cpus']} CPUs",
        f"the hypervisor {_percent(found['steal'])}",
        f"{found['involuntary_switches']} involuntary switches in {found['seconds']:.1f} s",
    ]
    if found["load_before"] is not None:
        parts.append(f"load {found['load_before']:.2f} before, {found['load_after']:.2f} after")
    return f"{state}: {', '.join(parts)}"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.1%}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 1
        else (f"{value:.3f}")
    )
