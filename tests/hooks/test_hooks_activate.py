"""On and off: what is patched, what is imported, and what a program sees of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hooked import STUB, Home

from gemmtuned.hooks.native.build import build, library_path

LOADED = """
    import json, sys, torch
    ours = sorted(m for m in sys.modules if m.startswith("gemmtuned"))
    heavy = sorted(m for m in ("sqlite3", "watchdog", "sqlite_utils", "pandas") if m in sys.modules)
    linear = type(torch.nn.functional.linear).__name__
    print(json.dumps([ours, heavy, linear, "c_api.cpp" in torch._C._dispatch_dump("aten::mm")]))
    """


@pytest.mark.long
@pytest.mark.parametrize("env", [{"AITER_TUNE_GEMM": ""}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
def test_switched_off_nothing_is_patched_and_nothing_imported(home: Home, env: dict[str, str]) -> None:
    ours, heavy, stock, in_front = home.run(LOADED, fresh=True, **env).said

    assert ours == ([] if "TORCH_DEVICE_BACKEND_AUTOLOAD" in env else STUB)
    assert heavy == []
    assert stock == "builtin_function_or_method"
    assert not in_front
    assert not home.path.exists()


@pytest.mark.parametrize(
    "env",
    [{"AITER_TUNE_GEMM": "2"}, {"GEMMTUNED_RELOAD": "sometimes"}],
)
def test_a_wrong_setting_is_named_and_the_program_runs_on_stock_torch(home: Home, env: dict[str, str]) -> None:
    done = home.run(
        "import json, torch; print(json.dumps(torch.mm(torch.ones(2, 3), torch.ones(3, 2)).sum().item()))",
        **env,
    )

    ((name, value),) = env.items()
    assert done.said == 12.0
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("gemmtuned: not active")
    assert name in done.err
    assert repr(value) in done.err


def test_enable_and_disable_take_every_patch_back_but_the_operators_which_pass_calls_on(home: Home) -> None:
    done = home.run(
        """
        import json, os, torch, threading
        import torch.nn.functional as F
        import gemmtuned
        torch.set_num_threads(1)
        tasks = len(os.listdir("/proc/self/task"))

        def in_front():
            return "c_api.cpp" in torch._C._dispatch_dump("aten::mm")

        def threads():
            return [t.name for t in threading.enumerate()], len(os.listdir("/proc/self/task")) - tasks

        x, w, stock = torch.randn(4, 16), torch.randn(8, 16), F.linear
        seen = []
        for _ in range(3):
            seen.append([gemmtuned.is_enabled(), in_front(), threads(), F.linear is stock])
            gemmtuned.enable()
            gemmtuned.enable(dispatch=False)  # the second replaces the first
            F.linear(x, w)
            seen.append([gemmtuned.is_enabled(), in_front(), threads(), gemmtuned.status()["path"]])
            gemmtuned.disable()
            F.linear(x, w)
        gemmtuned.disable()
        print(json.dumps([seen, gemmtuned.status()["path"], gemmtuned.generation(), gemmtuned.reload()]))
        """,
        AITER_TUNE_GEMM="0",
    )
    seen, path, generation, reloaded = done.said

    main = ["MainThread"]
    assert seen[0::2] == [[False, before, [main, 0], True] for before in (False, True, True)]
    assert seen[1::2] == [[True, True, [main, 1], "native"]] * 3
    assert (path, generation, reloaded) == ("off", 0, 0)
    assert home.calls() == 3
    assert done.err == ""


@pytest.mark.long
@pytest.mark.parametrize("tune", ["0", "1"])
def test_enable_works_before_torch_is_imported_and_the_package_alone_does_not_import_it(home: Home, tune: str) -> None:
    done = home.run(
        """
        import json, sys, gemmtuned
        before = "torch" in sys.modules
        gemmtuned.enable()
        import torch
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        print(json.dumps([before, gemmtuned.status()["path"], gemmtuned.status()["note"]]))
        """,
        fresh=True,
        AITER_TUNE_GEMM=tune,
    )

    assert done.said == [False, "native", ""]
    assert done.err == ""
    assert home.calls() == 1


@pytest.mark.long
def test_calls_in_other_threads_survive_enable_and_disable(home: Home) -> None:
    done = home.run(
        """
        import json, threading, torch, gemmtuned
        x, w = torch.randn(4, 16), torch.randn(8, 16).t()
        right, stop, wrong = torch.mm(x, w), threading.Event(), []

        def work():
            while not stop.is_set():
                if not torch.equal(torch.mm(x, w), right):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        for _ in range(15):
            gemmtuned.enable()
            gemmtuned.disable()
        stop.set()
        [t.join() for t in threads]
        print(json.dumps(len(wrong)))
        """,
        AITER_TUNE_GEMM="0",
    )

    assert done.said == 0


def test_what_our_thread_has_to_say_goes_past_the_programs_logging_to_stderr(home: Home, tmp_path: Path) -> None:
    done = home.run(
        """
        import json, logging, sys, threading, time
        logging.basicConfig(filename=sys.argv[1], level=logging.DEBUG)
        import torch
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        time.sleep(0.5)
        print(json.dumps([thread.name for thread in threading.enumerate()]))
        """,
        str(tmp_path / "log"),
        GEMMTUNED_DB="/proc/none/tune.db",
    )

    assert done.said == ["MainThread"]  # a logger asks who speaks, and threading then knows of us
    assert "counts stay in memory" in done.ours[0] and len(done.ours) <= 2


def test_status_says_which_path_is_live_and_what_it_did(home: Home) -> None:
    done = home.run(
        """
        import json, torch, gemmtuned
        from gemmtuned.hooks import activate
        for _ in range(5):
            torch.mm(torch.ones(2, 3), torch.ones(3, 2))
        activate.current().flusher.flush()
        print(json.dumps(gemmtuned.status()))
        """
    )
    status = done.said

    assert status["path"] == "native"
    assert (status["calls"], status["dropped"], status["errors"], status["note"]) == (5, 0, 0, "")
    assert (status["capture"], status["dispatch"], status["polling"]) == (True, True, False)
    assert json.dumps(status)


def test_status_has_the_same_keys_when_the_hook_is_off_and_says_why(home: Home) -> None:
    code = """
        import json, torch, gemmtuned
        on = gemmtuned.status()
        gemmtuned.disable()
        print(json.dumps([on, gemmtuned.status()]))
        """
    on, off = home.run(code).said

    assert on.keys() == off.keys()
    assert (off["path"], off["calls"], off["errors"], off["generation"]) == ("off", 0, 0, 0)
    assert "disable() was called" in off["note"]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"AITER_TUNE_GEMM": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "with: gemmtuned run"),
        ({"AITER_TUNE_GEMM": "0"}, "set GEMMTUNED=1"),
        ({"AITER_TUNE_GEMM": "yes"}, "AITER_TUNE_GEMM must be 0 or 1, got 'yes'"),
        ({"AITER_TUNE_GEMM": "1", "GEMMTUNED_IDLE_S": "soon"}, "must be a number of seconds, got 'soon'"),
    ],
)
def test_status_of_a_process_without_the_hook_names_the_variable(env: dict[str, str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import gemmtuned; print(gemmtuned.status()['note'])"],
        env={**os.environ, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("off: ") and done.stdout.strip().endswith(said)


@pytest.mark.parametrize("why", ["switched off", "not built"])
def test_without_a_library_nothing_is_patched_or_counted_and_one_line_says_so(
    home: Home, tmp_path: Path, why: str
) -> None:
    env = {"GEMMTUNED_NATIVE": "0"} if why == "switched off" else {}
    done = home.run(
        """
        import json, os, torch, gemmtuned
        import torch.nn.functional as F
        F.linear(torch.ones(4, 16), torch.ones(8, 16))
        try:
            os.waitpid(-1, os.WNOHANG)
            children = True
        except ChildProcessError:
            children = False
        state, stock = gemmtuned.status(), F.linear is torch._C._nn.linear
        print(json.dumps([state["path"], state["note"], stock, children, gemmtuned.is_enabled()]))
        """,
        GEMMTUNED_CACHE=str(tmp_path / "cache"),
        **env,
    )

    path, note, stock, children, enabled = done.said
    assert (path, stock, children, enabled) == ("off", True, False, False)
    assert note.startswith(
        "GEMMTUNED_NATIVE=0" if env else "nothing is counted or routed: the native hook is not built"
    )
    assert done.ours == ([] if env else [f"gemmtuned: {note}"])
    assert not (tmp_path / "cache").exists()


def test_a_child_forked_before_the_library_came_takes_it_up_too(home: Home, tmp_path: Path) -> None:
    built = build(home.cache)
    library = library_path(tmp_path / "cache")
    assert library is not None
    library.parent.mkdir(parents=True)
    done = home.run(
        """
        import json, os, shutil, sys, torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks import patches
        patches.LOOK_S = 0.1
        gemmtuned.enable()
        pid = os.fork()
        if not pid:
            wait_for(gemmtuned.is_enabled)
            torch.mm(torch.ones(4, 16), torch.ones(16, 8))
            sys.exit(7)
        shutil.copyfile(sys.argv[1][:-3] + ".json", sys.argv[2][:-3] + ".json")
        shutil.copyfile(sys.argv[1], sys.argv[2] + ".part")
        os.rename(sys.argv[2] + ".part", sys.argv[2])
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        """,
        str(built),
        str(library),
        GEMMTUNED_CACHE=str(tmp_path / "cache"),
    )

    assert done.said == 7
    assert sum(home.counts().values()) == 1


def test_a_library_that_comes_late_is_taken_up_and_recompiles_nothing(home: Home, tmp_path: Path) -> None:
    built = build(home.cache)
    library = library_path(tmp_path / "cache")
    assert library is not None
    library.parent.mkdir(parents=True)
    done = home.compiling().run(
        """
        import json, os, shutil, sys, torch, gemmtuned
        from hooked import wait_for
        from gemmtuned.hooks import patches
        patches.LOOK_S = 0.1
        gemmtuned.enable()
        f = torch.compile(lambda x, w: torch.nn.functional.linear(x, w).relu(), backend="eager", fullgraph=True)
        x, w = torch.ones(4, 16), torch.ones(8, 16)
        f(x, w)
        said = [gemmtuned.status()["path"]]
        shutil.copyfile(sys.argv[1][:-3] + ".json", sys.argv[2][:-3] + ".json")
        shutil.copyfile(sys.argv[1], sys.argv[2] + ".part")
        os.rename(sys.argv[2] + ".part", sys.argv[2])
        wait_for(gemmtuned.is_enabled)
        with torch.compiler.set_stance("fail_on_recompile"):
            f(x, w)
        print(json.dumps([*said, gemmtuned.status()["path"], gemmtuned.status()["note"]]))
        """,
        str(built),
        str(library),
        GEMMTUNED_CACHE=str(tmp_path / "cache"),
    )

    assert done.said == ["off", "native", ""]
    assert home.counts() == {("fp32:4x8x16,threads=2", "miss"): 1}


def test_threads_that_switch_it_on_and_off_at_once_leave_one_hook_or_none(home: Home) -> None:
    """Each that was overtaken once kept its thread, and what it had counted, for ever."""
    done = home.run(
        """
        import os, threading, torch, gemmtuned
        from hooked import wait_for
        tasks = len(os.listdir("/proc/self/task"))

        def run(calls):
            gate = threading.Barrier(len(calls))
            threads = [threading.Thread(target=lambda call=call: (gate.wait(), call())) for call in calls]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]

        def ours(*counts):  # one that is at its end may still be in its last turn
            wait_for(lambda: len(os.listdir("/proc/self/task")) - tasks in counts)

        run([gemmtuned.enable] * 6)
        ours(1)
        run([gemmtuned.enable, gemmtuned.disable] * 3)
        ours(0, 1)
        gemmtuned.enable()
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        gemmtuned.disable()
        ours(0)
        print(1)
        """,
        AITER_TUNE_GEMM="0",
    )
    assert done.said == 1
    assert home.calls() == 1


def test_what_was_taken_back_is_not_put_in_again_by_a_turn_that_was_going_on(home: Home) -> None:
    done = home.run(
        """
        import json, torch, gemmtuned
        from gemmtuned.hooks import activate
        hook, late = activate.current(), {}
        gemmtuned.disable()
        hook.patches.switches = 0  # as of before a switch that the turn has seen
        hook.patches.follow_switches()
        late["switches"] = hook.patches.switches
        hook.patches.look_at_s = 0.0
        late["looked"] = hook.patches.look_again(1.0)
        torch.mm(torch.ones(4, 16), torch.ones(16, 8))
        print(json.dumps([late, hook.path, sum(s.calls for s in hook.native.drain())]))
        """
    )
    assert done.said == [{"switches": 0, "looked": False}, "off", 0]


def test_a_child_waits_for_no_lock_that_its_parents_thread_held(home: Home) -> None:
    done = home.run(
        """
        import json, os, signal, threading, torch
        from hooked import LINEAR, published
        from gemmtuned.configs import key
        from gemmtuned.hooks import dispatch
        one = published(LINEAR, "torch_swap")
        held, ended = threading.Event(), threading.Event()
        def hold():  # as the hook's thread in a turn
            with dispatch._new_ident, key._new_family:
                held.set(), ended.wait()
        threading.Thread(target=hold).start()
        held.wait()
        if os.fork() == 0:
            signal.alarm(20)
            os._exit(0 if dispatch.solution_of(dispatch.ident_of(one)) == one and key.family_code("fast.scores") else 1)
        ended.set()
        print(json.dumps(os.waitstatus_to_exitcode(os.wait()[1])))
        """
    )
    assert done.said == 0
