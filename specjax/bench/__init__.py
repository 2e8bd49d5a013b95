"""Measurements: speed, acceptance and cost of drafters beside plain decoding. Calling it is :func:`specjax.api.bench`::

    table = specjax.bench(params, "builtin", k=(3, 7))

:mod:`specjax.bench.measure` measures one setting, :mod:`specjax.bench.run` several, :mod:`specjax.bench.sweep` a table
of them that can be resumed.
"""

import sys
import types
from typing import Any


class _Bench(types.ModuleType):
    """The package is a function as well: importing any part of it makes ``specjax.bench`` this module."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from specjax import api

        return api.bench(*args, **options)


sys.modules[__name__].__class__ = _Bench
