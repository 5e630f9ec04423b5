"""What torchrun's own parser gives for a command line that holds nothing but a script."""

from __future__ import annotations

TORCHRUN_DEFAULTS = {
    "nnodes": "1:1", "nproc_per_node": "1", "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_id": "none", "rdzv_conf": "",
    "standalone": False, "max_restarts": 0, "monitor_interval": 0.1, "start_method": "spawn", "event_log_handler": "null",
    "role": "default", "module": False, "no_python": False, "run_path": False, "log_dir": None, "redirects": "0", "tee": "0",
    "local_ranks_filter": "", "duplicate_stdout_filters": [], "duplicate_stderr_filters": [], "node_rank": 0,
    "master_addr": "127.0.0.1", "master_port": None, "local_addr": None, "logs_specs": None, "numa_binding": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "shutdown_timeout": None, "virtual_local_rank": False,
    "log_line_prefix_template": None, "print_completion": None,
}  # fmt: skip
