"""One device, the worker that sits at it, and what it works on."""
