"""The native hook where a thread ends, and where the program has set another locale."""

import os
import subprocess
from pathlib import Path

import pytest
from hooked import HERE, LINEAR, Home

from gemmtuned.hooks.native import records
from gemmtuned.hooks.native.build import compiler
from gemmtuned.hooks.op_counts import OpCounts


def compiled(source: Path, folder: Path) -> Path:
    """A C or C++ file of the tests as a library."""
    cxx = compiler()
    assert cxx is not None
    library = folder / f"{source.stem}.so"
    language = "c" if source.suffix == ".c" else "c++"
    subprocess.run([cxx, "-x", language, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    return library


def test_ops_counted_in_a_child_that_c_forked_are_its_own_and_the_parents_are_not() -> None:
    counts, cuda = OpCounts(), "cuda:0"
    counts.add(LINEAR, cuda)
    counts.dropped = 3
    reads, writes = os.pipe()
    child = os.fork()  # an object that no hook knows: nobody tells it of the fork, as of one by C code
    if child == 0:
        counts.reset()  # what the hook does once it sees that it is in a child, which is before its first count
        counts.add(LINEAR, cuda)
        counts.add(LINEAR, cuda)
        counts.reset()
        os.write(writes, f"{[s.calls for s in counts.drain()]} {counts.dropped}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with open(reads) as file:
        assert file.read() == "[2] 0"
    assert [s.calls for s in counts.drain()] == [1] and counts.dropped == 3


def test_a_call_of_an_op_asks_once_whether_its_process_was_forked(home: Home) -> None:
    """For half a microsecond each time."""
    done = home.run(
        """
        import json, sys, torch
        from gemmtuned.configs import processes
        from gemmtuned.hooks import activate
        from hooked import LINEAR

        asked, own_process = [], processes.own_process
        for name, module in list(sys.modules.items()):
            if name.startswith("gemmtuned.") and vars(module).get("own_process") is own_process:
                module.own_process = lambda: asked.append(1) or own_process()
        calls = []
        for _ in range(3):
            before = len(asked)
            activate.current().count_op(LINEAR, "cpu")
            calls.append(len(asked) - before)
        print(json.dumps(calls))
        """,
        GEMMTUNED_FLUSH_S="60",
    )
    assert done.said == [1] * 3
    assert home.calls() == 3


def test_products_of_a_thread_that_is_at_its_end_are_counted_and_leave_nothing(home: Home, tmp_path: Path) -> None:
    """Each of these calls comes after the destructors of C++'s own, or before, or after those of the keys."""
    done = home.run(
        """
        import ctypes, json, sys, torch
        from gemmtuned.hooks import activate

        torch.set_num_threads(1)
        with torch.no_grad():
            tensors = [torch.zeros(4, 8), torch.randn(4, 16), torch.randn(16, 8)]
        handles = [*map(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor, tensors)]
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        places = [ctypes.c_void_p(pointer(handle, None)) for handle in handles]
        hook = activate.current()
        threads, product = ctypes.CDLL(sys.argv[1]), hook.native._lib["aoti_torch_cpu_mm_out"]
        threads.run.argtypes = [ctypes.c_size_t, ctypes.c_int]
        early = threads.make_key()
        threads.take(product, *places)
        torch.mm(*tensors[1:])
        late = threads.make_key()

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def run(count):
            for how in (0, early, late):
                assert threads.run(how, count) == 0

        run(100)
        before = resident()
        run(1000)
        print(json.dumps(resident() - before))
        """,
        str(compiled(HERE / "thread_ends.c", tmp_path)),
    )

    assert home.calls() == 1 + 2 * 3 * 1100
    assert done.said < 8 << 20  # 36 MiB where the counters of each stay


def test_a_table_that_a_call_is_reading_stays_until_it_has_read_it(home: Home, tmp_path: Path) -> None:
    """The thread waits in the middle of its look-up; glibc overwrites what is freed meanwhile."""
    done = home.run(
        """
        import ctypes, json, sys, threading
        from gemmtuned.configs.problem import Problem
        from gemmtuned.hooks import activate, native
        from gemmtuned.hooks.native.records import pack

        hook, stall = activate.current(), ctypes.CDLL(sys.argv[1])
        hook.flusher.stop()
        ctypes.CDLL(None).mallopt(-6, 0xA5)  # M_PERTURB
        problems = [Problem(m=m, n=8, k=16, dtype="fp32") for m in range(1, 100)]
        rows = [native.Row(p, "exact", "eager", number, 0) for number, p in enumerate(problems)]
        hook.native.load(rows, 1)
        key = pack(problems[42])
        stall.copied.restype = ctypes.c_void_p
        at = stall.copied(ctypes.byref(key), ctypes.c_size_t(ctypes.sizeof(key)))
        found = []
        find = hook.native._lib.gt_find
        reader = threading.Thread(target=lambda: found.append(find(ctypes.cast(at, find.argtypes[0]))))
        reader.start()
        stall.wait_for_reader()
        for generation in (2, 3):
            hook.native.load((), generation)
        stall.let_go()
        reader.join()
        print(json.dumps([(found[0] >> 8) - 1, found[0] & 0xFF, hook.native.find(problems[42])]))
        """,
        str(compiled(HERE / "stalled_reader.c", tmp_path)),
    )

    assert done.said == [42, 1, ["miss", None]], "of the table that was in use when it began"


def test_schemas_are_read_alike_whatever_locale_the_program_has_set(home: Home, tmp_path: Path) -> None:
    """Numbers with separators: what an operator's schema was when it was tuned is what it is."""
    source = tmp_path / "grouping.cpp"
    source.write_text(
        """
        #include <locale>
        struct Grouping : std::numpunct<char> {
          char do_thousands_sep() const override { return '.'; }
          char do_decimal_point() const override { return ','; }
          std::string do_grouping() const override { return "\\3"; }
        };
        extern "C" void group() { std::locale::global(std::locale(std::locale(), new Grouping)); }
        """
    )
    done = home.run(
        """
        import ctypes, json, sys, torch
        from gemmtuned.hooks import activate
        from gemmtuned.hooks.native.structures import OperatorCall

        one = torch.library.Library("locales", "DEF")
        one.define("mm(Tensor x, Tensor w, int block=4096, float eps=0.5) -> Tensor")
        one.impl("mm", lambda x, w, block=4096, eps=0.5: x @ w, "CPU")
        schema = str(torch.ops.locales.mm.default._schema)
        ctypes.CDLL(sys.argv[1]).group()
        call = OperatorCall(count=2, name=b"locales::mm", schema=schema.encode())
        native = activate.current().native
        native.check_operator(call)
        names = native.stand_before("locales::mm", "", [-1, 0, 1, -1, -1, -1, -1], 2)
        print(json.dumps([schema, str(torch.ops.locales.mm.default._schema) == schema, names]))
        """,
        str(compiled(source, tmp_path)),
    )

    schema, is_same, names = done.said
    assert "block=4096, float eps=0.5" in schema and not is_same  # torch's own text has changed: the locale is set
    assert names == ["CPU locales::mm"]


def test_the_first_problems_of_a_process_are_made_once_and_no_more_than_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_KNOWN", 2)
    monkeypatch.setattr(records, "_known", {})
    packed = [records.Record(key=records.pack(LINEAR.with_m(m)), calls=(0, 0, 1)) for m in (1, 2, 3)]
    first, again = ([next(records.sightings(one)).problem for one in packed] for _ in range(2))

    assert [p.m for p in first] == [1, 2, 3] and first == again
    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True, False]
    assert len(records._known) == 2


def test_a_product_of_no_size_is_torchs_own_and_no_problem(home: Home) -> None:
    done = home.run(
        """
        import json, torch
        from gemmtuned.hooks import activate

        hook = activate.current()
        hook.flusher.stop()
        sums = []
        for m, n, k in ((4, 8, 0), (0, 8, 16), (4, 0, 16)):
            x, w = torch.ones(m, k), torch.ones(k, n)
            for y in (torch.mm(x, w), torch.addmm(torch.zeros(n), x, w), torch.bmm(x[None], w[None])[0]):
                assert y.shape == (m, n)
                sums.append(y.sum().item())
        print(json.dumps([sums, len(list(hook.native.drain()))]))
        """
    )
    assert done.said == [[0.0] * 9, 0]
