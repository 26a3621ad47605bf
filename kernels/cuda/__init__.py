"""Our kernels in CUDA C++, for what Triton has no words for; compiled by NVRTC, launched like Triton's binaries.

one_shot.cu     a kernel; one_shot.py: its KERNEL (kernel.py), its configurations, its source with the constants of one
nvrtc.py        the compiler, and what it made before
driver.py       loading and launching a binary from Python, to measure and check it
"""
