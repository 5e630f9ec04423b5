"""Which page of docs/ stands where in the site's navigation. Each page must be here: the build says so of one that is not."""

from __future__ import annotations

__all__ = ["GROUPS", "toctrees"]

GROUPS = {
    "Begin": ("quickstart", "coming-from-torchrun", "disasters"),
    "Run jobs": ("rendezvous", "schedulers", "etcd", "preemption", "recovery", "affinity", "data", "store", "security", "timers"),
    "On call": ("failures", "hangs", "inspect", "control-plane", "logs", "events", "health", "notifications", "signals"),
    "Programs": ("python-api", "compat", "torchrun-plugin"),
    "Plug-ins": ("plugin-backend", "plugin-logs", "plugin-events", "plugin-preflight", "plugin-scheduler"),
    "Reference": ("command-line", "environment", "reference-settings", "reference-api", "glossary"),
    "Project": ("behaviours", "tour", "dependencies"),
}


def toctrees() -> str:
    """One for each group; none is shown on the page itself."""
    return "".join(_toctree(caption, pages) for caption, pages in GROUPS.items())


def _toctree(caption: str, pages: tuple[str, ...]) -> str:
    return "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(caption, "\n".join(pages))
