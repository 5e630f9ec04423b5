"""A worker that writes numbered lines, so many in a second; in its first two attempts, rank 2 fails half of the way."""

from __future__ import annotations

import os
import sys
import time

FLUSHED_AT = 200
FAILS, ATTEMPTS_THAT_FAIL = "2", 2


def main() -> None:
    per_s, count = float(sys.argv[1]), int(sys.argv[2])
    rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    began = time.monotonic()
    for number in range(count):
        sys.stdout.write(f"<{attempt} {rank} {number}> as much as a line of a log may say\n")
        if number % FLUSHED_AT == FLUSHED_AT - 1:
            sys.stdout.flush()
            time.sleep(max(0.0, began + number / per_s - time.monotonic()))
            if rank == FAILS and attempt < ATTEMPTS_THAT_FAIL and number > count // 2:
                os._exit(1)


if __name__ == "__main__":
    main()
