"""The GPU kernels."""
