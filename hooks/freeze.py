"""gemmtuned.freeze: linear layers keep a packed copy of their weight, which the user promises not to change.

No dispatcher can notice a weight that is edited in place, so a transformed copy is never kept behind the user's back.
A frozen layer stays an nn.Linear with its own parameters: state_dict, isinstance and sharing are as before; its
class is swapped for `FrozenLinear`, and back by unfreeze.  It looks up its own problem (weight state packed), then
the plain one.

To the rest of torch a frozen layer is F.linear: when something is active that treats F.linear in its own way (autograd,
forward mode, vmap and the like, tracing, modes, subclasses), the layer simply calls F.linear.  Each call checks that
the weight is still the one that was packed, see `fingerprint_of` in native/frozen.h.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.hooks import frozen_layers
from gemmtuned.kernels.compiling import is_exporting

log = logging.getLogger("gemmtuned.hooks")
_waiting: list[weakref.ref[nn.Module]] = []  # modules to freeze as soon as the native hook is built
_frozen: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
_PACKED: Final = "_gemmtuned_packed"  # attribute of a frozen layer; not a buffer, so not in state_dict


class _Kept(NamedTuple):
    """What a layer keeps beside its weight.

    fingerprint: identifies the weight as it was packed, so that each call can check it.  There is no reference to the
    weight itself, not even a weak one, because torch.utils.swap_tensors refuses tensors that have any.  storage:
    reserves the identity of the weight's storage, without keeping its memory.
    """

    fingerprint: list[int]
    packed: torch.Tensor
    storage: StorageWeakRef

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a layer has another weight, which is not packed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class FrozenLinear(nn.Linear):
    """An nn.Linear with a packed copy of its weight beside it. Made by freeze(), never directly."""

    __module__ = nn.Linear.__module__  # torch.fx looks into modules that are not torch's own

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear; the packed copy serves a call only while nothing is active that has to see F.linear."""
        kept = self.__dict__.get(_PACKED)
        weight, bias = self.weight, self.bias
        if (
            kept is None
            or torch.is_grad_enabled()
            or type(input) not in _PLAIN
            or type(weight) not in _PLAIN
            or (bias is not None and type(bias) not in _PLAIN)
            or not (input.is_cpu and weight.is_cpu)
            or not (input.layout is weight.layout is torch.strided)
            or input.dtype is not weight.dtype
            or torch.is_autocast_enabled("cpu")
            or _somebody_looks_on()
        ):
            return nn.functional.linear(input, weight, bias)
        return torch.ops.gemmtuned.frozen_linear(input, weight, kept.packed, bias, kept.fingerprint)  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickled or copied, it is an nn.Linear again, not frozen
        if type(self) is not FrozenLinear:  # parametrized meanwhile: torch has a message for that
            return super().__reduce_ex__(protocol)
        state = {name: value for name, value in self.__dict__.items() if name != _PACKED}
        return object.__new__, (nn.Linear,), state

    def __prepare_scriptable__(self) -> nn.Linear:
        """What torch.jit.script compiles in its place: the layer, no longer frozen."""
        _thaw(self)
        return self


_PLAIN: Final = (torch.Tensor, nn.Parameter)


def _somebody_looks_on() -> bool:
    """Whether a mode, a transform or a tracer is active, which has to see F.linear itself."""
    if is_exporting():  # exported programs run where gemmtuned is not
        return True
    if torch.compiler.is_compiling():  # compiled code calls our operator, which has kernels for all of these (frozen.h)
        return False
    return (
        torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def freeze(module: nn.Module) -> int:
    """See gemmtuned.freeze. Layers without a packed form (other dtypes, devices, subclasses) are left as they are.

    Raises GemmtunedError when the module is in training mode, TypeError for what is no module, and nothing else: a
    program with this line runs on when the hook is off.
    """
    from gemmtuned.hooks.activate import current

    if _module("freeze", module).training:
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


def _module(what: str, given: Any) -> nn.Module:
    """What was given, where it is a module. Raises TypeError, naming what it was given to."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"{what}: expected a torch.nn.Module, got {type(given).__name__}")
    return given


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
                layer.__dict__[_PACKED] = _Kept(_fingerprint(layer.weight), packed, _storage(layer.weight))
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
    weight = getattr(layer, "weight", None)
    if weight is None or type(weight) not in _PLAIN or not weight.is_cpu or weight.layout is not torch.strided:
        return True  # a subclass may have its own way with our operator, too
    return bool(_fingerprint(weight) != kept.fingerprint)


def unfreeze(module: nn.Module) -> int:
    """See gemmtuned.unfreeze."""
    _waiting[:] = [ref for ref in _waiting if ref() not in (None, module)]
    count = 0
    for layer in _module("unfreeze", module).modules():
        if type(layer) is FrozenLinear:
            _thaw(layer)
            count += 1
    return count


def _thaw(layer: nn.Linear) -> None:
    layer.__dict__.pop(_PACKED, None)
    layer.__class__ = nn.Linear
    _frozen.discard(layer)


def _packable(w: torch.Tensor) -> bool:
    return (
        type(w) is nn.Parameter
        and w.device.type == "cpu"
        and w.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and w.is_contiguous()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _storage(weight: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _fingerprint(weight: torch.Tensor) -> list[int]:
    return [int(number) for number in torch.ops.gemmtuned.frozen_fingerprint(weight.detach())]


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
        fingerprint: list[int],
    ) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])


frozen_layers.when_native.append(freeze_waiting)
frozen_layers.notes.append(stale_note)
