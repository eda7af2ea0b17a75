"""jaxtyping's check of shapes in one pass: its own binds the arguments twice and checks each of them twice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping._storage import pop_shape_memo, push_shape_memo, shape_str


def shaped(function: Any = None, *, typechecker: Any = None) -> Any:
    """In place of `jaxtyping.jaxtyped`, for the functions and dataclasses that its import hook decorates.

    A name of an axis has one size in all arguments and the result of a call.
    """
    if function is None:
        return functools.partial(shaped, typechecker=typechecker)
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and not hasattr(function.__init__, "shaped"):
            with contextlib.suppress(NameError):  # of a class below, which is found when it is called
                hints = typing.get_type_hints(function, include_extras=True)  # those of a base in another module too
                function.__init__.__annotations__ |= {name: hints[name] for name in inherited(function)}
            function.__init__ = checked_call(function.__init__)
        return function
    return checked_call(function)


def inherited(of: type) -> set[str]:
    """The fields of a dataclass that a base in another module declares: their annotations have its names."""
    bases = [base for base in of.__mro__ if base.__module__ != of.__module__]
    return {
        field.name
        for field in dataclasses.fields(of)
        if any(field.name in vars(b).get("__annotations__", ()) for b in bases)
    }


def checked_call(function: Callable[..., Any]) -> Callable[..., Any]:
    checked, config = beartype(function), jaxtyping.config

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        sizes = push_shape_memo({})
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:
            raise jaxtyping.TypeCheckError(f"{error}\n{shape_str(sizes)}") from None
        finally:
            pop_shape_memo()

    call.shaped = True  # type: ignore[attr-defined]
    return call
