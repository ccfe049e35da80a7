"""Let OpenMP threads sleep while they wait. Import this before torch, which reads it once.

By default, waiting threads spin so long that a second busy process makes a training step many times
slower. After GOMP_SPINCOUNT turns they sleep instead. Beside one busy process on two cores, a step
of the default run took 118 ms instead of 161, and on quiet cores 48 ms with both (docs/speed.md).
We keep a value that you set.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
