"""Arguments read as the text they are: the base of every command, and the cheap half of typer.

Since 0.29 typer reads each value through a schema of pydantic's, also one that was never given, and importing pydantic
costs a quarter of a second of CPU: more than all else that `gemmtuned status` does. Nearly all values of ours need no
schema, being text, lists of text, or read by a function of ours; what else is given (a path) is left to typer, as is
every error. An earlier typer, whose parameters describe themselves otherwise, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

_FOR_TYPER: Final = object()


class Command(TyperCommand):
    """A command whose plain arguments are read without pydantic."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As click does."""
        return [_plain(param) for param in super().get_params(ctx)]

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """`-h`, too."""
        return [*super().get_help_option_names(ctx), "-h"]


class Group(TyperGroup):
    """A group of such commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As click does."""
        return [_plain(param) for param in super().get_params(ctx)]

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """`-h`, too."""
        return [*super().get_help_option_names(ctx), "-h"]


def _plain(param: Any) -> Any:
    if hasattr(param, "type_descriptor") and "process_value" not in vars(param):
        param.process_value = partial(_process, param, param.process_value)
    return param


def _process(param: Any, by_typer: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """What click calls for each parameter: the value as the command's function takes it, or a usage error."""
    read = _read(param, value)
    if read is _FOR_TYPER or (param.required and param.value_is_missing(read)):
        return by_typer(ctx, value)
    return read if param.callback is None else param.callback(ctx, param, read)


def _read(param: Any, value: Any) -> Any:
    """The value as typer's schema would give it; _FOR_TYPER where it takes the schema."""
    several = param.multiple or param.nargs == -1
    if value is None:
        return () if several else None
    kind = param.type_descriptor
    reader = kind.parameter_info.parser or _TEXT.get(kind.annotation)
    if reader is None or several != isinstance(value, (list, tuple)):
        return _FOR_TYPER
    try:
        return [reader(one) for one in value] if several else reader(value)
    except ValueError:  # typer makes a usage error of it
        return _FOR_TYPER


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


_TEXT: Final[dict[Any, Callable[[Any], Any]]] = {str: _text, list[str]: _text}
