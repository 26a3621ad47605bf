"""The native hook's CUDA half on a driver that is a fake: scratch memory and its owners, and who is blamed for what."""

from __future__ import annotations

from typing import Any


def test_a_launch_through_the_driver_serves_the_call_and_is_counted(run: Any) -> None:
    said = run(
        """
    begin()
    out = torch.ops.fake.on_gpu(torch.zeros(4, 8))
    torch.mm(gx, gw.t(), out=out)
    into = torch.allclose(torch.ops.fake.on_host(out), right, atol=1e-4)
    wide = torch.mm(gx, gw.t(), out_dtype=torch.float64)
    seen = sorted(f"{s.problem.out_dtype} {s.outcome} {s.calls}" for s in hook.drain())
    print(json.dumps([call(), calls("cuLaunchKernel"), into, seen, hook.left, hook.has_cuda, hook.failures()]))
    """
    )
    assert said == [["exact"], 2, True, ["fp32 exact 1", "fp64 miss 1"], {}, True, []]


def test_switching_dispatch_off_and_on_reaches_calls_that_have_been_looked_up(run: Any) -> None:
    said = run(
        """
    begin()
    said = [call()]
    for mode in (native.CAPTURE, native.CAPTURE | native.DISPATCH):
        hook.set_switches(mode)
        said += [call(), call()]
    print(json.dumps([said, calls("cuLaunchKernel")]))
    """
    )
    assert said == [[["exact"], ["miss"], ["miss"], ["exact"], ["exact"]], 3]


def test_a_kernel_of_clusters_has_so_many_times_the_thread_blocks_along_the_first_axis(run: Any) -> None:
    """As Triton's launcher has it; the driver refuses a grid that is no multiple of the cluster."""
    said = run(
        """
    from dataclasses import replace
    said = []
    for number, cluster in enumerate((1, 2, 4)):
        grid = (Axis("w.size0", 3), Axis("x.size0", 2), Axis("", 5))
        one = packed.kernel_launch(replace(record, grid=grid, cluster=cluster, shared=512), 0x3000, 2)
        hook.install()
        hook.load([native.Row(problem, "exact", "eager", number, 5, "cuda:0", one)], 1 + number)
        hook.set_switches(native.CAPTURE | native.DISPATCH)
        said.append([call(), *launched()])
    print(json.dumps([said, calls("cuLaunchKernel"), calls("cuLaunchKernelEx"), hook.failures()]))
    """
    )
    rest = [32, 1, 1, 512]  # threads, and bytes of shared memory
    assert said == [
        [
            [["exact"], [3, 2, 5], [*rest, 1, 1, 1]],
            [["exact"], [6, 2, 5], [*rest, 2, 1, 1]],
            [["exact"], [12, 2, 5], [*rest, 4, 1, 1]],
        ],
        1,
        2,
        [],
    ]


# CUDA_ERROR_ of cuda.h: OUT_OF_MEMORY, DEINITIALIZED, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT,
# CONTEXT_IS_DESTROYED, ASSERT, HARDWARE_STACK_ERROR, LAUNCH_FAILED, STREAM_CAPTURE_UNSUPPORTED to _WRONG_THREAD
BROKEN = (2, 4, 201, 400, 700, 702, 709, 710, 714, 719, *range(900, 909))
REFUSED = (1, 98, 209, 701, 999)  # INVALID_VALUE, INVALID_DEVICE_FUNCTION, NO_BINARY, OUT_OF_RESOURCES, UNKNOWN


def test_what_the_program_has_broken_is_no_fault_of_the_route(run: Any) -> None:
    said = run(
        f"""
    begin()
    said = {{}}
    for code in {BROKEN}:
        fail("cuLaunchKernel", code)
        during = [*call(), *call()]
        fail("cuLaunchKernel", 0)
        said[code] = [during, call()]
    print(json.dumps([said, hook.failures()]))
    """
    )
    assert said == [{str(code): [["miss", "miss"], ["exact"]] for code in BROKEN}, []]


