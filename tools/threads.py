"""Let the threads of OpenMP sleep while they wait. Imported before torch, which reads this once.

While torch's threads wait for each other they spin, by default for so long that one other busy
process on the machine makes a training step many times slower. After GOMP_SPINCOUNT turns they
sleep instead. For the measured table see docs/speed.md. A value that the user has set stays.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
