"""The environment variables that gemmtuned knows, with default and meaning; configs/settings.py reads them."""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.value_class import value_class


@value_class
class Variable:
    """One line of docs/reference/variables.md and of `gemmtuned doctor`."""

    name: str
    default: str
    meaning: str


_VARIABLES: Final = (
    Variable("GEMMTUNED", "0", "1: capture and dispatch; 0 or unset: nothing is patched"),
    Variable("AITER_TUNE_GEMM", "0", "1: the same, AITER's name; GEMMTUNED decides where both are set"),
    Variable("GEMMTUNED_DISPATCH", "unset", "1: dispatch without capture; 0 beside GEMMTUNED=1: capture only"),
    Variable("GEMMTUNED_DISABLE", "0", "1: everything goes to the default"),
    Variable("AITER_BYPASS_TUNE_CONFIG", "0", "1: the same, AITER's name"),
    Variable(
        "GEMMTUNED_RELOAD", "auto", "auto, start or manual: when new tables are taken up; start for several ranks"
    ),
    Variable("GEMMTUNED_HOME", "user state folder", "home of database, tables and locks"),
    Variable("GEMMTUNED_DB", "$GEMMTUNED_HOME/tune.db", "the database"),
    Variable("GEMMTUNED_CONFIG_DIR", "$GEMMTUNED_HOME/configs", "published tables, watched"),
    Variable(
        "GEMMTUNED_CACHE",
        "user cache folder",
        "where the native hook is kept, built once per torch, and kernels in CUDA C++",
    ),
    Variable("GEMMTUNED_RUN", "program name", "label of this workload in coverage reports"),
    Variable(
        "GEMMTUNED_DEVICE_LOCKS",
        "/run/lock/gemmtuned, else /run/lock, else /tmp",
        "locks by which daemons share GPUs and CPUs: one folder for all users and containers",
    ),
    Variable(
        "GEMMTUNED_TRUST", "unset", "a user (name or number) besides root and you whose published tables are used"
    ),
    Variable("GEMMTUNED_IDLE_S", "10", "clear seconds before a device counts as idle"),
    Variable(
        "GEMMTUNED_FLUSH_S",
        "1",
        "seconds between two flushes of counts to the database; of known problems: five of it",
    ),
    Variable("GEMMTUNED_NATIVE", "1", "0: never build or load the native hook: nothing is counted or routed"),
    Variable(
        "GEMMTUNED_BATCH_INVARIANT",
        "0",
        "1: dense products by kernels proven to give a row the same bits in every batch, all else by torch",
    ),
    Variable("GEMMTUNED_LIVE_CHECK", "0", "N: one routed call in N, by chance, is also computed by torch and compared"),
    Variable("GEMMTUNED_GRAPH_WAIT_S", "5", "seconds the first capture of a CUDA graph may wait for the tuned table"),
    Variable(
        "GEMMTUNED_SYNC", "unset", "URL at which the daemon shares results with other hosts (gemmtuned sync --help)"
    ),
    Variable("GEMMTUNED_SYNC_NAME", "the machine's name", "what this host is called there"),
    Variable("GEMMTUNED_SYNC_KEY", "unset", "file with the secret by which results, counts and claims are signed"),
    Variable("GEMMTUNED_SYNC_HOSTS", "all", "names or patterns of the hosts whose results are looked at"),
    Variable(
        "GEMMTUNED_RECAPTURE",
        "off",
        "idle: vLLM captures its graphs anew, when idle, for a new table; or off",
    ),
    Variable(
        "GEMMTUNED_PATCH",
        "unset",
        "patches to apply at the start, as gemmtuned.patch(...) does: transformers.moe, transformers.fp8_moe, "
        "deep_gemm, flashinfer",
    ),
    Variable(
        "GEMMTUNED_WITHOUT",
        "unset",
        "backends, or packages with backends, that the daemon and tune do without: vllm, triton, moe_*",
    ),
    Variable("GEMMTUNED_QUIET", "0", "1: a program does not say at its start that gemmtuned is on"),
)
# AITER's variables for tables of the user's own, and the family of the tables (configs/aiter_headers.py)
AITER_CONFIGS: Final = {
    "AITER_CONFIG_GEMM_BF16": "bf16",
    "AITER_CONFIG_GEMM_A8W8": "a8w8",
    "AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE": "a8w8_bpreshuffle",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE": "a8w8_blockscale",
    "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE": "a8w8_blockscale_bpreshuffle",
    "AITER_CONFIG_GEMM_A4W4": "a4w4_blockscale",
    "AITER_CONFIG_A8W8_BATCHED_GEMM": "batched_a8w8",
    "AITER_CONFIG_BF16_BATCHED_GEMM": "batched_bf16",
    "AITER_CONFIG_BATCHED_GEMM_A8W8_BLOCKSCALE_MXSCALE": "batched_mxscale",
    "AITER_CONFIG_FMOE": "fmoe",
    "AITER_CONFIG_FHMOE": "fhmoe",
    "AITER_CONFIG_GROUPED_FMOE": "grouped_fmoe",
    "AITER_CONFIG_GDN_K5_OPT": "gdn",
}
VARIABLES: Final = (
    *_VARIABLES,
    *(
        Variable(name, "unset", f"tuned tables of family {family}, colon separated")
        for name, family in AITER_CONFIGS.items()
    ),
    Variable("AITER_LOG_TUNED_CONFIG", "0", "1: log each selection once, in AITER's wording"),
)