def test_what_the_driver_refuses_of_the_launch_itself_switches_the_route_off(run: Any) -> None:
    said = run(
        f"""
    begin()
    said = {{}}
    for number, code in enumerate({REFUSED}):
        row = native.Row(problem, "exact", "eager", 100 + number, 5, "cuda:0", launch)
        hook.load([row], 2 + number)
        fail("cuLaunchKernel", code)
        first = call()
        fail("cuLaunchKernel", 0)
        said[code] = [first, call(), hook.failures()]
    print(json.dumps(said))
    """
    )
    for number, code in enumerate(REFUSED):
        failure = [100 + number, "failed", f"cuLaunchKernel: CUDA_ERROR_{code}"]
        assert said[str(code)] == [["miss"], ["miss"], [failure]]


def test_a_call_in_a_broken_capture_blames_nobody(run: Any) -> None:
    said = run(
        """
    begin()
    call()
    cuda.fake_capture(0x5000, 1, 2, 0x9000)  # invalidated
    said = [call()]
    cuda.fake_capture(0x5000, 0, 0, 0)
    print(json.dumps([*said, call(), hook.failures()]))
    """
    )
    assert said == [["miss"], ["exact"], []]


def test_a_status_of_cublaslt_is_the_routes_on_a_sound_device_alone(run: Any) -> None:
    said = run(
        """
    lt = lt_launch()
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    said = []
    for number, (code, state) in enumerate(((13, 0), (13, 719), (14, 700), (3, 0), (15, 0))):
        hook.load([native.Row(problem, "exact", "eager", number, 6, "cuda:0", lt)], 1 + number)
        fail("cublasLtMatmul", code)
        fail("cuStreamIsCapturing", state)
        said.append([call(), [how for _, how, _ in hook.failures()]])
    print(json.dumps([said, calls("cublasLtMatmul")]))
    """
    )
    assert said == [[[["miss"], ["failed"]], *[[["miss"], []]] * 4], 5]


def test_a_shortage_is_remembered_and_blames_nobody(run: Any) -> None:
    said = run(
        """
    begin()
    fail("cuMemAlloc_v2", 2)
    outcomes = {outcome for _ in range(1000) for outcome in call()}
    asked = calls("cuMemAlloc_v2")
    begin(lt_launch(1 << 20))
    call()
    print(json.dumps([sorted(outcomes), asked, calls("cublasLtMatmul"), hook.failures()]))
    """
    )
    assert said == [["miss"], 1, 0, []]


def test_each_stream_has_its_own_memory_also_one_whose_handle_came_again(run: Any) -> None:
    said = run(
        """
    begin()
    streams = [0x5000 + 16 * i for i in range(6)]
    for _ in range(50):
        for stream in streams:
            fake.fake_stream(stream)
            call()
    six = calls("cuMemAlloc_v2")
    cuda.fake_stream_id(streams[0], 4711)  # destroyed, and another made at the same address
    fake.fake_stream(streams[0])
    call()
    seven = calls("cuMemAlloc_v2")
    fake.fake_stream(2)  # the default stream of each thread: many streams under one handle
    per_thread = call()
    print(json.dumps([six, seven, per_thread, calls("cuMemAlloc_v2"), hook.failures()]))
    """
    )
    assert said == [6, 7, ["miss"], 7, []]


def test_threads_and_streams_at_once_are_served_right(run: Any) -> None:
    said = run(
        """
    begin()
    wrong = []

    def work(number):
        for i in range(300):
            fake.fake_stream(0x5000 + 16 * ((number + i) % 5))
            if not torch.allclose(product(), right, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    outcomes = {}
    for s in hook.drain():
        outcomes[s.outcome] = outcomes.get(s.outcome, 0) + s.calls
    print(json.dumps([wrong, outcomes, calls("cuMemAlloc_v2")]))
    """
    )
    assert said == [[], {"exact": 1200}, 5]


CAPTURES = """
    begin()
    call()
    before = cuda.fake_allocated()
    for number in range(1, 201):
        graph = 0x100000 + number
        cuda.fake_capture(0x5000, number, 1, graph)
        call()
        call()
        cuda.fake_capture(0x5000, 0, 0, 0)
"""


def test_a_launch_with_scratch_memory_leaves_a_capture_whole(run: Any) -> None:
    said = run(
        """
    begin()
    call()
    asked = calls("cuStreamGetId")
    cuda.fake_capture_state.argtypes = (ctypes.c_void_p,)
    cuda.fake_capture(0x5000, 1, 1, 0x100001)
    launched = calls("cuLaunchKernel")
    call()
    call()
    state = cuda.fake_capture_state(0x5000)
    print(json.dumps([state, calls("cuLaunchKernel") - launched, asked > 0, calls("cuStreamGetId") - asked]))
    """
    )
    assert said == [1, 2, True, 0]  # still active, both launched, and the driver was not asked for the stream's number


