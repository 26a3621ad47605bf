"""gemmtuned.freeze: packed weights, and every way in which a packed copy must not be used."""

from dataclasses import replace

import pytest
from frozen_program import START
from hooked import LINEAR, Home, publish, published

PACKED = replace(LINEAR, bias=True, weight_state="packed")


USES = """
    said = {}
    with torch.no_grad():
        for bias in (True, False):
            m = model(bias)
            right = m(x)
            counts()
            froze = gemmtuned.freeze(m)
            y = m(x)
            said[f"bias={bias}"] = [froze, torch.allclose(y, right, atol=1e-5), y.stride() == right.stride(), counts()]
        m = model()
        gemmtuned.freeze(m)
        x3 = torch.randn(2, 3, 16)
        plain = nn.functional.linear(x3, m[0].weight, m[0].bias)
        counts()
        y = m(x3)
        same = [torch.allclose(y, plain, atol=1e-5), y.shape == plain.shape, y.stride() == plain.stride()]
        said["3-D"] = [*same, counts()]
        one = m(x[0])
        said["1-D"] = [one.shape == (8,), torch.allclose(one, m(x)[0], atol=1e-5)]
        said["empty"] = [tuple(m(x[:0]).shape), tuple(m(x.new_empty(2, 0, 16)).shape)]
        wide = torch.randn(4, 32)[:, ::2]
        counts()
        same = torch.allclose(m(wide), nn.functional.linear(wide, m[0].weight, m[0].bias))
        said["strided x is declined"] = [same, counts()]
        said["again"] = gemmtuned.freeze(m)
        said["is"] = [isinstance(m[0], nn.Linear), list(m.state_dict()) == ["0.weight", "0.bias"]]
        twins = [copy.deepcopy(m), pickle.loads(pickle.dumps(m))]
        said["copies"] = [[type(t[0]) is nn.Linear, torch.allclose(t(x), m(x), atol=1e-5)] for t in twins]
        said["vmap"] = torch.allclose(torch.vmap(m)(x3), m(x3), atol=1e-5)
        counts()
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        said["compile"] = [torch.allclose(compiled(x), m(x), atol=1e-5), counts()]
    said["unfreeze"] = [gemmtuned.unfreeze(m), type(m[0]) is nn.Linear, gemmtuned.unfreeze(m)]
    said["failures"] = hook.native.failures()
    print(json.dumps(said))
    """


@pytest.mark.long
def test_a_frozen_layer_uses_its_packed_weight_and_is_still_a_linear_layer(home: Home) -> None:
    home.path.mkdir()
    rows = [published(p, "onednn_packed") for p in (PACKED, replace(PACKED, bias=False), replace(PACKED, m=6))]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        START + USES,
        GEMMTUNED_RELOAD="manual",
    )
    hit = "fp32:4x8x16+bias,weight=packed exact"

    assert done.said == {
        "bias=True": [1, True, True, {hit: 1}],
        "bias=False": [1, True, True, {"fp32:4x8x16,weight=packed exact": 1}],
        "3-D": [True, True, True, {"fp32:6x8x16+bias,weight=packed exact": 1}],
        "1-D": [True, True],
        "empty": [[0, 8], [2, 0, 8]],
        "strided x is declined": [True, {f"fp32:4x8x16+bias,layout=st{w} miss": 1 for w in ("", ",weight=packed")}],
        "again": 0,
        "is": [True, True],
        "copies": [[True, True], [True, True]],
        "vmap": True,
        "compile": [True, {hit: 2}],
        "unfreeze": [1, True, 0],
        "failures": [],
    }  # fmt: skip


