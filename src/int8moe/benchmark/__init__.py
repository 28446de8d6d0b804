"""Times one MoE layer against the roofline of the machine in the same run: what ``int8moe bench`` does.

One direction: request -> layers -> measure (interleaved samples) -> summary -> document -> table, JSON, plot.
Importing this package imports nothing; ``shapes``, ``request``, ``roofline``, ``summary`` and ``disturbance`` need no
torch.
"""
