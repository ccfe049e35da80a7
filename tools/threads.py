"""Let the threads of OpenMP sleep while they wait. Imported before torch, which reads this once.

While torch's threads wait for each other they spin, by default for so long that one other busy
process on the machine makes a training step many times slower. After GOMP_SPINCOUNT turns they
sleep instead. Beside one busy process on two cores the default step took 127 ms instead of 175;
on quiet cores the difference is within the noise (docs/speed.md). A value set by the user stays.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
