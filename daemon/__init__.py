"""The service that tunes: looks for an idle device, leases a problem, has a child measure it, publishes the verdict.

Start at `service/service.py: Daemon.turn`.  The rooms, in the order in which one problem walks through them:

    service/      the loops around one turn, signals, rules of the operator, metrics, compiling ahead
    device/       who uses a device, and since when it is idle: the driver's figures, asked in a process of their own
    seats/        one device and its worker: what is leased, started, ended, and what is still to be written
    protocol/     what parent and worker say to each other
    child/        the worker's process, the only one with torch: it searches, times and checks kernels
    publishing/   from the verdicts in the database to the tables that programs read
    watch/        the socket on which the daemon tells `gemmtuned top` what it does now

What several rooms use:

    status_file.py      `daemon.json` in the home: what the daemon does, for whoever asks while it runs
    process_output.py   the output of a child process, kept for its last line
    leftovers.py        child processes that were killed and are perhaps not gone
    timer.py            when something that is done again and again is due next

The parent process imports no torch and nothing of child/, so it holds no device context.
"""
