"""Measurements: speed, acceptance and cost of drafters beside plain decoding.

:mod:`specjax.bench.measure` measures one setting, :mod:`specjax.bench.run` several, :mod:`specjax.bench.sweep` a table
of them that can be resumed.
"""
