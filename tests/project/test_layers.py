"""Who may import whom, read from the source: a file that strays fails here and not in a user's process."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hooked import Home

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
FOLDERS = ("configs", "db", "kernels", "hooks", "daemon")  # installed as gemmtuned.<folder>
LEAF = "_testing"  # failpoints: any file may hold one; it imports the standard library alone
MAY_IMPORT = {
    "configs": {"configs"},
    "db": {"db", "configs"},
    "kernels": {"kernels", "configs"},
    "hooks": {"hooks", "configs", "db", "kernels"},
    "daemon": {"daemon", "configs", "db"},
    "daemon, worker side": {"daemon", "configs", "db", "kernels"},
}
CHILD = ROOT / "daemon" / "child"  # imports torch and kernels; the rest of daemon/ is the parent, which never does
WITH_FRAMES = ("queries.py", "notebook.py", "of_model.py")  # pandas is imported there when a frame is asked for
NOT_IN_THE_PARENT = {"torch", "triton", "numpy", "pandas", "transformers"}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts and not is_link(p))


def is_link(path: Path) -> bool:
    return any(part.is_symlink() for part in path.parents if ROOT in part.parents)


OURS = [(folder, path) for folder in (*FOLDERS, "gemmtuned") for path in sources(folder)]


@pytest.fixture(scope="module", autouse=True)
def trees_are_no_garbage() -> Iterator[None]:
    """A million nodes are made and none goes before the last test: no collection walks through them."""
    gc.disable()
    yield
    for kept in (nodes, import_statements, running_imports):
        kept.cache_clear()
    gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree, read once for all tests: none of those who ask here may change one."""
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Every import, wherever it stands."""
    return tuple(node for node in nodes(path) if isinstance(node, (ast.Import, ast.ImportFrom)))


@cache
def running_imports(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Those that run: without those under `if TYPE_CHECKING`."""
    only_told = {
        below
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for below in ast.walk(statement)
    }
    return tuple(node for node in import_statements(path) if node not in only_told)


