"""gemmtuned.freeze: linear layers that also keep their weight packed, on the user's word that it will not change.

No dispatcher can notice a weight that is edited in place, so a transformed copy is never kept behind the user's back.
A frozen layer stays an nn.Linear with its own parameters: state_dict, isinstance and sharing are as before; its
class is swapped for `FrozenLinear`, and back by unfreeze.  It looks up its own problem (weight state packed), then
the plain one; whenever autograd is recording, it is stock.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Final

import torch
from torch import nn

from gemmtuned.configs.errors import GemmtunedError

log = logging.getLogger("gemmtuned.hooks")
_waiting: list[weakref.ref[nn.Module]] = []  # frozen as soon as the native hook is built
_frozen: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
_PACKED: Final = (
    "_gemmtuned_packed"  # (weight, its version and address, packed copy): not a buffer, so not in state_dict
)


class FrozenLinear(nn.Linear):
    """An nn.Linear with a packed copy of its weight beside it. Made by freeze(), never directly."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear; the packed copy serves only calls that autograd does not record."""
        kept = self.__dict__.get(_PACKED)
        if kept is None or torch.is_grad_enabled() or kept[0] is not self.weight:
            return nn.functional.linear(input, self.weight, self.bias)
        if not (input.is_cpu and self.weight.is_cpu) or input.dtype is not self.weight.dtype:
            return nn.functional.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(input, self.weight, self.bias)
        _, version, address, packed = kept
        return torch.ops.gemmtuned.frozen_linear(input, self.weight, packed, self.bias, version, address)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickled or copied, it is an nn.Linear again, not frozen
        state = {name: value for name, value in self.__dict__.items() if name != _PACKED}
        return object.__new__, (nn.Linear,), state


def freeze(module: nn.Module) -> int:
    """See gemmtuned.freeze. Layers without a packed form (other dtypes, devices, subclasses) are left as they are.

    Raises GemmtunedError when the module is in training mode, and for no other reason: a program with this line runs
    on when the hook is off.
    """
    from gemmtuned.hooks.activate import current

    if module.training:
        raise GemmtunedError("freeze: the module is in training mode. Call module.eval() first")
    hook = current()
    if hook is not None and hook.path == "native":
        return _pack(module)
    if hook is None:
        log.info("nothing frozen reason='GEMMTUNED is not 1'")
    else:
        log.warning("nothing frozen yet reason=%r", hook.note or f"the hook's path is {hook.path}")
        _waiting.append(weakref.ref(module))
    return 0


def freeze_waiting() -> None:
    """Freeze what was asked for before the native hook was there."""
    waiting, _waiting[:] = list(_waiting), []
    for ref in waiting:
        module = ref()
        if module is not None and not module.training:
            _pack(module)


def _pack(module: nn.Module) -> int:
    _register_fake()
    count = 0
    with torch.no_grad():
        for layer in module.modules():
            if type(layer) is nn.Linear and _packable(layer.weight):
                try:
                    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
                except RuntimeError:  # oneDNN has no instructions for this dtype on this CPU
                    continue
                layer.__dict__[_PACKED] = (layer.weight, _version(layer.weight), layer.weight.data_ptr(), packed)
                layer.__class__ = FrozenLinear
                _frozen.add(layer)
                count += 1
    return count


def stale_note() -> str:
    """What to tell the user about frozen layers whose weights have changed or gone since; empty when there are none."""
    try:
        stale = sum(_is_stale(layer) for layer in tuple(_frozen))
    except RuntimeError:  # another thread is freezing layers
        return ""
    if not stale:
        return ""
    return f"{stale} frozen layers are served plain, their weights have changed: gemmtuned.unfreeze(model), then freeze"


def _is_stale(layer: nn.Linear) -> bool:
    kept = layer.__dict__.get(_PACKED)
    if kept is None:
        return False
    weight: torch.Tensor = kept[0]
    _, version, address, _ = kept
    return getattr(layer, "weight", None) is not weight or _version(weight) != version or weight.data_ptr() != address


def unfreeze(module: nn.Module) -> int:
    """See gemmtuned.unfreeze."""
    _waiting[:] = [ref for ref in _waiting if ref() not in (None, module)]
    count = 0
    for layer in module.modules():
        if type(layer) is FrozenLinear:
            layer.__dict__.pop(_PACKED, None)
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            _frozen.discard(layer)
            count += 1
    return count


def _packable(w: torch.Tensor) -> bool:
    return (
        type(w) is nn.Parameter
        and w.device.type == "cpu"
        and w.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and w.is_contiguous()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _version(w: torch.Tensor) -> int:
    return -1 if w.is_inference() else w._version


_fake_known = False


def _register_fake() -> None:
    global _fake_known
    if _fake_known:
        return
    _fake_known = True

    @torch.library.register_fake("gemmtuned::frozen_linear")  # type: ignore[untyped-decorator]
    def fake(
        x: torch.Tensor,
        weight: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        version: int,
        address: int,
    ) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