def test_a_graph_holds_its_memory_and_gives_it_to_the_next_when_it_is_gone(run: Any) -> None:
    said = run(
        CAPTURES
        + """
        cuda.fake_graph_gone(graph)  # as the driver calls back: nobody else tells
    one = cuda.fake_allocated() - before
    held = []
    for number in range(300, 305):  # alive side by side
        cuda.fake_capture(0x5000, number, 1, 0x200000 + number)
        call()
        cuda.fake_capture(0x5000, 0, 0, 0)
    print(json.dumps([one, cuda.fake_allocated() - before, hook.failures()]))
    """
    )
    assert said == [1 << 20, 5 << 20, []]


def test_launches_of_graphs_that_a_newer_table_would_serve_are_told_until_they_are_captured_anew(run: Any) -> None:
    said = run(
        """
    def capture(number):
        cuda.fake_capture(0x5000, number, 1, 0x100000 + number)
        assert hook.capture_begun(0) == number
        product()
        product()
        cuda.fake_capture(0x5000, 0, 0, 0)

    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    stale = [hook.stale_launches()]
    fake.fake_stream(0x5000)
    capture(1)
    stale.append(hook.stale_launches())
    begin()
    stale.append(hook.stale_launches())
    capture(2)
    stale.append(hook.stale_launches())
    hook.graph_gone(1)
    stale.append(hook.stale_launches())
    list(hook.drain())
    hook.load([], 2)  # withdrawn: what is captured has a kernel still
    print(json.dumps([*stale, hook.stale_launches()]))
    """
    )
    assert said == [0, 0, 2, 2, 0, 0]


def test_a_driver_that_holds_nothing_for_graphs_has_time_in_its_place(run: Any) -> None:
    said = run(
        CAPTURES.replace("201", "21")
        + """
        hook.graph_gone(number)
    print(json.dumps([cuda.fake_allocated() - before, hook.failures()]))
    """,
        driver="old",
    )
    assert said == [20 << 20, []], "a last replay may still run: nothing of it is another's within 30 s"


def test_a_graph_that_takes_no_memory_along_is_served_by_torch(run: Any) -> None:
    said = run(
        """
    begin()
    call()
    fail("cuGraphRetainUserObject", 1)
    cuda.fake_capture(0x5000, 1, 1, 0x100000)
    print(json.dumps([call(), hook.failures()]))
    """
    )
    assert said == [["miss"], []]


def test_a_driver_that_lacks_a_function_leaves_the_cuda_half_out_with_a_line(run: Any) -> None:
    said = run(
        """
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    on_gpu = call()
    torch.mm(x, w.t())
    print(json.dumps([hook.has_cuda, hook.left, on_gpu, [s.place for s in hook.drain()]]))
    """,
        driver="less",
    )
    assert said == [False, {"CUDA": "libcuda has no cuLaunchKernelEx"}, [], ["cpu"]]


def test_a_users_own_kernel_on_the_gpu_is_left_alone(run: Any) -> None:
    said = run(
        """
    import warnings
    warnings.simplefilter("ignore")
    lib = torch.library.Library("aten", "IMPL")
    lib.impl("mm", lambda a, b: torch.ops.fake.on_gpu(torch.full((4, 8), 42.0)), "CUDA")
    begin()
    print(json.dumps([torch.ops.fake.on_host(torch.mm(gx, gw.t())).unique().tolist(), list(hook.left)]))
    """
    )
    assert said == [[42.0], ["CUDA aten::mm"]]


FAULTS = (700, 714, 715, 716, 717, 718)
NO_FAULTS = (0, 2, 4, 600, 702, 709, 710, 719, 906)  # 600: a kernel still runs; 710: the program's own assertion


