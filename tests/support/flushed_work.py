"""A program that counts and forks, for tests of the flush."""


# ---- in a hooked process

WORK = """
    import atexit, os, sys, threading, time
    before = time.monotonic()
    import torch
    def work(n=10):
        for _ in range(n):
            torch.mm(torch.ones(4, 16), torch.ones(8, 16).t())
    work()
    """
