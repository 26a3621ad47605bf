"""The service that tunes: looks for an idle device, leases a problem, has a child measure it, publishes the verdict.

Start at `service.Daemon.turn`.  The parent process imports no torch, so it holds no device context; only the child
(`worker_main`, `search` and what they import) does.
"""
