"""Triton's interpreter without work that changes no result, and takes most of its time.

It works out whether integers overflow and then looks at what came out only with `debug`, which is off.  It puts its own
functions in the place of Triton's anew at every call of a function inside a kernel, though the launch has done so.  And
for each tensor it makes the same few types, shapes and their names once more: here each is made once.
"""

import inspect
from dataclasses import replace
from functools import lru_cache

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def make_quick() -> None:
    """For the whole process."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflows are looked at: leave the interpreter as it is"
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_once()
    _make_types_once()


def _patch_once() -> None:
    plain, nothing = (
        interpreter._patch_lang,
        getattr(interpreter, "_LangPatchScope", lambda: None),
    )  # from Triton 3.6 on
    langs_of = {}  # by the globals of a file

    def patch_lang(fn):
        key = id(fn.__globals__)
        if key not in langs_of:
            modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
            langs_of[key] = [module for module in modules if module in (tl, tl.core)]
        langs = langs_of[key]
        if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return nothing()  # all are in place; there is nothing to put back
        return plain(fn)

    interpreter._patch_lang = patch_lang


def _make_types_once() -> None:
    block_type, value_of, plain_eq = core.block_type, core._unwrap_if_constexpr, core.dtype.__eq__
    plain_block, plain_np_dtype = block_type.__init__, interpreter._get_np_dtype
    blocks, dtypes = {}, {}

    def block_init(self, element_ty, shape):
        sizes = shape.values if type(shape) is core.tuple else shape
        key = (type(element_ty), element_ty.name, *[size if type(size) is int else value_of(size) for size in sizes])
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    @lru_cache(None)
    def shape_of(*sizes):
        return core.constexpr(core.math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def tensor_init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(*type.shape) if type.is_block() else shape_of()

    def np_dtype(tt_dtype):
        element = tt_dtype.element_ty if isinstance(tt_dtype, block_type) else tt_dtype
        key = (type(element), element.name)
        if key not in dtypes:
            dtypes[key] = plain_np_dtype(tt_dtype)
        return dtypes[key]

    def quick_value_of(o):
        return o if type(o) in (int, core.tensor) else value_of(o)

    core._unwrap_if_constexpr = quick_value_of
    core.dtype.__eq__ = lambda self, other: self is other or plain_eq(self, other)
    block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init
    interpreter._get_np_dtype = np_dtype
