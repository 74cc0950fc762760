"""From a prompt to a plan: features, candidates, scores, and why.

numpy is loaded here, before anything else loads it, with one BLAS thread. OpenBLAS reads its thread
count when it is loaded, and its threads spin: for one prompt they gain nothing, and beside another
busy process they turn 10 ms of encoding into a second. A value that the user sets for
``OPENBLAS_NUM_THREADS`` is kept.
"""

import os
import sys
from importlib import import_module

_THREADS = "OPENBLAS_NUM_THREADS"

if "numpy" not in sys.modules and _THREADS not in os.environ:
    os.environ[_THREADS] = "1"
    import_module("numpy")
    del os.environ[_THREADS]
