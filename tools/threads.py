"""Let OpenMP threads sleep while they wait. Import this before torch, which reads it
once.

By default, waiting threads spin, and beside a second busy process a training step takes
much longer (research/log.md). After GOMP_SPINCOUNT turns they sleep instead. We keep a
value that you set.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
