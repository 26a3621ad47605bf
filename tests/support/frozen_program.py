"""How programs with a frozen layer begin."""

START = """
    import copy, json, pickle, torch, warnings
    from torch import nn
    import gemmtuned
    from gemmtuned.configs.errors import GemmtunedError
    from gemmtuned.hooks import activate
    hook = activate.current()
    hook.flusher.stop()
    gemmtuned.reload()
    x = torch.randn(4, 16)

    def model(bias=True):
        return nn.Sequential(nn.Linear(16, 8, bias=bias)).eval()

    def counts():
        sums = {}
        for s in hook.native.drain():
            key = f"{s.problem} {s.outcome}".replace(",threads=2", "")
            sums[key] = sums.get(key, 0) + s.calls
        return sums

    def raises(run):
        try:
            run()
        except Exception as err:
            return f"{type(err).__name__}: {err}"
    """
