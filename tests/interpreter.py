"""Triton's interpreter without work that it repeats: a third of the time of interpreted kernels."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Let the interpreter put its own functions in place of the language's once in a launch for each module.

    It does so anew whenever a kernel calls a function, `tl.sum` among them, by looking through all of the language, though they
    stay until the launch has ended.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def patch_if_new(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return None
        done.add(module)
        return patch(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_if_new, launch_anew
