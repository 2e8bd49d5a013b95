"""A clock on which compiling takes hours: what tells times apart must hold on a machine that is busy, too."""

import time

from specjax.core import programs

HOUR = 3600.0


def slow_compiler(monkeypatch) -> None:
    """Every program that is compiled from now on takes an hour longer."""
    ahead, clock, options = [0.0], time.perf_counter, programs.compiler_options

    def an_hour_later():
        ahead[0] += HOUR
        return options()

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead[0])
    monkeypatch.setattr(programs, "compiler_options", an_hour_later)
