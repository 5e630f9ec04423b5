"""What a notebook with Accelerate does: it launches a function of its own, with elastic names of torch."""

from accelerate import notebook_launcher
from accelerated import main

if __name__ == "__main__":
    notebook_launcher(main, num_processes=2, mixed_precision="no")
    print("NOTEBOOK goes on")
