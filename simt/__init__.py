"""Runs CUDA and Metal kernels on the CPU; see README.md beside this file."""
