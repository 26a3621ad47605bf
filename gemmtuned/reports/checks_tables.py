"""Doctor's checks of the tables that AITER_CONFIG_* name: are they there, whole, and does anything in them run here."""

from __future__ import annotations

from collections.abc import Iterator

from gemmtuned.configs.aiter_csv import read_file
from gemmtuned.configs.aiter_rows import solution_of
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import cpu_device
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.render import several


def checks(settings: Settings) -> Iterator[Check]:
    """One line for each variable that is set."""
    here = cpu_device().key
    for table in settings.tables:
        rows = ours = bad = 0
        try:
            for path in table.paths:
                found = read_file(path, family=table.family)
                rows, bad = rows + len(found.rows), bad + found.rejected
                solutions = [solution for row in found.rows if (solution := solution_of(row)) is not None]
                ours += sum(solution.device == here and not solution.launch for solution in solutions)
        except TableError as err:
            yield Check(table.variable, FAIL, str(err), f"mend the file, or unset {table.variable}")
            continue
        text = f"{several(rows, 'row')}, {ours} of them measured by gemmtuned on this kind of CPU"
        if bad:
            yield Check(
                table.variable, WARN, f"{text}; {several(bad, 'bad row')} left out", "gemmtuned import --dry-run"
            )
        elif rows and not ours:
            yield Check(
                table.variable, PASS, f"{text}: they are seeds for the search once imported", "gemmtuned import"
            )
        else:
            yield Check(table.variable, PASS, text)
