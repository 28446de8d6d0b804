"""Where the comparison with peers is; importing this lets its modules be imported, as they import each other."""

from __future__ import annotations

import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))
