"""A CUDA runtime that launches nothing and logs everything, for a machine without a GPU.

Stubs of libcudart, cuBLAS, cuBLASLt, cuDNN, cuSOLVER, NVRTC, NCCL and libcuda stand before torch's
own. torch's real CUDA host code runs on them: device checks, asserts, autocast, the caching
allocator, DDP over NCCL, graph capture. Memory is host memory and copies are real; kernels do
nothing; collectives move and add real numbers between real processes. Every launch, product, copy,
wait and collective is logged. Then a CPU computes what the kernel would have written
(`runtime.Values`; large tensors are left out), so that a small run has the weights of a CPU's.

It shows mixed devices, asserts that only CUDA has, waits of the host, launch counts, memory, and
whether the CUDA paths of a program compute the same numbers. It cannot show a GPU's own rounding,
races between streams, or torch.compile; of Triton's kernels, which are compiled, only the
launches. A convolution counts as one launch each way.

Tests use `tests.helpers.fakecuda`; `build.py` makes the libraries, `runtime.py` runs in the child.
"""
