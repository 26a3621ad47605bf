"""What can run a GEMM and how to tell that it ran it right: families, backends. Imports torch and configs only."""
