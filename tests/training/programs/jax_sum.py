"""Sums up the ranks of all processes by JAX; its coordinator, in the process of rank 0, listens at the master address itself.

In the first attempt rank 1 fails after that.
"""

import os
import sys

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from telling import tell

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(
    coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    num_processes=int(os.environ["WORLD_SIZE"]),
    process_id=int(os.environ["RANK"]),
)
ranks = multihost_utils.process_allgather(jnp.array([jax.process_index()]))
tell(sum=int(ranks.sum()), devices=jax.device_count(), processes=jax.process_count())
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    sys.exit(3)
jax.distributed.shutdown()
