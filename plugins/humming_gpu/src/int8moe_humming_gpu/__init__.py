"""An adapter to the INT8 grouped GEMM of the package humming-kernels, for NVIDIA GPUs."""