def test_a_weight_that_changed_after_freezing_is_served_plain(home: Home) -> None:
    home.path.mkdir()
    both = [PACKED, replace(PACKED, dtype="bf16", wdtype="bf16", out_dtype="bf16")]
    publish(home.path / "configs", [published(p, "onednn_packed") for p in both], 1)
    done = home.run(
        START
        + """
    changes = {
        "in place": lambda m: m[0].weight.mul_(2),
        "optimizer": lambda m: m[0].weight.add_(torch.ones_like(m[0].weight), alpha=0.1),
        "load_state_dict": lambda m: m.load_state_dict(model().state_dict()),
        "other memory": lambda m: setattr(m[0].weight, "data", torch.randn(8, 16)),
        "other parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(8, 16))),
        "other dtype": lambda m: m.to(torch.bfloat16),
        "double": lambda m: m.double(),
    }
    said = {}
    with torch.no_grad():
        for name, change in changes.items():
            m = model()
            gemmtuned.freeze(m)
            before = m(x)
            change(m)
            v = x.to(m[0].weight.dtype)
            right = nn.functional.linear(v, m[0].weight, m[0].bias)
            counts()
            same = torch.equal(m(v), right)
            said[name] = [same, [key.split(",")[-1] for key in counts()]]
    print(json.dumps([said, hook.native.failures()]))
    """,
        GEMMTUNED_RELOAD="manual",
    )
    said, failures = done.said

    assert failures == []
    for name, (same, keys) in said.items():
        assert same, name
        assert "weight=packed" not in str(keys), name


def test_without_a_packed_solution_a_frozen_layer_takes_the_plain_one_and_then_torch(home: Home) -> None:
    home.path.mkdir()
    fails = replace(PACKED, n=5)
    rows = [published(replace(LINEAR, bias=True), "torch_swap"), published(fails, "torch_mv")]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        START
        + """
    with torch.no_grad():
        m = model()
        gemmtuned.freeze(m)
        counts()
        swapped = torch.addmm(m[0].bias.unsqueeze(1), m[0].weight, x.t()).t()
        counts()
        said = [torch.equal(m(x), swapped), counts()]
        y = m(torch.cat([x, x]))
        said += [torch.equal(y, nn.functional.linear(torch.cat([x, x]), m[0].weight, m[0].bias)), counts()]
    print(json.dumps(said))
    """,
        GEMMTUNED_RELOAD="manual",
    )
    miss = "fp32:8x8x16+bias"

    assert done.said == [
        True, {"fp32:4x8x16+bias,weight=packed miss": 1},
        True, {f"{miss},weight=packed miss": 1, f"{miss} miss": 1},
    ]  # fmt: skip


def test_where_the_program_has_switched_onednn_off_it_multiplies_nothing(home: Home) -> None:
    """Neither by a packed weight nor by a plain one."""
    home.path.mkdir()
    publish(home.path / "configs", [published(PACKED, "onednn_packed"), published(replace(LINEAR, m=6), "onednn")], 1)
    done = home.run(
        START
        + """
    def outcomes():
        m(x), torch.mm(torch.cat([x, x[:2]]), torch.ones(8, 16).t())
        return sorted(key.rpartition(" ")[2] for key in counts())

    with torch.no_grad():
        m = model()
        gemmtuned.freeze(m)
        counts()
        said = [outcomes()]
        with torch.backends.mkldnn.flags(enabled=False):
            said.append(outcomes())
            said.append(torch.equal(m(x), nn.functional.linear(x, m[0].weight, m[0].bias)))
    print(json.dumps(said))
    """,
        GEMMTUNED_RELOAD="manual",
    )
    assert done.said == [["exact", "exact"], ["miss", "miss"], True]


def test_training_autocast_and_errors_are_torchs_own(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(PACKED, "onednn_packed")], 1)
    done = home.run(
        START
        + """
    m, twin = model(), model()
    twin.load_state_dict(m.state_dict())
    said = {"training": raises(lambda: gemmtuned.freeze(model().train()))}
    gemmtuned.freeze(m)
    m(x).sum().backward()
    twin(x).sum().backward()
    said["grad"] = torch.equal(m[0].weight.grad, twin[0].weight.grad)
    with torch.no_grad():
        with torch.autocast("cpu"):
            said["autocast"] = torch.equal(m(x), twin(x))
        wrong = [x[:, :10], x.double(), x.view(2, 8, 4), x.to(torch.int32), torch.ones(()), torch.ones(2, 8, 10)]
        said["errors"] = [raises(lambda: m(v)) == raises(lambda: twin(v)) != None for v in wrong]
    with torch.inference_mode():
        frozen = nn.Sequential(nn.Linear(16, 8)).eval()
        right = frozen(x)
        said["made in inference mode"] = [gemmtuned.freeze(frozen), torch.allclose(frozen(x), right, atol=1e-5)]
    others = nn.Sequential(nn.Linear(16, 8).double(), nn.Bilinear(2, 2, 2), nn.LSTM(4, 4)).eval()
    said["left alone"] = gemmtuned.freeze(others)
    gemmtuned.disable()
    with torch.no_grad():
        said["disabled"] = torch.equal(m(x), twin(x))
    said["off"] = gemmtuned.freeze(model())
    print(json.dumps(said))
    """,
        GEMMTUNED_RELOAD="manual",
    )
    said = done.said

    assert said.pop("training").endswith("the module is in training mode. Call module.eval() first")
    assert said.pop("off") == 0  # switched off, the line does nothing
    assert said == {
        "grad": True,
        "autocast": True,
        "errors": [True] * 6,
        "made in inference mode": [1, True],
        "left alone": 0,
        "disabled": True,
    }


