"""`gemmtuned report`: one HTML file that opens anywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from gemmtuned.commands.named_file import is_stream, target_of
from gemmtuned.commands.options import Since, settings
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.temporary import put
from gemmtuned.reports.render import size
from gemmtuned.reports.source import refuse_none


def report(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page is written.")] = Path(
        "gemmtuned-report.html"
    ),
    since: Since = "30d",  # type: ignore[assignment]
) -> None:
    """Write one HTML page: coverage, gains by layer, what is next.

    Coverage over time, gains by layer and by problem, what waits and why. The page needs no network and no script. It
    holds names of programs and their shapes: look at it before you send it on.
    """
    here = settings()
    refuse_none(here)
    from gemmtuned.reports.page import collect, render

    into = is_stream(out)
    file = out if into else target_of(out, here)
    page = render(collect(here.db, since_s=since, now_s=time.time())).encode(errors="replace")
    try:
        if not into:
            put(file, page)  # the earlier page is there until this one is whole
        elif os.path.samestat(out.stat(), os.fstat(1)):  # opened again, a file would be begun anew
            typer.echo(page, nl=False)
        else:
            out.write_bytes(page)
    except BrokenPipeError:
        raise
    except OSError as err:
        raise GemmtunedError(f"{out}: {err.strerror or err}. Choose another path with --out") from err
    typer.echo(f"{out}: {size(len(page))}. Open it in a browser.", err=into)
