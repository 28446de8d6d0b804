"""``python -m int8moe.cli`` is ``int8moe``."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
