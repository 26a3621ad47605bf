"""`gemmtuned.layers(model)`: which layers of a model got faster, by their names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.human_units import duration
from gemmtuned.reports.layers import by_size, gain_of_all, layers
from gemmtuned.reports.render import against_stock, clean, count, factor, percent

if TYPE_CHECKING:
    import pandas as pd
    import torch

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_HEADS: Final = ("layers", "N x K", "M", "threads", "calls", "on stock torch", "now", "gain", "no verdict")


class ModelLayers(Sequence[dict[str, Any]]):
    """The rows of `gemmtuned.coverage --by layer` for one model; each has `modules` besides, the names in the model.

    Prints as a table, in a notebook as HTML.  What a model's layers have not been called with yet has no row: `unseen`
    lists those modules.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], unseen: Sequence[str]) -> None:
        self._rows = list(rows)
        self.unseen = tuple(unseen)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def gain(self) -> float:
        """GEMM time of these layers on stock torch over their time now."""
        return gain_of_all(self._rows)

    def frame(self) -> pd.DataFrame:
        """Every column of the rows as a pandas DataFrame; only this imports pandas."""
        import pandas as pd

        return pd.DataFrame(self._rows)

    def __str__(self) -> str:
        lines = [_HEADS, *self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADS))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in text), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in _HEADS)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self._cells()
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self._rows:
            yield (
                ", ".join(clean(name) for name in patterns(row["modules"])),
                f"{row['n']}x{row['k']}",
                row["m"],
                str(row["threads"] or "-"),
                count(row["calls"]),
                duration(row["stock_us"]),
                duration(row["now_us"]),
                factor(row["gain"]),
                percent(row["none"]),
            )

    def _notes(self) -> list[str]:
        notes = [f"{against_stock(self.gain)}, all together", *by_size(self._rows)] if self._rows else []
        if self.unseen:
            notes.append(f"not called yet, or not recorded: {', '.join(clean(n) for n in patterns(self.unseen))}")
        return notes


def of_model(model: torch.nn.Module, served: Iterable[Mapping[str, Any]]) -> ModelLayers:
    """served: of db.queries.served. A module belongs to the row whose N and K its weight has. Raises TypeError."""
    if not hasattr(model, "named_modules"):
        raise TypeError(f"layers: expected a torch.nn.Module, got {type(model).__name__}")
    modules: dict[tuple[int, int], list[str]] = {}
    for name, module in model.named_modules():
        for size, weight in _weights(module):
            named = ".".join(part for part in (name, weight) if part) or type(module).__name__  # the model is a layer
            modules.setdefault(size, []).append(named)
    rows = [row for row in layers(served) if (row["n"], row["k"]) in modules]
    for row in rows:
        row["modules"] = modules[row["n"], row["k"]]
    seen = {(row["n"], row["k"]) for row in rows}
    return ModelLayers(rows, [name for size, names in modules.items() if size not in seen for name in names])


def _weights(module: torch.nn.Module) -> Iterator[tuple[tuple[int, int], str]]:
    """((N, K), name) of the products that the module itself makes; "" where it makes one alone."""
    weight: Any = getattr(module, "weight", None)
    if getattr(weight, "ndim", 0) == 2:
        if hasattr(module, "in_features"):
            yield (int(module.out_features), int(module.in_features)), ""  # type: ignore[arg-type]
        elif hasattr(module, "nf"):  # transformers' Conv1D has W as [K, N]
            yield (weight.shape[1], weight.shape[0]), ""
    for name, weight in module.named_parameters(recurse=False):
        if name.endswith("proj_weight") and weight.ndim == 2:  # nn.MultiheadAttention
            yield (weight.shape[0], weight.shape[1]), name


def patterns(names: Iterable[str]) -> list[str]:
    """`layers.0.up`, `layers.1.up` ... as `layers.*.up (2)`; names that stand alone as they are."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [f"{pattern} ({len(all_)})" if len(all_) > 1 else all_[0] for pattern, all_ in groups.items()]