def imports(path: Path) -> Iterator[tuple[str, int, int]]:
    """(module, level, line) of every import, wherever it stands; `from a import b` gives a and a.b."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0, node.lineno
        else:
            yield node.module or "", node.level, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.level, node.lineno


def runtime_imports(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level module, line) of imports that run, so without those under `if TYPE_CHECKING`."""
    for node in running_imports(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif node.level == 0:
            yield (node.module or "").split(".")[0], node.lineno


def folder_of(module: str) -> str | None:
    """`db` for gemmtuned.db.store; `gemmtuned` for the front door; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "gemmtuned":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in (*FOLDERS, LEAF) else "gemmtuned"


def test_imports_follow_the_layers() -> None:
    strays = []
    for folder, path in OURS:
        if folder == "gemmtuned":
            continue  # the front door may import everything
        allowed = MAY_IMPORT["daemon, worker side" if CHILD in path.parents else folder]
        # `from gemmtuned import db` gives "gemmtuned" itself too; only the name taken from it counts
        found = {(m, line) for m, level, line in imports(path) if not level and m != "gemmtuned"}
        strays += [
            f"{path.relative_to(ROOT)} line {line}: {module}, it may import {sorted(allowed)} only"
            for module, line in sorted(found)
            if folder_of(module) not in (None, LEAF, *allowed)
        ]
    assert not strays


def test_our_folders_are_imported_by_their_full_name_only() -> None:
    bare = [
        f"{path.relative_to(ROOT)} line {line}: {'.' * level}{module}"
        for _, path in OURS
        for module, level, line in imports(path)
        if level or module.split(".")[0] in (*FOLDERS, "commands", "reports")
    ]
    assert not bare, "write `from gemmtuned.x.y import z`: any other form makes a second copy of the module"


def test_environment_variables_are_read_by_settings_alone() -> None:
    may = (ROOT / "configs" / "settings.py", ROOT / "gemmtuned" / LEAF / "faults.py")  # the second: what only tests set
    used = [
        f"{path.relative_to(ROOT)} line {node.lineno}: {ast.unparse(node)}"
        for _, path in OURS
        if path not in may
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {"environ"})
    ]
    assert not used, "ask configs/settings.py (child_env builds the environment of a started program)"


def test_no_class_has_a_base_of_logging_with_a_parameter() -> None:
    """Python 3.10 refuses it when the module is imported, and with it the hook."""
    found = [
        f"{path.relative_to(ROOT)} line {node.lineno}: {ast.unparse(base)}"
        for _, path in OURS
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Subscript) and ast.unparse(base.value).startswith("logging.")
    ]
    assert not found


def test_sql_has_no_numbered_placeholders() -> None:
    """Python 3.14 refuses them beside a sequence of values (docs.python.org, sqlite3: placeholders)."""
    used = [
        f"{path.relative_to(ROOT)} line {node.lineno}"
        for _, path in OURS
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"[(,=\s]\?\d", node.value)
    ]
    assert not used, "write ?, or :name beside a dict"


def test_the_rules_look_at_every_folder() -> None:
    assert {folder for folder, _ in OURS} == {*FOLDERS, "gemmtuned"}


def test_the_leaf_package_needs_the_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "gemmtuned"}
    strays = {
        f"{path.relative_to(ROOT)} line {line}: {module}"
        for path in (*sources("configs"), *sources(f"gemmtuned/{LEAF}"))
        for module, line in runtime_imports(path)
        if module not in allowed
    }
    assert not strays


def test_the_daemons_parent_imports_nothing_of_the_childs() -> None:
    strays = {
        f"{path.relative_to(ROOT)} line {line}: {module}"
        for path in sources("daemon")
        if CHILD not in path.parents
        for module, _, line in imports(path)
        if module.startswith("gemmtuned.daemon.child")
    }
    assert not strays


def test_the_daemons_parent_and_the_front_door_import_no_torch() -> None:
    torch_free = [p for p in sources("daemon") if CHILD not in p.parents]
    user_program = ROOT / "gemmtuned" / "demo" / "program.py"  # a process of its own, started as a user's would be
    torch_free += [p for p in sources("gemmtuned") if p.parent.name not in ("ops", "testing") and p != user_program]
    torch_free += sources("db") + sources("configs")
    strays = {
        f"{path.relative_to(ROOT)} line {line}: {module}"
        for path in torch_free
        for module, line in runtime_imports(path)
        if module in NOT_IN_THE_PARENT and not (module == "pandas" and path.name in WITH_FRAMES)
    }
    assert not strays


# Run inside other people's programs, whose folder is first on the path: a watchdog.py of theirs would be imported.
OF_A_HOST = (*sources("hooks"), *sources("configs"), *sources("db"))
NOT_IN_A_HOST = {  # what those files may import besides, and why it never happens in a host
    (
        "db/migrations/__init__.py",
        "sqlite_utils",
    ),  # to bring an old file up to date, which Store(upgrade=False) refuses
    ("db/queries.py", "pandas"),  # `gemmtuned.frame`, which a program calls by name
}


def test_a_host_imports_the_standard_library_and_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "gemmtuned", "torch"}
    strays = {
        (str(path.relative_to(ROOT)), module)
        for path in OF_A_HOST
        for module, _ in runtime_imports(path)
        if module not in allowed
    }
    assert strays == NOT_IN_A_HOST


# Of the standard library what torch imports itself: nothing by these names in a program's folder can be new to it.
BROUGHT_BY_TORCH = {
    "__future__", "ast", "collections", "contextlib", "csv", "ctypes", "dataclasses", "datetime", "difflib", "enum",
    "fcntl", "fnmatch", "functools", "hashlib", "importlib", "inspect", "io", "json", "logging", "math", "mmap",
    "multiprocessing", "operator", "os", "pathlib", "pkgutil", "platform", "random", "re", "reprlib", "select",
    "shutil", "signal", "socket", "stat", "struct", "subprocess", "tempfile", "threading", "types", "typing", "weakref",
}  # fmt: skip


def test_a_host_imports_of_the_standard_library_what_torch_has_imported_before() -> None:
    """But for sqlite3, before which hooks/flush.py looks whose it is: a resource.py of the program ran as ours."""
    files = (*OF_A_HOST, *sources("kernels"), *sources("gemmtuned/ops"), *(ROOT / "gemmtuned").glob("*.py"))
    used = {module for path in files for module, _ in runtime_imports(path) if module in sys.stdlib_module_names}
    assert used - {*sys.builtin_module_names} - BROUGHT_BY_TORCH == {"sqlite3"}


@pytest.mark.long
def test_torch_brings_what_a_host_is_said_to_have() -> None:
    code = "import sys, torch; print(*{name.partition('.')[0] for name in sys.modules})"
    off = {name: value for name, value in os.environ.items() if not name.startswith(("GEMMTUNED", "AITER"))}
    done = subprocess.run([sys.executable, "-c", code], env=off, capture_output=True, text=True, check=True)
    assert not BROUGHT_BY_TORCH - {*done.stdout.split()}


def test_a_host_starts_no_process_and_no_thread_of_threading() -> None:
    """hooks/native/build.py alone starts one: the compiler, in processes of ours; callbacks of users have threads."""
    found = set()
    for path in sources("hooks"):
        tree = ast.parse(path.read_text(), str(path))
        for node in ast.walk(tree):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith(("subprocess.", "os.fork", "os.posix_spawn", "os.system", "os.popen", "os.exec")):
                found.add((path.name, name))
            if name in ("threading.Thread", "threading.current_thread", "threading.Timer", "_thread.start_new_thread"):
                found.add((path.name, name))
    assert found == {("build.py", "subprocess.run"), ("watch.py", "threading.Thread")}


def test_every_folder_with_an_init_is_in_the_packages_list() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {"gemmtuned", "gemmtuned.examples"}  # the latter are programs, no package: docs/examples
    for folder in (*FOLDERS, "gemmtuned"):
        for init in sources(folder):
            if init.name == "__init__.py":
                parts = init.parent.relative_to(ROOT).parts
                there.add(".".join(parts if folder == "gemmtuned" else ("gemmtuned", *parts)))
    assert sorted(listed) == sorted(there)


def test_the_map_of_the_daemon_names_each_of_its_files_and_folders() -> None:
    text = ast.get_docstring(ast.parse((ROOT / "daemon/__init__.py").read_text())) or ""
    named = re.findall(r"(?m)^    (\w+(?:/|\.py))  +\S", text)
    there = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "daemon").iterdir()
        if path.name not in ("__init__.py", "__pycache__")
    }
    assert sorted(named) == sorted(there)


def test_the_checkout_does_not_shadow_other_packages() -> None:
    assert str(ROOT) not in [os.path.abspath(p) for p in sys.path if p]


def test_kernels_in_cuda_need_nothing_of_those_in_triton() -> None:
    found = {(path.name, m) for path in sources("kernels/cuda") for m, _, _ in imports(path)}
    assert found and not [(name, m) for name, m in found if m.startswith(("triton", "gemmtuned.kernels.triton"))]


def module_of(path: Path) -> str:
    """`gemmtuned.db.store` for db/store.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    full = parts if parts[0] == "gemmtuned" else ("gemmtuned", *parts)
    return ".".join(full[:-1] if full[-1] == "__init__" else full)


def imported_at_run_time(path: Path, modules: frozenset[str]) -> set[str]:
    """Those of these modules that a file imports anywhere, inside functions too, but for `if TYPE_CHECKING`."""
    found = set()
    for node in running_imports(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {module_of(path): path for _, path in OURS}
    graph = {name: imported_at_run_time(path, frozenset(files)) - {name} for name, path in files.items()}
    changed = True
    while changed:  # what imports nothing that is left is on no circle
        ends = {name for name, imported in graph.items() if not imported & graph.keys()}
        changed = bool(ends)
        graph = {name: imported for name, imported in graph.items() if name not in ends}
    while unused := graph.keys() - set().union(*graph.values()):  # nor is what nobody left imports
        graph = {name: imported for name, imported in graph.items() if name not in unused}
    assert not graph, f"a circle of imports: {sorted(graph)}"


# What gevent and eventlet put others in place of, and where it is right to take what the program has
PATCHED = {
    "threading": {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer", "Thread"},
    "_thread": {"allocate_lock", "LockType", "RLock", "start_new_thread"},
    "time": {"sleep"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"},
    "select": {"select", "poll", "epoll"},
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
    "multiprocessing": {"Process", "Pool", "Queue", "Lock"},
    "concurrent.futures": {"ThreadPoolExecutor", "ProcessPoolExecutor"},
}
TAKEN_AS_IT_IS = {
    ("configs/unpatched.py", "time.sleep"),
    ("hooks/watch.py", "threading.Thread"),  # callbacks of the program, in a thread as it has them
    ("hooks/native/build.py", "subprocess.run"),  # of `doctor --build`, `run` and the daemon
    ("db/upkeep.py", "threading.Thread"),  # of the daemon and of commands
    ("configs/more_threads.py", "threading.Thread"),  # the same
}  # fmt: skip


def patched_names(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of everything taken from a module that an event loop patches."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module in PATCHED:
            yield from (
                (f"{node.module}.{a.name}", node.lineno) for a in node.names if a.name in PATCHED[node.module or ""]
            )
        elif isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).rpartition(".")
            if name in PATCHED.get(module, ()):
                yield f"{module}.{name}", node.lineno


IN_A_HOST = [path for folder, path in OURS if folder in ("configs", "db", "hooks")]


def test_what_runs_in_a_host_locks_and_sleeps_as_the_interpreter_does() -> None:
    strays = [
        f"{where} line {line}: {name}"
        for path in IN_A_HOST
        for where in [str(path.relative_to(ROOT))]
        for name, line in patched_names(path)
        if (where, name) not in TAKEN_AS_IT_IS
    ]
    assert not strays, "take it from configs/unpatched.py, or say in TAKEN_AS_IT_IS why it is right"


def test_who_goes_on_with_the_functions_of_the_start_takes_all_of_them_from_there() -> None:
    """Who is on the way of the counts to the store says so by `__builtins__ = builtins` (configs/unpatched.py)."""
    strays = [
        f"{path.relative_to(ROOT)} imports {alias.name}"
        for path in IN_A_HOST
        if any(isinstance(node, ast.Assign) and ast.unparse(node) == "__builtins__ = builtins" for node in nodes(path))
        for node in nodes(path)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in ("builtins", "fcntl", "os", "signal")
    ]
    assert not strays


def held_in_generators(path: Path) -> Iterator[int]:
    """Lines of functions that yield and enter a FrameLock."""
    locks = {"importing()"}
    for node in nodes(path):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "FrameLock()":
            locks |= {ast.unparse(target) for target in node.targets}
    for function in nodes(path):
        if isinstance(function, ast.FunctionDef):
            inside = list(ast.walk(function))
            entered = {ast.unparse(i.context_expr) for n in inside if isinstance(n, ast.With) for i in n.items}
            if entered & locks and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in inside):
                yield function.lineno


def test_no_generator_holds_a_frame_lock() -> None:
    """While it waits for its next turn it does not run, and whoever asks takes its lock to be free."""
    strays = [f"{path.relative_to(ROOT)} line {line}" for path in IN_A_HOST for line in held_in_generators(path)]
    assert not strays


CLOCKS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "clock_gettime"},
    "datetime": {"now", "today", "utcnow"},
}


def clocks_read(path: Path) -> Iterator[str]:
    """Each clock of a host's that this file asks for the time; a test may have stopped it."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{alias.name}" for alias in node.names if alias.name in CLOCKS["time"])
        elif isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).rpartition(".")
            if name in CLOCKS.get(module.rpartition(".")[2], ()):
                yield f"{module}.{name}"


def test_what_runs_in_a_host_asks_no_clock_that_the_program_may_have_stopped() -> None:
    files = {module_of(path): path for folder, path in OURS if folder in ("configs", "db", "hooks")}
    there = {name for name in files if ".hooks." in name} | {"gemmtuned.db.guest"}
    left = list(there)
    while left:
        new = imported_at_run_time(files[left.pop()], frozenset(files)) - there
        there |= new
        left += new
    strays = {name: found for name in there if (found := [*clocks_read(files[name])])}

    assert {"gemmtuned.db.lockfile", "gemmtuned.hooks.flush"} <= there
    assert not strays, "take it from configs/clock.py"


def test_what_runs_in_a_host_names_the_encoding_of_its_files() -> None:
    """Else a program that makes EncodingWarning an error (-X warn_default_encoding) would have no hook."""
    told = {"read_text": 1, "write_text": 2}  # with so many arguments by position
    strays = [
        f"{path.relative_to(ROOT)} line {node.lineno}: {node.func.attr}"
        for path in IN_A_HOST
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in told
        if len(node.args) < told[node.func.attr] and not any(word.arg == "encoding" for word in node.keywords)
    ]
    assert not strays


def test_no_test_file_takes_anything_from_another_one() -> None:
    files = [path for path in TESTS.rglob("*.py") if "data" not in path.relative_to(TESTS).parts]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()  # programs that tests start stand in their texts
        if re.search(r"\b(from|import) +(tests\.\S*)?test_\w+( +import | +as |;|\"|\s*$)", line)
    ]
    assert len(files) > 200 and found == [], "what two files need is a module of tests/support"


def test_each_test_file_is_in_a_folder_and_support_and_tools_have_none() -> None:
    tests = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert len(tests) > 150 and [path for path in tests if len(path.parts) != 2] == []
    assert [path for path in tests if path.parts[0] in ("support", "tools", "data")] == []
    assert len({path.name for path in tests}) == len(tests), "a page names a file without its folder"
    assert {path.name for path in TESTS.glob("*.py")} == {"conftest.py"}


def test_no_folder_of_tests_shadows_a_package(tmp_path: Path) -> None:
    """tests/db is no `db`: the folder above it is on no path, of this process nor of programs that tests start."""
    program = Home(tmp_path, tmp_path, None).environment()["PYTHONPATH"].split(os.pathsep)
    paths = {Path(p or ".").resolve() for p in [*sys.path, *program]}
    assert {TESTS / "support", TESTS / "tools"} <= paths and TESTS not in paths
    assert Path(program[0]) == TESTS / "support"
    on_paths = {path.name for p in paths if TESTS in p.parents for path in p.iterdir()}
    assert on_paths & {*FOLDERS, "gemmtuned"} == set()
