"""Triton's interpreter without two kinds of work that change no result, and take two fifths of its time.

It works out whether integers overflow and then looks at what came out only with `debug`, which is off.  And it puts its
own functions in the place of Triton's anew at every call of a function inside a kernel, though the launch has done so.
"""

import inspect
from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    """For the whole process."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are looked at: leave the interpreter as it is"
    builder.options = replace(builder.options, sanitize_overflow=False)
    plain = interpreter._patch_lang

    def patch_lang(fn):
        langs = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return interpreter._LangPatchScope()  # all are in place; there is nothing to put back
        return plain(fn)

    interpreter._patch_lang = patch_lang
