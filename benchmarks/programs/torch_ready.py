"""A worker that does a first step with torch, on a GPU if there is one, reports when that is done, and sleeps."""

import os
import time

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device)).sum().item()
os.write(1, f"{time.monotonic()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\n".encode())  # in one piece
time.sleep(600)
