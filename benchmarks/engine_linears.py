"""`--worker-extension-cls engine_linears.Aten`: vLLM's CPU linears as torch's own, which is what it runs on a GPU."""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class Aten:
    """Adds nothing: that this module was imported before the model is made is what counts."""