def test_a_fault_on_the_gpu_is_known_with_the_routes_that_ran_there_on_probation(run: Any) -> None:
    said = run(
        f"""
    folder = Path(f"/dev/shm/test-{{os.getpid()}}/pages")

    def page():
        address = hook.probation_page()
        return list((ctypes.c_uint32 * 4).from_address(address)) if address else None

    begin()
    call()
    hook.begin_probation(folder, 1, b'{{"run": "x", "start": ', 0)
    fail("cuStreamQuery", 700)
    said = [hook.fault(), page()]  # what ran before the probation is no part of it
    call()
    said.append(page())
    waits = calls("cuStreamSynchronize")
    for code in {FAULTS + NO_FAULTS}:
        fail("cuStreamQuery", code)
        said.append(hook.fault())
    waited = calls("cuStreamSynchronize") - waits
    for code in (710, 719, 715):
        fail("cuLaunchKernel", code)
        call()
        said.append(page())
    hook.end_probation(keep=False)
    folder.rmdir()
    folder.parent.rmdir()
    print(json.dumps([said, waited]))
    """
    )
    unasked, before, after, *asked = said[0]
    launched, refused = asked[: len(FAULTS + NO_FAULTS)], asked[len(FAULTS + NO_FAULTS) :]
    assert (unasked, before, after) == ([0, []], None, [0, 1, 0, 0])
    assert launched == [*([code, [7]] for code in FAULTS), *([0, [7]] for _ in NO_FAULTS)]
    assert refused == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 715, 0]]  # a launch that fails notes it at once
    assert said[1] == 0


MIXTURE = "moe:bf16:8x64x64,math=reduced,experts=4,topk=2,inter=32,act=silu_gated"


def test_products_inside_an_op_that_counts_itself_are_torchs_and_not_counted(run: Any) -> None:
    """In its own thread alone, and after it they are counted again; that it ended twice does no harm."""
    said = run(
        """
    begin()
    said = [call()]
    for routed in ("", "cuda:0"):
        on_probation = hook.op_begins(routed)
        inner = hook.op_begins("")
        hook.op_ends(inner)
        launched = calls("cuLaunchKernel")
        said.append([call(), calls("cuLaunchKernel") - launched, on_probation])
        other = threading.Thread(target=lambda: said.append(call()))
        other.start()
        other.join()
        hook.op_ends(on_probation)
        hook.op_ends(None)
        said.append(call())
    print(json.dumps(said))
    """
    )
    inside = [[], 0, None]
    assert said == [["exact"], inside, ["exact"], ["exact"], inside, ["exact"], ["exact"]]


def test_a_replay_counts_for_the_ops_that_count_themselves(run: Any) -> None:
    said = run(
        f"""
    import dataclasses
    mixture = Problem.parse({MIXTURE!r})
    begin()
    cuda.fake_capture(0x5000, 7, 1, 0x100007)
    number = hook.capture_begun(0)
    for outcome in ("exact", "exact", "miss"):
        hook.op_captured(mixture, outcome, "cuda:0")
    cuda.fake_capture(0x5000, 0, 0, 0)
    hook.op_captured(dataclasses.replace(mixture, act="tanh_gated"), "exact", "cuda:0")  # the key cannot hold it
    hook.op_captured(mixture, "exact", "cuda:0")  # no capture: nothing is replayed
    said = [list(hook.drain())]
    hook.graph_replayed(number, 3)
    said.append(sorted((str(s.problem), s.outcome, s.calls, s.graph, s.place) for s in hook.drain()))
    print(json.dumps([number, *said]))
    """
    )
    assert said == [7, [], [[MIXTURE, "exact", 6, True, "cuda:0"], [MIXTURE, "miss", 3, True, "cuda:0"]]]


def test_a_kernel_of_an_op_is_noted_on_probation_as_a_routes_is(run: Any) -> None:
    said = run(
        """
    folder = Path(f"/dev/shm/test-{os.getpid()}/pages")

    def page():
        address = hook.probation_page()
        return list((ctypes.c_uint32 * 4).from_address(address)) if address else None

    begin()
    said = []
    for routed in ("", "cpu", "cuda:0"):
        hook.begin_probation(folder, 1, b'{"run": "x", "start": ', 0)
        on_probation = hook.op_begins(routed)
        said.append(page())
        hook.op_ends(on_probation)
        said.append(page())
        hook.end_probation(keep=False)
    folder.rmdir()
    folder.parent.rmdir()
    print(json.dumps(said))
    """
    )
    assert said == [None, None, [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]


def test_a_program_that_forbids_tf32_to_nvidias_libraries_has_none_of_our_kernels_in_it(run: Any) -> None:
    modes = """
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    product()
    print(json.dumps([s.problem.math_mode for s in hook.drain()]))
    """

    assert run(modes) == ["tf32"]
    assert run('\n    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"', modes) == ["ieee"]
