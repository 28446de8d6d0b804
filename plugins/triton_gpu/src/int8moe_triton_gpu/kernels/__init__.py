"""The device code, one file a step of docs/numerics.md. Importing these files imports triton."""
