"""One thing that a check has seen."""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """What was seen, and what to do about it; made by :func:`ok`, :func:`note` or :func:`problem`.

    Attributes:
        check: name of the check.
        severity: "ok", "note" (worth to know, nothing is wrong) or "problem".
        text: one line.
        mend: one line, the command or variable that helps; never empty for a problem.
        details: lines such as a traceback, or "".
    """

    check: str
    severity: Severity
    text: str
    mend: str = ""
    details: str = ""


def ok(check: str, text: str) -> Finding:
    """All is well, or a plain fact."""
    return Finding(check, "ok", text)


def note(check: str, text: str, mend: str = "", details: str = "") -> Finding:
    """Worth to know; nothing has to be done."""
    return Finding(check, "note", text, mend, details)


def problem(check: str, text: str, mend: str, details: str = "") -> Finding:
    """Something is wrong, and ``mend`` helps."""
    return Finding(check, "problem", text, mend, details)
