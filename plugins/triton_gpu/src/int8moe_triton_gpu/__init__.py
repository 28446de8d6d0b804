"""INT8 fused experts for GPUs in Triton: kernel ``grouped_gemm``, on the canonical layout."""
