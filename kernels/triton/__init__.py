"""Our own Triton kernels, one a file, and what they share.

A kernel's file ends with KERNEL, a TritonKernel (kernel.py), which says all that the rest of the code asks of it.  All
are correct for every M they accept and for any N, K, bias or none, bf16 or fp16, layout `nt`.

source.py        what a kernel is made of, so what its stamp covers
launch.py        the record of how one is launched; python_launch.py launches it from Python
to_shared.py     operands by way of a ring in shared memory: candidates and estimates
to_registers.py  operands straight into registers: loads, sums, candidates and estimates
cluster.py, split_k.py                          sums over slices of K, in a cluster or through memory
diagonal.py, load_barrier.py, thread_access.py  PTX for what Triton has no words for
inline_ptx.py    names for the operands of such PTX
"""
