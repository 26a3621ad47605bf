"""The native hook, loaded with ctypes: with our_thread.py the only file that calls into c_api.cpp.

Loading needs torch imported first (it links against torch's libraries) and takes a millisecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.hooks.native.our_thread import Functions, OurThread, knows_of_forks
from gemmtuned.hooks.native.records import HOW, LAYOUT, GtFailure, PackedProblem, Record, Unread, lies_so, pack
from gemmtuned.hooks.overrides import Watch, is_torchs, registered_at

if TYPE_CHECKING:
    from gemmtuned.hooks.native.structures import OperatorCall
    from gemmtuned.hooks.native.table_rows import PackedRows, Row

__builtins__ = builtins

OFF: Final = 0
CAPTURE: Final = 1
DISPATCH: Final = 2
INVARIANT: Final = 4
_REASON_BYTES: Final = 500
_POSITIONS: Final = 11  # positions of arguments that gt_stand_before reads
# Types of arrays, made once: each holds itself, and would be garbage that a program which looks for leaks finds.
_Reason: Final = ctypes.c_char * _REASON_BYTES
_Failures: Final = GtFailure * 64
_Ids: Final = ctypes.c_int32 * 256

SIGNATURES: Final = (
    ("gt_fields", ctypes.c_char_p),
    ("gt_check_operator", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
    ("gt_prepare", ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
    ("gt_operator", ctypes.c_char_p, ctypes.c_size_t),
    ("gt_install", ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    ("gt_is_installed", ctypes.c_int, ctypes.c_size_t),
    ("gt_has_cuda", ctypes.c_int),
    ("gt_has_shims", ctypes.c_int),
    ("gt_live_check", None, ctypes.c_uint32),
    ("gt_live_cap", ctypes.c_double, ctypes.POINTER(PackedProblem), ctypes.c_double),
    (
        "gt_load_kernel",
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ),
    ("gt_set_switches", None, ctypes.c_int),
    ("gt_at_first_count", ctypes.c_int, ctypes.c_void_p),
    ("gt_thread", ctypes.c_void_p, ctypes.c_void_p),
    ("gt_sleep", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)),
    ("gt_wake", None),
    ("gt_before_python_fork", None),
    ("gt_is_held", ctypes.c_int),
    ("gt_release_gate", None),
    ("gt_watched", None, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
    ("gt_forked_us", ctypes.c_int64),
    ("gt_begin_soon", None),
    ("gt_after_python_fork", None),
    (
        "gt_probation_begin",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_uint64,
    ),
    (
        "gt_stand_before",
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_int8),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ),
    ("gt_probation_end", None, ctypes.c_int),
    ("gt_probation_page", ctypes.c_void_p, ctypes.c_int),
    ("gt_fault", ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)),
    ("gt_generation", ctypes.c_uint64),
    ("gt_dropped", ctypes.c_uint64),
    ("gt_drain", ctypes.c_size_t, ctypes.POINTER(Record), ctypes.c_size_t, ctypes.c_int),
    ("gt_capture_begun", ctypes.c_uint64, ctypes.c_int),
    ("gt_cublaslt_version", ctypes.c_uint64),
    ("gt_op_captured", None, ctypes.POINTER(PackedProblem), ctypes.c_int),
    ("gt_op_begins", ctypes.c_void_p, ctypes.c_int),
    ("gt_op_ends", None, ctypes.c_void_p),
    ("gt_graph_replayed", None, ctypes.c_uint64, ctypes.c_uint64),
    ("gt_graph_gone", None, ctypes.c_uint64),
    ("gt_stale_launches", ctypes.c_uint64),
    ("gt_show_beats", ctypes.c_int, ctypes.c_char_p),
    (
        "gt_load",
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_size_t,
    ),
    ("gt_find", ctypes.c_uint64, ctypes.POINTER(PackedProblem)),
    ("gt_padded_m", ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    ("gt_take_failures", ctypes.c_size_t, ctypes.POINTER(GtFailure), ctypes.c_size_t),
)


class NativeError(GemmtunedError):
    """The native hook cannot be loaded or installed."""


class Native(OurThread):
    """The loaded library. One per process; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        try:
            lib = Functions(str(path), SIGNATURES)
        except OSError as err:
            raise NativeError(f"{path} does not load ({err}). Run: gemmtuned doctor --build") from err
        _compare(LAYOUT, lib)
        self._lib, self._path = lib, path
        self.left: dict[str, str] = {}  # operators that somebody else has overridden -> where that was registered
        self._watch: Watch | None = None
        self._unread = Unread(lib.gt_drain)

    def install(self) -> None:
        """Put our operators in front of torch's own, for the life of the process; a second time does nothing.

        Operators that somebody else has overridden are left alone: see `left`.  Raises NativeError.
        """
        text = _Reason()
        prepared = self._lib.gt_prepare(text, len(text))
        why = text.value.decode(errors="replace")
        if prepared < 0:
            raise NativeError(f"torch refused the native hook: {why}")
        knows_of_forks(self._lib)
        self.left = {}
        if prepared == 1 and "does not load" not in why:  # without a driver there are no such calls
            self.left["CUDA"] = why
        ours, had = [], 0
        for number, operator in enumerate(self.operators()):
            if operator.startswith("CUDA ") and not self.has_cuda:
                continue
            source = registered_at(operator)
            if self._lib.gt_is_installed(number):  # by an earlier enable(); somebody may have come on top since
                had += 1
                ours.append(operator)
            elif is_torchs(source):
                if self._lib.gt_install(number, text, len(text)) == 0:
                    ours.append(operator)
            elif source:  # an operator without any kernel is nobody's
                self.left[operator] = source
        if not ours:
            raise NativeError(f"no operator is torch's own any more: {self.left}")
        self._watch = Watch(ours)
        if had:
            self.overridden(anew=True)
        with suppress(OSError):  # compiled C++ that is loaded from now on calls ours (shims.h), unless torch's is first
            ctypes.CDLL(str(self._path), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)

    @property
    def has_shims(self) -> bool:
        """True when products in compiled C++ code that is loaded from now on are counted and routed."""
        return bool(self._lib.gt_has_shims())

    def take_freed(self) -> None:
        """Install ours in front of operators that somebody else had overridden and that are torch's own again."""
        error = _Reason()
        for number, operator in enumerate(self.operators() if self.left else ()):
            if operator not in self.left or not is_torchs(registered_at(operator)):
                continue
            if self._lib.gt_install(number, error, len(error)) == 0 and self._watch is not None:
                self._watch.add(operator)
            self.left = {name: source for name, source in self.left.items() if name != operator}

    def stand_before(self, name: str, schema: str, arguments: Sequence[int], form: int, family: int = 0) -> list[str]:
        """Count an operator of another package; returns the names it is counted under: "CPU _C::onednn_mm".

        arguments: the positions of y, x, w, the scale of x, the scale of w, the bias and the result's type, then, where
        there are any, of zero points of x, sums of w, what keeps a route away where it is true, and what one scale of w
        stands for; -1: none.
        form: of W, an index of hooks/foreign.FORMS.  family: code of another package's family (configs/key.py,
        family_code), whose calls are routed as well.  Raises NativeError if the schema differs; "" fits any.
        """
        error = _Reason()
        positions = (*arguments, *[-1] * (_POSITIONS - len(arguments)))
        done = self._lib.gt_stand_before(*_as_c(name, schema, positions), form, family, error, _REASON_BYTES)
        if done < 0:
            raise NativeError(error.value.decode(errors="replace"))
        return [f"{key} {name}" for bit, key in ((1, "CPU"), (2, "CUDA")) if done & bit]

    def watch(self, operators: Iterable[str]) -> None:
        """Report in `overridden` when somebody puts a kernel on top of ours at these operators, too."""
        if self._watch is not None:
            self._watch.others(operators)

    def overridden(self, *, anew: bool = False) -> dict[str, str]:
        """Operators whose calls do not reach us, with the source of the kernel that serves them, or the reason.

        anew: include what C++ has registered since, by a dump of torch's tables, which takes a millisecond.
        """
        over = self._watch.look(anew=anew) if self._watch is not None else {}
        return {**self.left, **over}

    def operators(self) -> Iterator[str]:
        """Names of the operators that we can stand in front of, "CPU aten::mm.out", as operator_list.h has them."""
        number = 0
        while name := self._lib.gt_operator(number):
            yield name.decode()
            number += 1

    def live_check(self, every: int) -> None:
        """Compare one routed call in `every` with stock torch; 0: none."""
        self._lib.gt_live_check(every)

    def live_cap(self, problem: Problem, count: int) -> float:
        """The C++ twin of kernels.families.error.cap for `count` results; 0 where none are compared."""
        return float(self._lib.gt_live_cap(byref(pack(problem)), float(count)))

    def begin_probation(self, folder: Path, generation: int, facts: bytes, namespace: int) -> None:
        """Have the first routed call from now on make a page that routed calls are noted in (native/probation_page.h).

        folder: where such pages lie; it is made if need be.  facts: JSON up to the value of its last member, which is
        when the process began.  namespace: the inode of the PID namespace that the facts name, 0 for none.
        """
        self._lib.gt_probation_begin(os.fsencode(folder.parent), os.fsencode(folder), generation, facts, namespace)

    def end_probation(self, *, keep: bool) -> None:
        """Stop noting routed calls. keep: leave the page for others to read."""
        self._lib.gt_probation_end(keep)

    def probation_page(self, *, make: bool = False) -> int | None:
        """Address of the page, or None. make: make a page if there is none."""
        return self._lib.gt_probation_page(make)  # type: ignore[no-any-return]

    def fault(self) -> tuple[int, list[int]]:
        """(CUresult of a fault that a kernel left on a GPU, else 0; ids of routes that ran there on probation)."""
        ids, count = _Ids(), ctypes.c_size_t()
        fault = int(self._lib.gt_fault(ids, len(ids), byref(count)))
        return fault, ids[: count.value]

    def set_switches(self, switches: int) -> None:
        """OFF, or CAPTURE, DISPATCH and INVARIANT or-ed together."""
        self._lib.gt_set_switches(switches)

    @property
    def has_cuda(self) -> bool:
        """True when we stand in front of torch's CUDA operators too."""
        return bool(self._lib.gt_has_cuda())

    def load_kernel(self, device: int, image: bytes, name: str, shared_bytes: int, cluster: int) -> int:
        """Load a binary on a CUDA device for the life of the process; the handle of its kernel. Raises NativeError.

        cluster: thread blocks per cluster; more than the portable number (8) must be allowed for the kernel.
        """
        error = _Reason()
        handle = self._lib.gt_load_kernel(device, image, name.encode(), shared_bytes, cluster, error, len(error))
        if not handle:
            raise NativeError(f"kernel {name} does not load on cuda:{device}: {error.value.decode(errors='replace')}")
        return int(handle)

    def check_operator(self, facts: OperatorCall) -> None:
        """Raises NativeError where the program does not have this operator, or has it with another schema."""
        error = _Reason()
        if self._lib.gt_check_operator(byref(facts), error, len(error)) != 0:
            raise NativeError(error.value.decode(errors="replace"))

    def load(self, rows: Iterable[Row], generation: int) -> tuple[int, str]:
        """Swap in a new table; (how many rows it could not take, why). Raises NativeError without memory for it."""
        packed = _packed(self._lib, rows) if rows != () else None
        array, count = (packed.array, packed.count) if packed is not None else (None, 0)
        error = _Reason()
        if self._lib.gt_load(array, count, generation, error, len(error)) != 0:
            raise NativeError(f"the table was not taken up: {error.value.decode(errors='replace')}")
        return (packed.refused, packed.why) if packed is not None else (0, "")

    def find(self, problem: Problem, *, graph: bool = False, place: str = "cpu") -> tuple[str, int | None]:
        """(outcome, route id) that a call with this problem would get now."""
        found = self._lib.gt_find(byref(pack(problem, graph=graph, place=place)))
        return OUTCOMES[found & 0xFF], (found >> 8) - 1 if found >> 8 else None

    def drain(self, phase: str = "") -> Iterator[Sighting]:
        """All calls counted since the last drain; see Unread. phase: the one that goes on now."""
        return self._unread.drain(phase)

    def set_aside(self, phase: str) -> None:
        """What was counted until now was counted in this phase."""
        self._unread.set_aside(phase)

    def after_fork(self) -> None:
        """In a forked child."""
        self._unread.forget()

    def capture_begun(self, device: int) -> int:
        """Id of the graph capture that the current stream of this device is part of; 0 for none.

        Launches in that capture are kept until `graph_gone`.
        """
        return int(self._lib.gt_capture_begun(device))

    def op_captured(self, problem: Problem, outcome: str, place: str) -> None:
        """A call that an op counts itself was captured: its replays count, if its key fits the native 48 bytes."""
        with suppress(ProblemError):
            self._lib.gt_op_captured(byref(pack(problem, graph=True, place=place)), OUTCOMES.index(outcome))

    def op_begins(self, routed: str) -> int | None:
        """A call of an op that counts itself begins in this thread: until `op_ends`, aten's GEMMs are not counted.

        routed: the place (`cpu`, `cuda:0`) where a kernel of the table serves the op, else "".  Returns the argument
        of `op_ends`.
        """
        on_probation: int | None = self._lib.gt_op_begins(0 if not routed else 1 if routed == "cpu" else 2)
        return on_probation

    def op_ends(self, on_probation: int | None) -> None:
        """The call has ended, whether or not it raised."""
        self._lib.gt_op_ends(on_probation)

    def graph_replayed(self, capture: int, times: int) -> None:
        """Count the launches of a captured graph `times` times more."""
        self._lib.gt_graph_replayed(capture, times)

    def graph_gone(self, capture: int) -> None:
        """Forget a capture, whose graph no longer exists, as soon as its replays are drained."""
        self._lib.gt_graph_gone(capture)

    def stale_launches(self) -> int:
        """How many launches in captured graphs are torch's, though the current table would serve them."""
        return int(self._lib.gt_stale_launches())

    def show_beats(self, path: Path) -> bool:
        """Count calls in a page at this path, too, for others to see (native/beat.h). False if none can be made."""
        return bool(self._lib.gt_show_beats(os.fsencode(path)))

    @property
    def cublaslt_version(self) -> int:
        """The version of the cuBLASLt that launches call; 0 without one."""
        return int(self._lib.gt_cublaslt_version())

    def failures(self) -> list[tuple[int, str, str]]:
        """(route id, how: one of HOW, reason) of routes that failed since the last time."""
        found = _Failures()
        count = self._lib.gt_take_failures(found, len(found))
        return [(f.id, HOW[f.how], f.reason.decode(errors="replace")) for f in found[:count]]

    @property
    def generation(self) -> int:
        """Generation of the table in use."""
        return int(self._lib.gt_generation())

    @property
    def dropped(self) -> int:
        """Calls not counted because a thread saw more distinct problems than it may keep."""
        return int(self._lib.gt_dropped())

    def padded_m(self, m: int, n: int, covers: str) -> int:
        """The C++ twin of configs.padding.padded_m."""
        return int(self._lib.gt_padded_m(m, n, COVERS.index(covers)))


def _compare(layout: str, lib: Any) -> None:
    """Raises NativeError where structures of `layout` lie otherwise in the library."""
    if not lies_so(layout, (lib.gt_fields() or b"").decode()):
        raise NativeError(f"{lib._name} was built from other sources. Run: gemmtuned doctor --build")


def _packed(lib: Any, rows: Iterable[Row]) -> PackedRows:
    from gemmtuned.hooks.native import table_rows  # with the first table, as hooks/routes.py

    _compare(table_rows.LAYOUT, lib)
    return table_rows.PackedRows(rows)


@lru_cache(1024)  # asked for each of them every second
def _as_c(name: str, schema: str, arguments: tuple[int, ...]) -> tuple[bytes, bytes, Any]:
    return name.encode(), schema.encode(), (ctypes.c_int8 * len(arguments))(*arguments)
