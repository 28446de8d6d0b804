"""Fixtures that several test folders share."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin_folder import PluginFolder


def pytest_configure() -> None:
    """A shell starts jobs in the background with Ctrl-C ignored, and programs that tests interrupt inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def plugins(tmp_path: Path) -> PluginFolder:
    folder = tmp_path / "site"
    folder.mkdir()
    return PluginFolder(folder)


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def isolated(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in a fresh process."""
    return PluginFolder(tmp_path).run
