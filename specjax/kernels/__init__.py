"""Hand-written GPU kernels. ``dispatch`` decides which of them runs, and can say why."""
