"""``python -m int8moe`` is ``int8moe``."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
