"""Our own Triton kernels, one a file, and the record that says how each is launched.

A module of this package offers
    scored(m, n, k, units, *, arch)     (estimated us, config) of its candidates, the fastest first
    launch_record(config, problem)      grid, arguments, constants and workspace of one of them
    run(x, w, bias, config, workspace)  Y[M, N] = X[M, K] @ W[N, K].T + bias from Python

`shortlist.py` puts those of all kernels together.

All are correct for every M they accept and for any N, K, bias or none, bf16 or fp16, layout `nt`.
"""
