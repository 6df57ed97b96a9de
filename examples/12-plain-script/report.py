"""Writes the night's report. It knows nothing of LeasedJob but its environment."""

import os
import sys
import time

night = os.environ.get("LEASEDJOB_RUN_KEY", "tonight")
pages = int(os.environ.get("PAGES", "3"))
if pages < 1:
    sys.exit("there is nothing to report")
for page in range(1, pages + 1):
    print(f"{night}: page {page}", flush=True)
    time.sleep(0.2)
print(f"{night}: done")
