"""Write docs/reference/ from the code: variables, commands, views and their columns, messages, operators.

    python docs/generate.py            # writes the pages
    python docs/generate.py --check    # ends with 1 and names the pages that differ; `make check` runs it

Nothing under docs/reference/ is edited by hand; what each column of a view holds says gemmtuned/reports/columns.json.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import operator_list

from gemmtuned import cli
from gemmtuned.configs import errors
from gemmtuned.configs.engine_races import ENGINES as COMPARED
from gemmtuned.configs.variables import AITER_CONFIGS, VARIABLES
from gemmtuned.db import migrations, queries
from gemmtuned.hooks.engine_operators import UNSEEN, Operator, operators
from gemmtuned.reports.questions import QUESTIONS, meaning_of

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs/reference"
_FOUND: Final = "..."  # stands for what is known at run time alone
COLUMNS: Final = ROOT / "gemmtuned/reports/columns.json"
_MADE: Final = "\n\n<!-- Written by docs/generate.py: edit the code that it reads, then run it again. -->"

# What each namespace of operators belongs to, and how the graphs of its programs are captured anew for a new table
ENGINES: Final = {
    "_C": ("vLLM 0.32", "`GEMMTUNED_RECAPTURE=idle`, not tried on a GPU"),
    "vllm": ("vLLM 0.32", "`GEMMTUNED_RECAPTURE=idle`, not tried on a GPU"),
    "sgl_kernel": ("SGLang 0.5.23", "`POST /update_weights_from_disk`"),
    "deep_gemm": ("DeepGEMM", "by its program"),
    "trtllm": ("TensorRT-LLM", "at its next start"),
    "gemmtuned": ("any, by `gemmtuned.ops`", "by its program"),
}
_REAL: Final = "a real server on a CPU (`make engines`)"
_LAID: Final = "a stand-in of its schema (`test_hooks_foreign_table.py`)"
# torch's own operators, which most linears of every engine arrive at: engine, path, recorded as, routed, since, tested
TORCHS: Final = f"""
vLLM 0.32 | linears in bf16, fp16 and fp32 | dense, batched, dense_add | yes | 0.1.0 | {_REAL}
SGLang 0.5.23 | linears in bf16, fp16 and fp32 | dense, batched, dense_add | yes | 0.1.0 | {_REAL}
`transformers serve` 5.19 | linears in bf16, fp16 and fp32 | dense, batched | yes | 0.1.0 | {_REAL}
diffusers 0.42 | linears in bf16, fp16 and fp32 | dense, batched | yes | 0.1.0 | a real DiT on a CPU (`make engines`)
any | `torch._scaled_mm`, v1 and v2 | scaled | yes | 0.2.0 | on an H200 (`test_gpu_scaled.py`)
any, transformers 5 | `torch._grouped_mm` | grouped | yes | after 0.2.0 | on an H200 (`test_gpu_grouped.py`)
any | `torch._int_mm` | dense, int8 into int32 | yes | after 0.2.0 | on a CPU (`test_programs_int_mm.py`)
any | `torch._scaled_grouped_mm` | grouped, with scales | of rows | after 0.2.0 | on a GPU (`test_gpu_grouped.py`)
"""
# What was tried of one operator beyond a stand-in
TRIED: Final = {
    "_C::onednn_mm": _REAL,
    "_C::cutlass_scaled_mm": "a stand-in, in a CUDA graph on an H200 (`test_gpu_recapture.py`)",
    "gemmtuned::int8_scaled_mm": "on an H200 (`test_gpu_int8.py`)",
    "gemmtuned::int8_scaled_mm_zero": "on an H200 (`test_gpu_int8.py`)",
    "gemmtuned::shuffled_scaled_mm": "on an H200 (`test_gpu_int8.py`)",
    "gemmtuned::mxfp4_mm": "on an H200, decoded (`test_gpu_mxfp4.py`)",
    "gemmtuned::block_scaled_mm": "on an H200 (`test_gpu_blocks.py`)",
    "gemmtuned::weight_only_mm": "on an H200 (`test_gpu_weight_only.py`)",
}
_FORMS: Final = {
    "kn": "scaled", "nk": "scaled", "shuffled": "scaled", "weights": "weight_only", "pairs": "scaled",
    "opaque": "dense, opaque", "opaque batched": "batched, opaque",
}  # fmt: skip


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "variables.md": _variables(),
        "commands.md": _commands(),
        "views.md": _views(),
        "messages.md": _messages(),
        "engines.md": _engines(),
        "operators.md": _operators_of_torch(),
        "../database.md": _database(),
    }


def _variables() -> str:
    rows = [(f"`{v.name}`", v.default, v.meaning) for v in VARIABLES if v.name not in AITER_CONFIGS]
    tables = [(f"`{name}`", family) for name, family in AITER_CONFIGS.items()]
    return "\n\n".join([
        "# Environment variables" + _MADE,
        "A program reads these once, when it starts. `gemmtuned doctor` shows the value that each has in your shell "
        "and names a misspelled `GEMMTUNED_*`.",
        _table(("variable", "default", "meaning"), rows),
        "## Tables of your own, by AITER's variables",
        "Each names tuned tables of one AITER family; several paths are separated by colons. [tables.md](../tables.md) "
        "says what becomes of their rows.",
        _table(("variable", "family of the tables"), tables),
    ])  # fmt: skip


def _commands() -> str:
    made = cli._Commands()
    parts = [
        "# Commands" + _MADE,
        "Exit codes: 0 done, 1 wrong or failed, 2 wrong usage, 75 try later, 129 terminal closed, 130 interrupted, "
        "143 stopped.",
    ]
    for name in cli.COMMANDS:
        parts += _command(f"gemmtuned {name}", made[name])
    return "\n\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"{'#' * (name.count(' ') + 1)} {name}"
    yield inspect.cleandoc(command.help or "")
    children = getattr(command, "commands", {})
    for child in children:
        yield from _command(f"{name} {child}", children[child])
    if not children:
        rows = [
            (_spelled(p), " ".join((getattr(p, "help", "") or "").split())) for p in command.params if not _hidden(p)
        ]
        if rows:
            yield _table(("argument or option", "meaning"), rows)


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False)) or parameter.name in ("help", "context")


def _spelled(parameter: Any) -> str:
    metavar = parameter.metavar or ("" if getattr(parameter, "is_flag", False) else (parameter.name or "").upper())
    if parameter.param_type_name == "argument":
        text = metavar + ("..." if parameter.nargs == -1 and not metavar.endswith(("...", "]")) else "")
        return f"`{text}`"
    names = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.default
    shown = f" ({default})" if isinstance(default, (int, float, str)) and default not in (False, True, "") else ""
    return f"{names} {metavar}{shown}".strip()


def _views() -> str:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    migrations.apply(conn)
    meanings = json.loads(COLUMNS.read_text())
    parts = [
        "# Views of the database" + _MADE,
        "The database is a SQLite file, `tune.db` in the home. Read it with these views: tables may change from "
        'version to version, and a view keeps its columns. `gemmtuned.frame("coverage")` gives one as a DataFrame. '
        "Times of day are microseconds since 1970 (UTC); the columns that end in `_at` say the same as text. "
        "[database.md](../database.md) has questions with their answers in SQL, sqlite-utils, datasette and pandas.",
    ]
    key = list(meanings["problem columns"])
    parts += [
        "## The columns of a problem",
        "Most views begin with these, one column for each part of the key.",
        _table(("column", "meaning"), [(f"`{c}`", m) for c, m in meanings["problem columns"].items()]),
    ]
    for view in queries.VIEWS:
        columns = [row[1] for row in conn.execute(f"PRAGMA table_info({view})")]
        own = [c for c in columns if c not in key] if "family" in columns and "m" in columns else columns
        rows = [(f"`{c}`", _meaning(meanings, view, c)) for c in own]
        begins = "The columns of a problem, and:" if len(own) < len(columns) else ""
        parts += [
            f"## {view}",
            meanings["views"][view],
            *([begins] if begins else []),
            _table(("column", "meaning"), rows),
        ]
    conn.close()
    return "\n\n".join(parts)


def _meaning(meanings: dict[str, dict[str, str]], view: str, column: str) -> str:
    said = meaning_of(meanings, view, column)
    if not said:
        raise SystemExit(f"column {column} of view {view} has no meaning: add it to {COLUMNS.relative_to(ROOT)}")
    return said


def _database() -> str:
    parts = [
        "# The database" + _MADE,
        "Everything that gemmtuned knows is in one SQLite file, `tune.db` in the home (`gemmtuned db path`). "
        "Read it with whatever reads SQLite, while programs write: readers and writers do not wait for each other. Its "
        "*views* are promises, tables are not: [every view and column](reference/views.md). Do not write to it.",
        _table(
            ("with", "how it is opened", "needs"),
            [
                ("sqlite-utils", '`sqlite-utils tables --views "$(gemmtuned db path)"`', "comes with gemmtuned"),
                (
                    "datasette",
                    '`gemmtuned db datasette > gemmtuned.json`, then `datasette "$(gemmtuned db path)" -m '
                    "gemmtuned.json`",
                    "`pip install 'datasette<1'`",
                ),
                ("pandas", '`gemmtuned.frame("coverage")`', "comes with gemmtuned"),
                ("a notebook", "`gemmtuned.coverage()`, `gemmtuned.gains()`, `gemmtuned.layers(model)`", ""),
                ("SQL", '`sqlite3 -readonly "$(gemmtuned db path)"`', "the `sqlite3` program"),
            ],
        ),
        "`gemmtuned db datasette` writes what each view and column is for, the units of the numbers, and the questions "
        "below as canned queries: datasette lists them on the database's first page.",
        "Times end in `_us` (microseconds) or, for times of day, in `_at` (UTC, as SQLite's `datetime` writes it). The "
        "views `coverage*` are of the last 24 hours; `traffic` is for every other window.",
        "# Ten questions",
    ]
    for one in QUESTIONS:
        words = f"rows tune.db {one.sqlite_utils}" if one.sqlite_utils else f'tune.db "{_wrapped(one.sql)}"'
        imports = "import pandas as pd\n\nimport gemmtuned\n\n" if "pd." in one.pandas else "import gemmtuned\n\n"
        parts += [
            f"## {one.title}",
            f"```sql\n{_wrapped(one.sql)}\n```",
            f"```sh\nsqlite-utils {words} --table\n```",
            f"```python\n{imports}{one.pandas}\n```",
            f"With datasette: the canned query `{one.name}` (`/tune/{one.name}`).",
        ]
    return "\n\n".join(parts)


def _wrapped(sql: str) -> str:
    """One clause a line."""
    return re.sub(r" (FROM|WHERE|GROUP BY|ORDER BY|LIMIT) ", r"\n\1 ", sql)


def _messages() -> str:
    classes = [
        (f"`{name}`", str(cls.exit_code), " ".join(inspect.cleandoc(cls.__doc__ or "").split()))
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, errors.GemmtunedError)
    ]
    return "\n\n".join([
        "# Messages" + _MADE,
        "A command that fails prints one line, `gemmtuned: ...`, and ends with the exit code of its error. A traceback "
        "is a bug: please report it. [when-it-goes-wrong.md](../when-it-goes-wrong.md) goes through the cases.",
        "## Errors",
        _table(("error", "exit code", "meaning"), classes),
        "## What `gemmtuned doctor` checks",
        "Each check says PASS, WARN or FAIL. These lines ask for something; `...` stands for what was found.",
        _table(("check", "result", "says", "to mend it"), sorted({*_checks()})),
    ])  # fmt: skip


def _engines() -> str:
    heads = ("engine", "path to a product", "recorded as", "routed", "graphs captured anew", "since", "how tested")
    graphs = {name.split()[0]: how for name, how in ENGINES.values()}
    rows = [
        (engine, path, family, routed, graphs.get(engine.split()[0], "by its program"), since, tested)
        for engine, path, family, routed, since, tested in (line.split(" | ") for line in TORCHS.strip().splitlines())
    ]
    rows += [_operator(one) for one in operators()]
    rows += [(what, f"`{module}`", "not seen", "no", "-", "-", "-") for module, what in UNSEEN.items()]
    return "\n\n".join([
        "# Ways to a product, engine by engine" + _MADE,
        "[engines.md](../engines.md) says how an operator that is not torch's own is found, and what *opaque* means. "
        "Each is recorded where its schema is the one in `hooks/engine_operators.py`; those with a star are found by "
        "the names of their arguments, which forks keep. `coverage`, `status` and `doctor` name what is not seen.",
        _table(heads, rows),
    ])  # fmt: skip


def _operators_of_torch() -> str:
    listed = operator_list.operators()
    rows = [
        (f"`{name}`", "yes" if name in listed.everywhere else "no", "yes", "yes" if name in listed.compiled else "no")
        for name in (*listed.everywhere, *listed.gpus_alone)
    ]
    return "\n\n".join([
        "# Operators of torch's that the hook stands in front of" + _MADE,
        "The list is `hooks/native/operator_list.h`. Each is one of aten's, `torch.ops.aten.mm.out` for `mm.out`, and "
        "the hook registers above torch's own kernel of it. An operator that the installed torch has not, or has with "
        "other arguments, is left alone.",
        "Calls of all of them are counted, and routed where a solution can serve them. `_addmm_activation` is only "
        "counted on a GPU, since one kernel of torch's computes the sum and the function there.",
        "The last column says which of them compiled C++ (AOTInductor, a C++ wrapper) calls by a function of torch's "
        "of its own, `aoti_torch_cpu_mm_out` for `mm.out`: the hook has a function of the same name for each.",
        _table(("operator", "CPU", "CUDA", "in compiled C++"), rows),
    ])  # fmt: skip


def _operator(one: Operator) -> tuple[str, ...]:
    engine, graphs = ENGINES[one.name.partition("::")[0]]
    star = "" if one.is_exact else " *"
    routed = ("no", "-")
    if one.routed:
        routed = ("by what has won over its kernel" if one.name in COMPARED else "yes", graphs)
    return engine, f"`{one.name}`{star}", _FORMS[one.form], *routed, "after 0.2.0", TRIED.get(one.name, _LAID)


def _checks() -> Iterator[tuple[str, str, str, str]]:
    """(name, result, what it says, way out) of every Check that warns or fails and whose words stand in the source."""
    for path in sorted((ROOT / "gemmtuned/reports").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            known = _assigned(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Check":
                    name, result, found, fix = [*(_words(n, known) for n in node.args), "", ""][:4]
                    if name != _FOUND and found.strip(". ") and ("WARN" in result or "FAIL" in result):
                        yield name, result, found, "it is printed beside it" if fix == _FOUND else fix


def _assigned(function: ast.FunctionDef) -> dict[str, str]:
    """The text of each variable of a function that is set once."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: _words(values[0], {}) for name, values in found.items() if len(values) == 1}


def _words(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _FOUND
    if isinstance(node, ast.IfExp):
        return " or ".join(dict.fromkeys(w for w in (_words(node.body, known), _words(node.orelse, known)) if w))
    if isinstance(node, ast.Name):
        return node.id if node.id in ("PASS", "WARN", "FAIL") else known.get(node.id, _FOUND)
    return _FOUND


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") or " " for cell in line) + " |" for line in lines)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 if a page is not what it would be"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pages lie, if not in docs/reference")
    given = parser.parse_args()
    check, folder = given.check, given.folder
    stale = []
    for name, text in pages().items():
        path = folder / name
        text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).rstrip() + "\n"
        if not path.is_file() or path.read_text() != text:
            stale.append(str(path))
            if not check:
                path.write_text(text)
    if stale and check:
        print(f"not what the code says: {', '.join(stale)}. Run: python docs/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
