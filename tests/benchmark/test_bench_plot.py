"""The plot is a picture in the format that its name says, with every kernel and limit in its legend."""

from __future__ import annotations

import struct
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from int8moe.benchmark.plot import draw


def side(label: str, seconds: float, fraction: float | None) -> dict[str, Any]:
    return {
        "label": label, "median_seconds": seconds, "quartile_seconds": [seconds * 0.9, seconds * 1.1],
        "roofline_seconds": None if fraction is None else seconds * fraction, "memory_seconds": seconds / 4,
        "fraction": fraction, "memory_fraction": 0.25,
    }  # fmt: skip


def document(*, peaks: bool = True, counts: tuple[int, ...] = (1, 16, 300)) -> dict[str, Any]:
    return {
        "shape": {"name": "tiny", "num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32},
        "machine": {"cpu": "Acme 9000"},
        "threads": 2,
        "dtype": "bfloat16",
        "disturbance": {"disturbed": True, "others": 0.2, "steal": 0.01},
        "kernels": [{"kernel": name, "label": name} for name in ("acme.fast", "acme.slow")],
        "points": [
            {
                "tokens": count,
                "kernels": [
                    side("acme.fast", count / 1e3, 0.8),
                    side("acme.slow", count / 1e2, 0.1 if peaks else None),
                ],
            }
            for count in counts
        ],
    }


def texts(svg: bytes) -> str:
    """What is written in the picture: matplotlib draws letters as paths and keeps the words as comments."""
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    return " ".join(line.strip() for line in svg.decode().splitlines() if "<!--" in line)


def test_svg_with_all_that_it_has_to_tell() -> None:
    drawn = texts(draw(document(), "svg"))
    for words in ("tiny", "Acme 9000, 2 threads", "disturbed: others took 21%", "acme.fast", "acme.slow",
                  "roofline of acme.fast", "roofline of acme.slow", "tokens a call (M)", "300"):  # fmt: skip
        assert words in drawn, words
    assert "hollow" not in drawn


def test_a_limit_that_is_only_the_memorys_is_called_so() -> None:
    drawn = texts(draw(document(peaks=False), "svg"))
    assert "memory limit of acme.slow" in drawn
    assert "roofline of acme.slow" not in drawn
    assert "hollow" in drawn


def test_png() -> None:
    drawn = draw(document(counts=(1,)), "png")
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", drawn[16:24])
    assert width > 1000
    assert height > 500


def test_the_same_document_gives_the_same_file() -> None:
    assert draw(document(), "svg") == draw(document(), "svg")
