"""Kernels that take tensor maps, launched by the native hook through a driver that is a fake."""

from __future__ import annotations

from typing import Any

MAPPED = """
    from dataclasses import replace
    given = ("x.map64", "w.map8", "y.ptr")
    mapped = packed.kernel_launch(replace(record, arguments=given), 0x3007, 2)
    begin(mapped)
"""


def test_a_launch_brings_maps_of_the_operands_as_they_are(run: Any) -> None:
    """Of rows with gaps between them, and of a single row, whose stride may be any number."""
    said = run(
        f"""
    {MAPPED}
    said = [call(), calls("cuTensorMapEncodeTiled")]
    for rows, apart in ((4, 20), (1, 16), (1, 3), (3, 16)):
        x = torch.randn(100).as_strided((rows, 16), (apart, 1))
        right, gx = (x[:, None] * w).sum(-1), torch.ops.fake.on_gpu(x)
        hook.load([
            native.Row(replace(problem, m=rows), "exact", "eager", 7, 5, "cuda:0", mapped,
                       packed.conditions(record.checked, 2))], 2 + rows + apart)
        said.append([rows, apart, call()])
    print(json.dumps([said, hook.failures()]))
    """
    )
    assert said == [[["exact"], 2, [4, 20, ["exact"]], [1, 16, ["exact"]], [1, 3, ["exact"]], [3, 16, ["exact"]]], []]


def test_a_driver_that_makes_no_maps_serves_the_call_by_torch_and_the_route_stays(run: Any) -> None:
    code = f"""
    {MAPPED}
    print(json.dumps([call(), call(), calls("cuLaunchKernel"), hook.failures()]))
    """
    assert run(code, driver="old") == [["miss"], ["miss"], 0, []]


def test_a_map_that_the_driver_refuses_switches_its_route_off_and_a_broken_device_does_not(run: Any) -> None:
    said = run(
        f"""
    {MAPPED}
    said = []
    for code in (700, 0, 1, 0):
        fail("cuTensorMapEncodeTiled", code)
        said.append(call())
    print(json.dumps([said, len(hook.failures())]))
    """
    )
    assert said == [[["miss"], ["exact"], ["miss"], ["miss"]], 1]
