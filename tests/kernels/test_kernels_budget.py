"""Which candidates get a place, and what our kernels expect of them: as tests/data/candidates.json has it.

That file was written by the code from before places were dealt out by one allocator and constants were data, so it
proves that neither changed.  Who changes an estimate, a candidate or a share on purpose writes it anew and says why:

    python tests/kernels/test_kernels_budget.py
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import budget, catalog
from gemmtuned.kernels.cuda import one_shot
from gemmtuned.kernels.own_kernel import Offer

SNAPSHOT = Path(__file__).parents[1] / "data" / "candidates.json"
SHAPES = (
    (576, 7168), (7168, 2048), (4096, 4096), (5120, 2880), (256, 7168), (512, 16384), (2112, 7168), (1280, 8192),
    (1536, 7168), (3072, 1536), (28672, 4096), (4096, 14336), (6144, 4096), (5120, 25600), (2880, 4096),
    (7168, 16384), (24576, 1536), (32768, 512), (128, 2048), (151936, 1024), (512, 512), (64, 64), (17, 40),
    (1001, 1032), (577, 7168), (576, 70), (40, 71), (256, 8190), (1, 4096), (8192, 8),
)  # fmt: skip
DEVICES = {"sm_90": Device("", "cuda", "", "sm_90", 132), "sm_80": Device("", "cuda", "", "sm_80", 108)}


def digest(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:12]


def offered(problem: Problem, device: Device) -> dict[str, list[Offer]]:
    """As catalog.offers, whatever compilers are here."""
    return {
        backend: [o for kernel in catalog.kernels(backend).values() for o in kernel.offers(problem, device, backend)]
        for backend in catalog.FOLDERS
    }


def state(arch: str, m: int, n: int, k: int) -> dict[str, Any]:
    """places: of each kernel, and a digest of all in their order; estimates: a digest of each kernel's."""
    problem, device = Problem(m=m, n=n, k=k), DEVICES[arch]
    offers = offered(problem, device)
    dealt = [c for found in budget.deal(problem, device, offers).values() for c in found]
    kernels = sorted({c.kernel for c in dealt})
    estimates = {
        name: [(round(us, 4), sorted(config.items())) for us, config in kernel.scored(problem, device)]
        for name, kernel in catalog.kernels("triton").items()
        if name in kernels
    }
    estimates["one_shot"] = [
        (round(us, 4), sorted(config.items())) for us, config in one_shot.scored(m, n, k, device.units, arch=arch)
    ]
    return {
        "places": [{name: sum(c.kernel == name for c in dealt) for name in kernels}, digest([str(c) for c in dealt])],
        "estimates": {name: [len(found), digest(found)] for name, found in estimates.items() if found},
    }


def states() -> dict[str, dict[str, Any]]:
    sizes = [(arch, m, n, k) for arch in DEVICES for n, k in SHAPES for m in (1, 8, 16, 32, 64, 256, 2048)]
    return {f"{arch} {m}x{n}x{k}": state(arch, m, n, k) for arch, m, n, k in sizes}


@pytest.mark.long
def test_candidates_and_estimates_are_those_of_the_snapshot() -> None:
    snapshot, now = json.loads(SNAPSHOT.read_text()), states()

    assert set(now) == set(snapshot) and len(now) == 420
    assert {key: one for key, one in now.items() if one != snapshot[key]} == {}


def test_a_kernel_that_was_not_measured_beside_the_others_has_a_few_places() -> None:
    problem, device = Problem(m=64, n=4096, k=4096), DEVICES["sm_90"]
    new = [Offer(Candidate.of("triton", kernel="new", rows=i), "triton.new", float(i), i) for i in range(1, 50)]
    offers = offered(problem, device)
    before = budget.deal(problem, device, offers)
    after = budget.deal(problem, device, {**offers, "triton": offers["triton"] + new})

    added = [c for c in after["triton"] if c.kernel == "new"]
    assert added == [o.candidate for o in new[: len(added)]] and 0 < len(added) <= 6
    assert [c for c in after["triton"] if c.kernel != "new"] == before["triton"]


def test_what_says_no_estimate_keeps_its_order_and_has_as_many_places_as_a_search() -> None:
    some = [Offer(Candidate("outside", f'{{"x":{i}}}')) for i in reversed(range(40))]
    dealt = budget.deal(Problem(m=8, n=64, k=64), DEVICES["sm_90"], {"outside": some})
    assert dealt == {"outside": [o.candidate for o in some[: budget.MOST]]}


def test_the_table_of_shares_names_kernels_and_backends_that_there_are() -> None:
    table = json.loads(Path(budget.__file__).with_suffix(".json").read_text())
    known = {f"{backend}.{name}" for backend in catalog.FOLDERS for name in catalog.kernels(backend)}
    for row in table["rows"]:
        assert set(row["kernels"]) <= known and set(row["backends"]) <= {"cublaslt", *catalog.FOLDERS}
        assert {row.get("with"), row.get("without")} - {None} <= known
    assert set(table["alike"]) <= known
    assert table["rows"][-1].keys() == {"up_to_m", "backends", "kernels"}, "the last is about all problems"


def test_parameters_are_read_from_the_files_as_they_are_in_the_kernels() -> None:
    for backend in catalog.FOLDERS:
        for name, kernel in catalog.kernels(backend).items():
            assert catalog.parameters()[f"{backend}.{name}"] == kernel.parameters


def test_every_candidate_offered_is_a_config_that_its_kernel_takes() -> None:
    for m in (1, 8, 16, 64, 256):
        for n, k in SHAPES[:4] + SHAPES[-9:]:
            problem = Problem(m=m, n=n, k=k)
            for offers in offered(problem, DEVICES["sm_90"]).values():
                for offer in offers:
                    kernel, values = catalog.kernel_of(offer.candidate)
                    assert kernel.checked(values).items() >= values.items()


if __name__ == "__main__":
    lines = [f"{json.dumps(key)}: {json.dumps(one)}" for key, one in states().items()]
    SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{len(lines)} written\n")
