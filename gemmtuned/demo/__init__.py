"""What `gemmtuned demo` runs: program.py, a small decoder that knows nothing of us, and loop.py, which drives it."""
