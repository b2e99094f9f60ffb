"""Make Triton's interpreter three times as fast: leave out what it repeats, and what it computes but never uses.

Each call of a function inside a kernel looks through all of Triton's language for what to replace by interpreted code,
though that was done when the kernel began. Each sum and product of integers is computed again in int64, for an assert
that only `debug` enables. And types are made anew for each value. What kernels compute stays the same.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any


def hasten() -> None:
    """Speed up the interpreter in this process; leave a Triton with other parts as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    needed = ("interpreter_builder", "_patch_lang", "_get_np_dtype", "_LangPatchScope")
    if not all(hasattr(interpreter, each) for each in needed) or interpreter._patch_lang.__module__ == __name__:
        return
    builder, patch, numpy_type = interpreter.interpreter_builder, interpreter._patch_lang, interpreter._get_np_dtype
    languages: dict[Callable, list[Any]] = {}
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[str, str], tl.block_type] = {}

    def patch_once(function: Callable) -> Any:
        if function not in languages:
            modules = filter(inspect.ismodule, function.__globals__.values())
            languages[function] = [each for each in modules if each in (tl, tl.core)]
        known = languages[function]
        last = tl.core.tensor_descriptor_base.store  # replaced last and restored first: an interrupt may come between
        if known and not any(map(tl.core.is_builtin, (last, *(each.load for each in known)))):
            return interpreter._LangPatchScope()
        return patch(function)

    def known_numpy_type(type_: Any) -> Any:
        scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    def block(element: Any, shape: Sequence[int]) -> Any:
        key = element.name, str(shape)  # not the shape itself: True would be 1
        if key not in blocks:
            blocks[key] = tl.block_type(element, shape)
        return blocks[key]

    builder.options = replace(builder.options, sanitize_overflow=False)
    builder.get_block_ty = block
    tl.block_type.with_element_ty = lambda self, element: block(element, self.shape)
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, known_numpy_type
