"""Columns that somebody added to a table and that cannot be part of what is multiplied: notes, dates, figures."""

from __future__ import annotations

import re
from typing import Final

# Of columns that nobody knows these words say that they describe a row, or measure it, and are no part of the product
_REMARKS: Final = frozenset({
    "at", "by", "on", "per", "tuned", "average", "call", "exec", "execution", "gpu", "iter", "microseconds",
    "milliseconds", "min", "msecs", "nanoseconds", "nsec", "runtime", "secs", "times", "usecs",
    "abs", "after", "atol", "author", "avg", "backend", "bandwidth", "baseline", "before", "best", "branch", "bw",
    "calls", "checked", "comment", "comments", "commit", "cos", "cosine", "count", "counts", "created", "cuda",
    "date", "day", "default", "desc", "description", "diff", "driver", "duration", "efficiency", "elapsed", "err",
    "error", "errors", "errratio", "flop", "flops", "freq", "frequency", "gain", "gb", "gbps", "gbs", "gflops",
    "gib", "hash", "hits", "host", "hostname", "improvement", "index", "info", "issue", "iters", "kernel",
    "label", "latency", "layer", "layers", "lib", "library", "line", "link", "machine", "mb", "mean", "median",
    "model", "models", "ms", "mse", "msec", "name", "new", "no", "note", "notes", "ns", "number", "occurrences",
    "old", "origin", "outcome", "owner", "pct", "percent", "perf", "phase", "pr", "priority", "rank", "ratio",
    "reason", "ref", "reference", "rel", "remark", "remarks", "rmse", "rocm", "row", "rtol", "s", "sec",
    "seconds", "seq", "share", "snr", "sol", "solution", "source", "speedup", "state", "status", "std", "stddev",
    "tag", "tags", "tflops", "time", "timestamp", "todo", "torch", "trials", "triton", "updated", "uplift", "url",
    "us", "usec", "user", "util", "utilization", "valid", "verified", "version", "vs", "warmup", "weight_pct",
    "when", "who", "worst",
})  # fmt: skip
_FIGURES: Final = frozenset({
    "bytes", "calls", "count", "flop", "flops", "gb", "gflops", "gib", "iters", "mb", "ms", "ns", "s", "sec", "seconds",
    "tflops", "time", "us", "usec",
})  # fmt: skip
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def words_of(column: str) -> list[str]:
    """The words of a column's name: `time_ms`, `timeMs` and `Time (ms)` are time and ms."""
    return [word.lower() for word in _WORD.findall(column)]


def is_remark(column: str) -> bool:
    """Whether a column that nobody knows cannot be part of what the product is, by the words of its name."""
    words = words_of(column)
    numbers = [word for word in words if word.isdigit()]  # kernelName1
    if "per" in words and not _FIGURES.intersection(words):  # per_row may say how something is scaled
        return False
    return len(words) > len(numbers) and all(word in _REMARKS or (word.isdigit() and len(word) == 1) for word in words)


_FLAGS: Final = frozenset({
    "best", "checked", "default", "new", "note", "notes", "old", "outcome", "state", "status", "tuned", "valid",
    "verified",
})  # fmt: skip


def is_flag(column: str) -> bool:
    """Whether a remark of this name may be True or False."""
    return not _FLAGS.isdisjoint(words_of(column))


def is_index(column: str) -> bool:
    """Whether a first column of this name is a data frame's own numbers, which pandas writes without a name."""
    return column in ("", "Unnamed: 0", "Unnamed: 0.1")