COMES_BACK = """
    from torch.autograd import _unsafe_preserve_version_counter as keep_version

    def emptied_and_set(w, new):
        w.data = torch.empty(0)
        w.data = new()

    def storage_resized(w, new):
        values = new()
        storage, size = w.untyped_storage(), w.untyped_storage().nbytes()
        with keep_version(w):
            storage.resize_(0)
            storage.resize_(size)
            w.copy_(values)

    def edited_under_data(w, new):
        w.data.mul_(2)

    def swapped(w, new):
        other = torch.nn.Parameter(new())
        w.data, other.data = other.data, w.data

    said = {}
    with torch.no_grad():
        for change in (emptied_and_set, storage_resized, edited_under_data, swapped):
            wrong = 0
            for n in (64, 96, 128) * 8:
                m = nn.Linear(n, n).eval()
                assert gemmtuned.freeze(m) == 1
                v = torch.randn(4, n)
                m(v)
                change(m.weight, lambda: torch.randn(n, n))
                wrong += not torch.allclose(m(v), v @ m.weight.t() + m.bias, atol=1e-3)
            said[change.__name__] = wrong
        wrong = 0
        models = [nn.Linear(128, 128).eval() for _ in range(20)]
        gemmtuned.freeze(nn.Sequential(*models).eval())
        whole = nn.Sequential(*models)
        whole.half()
        for layer in models:  # as a checkpoint comes in
            layer.weight.data.copy_(torch.randn(128, 128))
        whole.float()
        v = torch.randn(4, 128)
        said["half_float"] = sum(not torch.allclose(m(v), v @ m.weight.t() + m.bias, atol=1e-3) for m in models)
        again = nn.Linear(128, 128).eval()
        gemmtuned.freeze(again)
        again.half()
        again.float()
        said["half_float_alone"] = not torch.allclose(again(v), v @ again.weight.t() + again.bias, atol=1e-3)
    print(json.dumps([said, hook.native.failures()]))
    """


def test_memory_that_comes_back_is_not_taken_for_the_weight_that_was_packed(home: Home) -> None:
    """Addresses come again, versions stay: what was packed is known by its storage and its content."""
    home.path.mkdir()
    sizes = dict.fromkeys((64, 96, 128), None)
    rows = [published(replace(PACKED, m=4, n=n, k=n), "onednn_packed") for n in sizes]
    publish(home.path / "configs", rows, 1)
    done = home.run(
        START + COMES_BACK,
        GEMMTUNED_RELOAD="manual",
    )
    said, failures = done.said

    assert failures == []
    assert said == {
        "emptied_and_set": 0,
        "storage_resized": 0,
        "edited_under_data": 0,
        "swapped": 0,
        "half_float": 0,
        "half_float_alone": False,
    }


def test_a_frozen_layer_holds_no_memory_of_a_weight_that_was_replaced(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(PACKED, "onednn_packed")], 1)
    done = home.run(
        START
        + """
    import gc, weakref
    m = model()
    gemmtuned.freeze(m)
    old = weakref.ref(m[0].weight)
    memory = torch.multiprocessing.reductions.StorageWeakRef(m[0].weight.untyped_storage())
    m[0].weight = nn.Parameter(torch.randn(8, 16))
    gc.collect()
    print(json.dumps([old() is None, memory.expired()]))
    """,
        GEMMTUNED_RELOAD="manual",
    )
    assert done.said == [True, True]
